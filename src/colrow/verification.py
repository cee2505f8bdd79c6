"""Whether a split model is the model: loss, logits, every gradient, their norm, and the weights after a step.

Each rank builds the model, splits it and takes a step; the first rank takes the same step with the model whole, and
judges. In double both must agree to rounding. In a shorter dtype each has errors of its own, so both are measured
against the step in double: the split may be less exact than one process, but by no more than another order of sums
explains.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from colrow import comm
from colrow.errors import DataError
from colrow.parallelize import parallelize
from colrow.precision import KeepDouble
from colrow.state import clip_grad_norm_, full_grads, full_state_dict, replica_drift, sync_replicas

EQUAL = 1e-9
"""In double throughout, rounding is near 1e-15 and a lost or doubled term of order 1: this lies far from both."""
FACTOR = 3.0
"""A shorter dtype: the largest of many rounding errors is a matter of luck. Over all families it differed between two
orders of sums by up to 2.7. Where a ReLU is near zero bfloat16 falls to either side. A router of experts near a tie may
even send a token elsewhere, which no factor allows for."""
FLOOR = 8.0
"""In units of the dtype's precision: one process may be exact by luck."""
SMALL_GRADIENT = 1e-3
"""A gradient smaller than this part of the model's largest is measured against that part: where the true one is zero (a
bias on k that softmax does not see) there is only rounding, and nothing to divide by."""


