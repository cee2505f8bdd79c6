"""One training step of a model, whole or split, as often as a comparison needs it.

Each step is made of a model that is built anew, and let go afterwards: that costs time, and saves the memory of holding
the model in all its forms at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from colrow import comm
from colrow.errors import DataError
from colrow.parallelize import parallelize
from colrow.params import fingerprint
from colrow.precision import KeepDouble
from colrow.rules import Plan
from colrow.together import Alike
from colrow.verdict import Settings

Batch = Mapping[str, Any] | tuple[Any, ...]
"""What a model is called with: arguments by name, or by place."""


class Source(Protocol):
    """Where the model comes from: the same on every rank, and every time."""

    def build(self, *, dropout: float, seed: int) -> nn.Module: ...

    def batch(self, model: nn.Module, *, seed: int) -> Batch: ...


@dataclass(frozen=True)
class Meshes:
    """The axes of a comparison: `tp` splits the model, `one` holds this rank alone, `every` all who want the verdict.
    The first rank of `every` judges."""

    tp: DeviceMesh
    one: DeviceMesh
    every: DeviceMesh

    @staticmethod
    def of(tp: int) -> Meshes:
        """Raises: DataError: the run's ranks are no multiple of `tp`."""
        world = dist.get_world_size()
        if world % tp:
            allowed = "replicas have tp ranks each"
            raise DataError("--tp", f"{tp} with {world} ranks", allowed, f"Start a multiple of {tp}")
        kind = "cpu" if dist.get_backend() == "gloo" else "cuda"
        split = init_device_mesh(kind, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        alone = init_device_mesh(kind, (world, 1), mesh_dim_names=("every", "one"))
        return Meshes(split["tp"], alone["one"], alone["every"])

    @staticmethod
    def alone(mesh: DeviceMesh) -> DeviceMesh:
        """An axis that holds this rank alone. To be called on every rank of the run."""
        names = ("every", "one")
        return init_device_mesh(mesh.device_type, (dist.get_world_size(), 1), mesh_dim_names=names)["one"]

    @property
    def judges(self) -> bool:
        """Whether this rank computes with the model whole."""
        return self.every.get_local_rank() == 0


@dataclass(frozen=True)
class Trial:
    """What is compared: a source of models, and how they are split.

    Attributes:
        split: splits the model that is judged, as `parallelize` does.
        loss: from the model's output to a scalar; None: the output's own.
    """

    source: Source
    settings: Settings
    meshes: Meshes
    split: Callable[..., nn.Module] = parallelize
    plan: Plan | None = None
    loss: Callable[[Any], Tensor] | None = None
    seen: list[int] = field(default_factory=list)

    def alike(self) -> Alike:
        """For what only the judging rank does."""
        return Alike(self.meshes.every, "colrow.verify")

    def whole(self, *, double: bool) -> tuple[nn.Module, Batch]:
        """The model in one process, and its batch. With dropout: split over one rank, whose masks are ours."""
        model, batch = self._build()
        model = model.double() if double else model
        return (parallelize(model, self.meshes.one, **self._options) if self.settings.dropout else model), batch

    def parted(self) -> tuple[nn.Module, Batch]:
        """The split model, and its batch. To be called on every rank."""
        with self.alike():
            model, batch = self._build()
        return self.split(model, self.meshes.tp, **self._options), batch

    def plain(self) -> nn.Module:
        """The model as it is built, in the dtype of the comparison."""
        return self._build()[0]

    def run(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Forward and backward. Returns the loss, and the whole logits."""
        with KeepDouble():
            loss, logits = forward(model, batch, self.settings.seed, self.loss)
            loss.backward()
        return loss.detach(), logits

    @property
    def _options(self) -> dict[str, Any]:
        plan = {} if self.plan is None else {"plan": self.plan}
        return {"sequence_parallel": self.settings.sequence_parallel, **plan}

    def _build(self) -> tuple[nn.Module, Batch]:
        """Raises: DataError: it is not the model that was built before."""
        s = self.settings
        torch.manual_seed(s.seed)
        model = self.source.build(dropout=s.dropout, seed=s.seed)
        model = model.to(comm.device(self.meshes.tp), getattr(torch, s.dtype)).train(s.training)
        prints = [fingerprint(param) for param in model.parameters()]
        if self.seen and prints != self.seen:
            given, fix = "it has built two different models", "Draw its weights from torch's generator, or load them"
            raise DataError("colrow.verify", given, "every call must build the same one", fix)
        self.seen[:] = prints
        return model, self.source.batch(model, seed=s.seed + 1)


def forward(
    model: nn.Module, batch: Batch, seed: int, loss: Callable[[Any], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and whole logits. A class without a loss has its first output weighted at random, and summed."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    out: Any = model(*(_cast(x, dtype) for x in args), **{name: _cast(x, dtype) for name, x in kwargs.items()})
    first = _first(out)
    if loss is not None:
        return loss(out), _whole(first.detach())
    if isinstance(out, Tensor) and out.dim() == 0:  # a loss alone; without targets the same call may give logits
        if "targets" not in kwargs:
            return out, out.detach()
        torch.manual_seed(seed)  # with gradients: without them short inputs take another path
        return out, _whole(model(**{name: x for name, x in kwargs.items() if name != "targets"}).detach())
    if isinstance(out, Mapping) and out.get("loss") is not None:
        return out["loss"], _whole(first.detach())
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (first * weights.to(first)).sum(), _whole(first.detach())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _first(out: Any) -> Tensor:
    """The logits, or what else comes first.

    Raises: DataError: there is no tensor.
    """
    if isinstance(out, Mapping):
        found = out.get("logits", next((x for name, x in out.items() if name != "loss"), out.get("loss")))
    else:
        found = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(found, Tensor):
        given, fix = f"the model returns a {type(out).__name__}", "Wrap it in a module that returns a tensor"
        raise DataError("colrow.verify", given, "a tensor, or a tuple or mapping that starts with one, is needed", fix)
    return found


def _whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
