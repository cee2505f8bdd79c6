"""Folders that cannot be read or written: the same error on every rank, which names the file or the tensor.

What was there stays as it was.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from colrow import Column, Plan
from colrow.folder import INDEX
from colrow.models.tiny import tiny
from colrow.pretrained import load_pretrained, save_pretrained
from colrow.rules import Rule
from pool import mesh

ONE = "model.safetensors"
LIMIT = 2 << 20
"""Bytes of a file on a disk that is full. (The ranks meet in a file too, which is smaller.)"""


def write(folder: Path, family: str = "llama", shard: str = "5GB", **changes: Any) -> Path:
    model: Any = tiny(family, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = ONE) -> None:
    """Change the tensors of a file, in place."""
    tensors = load_file(folder / file)
    change(tensors)
    (folder / file).unlink()
    save_file(tensors, folder / file)


def load(folder: Path, rules: dict[str, Rule] | None = None, **options: Any) -> None:
    load_pretrained(folder, mesh(), Plan(rules) if rules else None, **options)


def refused(ranks: Any, folder: Path, kind: str = "CheckpointError", **options: Any) -> str:
    """The message of the error, which is the same on every rank."""
    errors = ranks(2).run(load, folder, expect_errors=True, timeout=30, **options)
    assert [getattr(error, "type_name", "none") for error in errors] == [kind] * 2, errors
    (message,) = {error.message for error in errors}
    where, _, rest = message.partition(": ")
    assert where and ";" in rest and rest.count(". ") >= 1 and rest.endswith("."), f"four clauses: {message}"
    return message


def no_model(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def unknown_model(folder: Path) -> None:
    edit_config(folder, model_type="lama", architectures=["LamaForCausalLM"])


def unknown_class(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForPoetry"])


def no_class_of_a_model(folder: Path) -> None:
    edit_config(folder, architectures=["AutoTokenizer"])


def impossible_sizes(folder: Path) -> None:
    edit_config(folder, hidden_size=-32)


def remote_code(folder: Path) -> None:
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})
    (folder / "code.py").write_text("raise SystemExit('it ran')")


def quantised_config(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


def int8(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 32, dtype=torch.int8)}))


def fp8(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()


def no_weights(folder: Path) -> None:
    (folder / ONE).unlink()


def truncated(folder: Path) -> None:
    whole = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(whole[: len(whole) // 2])


def empty(folder: Path) -> None:
    (folder / ONE).write_bytes(b"")


def no_safetensors(folder: Path) -> None:
    (folder / ONE).write_bytes(b"<html>404 not found</html>" * 100)


def a_pointer(folder: Path) -> None:
    (folder / ONE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def other_shape(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 31)}))


def transposed(folder: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].t().contiguous()}))


def other_config(folder: Path) -> None:
    edit_config(folder, vocab_size=67)


def absent(folder: Path) -> None:
    edit(folder, lambda t: t.pop("model.layers.1.input_layernorm.weight"))


def more_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)


def fewer_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)


def unexpected(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.1.extra.weight": torch.zeros(3)}))


def ties_differ(folder: Path) -> None:
    """Only in the rows of the last rank."""
    edit_config(folder, tie_word_embeddings=True)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1

    edit(folder, change)


ALONE: list[tuple[Callable[[Path], None], str]] = [
    (no_model, "there is no config.json in it"),
    (no_config, "there is no config.json in it"),
    (damaged_config, "its config.json cannot be used"),
    (unknown_model, "its config.json cannot be used"),
    (unknown_class, "its class is LlamaForPoetry"),
    (no_class_of_a_model, "its class is AutoTokenizer"),
    (impossible_sizes, "LlamaForCausalLM cannot be built"),
    (remote_code, "the model wants code of its own"),
    (quantised_config, "its weights are quantised"),
    (int8, "'model.layers.1.mlp.up_proj.weight' is stored as I8"),
    (fp8, "'model.norm.weight' is stored as F8_E4M3"),
    (pickled, "its weights are pickled (pytorch_model.bin)"),
    (no_weights, "there are no *.safetensors in it"),
    (truncated, "model.safetensors cannot be read"),
    (empty, "model.safetensors cannot be read"),
    (no_safetensors, "model.safetensors cannot be read"),
    (a_pointer, "model.safetensors cannot be read"),
    (other_shape, "'model.layers.0.mlp.up_proj.weight' has shape (48, 31)"),
    (transposed, "'model.layers.1.mlp.down_proj.weight' has shape (48, 32)"),
    (other_config, "has shape (61, 32)"),
    (absent, "no file has 'model.layers.1.input_layernorm.weight', of shape (32,)"),
    (more_layers, "no file has 'model.layers.2."),
    (fewer_layers, "LlamaForCausalLM has no place for 'model.layers.1.input_layernorm.weight' and 8 more"),
    (unexpected, "LlamaForCausalLM has no place for 'model.layers.1.extra.weight'"),
    (ties_differ, "'model.embed_tokens.weight' and 'lm_head.weight' are one tensor in the model and two in the files"),
]


@pytest.mark.parametrize(("break_it", "said"), ALONE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_folder(ranks: Any, tmp_path: Path, break_it: Callable[[Path], None], said: str) -> None:
    folder = write(tmp_path / "m", tie_word_embeddings=False)
    break_it(folder)
    message = refused(ranks, folder)
    assert said in message and str(folder) in message, message


def no_such_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def a_file(folder: Path) -> None:
    no_such_folder(folder)
    folder.write_text("weights")


def file_missing(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def index_damaged(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def index_disagrees(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def index_points_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def in_two_files(folder: Path) -> None:
    last = sorted(folder.glob("model-*.safetensors"))[-1].name
    edit(folder, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(61, 32)}), last)


def out_of_date(folder: Path) -> None:
    """One file of an earlier save beside the index of a later one."""
    save_file({"model.norm.weight": torch.zeros(32)}, folder / ONE)


SEVERAL: list[tuple[Callable[[Path], None], str]] = [
    (no_such_folder, "there is no such folder"),
    (a_file, "it is a file"),
    (file_missing, "model-00002-of-"),
    (index_damaged, f"{INDEX} cannot be read"),
    (index_disagrees, "says that 'model.norm.weight' is in"),
    (index_points_outside, "names secret.safetensors"),
    (in_two_files, "'model.embed_tokens.weight' is in"),
    (out_of_date, f"it has model.safetensors, and {INDEX}, which does not name it"),
]


@pytest.mark.parametrize(("break_it", "said"), SEVERAL, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_folder_of_several_files(ranks: Any, tmp_path: Path, break_it: Callable[[Path], None], said: str) -> None:
    folder = write(tmp_path / "m", shard="20KB", tie_word_embeddings=False)
    break_it(folder)
    message = refused(ranks, folder)
    assert said in message and str(folder) in message, message


W1 = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(W1.format(3)), "'model.layers.0.mlp.experts.gate_up_proj' has shape (3, 48, 32)"),
        (lambda t: t.update({W1.format(2): torch.zeros(47, 32)}), f"'{W1.format(2)}' has shape (47, 32)"),
        (
            lambda t: t.update({W1.format(1): torch.zeros(48, 32, dtype=torch.int8)}),
            f"'{W1.format(1)}' is stored as I8",
        ),
    ],
    ids=["missing", "another shape", "quantised"],
)
def test_experts_that_do_not_stack(ranks: Any, tmp_path: Path, change: Callable[..., Any], said: str) -> None:
    folder = write(tmp_path / "m", "mixtral")
    edit(folder, change)
    message = refused(ranks, folder)
    assert said in message, message


def test_a_class_that_is_no_model(ranks: Any, tmp_path: Path) -> None:
    assert "its class is GenerationConfig" in refused(ranks, write(tmp_path / "m"), model_class=GenerationConfig)


def test_a_plan_that_does_not_fit(ranks: Any, tmp_path: Path) -> None:
    rules = {"model.layers.*.self_attn.query": Column()}
    message = refused(ranks, write(tmp_path / "m"), "PlanError", rules=rules)
    assert "plan, pattern 'model.layers.*.self_attn.query'" in message


def load_own(folders: list[Path]) -> None:
    load_pretrained(folders[dist.get_rank()], mesh())


@pytest.mark.parametrize("break_it", [no_config, truncated, absent, ties_differ])
def test_one_rank_cannot_read(ranks: Any, tmp_path: Path, break_it: Callable[[Path], None]) -> None:
    """As where each machine has a copy of its own: that rank says why, and the others say which."""
    folders = [write(tmp_path / str(rank), tie_word_embeddings=break_it is ties_differ) for rank in range(3)]
    break_it(folders[1])
    errors = ranks(3).run(load_own, folders, expect_errors=True, timeout=30)
    assert [error.type_name for error in errors] == ["RankError", "CheckpointError", "RankError"]
    assert all("ranks [1] could not" in error.message for error in (errors[0], errors[2])), errors
    ranks(3).run(load, folders[0])  # and all can go on


def saving(folder: Path, out: Path, limit: int | None = None, **options: Any) -> None:
    """Load and save, with files of at most `limit` bytes on the first rank, as on a disk that is full."""
    model = load_pretrained(folder, mesh())
    with a_full_disk(limit if dist.get_rank() == 0 else None):
        save_pretrained(model, out, **options)


@contextmanager
def a_full_disk(limit: int | None) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def not_saved(ranks: Any, out: Path, *args: Any, run: Callable[..., Any] = saving, **options: Any) -> str:
    """The message of the error, which is the same on every rank. What was there is as it was, and nothing is new."""
    before = contents(out.parent)
    errors = ranks(2).run(run, *args, out, expect_errors=True, timeout=30, **options)
    assert {getattr(error, "type_name", "none") for error in errors} == {"CheckpointError"}, errors
    assert contents(out.parent) == before
    assert not list(out.parent.glob("*.writing")) and not list(out.parent.glob("*.replaced"))
    (message,) = {error.message for error in errors}
    assert str(out) in message, message
    return message


class NoRoom:
    """A tokenizer for which there is no room: all weights are written by then."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "tokenizer.json"))


