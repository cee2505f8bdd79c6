"""Hugging Face folders in and out, at any degree: what is read is what transformers reads, and it comes out as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from colrow.checkpoint import load as load_checkpoint
from colrow.checkpoint import save as save_checkpoint
from colrow.errors import PlanError, RankError
from colrow.folder import INDEX, Folder, runs
from colrow.models import GPT, GPTConfig
from colrow.models import tiny as models
from colrow.models.tiny import FAMILIES, tiny
from colrow.params import local_of, named_parts
from colrow.parallelize import parallelize
from colrow.precision import KeepDouble
from colrow.pretrained import load_pretrained, save_pretrained
from colrow.state import full_state_dict
from hf import ODD
from oracle import FP32, relative
from pool import mesh
from test_hf import named


def write(folder: Path, family: str = "llama", kind: str | None = None, shard: str = "5GB", **changes: Any) -> Path:
    """A folder as transformers writes it, with random biases and gains."""
    dtype = changes.pop("dtype", torch.float32)
    tiny(family, kind, **changes).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def auto(kind: str) -> Any:
    return getattr(transformers, kind)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files, whatever an index says."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key).clone() for key in tensors.keys()}  # noqa: SIM118 - it is no dict
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
        mine, sharded = local_of(param), parts is not None and parts.sharded
        assert torch.equal(mine, parts.take(want[name], rank) if sharded else want[name]), f"{name} is another slice"
        assert mine.untyped_storage().nbytes() == mine.nbytes, f"{name} holds more than its slice"
    if reference.dtype == torch.float32:
        assert relative(logits(split), logits(reference)) <= FP32


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
def test_every_family_is_read_as_transformers_reads_it(ranks: Any, size: int, folders: dict[str, Path]) -> None:
    """MEM-3, FUSE-5, INIT-2."""
    ranks(size).run(load_all, folders, [None])


def test_in_another_dtype(ranks: Any, folders: dict[str, Path]) -> None:
    """Some parts stay in fp32, as their classes say (t5's `wo`, a router's bias); so do rotary frequencies."""
    some = {name: folders[name] for name in ("llama", "bloom", "t5", "mixtral", "deepseek_v3")}
    ranks(2).run(load_all, some, [torch.bfloat16, torch.float16])
