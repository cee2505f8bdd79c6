"""`colrow.verify`: the comparison with one process for a model, a batch and a mesh of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colrow.dropout import may_drop
from colrow.errors import DataError
from colrow.layout import check_mesh
from colrow.rules import Plan
from colrow.trial import Batch, Meshes, Trial
from colrow.verdict import Settings, Verdict
from colrow.verification import judge_trial


def verify(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    sequence_parallel: bool = True,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    seed: int = 0,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Verdict:
    """Compare a training step of your model, split over `mesh`, with one process: call it on every rank of the mesh.

        verdict = colrow.verify(lambda: MyModel(config), {"input_ids": ids, "labels": ids}, mesh["tp"], plan)
        assert verdict.ok, verdict.first_divergence

    Arguments:
        model_fn: builds the model, the same on every rank and at every call: it is called several times.
        batch: what the model is called with, by name or by place; the same on every rank.
        mesh, plan, sequence_parallel: as for `parallelize`.
        dtype: float64 asks whether the algebra is right; float32 and bfloat16, whether the split is as exact as one
            process.
        dropout: every probability of dropout. 0: the model is in eval mode. Above: it trains, and is compared with the
            model split over one rank, whose masks are the same.
        seed: rules dropout, and what `model_fn` draws.
        loss_fn: from the model's output to a scalar. Without it: the output's loss, or its first tensor weighted at
            random.

    Returns: the same verdict on every rank.

    Cost: the first rank computes with the whole model, and the others wait. Memory over t ranks: t + 2 copies of it.

    Raises:
        DataError: a dtype or a dropout that cannot be compared.
        RankError: what one rank has raised, on all of them.
    """
    mesh = check_mesh(mesh, "colrow.verify")
    names = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
    if dtype not in names:
        raise DataError(
            "colrow.verify", f"dtype={dtype}", f"it may be {', '.join(map(str, names))}", "Give one of them"
        )
    if not 0 <= dropout < 1:
        raise DataError("colrow.verify", f"dropout={dropout}", "a probability below 1 is needed", "Give 0.1, say")
    settings = Settings(mesh.size(), sequence_parallel, names[dtype], dropout, seed, dropout > 0)  # pyright: ignore[reportArgumentType]
    alone = Meshes.alone(mesh) if dropout else mesh
    return judge_trial(Trial(_Given(model_fn, batch), settings, Meshes(mesh, alone, mesh), plan=plan, loss=loss_fn))


@dataclass(frozen=True)
class _Given:
    """A model and a batch that the caller has."""

    model_fn: Callable[[], nn.Module]
    given: Batch

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        """The model, with the probability in its layers and their attributes; a config is left alone."""
        model = self.model_fn()
        for part in model.modules():
            named = {at: p for at, p in vars(part).items() if "drop" in at and isinstance(p, float)}
            vars(part).update({at: dropout for at in named if "layerdrop" not in at})
            if isinstance(part, nn.Dropout):
                part.p = dropout
        if dropout and not may_drop(model.train()):
            given, fix = f"dropout={dropout}, for a model without dropout", "Leave it out"
            raise DataError("colrow.verify", given, "there is nothing to drop", fix)
        return model

    def batch(self, model: nn.Module, *, seed: int) -> Batch:
        device = next(model.parameters()).device
        if isinstance(self.given, Mapping):
            return {name: _to(value, device) for name, value in self.given.items()}
        return tuple(_to(value, device) for value in self.given)


def _to(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, Tensor) else value