@pytest.mark.parametrize("options", [{"limit": LIMIT}, {"tokenizer": NoRoom()}], ids=["weights", "tokenizer"])
@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk(ranks: Any, tmp_path: Path, options: dict[str, Any], there: bool) -> None:
    """With an older model in the folder, or with none."""
    folder, out = write(tmp_path / "m", hidden_size=256, intermediate_size=512), tmp_path / "out"
    if there:
        write(out, "gpt2")
    assert (folder / ONE).stat().st_size > LIMIT
    assert "it could not be written" in not_saved(ranks, out, folder, **options)
    ranks(2).run(saving, folder, out)
    assert load_file(out / ONE).keys() == load_file(folder / ONE).keys(), "and with room it is replaced"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "out"]


@pytest.mark.parametrize("name", ["notes.txt", "train.py", "checkpoint.pt", "runs"])
def test_a_folder_that_holds_other_things(ranks: Any, tmp_path: Path, name: str) -> None:
    folder, out = write(tmp_path / "m"), write(tmp_path / "out")
    if name == "runs":
        (out / name).mkdir()
        (out / name / "1.json").write_text("{}")
    else:
        (out / name).write_text("mine")
    assert f"the folder holds '{name}', which would be lost" in not_saved(ranks, out, folder)


def test_a_place_that_is_a_file(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "it could not be written" in not_saved(ranks, tmp_path / "out", write(tmp_path / "m"))


def test_the_folder_that_the_model_came_from(ranks: Any, tmp_path: Path) -> None:
    """Also by another name."""
    folder = write(tmp_path / "m")
    assert "the model was loaded from there" in not_saved(ranks, folder, folder)
    (tmp_path / "link").symlink_to(folder)
    assert "the model was loaded from there" in not_saved(ranks, tmp_path / "link", folder)


def save_what_cannot_be(folder: Path, out: Path) -> None:
    model = load_pretrained(folder, mesh())
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.3  # transformers refuses it
    save_pretrained(model, out)


def test_settings_that_transformers_refuses_to_write(ranks: Any, tmp_path: Path) -> None:
    message = not_saved(ranks, tmp_path / "out", write(tmp_path / "m"), run=save_what_cannot_be)
    assert "GenerationConfig is invalid" in message


def test_a_link_to_a_folder_stays_a_link(ranks: Any, tmp_path: Path) -> None:
    real = write(tmp_path / "real", "gpt2")
    (tmp_path / "out").symlink_to(real)
    ranks(2).run(saving, write(tmp_path / "m"), tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and "model.norm.weight" in load_file(real / ONE)
