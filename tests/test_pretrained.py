"""Hugging Face folders at any degree: what is read is what transformers reads, and it comes out as it was."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from colrow.checkpoint import load as load_checkpoint
from colrow.checkpoint import save as save_checkpoint
from colrow.errors import RankError
from colrow.folder import INDEX, Folder, runs
from colrow.models import GPT, GPTConfig
from colrow.models import tiny as models
from colrow.models.tiny import FAMILIES, tiny
from colrow.parallelize import parallelize
from colrow.params import local_of, named_parts
from colrow.precision import KeepDouble
from colrow.pretrained import load_pretrained, save_pretrained
from colrow.state import full_state_dict
from oracle import FP32, relative
from pool import mesh
from test_hf import HF64, named


def write(folder: Path, family: str = "llama", kind: str | None = None, **changes: Any) -> Path:
    """A folder as transformers writes it, with random biases and gains."""
    dtype, shard = changes.pop("dtype", torch.float32), changes.pop("shard", "5GB")
    model: Any = tiny(family, kind, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    return folder


def auto(kind: str) -> Any:
    return getattr(transformers, kind)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files, whatever an index says."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key).clone() for key in tensors.keys()}
    return found


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert got.keys() == want.keys(), f"{sorted(got.keys() ^ want.keys())} on one side only"
    for name, value in want.items():
        assert got[name].dtype == value.dtype, f"{name}: {got[name].dtype}, wanted {value.dtype}"
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def logits(model: nn.Module) -> Tensor:
    """The first output of a call without labels."""
    given = models.batch(model)
    labels = given.pop("labels", None)
    if getattr(model.config, "is_encoder_decoder", False) and labels is not None:
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        return model(**given)[0]


def equals_from_pretrained(folder: Path, dtype: torch.dtype | None) -> None:
    """Every parameter, shard, buffer, tie and setting is that of the model which transformers loads."""
    where = torch.get_rng_state()
    split = load_pretrained(folder, mesh(), dtype=dtype)
    assert torch.equal(torch.get_rng_state(), where), "loading draws no random numbers"
    reference = auto(split.config.architectures[0]).from_pretrained(folder, dtype="auto" if dtype is None else dtype)
    assert type(split).__name__ == type(reference).__name__
    assert not split.training, "as from_pretrained"
    assert split.config.to_dict() == reference.config.to_dict()
    want = reference.state_dict()
    same(full_state_dict(split), want)
    same(dict(split.named_buffers()), dict(reference.named_buffers()))
    frequencies = [x for name, x in split.named_buffers() if name.endswith("inv_freq")]
    assert all(x.dtype == torch.float32 and x[0] == 1.0 for x in frequencies), "rotary frequencies stay exact"
    rank = mesh().get_local_rank()
    for name, param, parts in named_parts(split):
        mine = local_of(param)
        wanted = parts.take(want[name], rank) if parts is not None and parts.sharded else want[name]
        assert torch.equal(mine, wanted), f"{name} is another slice"
        assert mine.untyped_storage().nbytes() == mine.nbytes, f"{name} holds more than its slice"
    if reference.dtype == torch.float32:
        assert relative(logits(split), logits(reference)) <= FP32
    if dtype is None:
        comes_out_as_it_was(split, folder)


def comes_out_as_it_was(split: Any, folder: Path) -> None:
    """The same keys and bits, config and tokenizer; transformers reads it and misses nothing."""
    out = folder.with_name(f"{folder.name} again from {mesh().size()}")
    save_pretrained(split, out)
    if mesh().get_local_rank() > 0:
        return
    same(read_tensors(out), read_tensors(folder))
    assert {file.name for file in out.iterdir()} == {file.name for file in folder.iterdir()}
    for file in folder.glob("*.json"):
        assert json.loads((out / file.name).read_text()) == json.loads(file.read_text()), file.name
    _, told = auto(split.config.architectures[0]).from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, and of some other classes."""
    root = tmp_path_factory.mktemp("families")
    others = [("bert", "AutoModel"), ("llama", "AutoModelForSequenceClassification")]
    fused = {"deepseek_v3": {"moe_intermediate_size": 24}}  # transformers' own fused experts want multiples of 4
    todo = [(family, None) for family in FAMILIES] + others
    return {
        f"{name} {kind or ''}".strip(): write(root / f"{name}{kind}", name, kind, **fused.get(name, {}))
        for name, kind in todo
    }


