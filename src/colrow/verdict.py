"""What a comparison of a split model with one process is asked, and what it finds, as values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

EQUAL = 1e-9
"""In double throughout, rounding is near 1e-15 and a lost or doubled term of order 1: this lies far from both."""
FACTOR = 3.0
"""A shorter dtype: the largest of many rounding errors is a matter of luck. Over all families it differed between two
orders of sums by up to 2.7. Where a ReLU is near zero bfloat16 falls to either side. A router of experts near a tie may
even send a token elsewhere, which no factor allows for."""
FLOOR = 8.0
"""In units of the dtype's precision: one process may be exact by luck."""

PIECE = 1 << 20
"""Elements that are turned into doubles at a time."""

Dtype = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """How to split, and what to compare with.

    Attributes:
        dropout: every probability of dropout. Above 0 the other side is the model split over one rank, since torch's
            own masks are others.
        training: whether the model is in training mode.
    """

    tp: int = 2
    sequence_parallel: bool = True
    dtype: Dtype = "float64"
    dropout: float = 0.0
    seed: int = 0
    training: bool = True

    def tolerance(self, own: float) -> float:
        """What an error may be, where one process in this dtype has the error `own`."""
        if self.dtype == "float64":
            return EQUAL
        return FACTOR * own + FLOOR * torch.finfo(getattr(torch, self.dtype)).eps


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


Where = Literal[
    "parameter",
    "replicas",
    "input",
    "output",
    "dropout mask",
    "output gradient",
    "input gradient",
    "parameter gradient",
    "step",
    "rounding",
]


@dataclass(frozen=True)
class Divergence:
    """The first place at which the split model leaves the whole one.

    Attributes:
        module: its full name.
        where: what of it differs. Weights are looked at first, then outputs in the order in which they are computed,
            then gradients in theirs, then the gradients of parameters.
        cause: the likely one, in a sentence.
        ratio: what the split model's tensor is as a multiple of the right one, if it is one.
        parameter: the parameter's full name, if it is about one.
    """

    module: str
    where: Where
    rel_error: float
    cause: str
    ratio: float | None = None
    parameter: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a comparison found: errors are the largest difference over the largest element that is wanted.

    Attributes:
        tolerance: what loss, logits, gradients, grad_norm and step (the weights after it) may be off by.
        parameters: the gradients' errors, in the order of the model's parameters.
        replicas_equal: whether, after the step, parameters that are whole on every rank have the same bits everywhere.
        first_divergence: where the split model leaves the whole one; None if all holds.
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
    first_divergence: Divergence | None = None

    def as_json(self) -> dict[str, Any]:
        """As `colrow verify --json` prints it; a number that is not finite is null."""
        return _finite(asdict(self))


def relative(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest wanted element, or over `least` if that is more."""
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    parts = zip(got.detach().flatten().split(PIECE), want.detach().flatten().split(PIECE), strict=True)
    most = [torch.stack([(a.double() - b).abs().max(), b.abs().max()]) for a, b in ((a, b.double()) for a, b in parts)]
    difference, size = torch.stack(most).amax(0)
    return float(difference / size.clamp(min=max(least, 1e-30)))


def exceeds(error: float, tolerance: float) -> bool:
    """Whether an error is too large; one that is no number is."""
    return not error <= tolerance


def largest(errors: Iterable[float]) -> float:
    """The largest; one that is no number is larger than any."""
    return max((error if error == error else math.inf for error in errors), default=0.0)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
