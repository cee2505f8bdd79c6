"""Checkpoints that do not know the degree: canonical names, true sizes, canonical order; no pickle. See `storage`.

A run at any degree saves the same tensors, and reads those of any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colrow import comm
from colrow.checks import require_split
from colrow.errors import CheckpointError
from colrow.params import local_of, shard_like, splits, true_name, unshard
from colrow.split import Split
from colrow.state import require_equal_replicas
from colrow.storage import Reader, Writer, choose, prune

Progress = dict[str, Any]


def save(
    folder: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None, progress: Progress, *, keep: int = 2
) -> Path:
    """Write `folder/step-NNNNNN`, atomically, and remove all but the last `keep` checkpoints.

    Arguments:
        progress: what `load` gives back; plain JSON values, with the number "step".

    Cost: every rank of the run must call it. An all-gather of every shard, one tensor at a time; the run's first rank
    writes, and holds at most one file's tensors (2 GiB).

    Raises:
        PlanError: the model is not split.
        CheckpointError: it could not be written (on every rank); earlier checkpoints are as they were.
        RankError: some ranks did not call it (within seconds), or replicas have drifted apart.
    """
    require_split(model, "colrow.checkpoint.save")
    comm.all_here("colrow.checkpoint.save")
    require_equal_replicas(model)
    folder = Path(folder)
    writer = Writer(folder / f"step-{int(progress['step']):06d}")
    for name, value, split in _model_tensors(model):
        writer.add("model", name, unshard(value, split))
    settings = None if optimizer is None else _save_optimizer(writer, model, optimizer)
    path = writer.finish({"progress": progress, "optimizer": settings})
    if writer.active:
        prune(folder, keep)
    return path


def load(path: Path | str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Fill `model` and `optimizer`, split at any degree or not at all, and return the progress that was saved.

    Arguments:
        path: one checkpoint, or the folder that holds them: then the newest that is whole is taken, and damaged ones
            are named on stderr.

    Cost: every rank of the run must call it and see the files. Each reads one whole tensor at a time.

    Raises:
        CheckpointError: none is there, all are damaged, or it belongs to another model.
    """
    reader = Reader(choose(Path(path)))
    with torch.no_grad():
        for name, value, split in _model_tensors(model):
            _fill(value, reader.get("model", name, _true_shape(value, split)), split)
        if optimizer is not None:
            _load_optimizer(reader, model, optimizer)
    return reader.index["progress"]


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Split | None]]:
    """Every tensor of the model's state once, under its first name."""
    by_name, seen = splits(model), set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield true_name(name), value, by_name.get(true_name(name))


def _true_shape(value: Tensor, split: Split | None) -> tuple[int, ...]:
    shape = list(value.shape)
    if split is not None:
        shape[split.dim] = split.true_size
    return tuple(shape)


def _fill(value: Tensor, whole: Tensor, split: Split | None) -> None:
    local_of(value).copy_(local_of(shard_like(whole, split, value)))


def _save_optimizer(writer: Writer, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    by_id = {id(value): (name, split) for name, value, split in _model_tensors(model)}
    groups, scalars = [], {}
    for group in optimizer.param_groups:
        plain = {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"}
        groups.append(plain | {"params": [by_id[id(param)][0] for param in group["params"]]})
        for param in group["params"]:
            name, split = by_id[id(param)]
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    writer.add(
                        "optimizer", f"{name}/{key}", unshard(value, split if value.shape == param.shape else None)
                    )
                else:
                    scalars[f"{name}/{key}"] = value
    return {"groups": groups, "scalars": scalars}


def _load_optimizer(reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved: dict[str, Any] = reader.index["optimizer"] or {"groups": [], "scalars": {}}
    by_id = {id(value): (name, split) for name, value, split in _model_tensors(model)}
    mine = [[by_id[id(param)][0] for param in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["groups"]]
    if mine != theirs:
        given = f"{len(theirs)} parameter groups with other members" if theirs else "it was saved without an optimizer"
        fix = "Build the optimizer as it was built, or load without one"
        raise CheckpointError(str(reader.path), given, f"this optimizer has {len(mine)} groups", fix)
    keys: dict[str, list[str]] = {}
    for entry in [*reader.index["tensors"], *(f"optimizer/{scalar}" for scalar in saved["scalars"])]:
        part, _, rest = entry.partition("/")
        name, _, key = rest.rpartition("/")
        if part == "optimizer":
            keys.setdefault(name, []).append(key)
    for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
        betas = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        group.update({key: value for key, value in betas.items() if key != "params"})
        for param in group["params"]:
            name, split = by_id[id(param)]
            state = {key: _moment(reader, name, key, param, split) for key in keys.get(name, [])}
            if state:
                optimizer.state[param] = state


def _moment(reader: Reader, name: str, key: str, param: Tensor, split: Split | None) -> Any:
    if f"{name}/{key}" in reader.index["optimizer"]["scalars"]:
        return reader.index["optimizer"]["scalars"][f"{name}/{key}"]
    whole = reader.get("optimizer", f"{name}/{key}")
    like_param = tuple(whole.shape) == _true_shape(param, split)
    return shard_like(whole, split, param) if like_param else whole