def load_all(folders: dict[str, Path], dtypes: list[torch.dtype | None]) -> None:
    for name, folder in folders.items():
        for dtype in dtypes:
            with named(f"{name}, {dtype}"):
                equals_from_pretrained(folder, dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_family_is_read_as_transformers_reads_it_and_comes_out_as_it_was(
    ranks: Any, size: int, folders: dict[str, Path]
) -> None:
    """MEM-3, FUSE-5, INIT-2, CKPT-6."""
    ranks(size).run(load_all, folders, [None])


def test_in_another_dtype(ranks: Any, folders: dict[str, Path]) -> None:
    """Some parts stay in fp32, as their classes say (t5's `wo`, a router's bias); so do rotary frequencies."""
    some = {name: folders[name] for name in ("llama", "bloom", "t5", "mixtral", "deepseek_v3")}
    ranks(2).run(load_all, some, [torch.bfloat16, torch.float16])


def reads(folder: Path, **options: Any) -> None:
    """The weights that transformers reads, and the same logits."""
    split = load_pretrained(folder, mesh(), **options)
    kind = options.get("model_class") or auto(split.config.architectures[0])
    reference = kind.from_pretrained(folder)
    same(full_state_dict(split), reference.state_dict())
    assert len(list(split.parameters())) == len(list(reference.parameters())), "what is tied stays tied"
    assert relative(logits(split), logits(reference)) <= (FP32 if split.dtype == torch.float32 else 0.05)


def test_several_files_with_an_index(ranks: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "mixtral", shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3 and (folder / INDEX).exists()
    ranks(2).run(reads, folder)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_TIE_4_tied_weights_without_a_key_for_the_head(ranks: Any, tmp_path: Path, size: int, family: str) -> None:
    folder = write(tmp_path / "m", family, tie_word_embeddings=True)
    assert not any("head" in key or "decoder.weight" in key for key in Folder(folder).files)
    ranks(size).run(reads, folder)


def test_tied_weights_that_the_file_has_twice(ranks: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", tie_word_embeddings=True)
    tensors = read_tensors(folder)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    ranks(2).run(reads, folder)


def test_a_config_in_bf16(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(reads, write(tmp_path / "m", dtype=torch.bfloat16))


def test_a_config_without_a_dtype(ranks: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    ranks(2).run(reads, folder)


@pytest.mark.parametrize("kind", [transformers.LlamaModel, transformers.AutoModel, transformers.AutoModelForCausalLM])
def test_another_class_of_the_same_folder(ranks: Any, tmp_path: Path, kind: Any) -> None:
    ranks(3).run(reads, write(tmp_path / "m"), model_class=kind)


class Peak(threading.Thread):
    """The most anonymous memory that this process has meanwhile, beyond what it had before."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again, and not be seen
        self.done, self.start_bytes, self.bytes = threading.Event(), anonymous(), 0

    def __enter__(self) -> Peak:
        self.start()
        return self

    def run(self) -> None:
        while not self.done.wait(0.0005):
            self.bytes = max(self.bytes, anonymous() - self.start_bytes)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


def anonymous() -> int:
    """Bytes of memory that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def memory_to_load(folder: Path, small: Path, dtype: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes at the peak, of the shards, of the largest tensor."""
    load_pretrained(small, mesh(), dtype=dtype)  # what is imported and kept at the first time
    with Peak() as peak:
        split = load_pretrained(folder, mesh(), dtype=dtype)
    shards = sum(local_of(param).nbytes for param in split.parameters())
    return peak.bytes, shards, max(param.numel() * param.element_size() for param in split.parameters())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(("family", "dtype"), [("llama", None), ("mixtral", torch.bfloat16)])
def test_MEM_1_loading_holds_the_shard_and_little_more(ranks: Any, tmp_path: Path, family: str, dtype: Any) -> None:
    """16 MiB tensors, as they are; experts' that are converted and stacked on the way."""
    sizes = {"hidden_size": 2048, "intermediate_size": 2048 if family == "llama" else 512, "num_hidden_layers": 2}
    config = models.tiny_config(family, **sizes)
    model: Any = models.from_config(config, FAMILIES[family].kinds[0])
    model.save_pretrained(tmp_path / "m")
    for peak, shard, largest in ranks(2).run(memory_to_load, tmp_path / "m", write(tmp_path / "small", family), dtype):
        assert shard // 2 <= peak, "the measurement sees the shards"
        assert peak <= shard + 2 * largest, f"{peak >> 20} MiB for {shard >> 20} MiB of shards"


def with_exact_experts(model: Any) -> Any:
    """transformers' fused experts do not compute in double."""
    if model.config.model_type == "mixtral":
        model.set_experts_implementation("eager")
    return model


def in_double(folder: Path) -> Any:
    return with_exact_experts(load_pretrained(folder, mesh(), dtype=torch.float64))


def plain_in_double(folder: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, told = auto(kind).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(told.values()), told
    return with_exact_experts(model)


def train(model: Any, steps: range, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Some steps of AdamW, each on other tokens; their losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in steps:
        with KeepDouble():
            loss = model(**models.batch(model, seed=step)).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TRAINED = ("llama", "gpt2", "phi3", "gpt_neox", "falcon", "mixtral")


def train_and_save(root: Path) -> None:
    for family in TRAINED:
        with named(family):
            split = in_double(root / family)
            train(split, range(2))
            save_pretrained(split, root / f"{family} trained")


def logits_of_all(root: Path) -> list[Tensor]:
    with KeepDouble():
        return [logits(in_double(root / f"{family} trained")) for family in TRAINED]


def test_FUSE_3_VOC_2_CKPT_6_trained_at_one_degree_and_read_at_any(ranks: Any, tmp_path: Path) -> None:
    """Also by transformers; tied and fused weights, 61 rows of a vocabulary."""
    for family in TRAINED:
        write(tmp_path / family, family, tie_word_embeddings=family in ("llama", "gpt2"))
    ranks(2).run(train_and_save, tmp_path)
    for family, *got in zip(TRAINED, *(ranks(size).run(logits_of_all, tmp_path)[0] for size in (2, 4)), strict=True):
        plain, saved = plain_in_double(tmp_path / family), plain_in_double(tmp_path / f"{family} trained")
        train(plain, range(2))
        assert all(value.shape == plain.state_dict()[name].shape for name, value in saved.state_dict().items())
        with KeepDouble():
            want = logits(plain)
            for other in (*got, logits(saved)):
                assert relative(other, want) <= HF64, family


def resume(folder: Path, checkpoints: Path, steps: range) -> list[float]:
    """Load, go on from the last checkpoint if there is one, and leave another."""
    split = in_double(folder)
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2, eps=1e-4)
    if steps.start:
        assert load_checkpoint(checkpoints, split, optimizer) == {"step": steps.start}
    losses = train(split, steps, optimizer)
    save_checkpoint(checkpoints, split, optimizer, {"step": steps.stop})
    return losses


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_CKPT_1_a_run_goes_on_at_another_degree(ranks: Any, tmp_path: Path, family: str) -> None:
    folder = write(tmp_path / "m", family, tie_word_embeddings=True)
    want = train(plain_in_double(folder), range(6))
    got: list[float] = []
    for size, steps in ((2, range(2)), (3, range(2, 4)), (1, range(4, 6))):
        got += ranks(size).run(resume, folder, tmp_path / "checkpoints", steps)[0]
    torch.testing.assert_close(got, want, rtol=HF64, atol=0)


def save_alone(folder: Path, out: Path) -> bool:
    """The first rank saves by itself and is told; then all do."""
    split, told = load_pretrained(folder, mesh()), ""
    if dist.get_rank() == 0:
        try:
            save_pretrained(split, out, patience=1)
        except RankError as error:
            told = str(error)
        assert "ranks [1] did not call it within 1 s" in told and not out.exists(), told
    dist.barrier()
    save_pretrained(split, out)
    return out.exists()


def test_CKPT_1_one_rank_saves_alone(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(save_alone, write(tmp_path / "m"), tmp_path / "out", timeout=30) == [True, True]


SLACK = 16 << 20
"""Bytes for what is imported on the way and what malloc keeps: a tenth of the model that must not be held."""


def memory_to_save(folder: Path, out: Path, file_bytes: int) -> tuple[int, int]:
    split = load_pretrained(folder, mesh())
    with Peak() as peak:
        save_pretrained(split, out, file_bytes=file_bytes)
    return peak.bytes, max(param.nbytes for param in split.parameters())


def test_several_files_are_written_one_after_the_other(ranks: Any, tmp_path: Path) -> None:
    config = models.tiny_config("llama", hidden_size=1024, intermediate_size=1024, num_hidden_layers=6)
    model: Any = models.from_config(config, FAMILIES["llama"].kinds[0])
    model.save_pretrained(tmp_path / "m")
    file_bytes = 40 << 20
    peaks = ranks(2).run(memory_to_save, tmp_path / "m", tmp_path / "out", file_bytes)
    for rank, (peak, largest) in enumerate(peaks):  # gathering a tensor takes some copies, and malloc keeps a few more
        held = peak - 10 * largest - SLACK
        assert held <= (file_bytes if rank == 0 else 0), f"rank {rank}: {peak >> 20} MiB"
    files = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert set(files) == {f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)}
    assert len(files) >= 4 and max(files.values()) < file_bytes + 65536
    assert Folder(tmp_path / "out").files.keys() == Folder(tmp_path / "m").files.keys()
    same(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "m"))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())


def of_no_model(out: Path) -> None:
    save_pretrained(parallelize(GPT(GPTConfig(heads=2, width=16, vocab=61)), mesh()), out)


def test_a_model_that_transformers_does_not_know_is_refused(ranks: Any, tmp_path: Path) -> None:
    errors = ranks(2).run(of_no_model, tmp_path / "out", expect_errors=True)
    assert all("GPT is no model of transformers" in error.message for error in errors), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("index", "want"), [([4, 5, 6, -1, 0, 1], [(0, 4, 3), (4, 0, 2)]), ([], []), ([-1, 7], [(1, 7, 1)])]
)
def test_runs(index: list[int], want: list[tuple[int, int, int]]) -> None:
    assert list(runs(index)) == want


def overwritten(folder: Path) -> None:
    split = load_pretrained(folder, mesh())
    before = full_state_dict(split)
    dist.barrier()
    if dist.get_rank() == 0:
        with (folder / "model.safetensors").open("r+b") as file:
            file.write(bytes((folder / "model.safetensors").stat().st_size))
    dist.barrier()
    same(full_state_dict(split), before)


def test_a_loaded_model_does_not_need_the_files(ranks: Any, tmp_path: Path) -> None:
    """What is whole on every rank is no window onto the file."""
    ranks(2).run(overwritten, write(tmp_path / "m"))


def beside_data_parallel(folder: Path, out: Path) -> None:
    split = load_pretrained(folder, mesh((2, 2), ("dp", "tp"))["tp"])
    save_pretrained(split, out)
    same(read_tensors(out), read_tensors(folder))


def test_beside_data_parallel_the_runs_first_rank_writes(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(beside_data_parallel, write(tmp_path / "m"), tmp_path / "out")
