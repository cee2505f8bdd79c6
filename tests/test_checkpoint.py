"""Checkpoints: independent of the degree, bit-equal at the same one, whole or not there, damage found and named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import colrow
from colrow import checkpoint, storage
from colrow.models import GPT, GPTConfig
from colrow.models.tiny import from_config, tiny_config
from oracle import randomize, relative
from pool import mesh

ODD = GPTConfig(vocab=61, context=16, layers=2, width=40, heads=5, ffn=70, gated=True, rotary=True)
KV = GPTConfig(vocab=64, context=16, layers=1, width=32, heads=4, kv_heads=1)


def _model(config: GPTConfig = ODD, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return randomize(GPT(config), seed)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(step))
        loss = model(ids, ids.roll(1, -1))
        loss.backward()
        colrow.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def _adam(model: nn.Module) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _train_and_save(folder: str, config: GPTConfig = ODD) -> list[float]:
    model = colrow.parallelize(_model(config), mesh())
    optimizer = _adam(model)
    _steps(model, optimizer, 0, 3)
    checkpoint.save(folder, model, optimizer, {"step": 3, "note": "three"})
    return _steps(model, optimizer, 3, 3)


def _resume(folder: str, config: GPTConfig = ODD) -> tuple[list[float], dict[str, Any]]:
    model = colrow.parallelize(_model(config, seed=1), mesh())
    optimizer = _adam(model)
    progress = checkpoint.load(folder, model, optimizer)
    return _steps(model, optimizer, 3, 3), progress


@pytest.mark.parametrize("config", [ODD, KV], ids=["odd", "kv"])
def test_CKPT_2_resume_at_any_degree(ranks: Any, tmp_path: Path, config: GPTConfig) -> None:
    unbroken = ranks(2).run(_train_and_save, str(tmp_path), config)[0]
    for size in (1, 2, 3, 4):
        losses, progress = ranks(size).run(_resume, str(tmp_path), config)[0]
        assert progress == {"step": 3, "note": "three"}
        if size == 2:
            assert losses == unbroken, "the same degree resumes bit for bit"
        else:
            assert losses == pytest.approx(unbroken, rel=1e-5), "another degree sums in another order, in fp32"


def test_a_checkpoint_has_the_unsplit_models_names_and_sizes(ranks: Any, tmp_path: Path) -> None:
    ranks(3).run(_train_and_save, str(tmp_path))
    plain = _model(seed=2)
    optimizer = _adam(plain)
    checkpoint.load(tmp_path, plain, optimizer)  # the unsplit model reads it
    assert len(optimizer.state) == sum(1 for _ in plain.parameters())
    for param in plain.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert float(optimizer.state[param]["step"]) == 3


def _save_twice(folder: str) -> list[torch.Tensor]:
    model = colrow.parallelize(_model(), mesh())
    optimizer = _adam(model)
    _steps(model, optimizer, 0, 1)
    checkpoint.save(folder, model, optimizer, {"step": 1})
    first = colrow.full_state_dict(model)
    _steps(model, optimizer, 1, 1)
    checkpoint.save(folder, model, optimizer, {"step": 2})
    return [first["token.weight"], colrow.full_state_dict(model)["token.weight"]]


def _load_only(folder: str) -> tuple[int, torch.Tensor]:
    model = colrow.parallelize(_model(seed=3), mesh())
    return checkpoint.load(folder, model)["step"], colrow.full_state_dict(model)["token.weight"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = ranks(2).run(_save_twice, str(tmp_path))[0]
    file = next((tmp_path / "step-000002").glob("model-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # one bit of one weight
    file.write_bytes(bytes(content))
    assert storage.damage(tmp_path / "step-000002") == f"{file.name} is not what was written"
    for step, weight in ranks(2).run(_load_only, str(tmp_path)):
        assert step == 1
        assert relative(weight, first) == 0
    assert storage.choose(tmp_path).name == "step-000001"
    assert "step-000002 is damaged" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["missing index", "no index", "half an index", "missing file", "other format"])
def test_every_kind_of_damage_is_found(ranks: Any, tmp_path: Path, how: str) -> None:
    ranks(1).run(_save_twice, str(tmp_path))
    newest = tmp_path / "step-000002"
    index = newest / "checkpoint.json"
    if how == "missing index":
        index.unlink()
    elif how == "no index":
        index.write_text("[]")
    elif how == "half an index":
        index.write_text(index.read_text()[:100])
    elif how == "missing file":
        next(newest.glob("optimizer-*")).unlink()
    else:
        index.write_text(json.dumps(json.loads(index.read_text()) | {"format": 99}))
    assert storage.damage(newest) is not None
    assert ranks(1).run(_load_only, str(tmp_path))[0][0] == 1


def test_a_folder_that_was_not_finished_is_passed_over_and_cleared(ranks: Any, tmp_path: Path) -> None:
    left_over = tmp_path / "step-000009.writing"
    left_over.mkdir()
    (left_over / "model-00001.safetensors").write_bytes(b"half")
    ranks(2).run(_save_twice, str(tmp_path))
    assert not left_over.exists()
    assert [path.name for path in storage.find(tmp_path)] == ["step-000002", "step-000001"]


def _save_errors(folder: str) -> Any:
    model = colrow.parallelize(_model(), mesh())
    checkpoint.save(folder, model, None, {"step": 1})


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    errors = ranks(2).run(_save_errors, str(tmp_path / "file"), expect_errors=True)
    assert [error.type_name for error in errors] == ["CheckpointError"] * 2
    assert "could not be written" in errors[1].message


def test_no_checkpoint_is_an_error_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    errors = ranks(2).run(_load_only, str(tmp_path), expect_errors=True)
    assert [error.type_name for error in errors] == ["CheckpointError"] * 2
    assert "there is no checkpoint in it" in errors[1].message


def _load_other(folder: str, config: GPTConfig) -> Any:
    checkpoint.load(folder, colrow.parallelize(_model(config), mesh()))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPTConfig(vocab=61, context=16, layers=3, width=40, heads=5, ffn=70, gated=True, rotary=True), "blocks.2"),
        (GPTConfig(vocab=61, context=16, layers=2, width=40, heads=5, ffn=72, gated=True, rotary=True), "(144, 40)"),
    ],
    ids=["another layer", "another size"],
)
def test_a_checkpoint_of_another_model_is_refused(ranks: Any, tmp_path: Path, config: GPTConfig, says: str) -> None:
    ranks(2).run(_save_errors, str(tmp_path))
    errors = ranks(2).run(_load_other, str(tmp_path), config, expect_errors=True)
    assert [error.type_name for error in errors] == ["CheckpointError"] * 2
    assert says in errors[0].message


def _drift(folder: str) -> Any:
    model = colrow.parallelize(_model(), mesh())
    with torch.no_grad():
        model.get_parameter("norm.weight").mul_(1 + mesh().get_local_rank() * 1e-3)
    checkpoint.save(folder, model, None, {"step": 1})


def test_NORM_8_replicas_that_drifted_are_not_saved(ranks: Any, tmp_path: Path) -> None:
    errors = ranks(2).run(_drift, str(tmp_path), expect_errors=True)
    assert [error.type_name for error in errors] == ["RankError"] * 2
    assert "norm.weight" in errors[0].message
    assert not storage.find(tmp_path)


def even(seed: int = 0) -> Any:
    """Sizes that divide, and no fused layer, whose order at rest depends on the degree: `checkpoint` is for all."""
    config = tiny_config("llama", vocab_size=64)
    return randomize(from_config(config, "AutoModelForCausalLM"), seed)


def dcp_save(folder: str) -> None:
    grid = mesh((2, 2), ("dp", "tp"))
    dcp.save(get_model_state_dict(colrow.parallelize(even(), grid["tp"])), checkpoint_id=folder)


def dcp_load(folder: str) -> dict[str, torch.Tensor]:
    model = colrow.parallelize(even(seed=1), mesh())
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return colrow.full_state_dict(model)


def test_CKPT_5_torchs_own_checkpoints_hold_the_whole_model(ranks: Any, tmp_path: Path) -> None:
    """A shard without its placement would pass for the whole."""
    ranks(4).run(dcp_save, str(tmp_path / "dcp"))
    want = even().state_dict()
    stored = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    sizes = {name: math.prod(meta.size) for name, meta in stored.items() if isinstance(meta, TensorStorageMetadata)}
    assert sizes == {name: value.numel() for name, value in want.items()}
    for tp in (1, 2):
        for got in ranks(tp).run(dcp_load, str(tmp_path / "dcp")):
            assert all(torch.equal(got[name], value) for name, value in want.items())