class Source(Protocol):
    """Where the model comes from: the same on every rank."""

    def build(self, *, dropout: float, seed: int) -> nn.Module: ...

    def batch(self, model: nn.Module, *, seed: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Settings:
    """How to split, and what to compare with. With `dropout` the other side is the model split over one rank, since
    torch's own masks are others."""

    tp: int = 2
    sequence_parallel: bool = True
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    dropout: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Loss:
    """Of the model in one process (in double), and of the split model."""

    reference: float
    parallel: float
    rel_error: float


@dataclass(frozen=True)
class Gradient:
    """The error in one parameter's gradient."""

    name: str
    rel_error: float


@dataclass(frozen=True)
class Verdict:
    """What a comparison found: errors are the largest difference over the largest element that is wanted.

    Attributes:
        tolerance: what loss, logits, gradients, grad_norm and step (the weights after it) may be off by.
        parameters: the gradients' errors, in the order of the model's parameters.
        replicas_equal: whether, after the step, parameters that are whole on every rank have the same bits everywhere.
        first_divergence: the first module whose output differs, where that was looked for.
    """

    ok: bool
    tp: int
    sequence_parallel: bool
    dtype: str
    dropout: float
    loss: Loss
    logits_rel_error: float
    max_grad_rel_error: float
    grad_norm_rel_error: float
    step_rel_error: float
    replicas_equal: bool
    tolerance: Mapping[str, float]
    parameters: tuple[Gradient, ...]
    first_divergence: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """As `colrow verify --json` prints it; a number that is not finite is null."""
        return _finite(asdict(self))


@dataclass(frozen=True)
class Meshes:
    """The axes of a comparison: `tp` splits the model, `one` holds this rank alone, `every` all ranks of the run."""

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


@dataclass(frozen=True)
class Step:
    """One step of training, whole on every rank: what came out, and what the weights are after it."""

    loss: Tensor
    logits: Tensor
    grads: dict[str, Tensor]
    grad_norm: Tensor
    state: dict[str, Tensor]
    replicas_equal: bool = True


def verify_source(source: Source, settings: Settings, split: Callable[..., nn.Module] = parallelize) -> Verdict:
    """One rank's part; the default process group must be there. Every rank returns the first one's verdict."""
    return compare(source, settings, Meshes.of(settings.tp), split)


def compare(source: Source, s: Settings, meshes: Meshes, split: Callable[..., nn.Module] = parallelize) -> Verdict:
    """`verify_source` on axes that are there. `split` splits the model that is judged, as `parallelize` does."""
    model = source.build(dropout=s.dropout, seed=s.seed).to(comm.device(meshes.tp), getattr(torch, s.dtype)).train()
    batch = source.batch(model, seed=s.seed + 1)
    whole = copy.deepcopy(model) if comm.is_rank_zero() else None
    got = take_step(split(model, meshes.tp, sequence_parallel=s.sequence_parallel), batch, s.seed)
    verdict = None
    if whole is not None:
        exact = copy.deepcopy(whole).double()
        both = [exact] if s.dtype == "float64" else [exact, whole]
        if s.dropout:
            both = [parallelize(one, meshes.one, sequence_parallel=s.sequence_parallel) for one in both]
        steps = [take_step(one, batch, s.seed) for one in both]
        verdict = judge(got, steps[-1], steps[0], s)
    return _from_first(verdict, meshes.every)


def take_step(model: nn.Module, batch: Mapping[str, Tensor], seed: int) -> Step:
    """Forward, backward and one step of AdamW; of a whole model or a split one."""
    split = any(isinstance(param, DTensor) for param in model.parameters())
    with KeepDouble():
        loss, logits = forward(model, batch, seed)
        loss.backward()
    if split:
        grads = full_grads(model)
        norm = clip_grad_norm_(model, math.inf)
        _adamw(model, norm)
        drift = replica_drift(model)
        if drift:
            sync_replicas(model)  # or the weights could not be compared
        return Step(loss.detach(), logits, grads, norm, full_state_dict(model), not drift)
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    _adamw(model, norm)
    return Step(loss.detach(), logits, grads, norm, model.state_dict())


def _adamw(model: nn.Module, norm: Tensor) -> None:
    """One step. Adam divides a gradient by its own size; where that is rounding, the step would be a toss of a coin, so
    its eps is a small part of the norm."""
    torch.optim.AdamW(model.parameters(), eps=SMALL_GRADIENT * float(norm)).step()


def forward(model: nn.Module, batch: Mapping[str, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """Loss and whole logits. A class without a loss has its first output weighted at random, and summed."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    out: Any = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()})
    if isinstance(out, Tensor):  # a loss alone; without targets the same call gives logits
        torch.manual_seed(seed)
        with torch.no_grad():
            return out, _whole(model(**{name: x for name, x in batch.items() if name != "targets"}))
    first = out.logits if "logits" in out else out[0]
    if out.get("loss") is not None:
        return out.loss, _whole(first.detach())
    weights = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (first * weights.to(first)).sum(), _whole(first.detach())


def judge(got: Step, one: Step, exact: Step, s: Settings) -> Verdict:
    """Measure the split model's step and one process's against the step in double. In double, `one` is `exact`."""
    gradients, errors = _errors(got, exact)
    _, own = _errors(one, exact)
    floor = FLOOR * torch.finfo(getattr(torch, s.dtype)).eps
    tolerance = {name: EQUAL if s.dtype == "float64" else FACTOR * error + floor for name, error in own.items()}
    return Verdict(
        ok=got.replicas_equal and all(error <= tolerance[name] for name, error in errors.items()),
        tp=s.tp,
        sequence_parallel=s.sequence_parallel,
        dtype=s.dtype,
        dropout=s.dropout,
        loss=Loss(float(exact.loss), float(got.loss), errors["loss"]),
        logits_rel_error=errors["logits"],
        max_grad_rel_error=errors["gradients"],
        grad_norm_rel_error=errors["grad_norm"],
        step_rel_error=errors["step"],
        replicas_equal=got.replicas_equal,
        tolerance=tolerance,
        parameters=tuple(Gradient(name, error) for name, error in gradients.items()),
    )


def _errors(got: Step, want: Step) -> tuple[dict[str, float], dict[str, float]]:
    """The relative errors of the gradients, by name; and those that count: of these the largest."""
    least = SMALL_GRADIENT * max((float(grad.abs().max()) for grad in want.grads.values()), default=0.0)
    names = [*want.grads, *(name for name in got.grads if name not in want.grads)]
    gradients = {name: relative(*_pair(got.grads, want.grads, name), least) for name in names}
    floats = [name for name, value in want.state.items() if value.is_floating_point() and value.numel()]
    return gradients, {
        "loss": relative(got.loss, want.loss),
        "logits": relative(got.logits, want.logits),
        "gradients": _largest(gradients.values()),
        "grad_norm": relative(got.grad_norm, want.grad_norm),
        "step": _largest(relative(*_pair(got.state, want.state, name)) for name in floats),
    }


def _largest(errors: Iterable[float]) -> float:
    """The largest; one that is no number is larger than any."""
    return max((error if error == error else math.inf for error in errors), default=0.0)


def _pair(got: Mapping[str, Tensor], want: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The two tensors of that name; one that is missing is zero."""
    a, b = got.get(name), want.get(name)
    there = b if a is None else a
    if there is None:
        raise KeyError(name)
    return torch.zeros_like(there) if a is None else a, torch.zeros_like(there) if b is None else b


def relative(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest wanted element, or over `least` if that is more."""
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=max(least, 1e-30)))


def _whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _from_first(verdict: Verdict | None, every: DeviceMesh) -> Verdict:
    """The first rank's verdict, on all ranks of the run."""
    raw = b"" if verdict is None else pickle.dumps(verdict)
    size = comm.exchange([len(raw)], every)[0][0]
    letters = torch.tensor(list(raw.ljust(size, b"\0")), dtype=torch.uint8, device=comm.device(every))
    return pickle.loads(bytes(comm.broadcast(letters[:size], every).tolist()))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
