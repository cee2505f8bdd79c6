"""From a tensor that differs to why: the mistakes of tensor parallelism leave traces that can be measured.

A reduction that is missing leaves each rank its own term; one made twice multiplies by the ranks, an average divides by
them; a bias inside the sum counts once a rank; a fused layer that is cut in the wrong order has the right features in
other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colrow.dropout import Dropout
from colrow.embedding import VocabEmbedding
from colrow.linear import RowLinear
from colrow.params import local_of
from colrow.places import End, Place, Point
from colrow.region import Block, Region
from colrow.verdict import Where, largest, relative

NEAR = 0.02
"""How much of the error a trace may leave unexplained: bfloat16 has some rounding of its own."""


@dataclass(frozen=True)
class Traces:
    """A tensor that differs: what one process has, what the ranks hold, and what that makes up."""

    want: Tensor
    got: Tensor
    shares: Sequence[Tensor]
    place: Place

    @property
    def ranks(self) -> int:
        return len(self.shares)

    @property
    def unequal(self) -> bool:
        """Whether ranks differ where they must hold the same."""
        return self.place.kind == "same" and any(relative(share, self.shares[0]) > 0 for share in self.shares)

    @property
    def error(self) -> float:
        """The largest of any rank."""
        return largest(relative(x, self.want) for x in (self.shares if self.place.kind == "same" else [self.got]))

    def fits(self, trial: Tensor) -> bool:
        return relative(trial, self.want) <= NEAR * min(self.error, 1.0)


@dataclass(frozen=True)
class Evidence(Traces):
    """A tensor that differs at one end of a module."""

    point: Point
    end: End


Cause = tuple[Where, str, float | None]
"""What differs, why, and by which factor if it is one."""


def of_gradient(e: Evidence) -> Cause:
    """Why a gradient at a module's end differs, where all that came before is right."""
    where: Where = "input gradient" if e.end == "input" else "output gradient"
    found = unsummed(e) or multiplied(e.got, e.want, e.ranks)
    if found is not None:
        return where, found[0], found[1]
    if e.end == "output":
        return where, "The gradient is wrong where it reaches its output: look at what reads it.", None
    if isinstance(e.point.module, Region):
        said = (
            "The gradient is right inside and wrong at its entry: f, which sums the ranks' terms, is missing or wrong."
        )
        return where, said, None
    return where, "The gradient is right at its output and wrong at its input.", None


def of_value(e: Evidence) -> Cause:
    """Why a module's output (or a row layer's input) differs, where all that came before is right."""
    module = e.point.module
    if isinstance(module, Dropout) and module.p > 0:
        return "dropout mask", _masks(e), None
    if isinstance(module, VocabEmbedding):
        rows = (e.got - e.want).flatten(0, -2).abs().amax(-1) > NEAR * e.want.abs().max()
        said = (
            f"{int(rows.sum())} of {rows.numel()} tokens get the row of another one, or none, or two: the ranks' shares"
        )
        found = _missing_sum(e, None) or multiplied(e.got, e.want, e.ranks)
        return ("output", *found) if found else ("output", f"{said} of the vocabulary are shifted.", None)
    if e.end == "input":
        said = "The column layers before it are right as a whole, so the parts do not fit together: check their units"
        return "input", f"{said} in the plan (the pieces of a fused layer).", None
    bias = _bias(module)
    found = (
        _missing_sum(e, bias)
        or multiplied(e.got, e.want, e.ranks, bias)
        or _biases(e, bias)
        or reordered(e.got, e.want)
    )
    if found is not None:
        return "output", *found
    if e.unequal:
        return "output", "The ranks differ where all must hold the same: a layout that was not declared.", None
    kind = type(module).__name__
    if isinstance(module, RowLinear | Region | Block):
        return "output", f"All that it is made of is right, and its own output is not (a {kind}).", None
    return "output", f"Its input is right, and its output is not: look at the slices of its weight (a {kind}).", None


def of_parameter(e: Traces) -> Cause:
    """Why a parameter at rest differs from the whole model's, before any step."""
    if e.unequal:
        odd = [rank for rank, share in enumerate(e.shares) if relative(share, e.want) > 0]
        said = f"A replica is stale: the parameter is whole on every rank, and ranks {odd} hold other values."
        return "replicas", said, None
    found = reordered(e.got, e.want, e.place.dim) or multiplied(e.got, e.want, e.ranks)
    if found is not None:
        return "parameter", *found
    return "parameter", "The ranks hold other values than the whole model: look at how it was loaded or split.", None


def of_parameter_gradient(e: Traces) -> Cause:
    """Why a parameter's gradient differs, where all gradients of activations are right."""
    found = unsummed(e) or multiplied(e.got, e.want, e.ranks) or reordered(e.got, e.want, e.place.dim)
    said = "What reaches the module is right: look at how it reads the parameter, local(param, grad=...)."
    return ("parameter gradient", *found) if found else ("parameter gradient", said, None)


Reason = tuple[str, float | None]


def unsummed(e: Traces) -> Reason | None:
    """Each rank has its own term of what should be their sum."""
    if not e.unequal or not e.fits(torch.stack(list(e.shares)).sum(0)):
        return None
    said = "It is not summed over the ranks: each holds its own term, and the terms add up to the right gradient"
    return f"{said}. It was read as I where it is R.", None


def multiplied(got: Tensor, want: Tensor, ranks: int, bias: Tensor | None = None) -> Reason | None:
    """The tensor, or what it is without its bias, times a number."""
    unexplained = NEAR * min(relative(got, want), 1.0)
    for base in (0.0,) if bias is None else (0.0, bias):
        a, b = (got - base).double().flatten(), (want - base).double().flatten()
        ratio = float(a @ b / (b @ b).clamp(min=1e-60))
        if abs(ratio) <= NEAR or relative(a, ratio * b) > unexplained * max(abs(ratio), 1):
            continue
        if abs(ratio - 1 / ranks) <= NEAR:
            return (
                f"It is 1/{ranks} of the right one: averaged over the ranks instead of summed, or one of equal terms.",
                ratio,
            )
        if abs(ratio - ranks) <= NEAR * ranks:
            return (
                f"It is {ranks} times the right one: it counts once for every rank, or is summed a second time.",
                ratio,
            )
        return f"It is {ratio:.7g} times the right one: a term is scaled, or counted more than once.", ratio
    return None


def reordered(got: Tensor, want: Tensor, dim: int = -1) -> Reason | None:
    """The right entries in other places."""
    if got.dim() == 0:
        return None
    a, b = (x.detach().double().movedim(dim, -1).reshape(-1, x.shape[dim]) for x in (got, want))
    weights = torch.randn(a.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(a.device)
    mine, theirs = weights @ a, weights @ b
    (mine, here), (theirs, there) = mine.sort(), theirs.sort()
    unexplained = NEAR * min(relative(got, want), 1.0)
    if relative(mine, theirs) > NEAR or relative(a[:, here], b[:, there]) > unexplained or bool((here == there).all()):
        return None
    half = len(here) // 2
    swapped = len(here) % 2 == 0 and bool(((here - there).abs() == half).all())
    if swapped:
        return "Its two halves are swapped: the pieces of a fused layer, gate and up say, in the wrong order.", None
    return "It has the right entries in the wrong order: a fused layer is cut as if its pieces lay otherwise.", None


def _missing_sum(e: Traces, bias: Tensor | None) -> Reason | None:
    """Each rank has its own term of the output."""
    if not e.unequal:
        return None
    total = torch.stack(list(e.shares)).sum(0)
    if e.fits(total) or (bias is not None and e.fits(total - (e.ranks - 1) * bias)):
        return "The ranks' terms are not summed: g is missing at its exit, and each rank goes on with its own.", None
    return None


def _biases(e: Traces, bias: Tensor | None) -> Reason | None:
    """The bias counts more than once."""
    if bias is None:
        return None
    more, direction = (e.got - e.want).double(), bias.double()
    times = float((more.flatten(0, -2).mean(0) @ direction) / (direction @ direction).clamp(min=1e-60))
    if abs(times) <= NEAR or relative(more, (times * direction).expand_as(more)) > NEAR:
        return None
    return f"Its bias counts {1 + times:.4g} times instead of once: it is added inside the sum over the ranks.", None


def _bias(module: nn.Module) -> Tensor | None:
    """The bias of a row layer, which is whole on every rank."""
    found = module._parameters.get("bias") if isinstance(module, RowLinear) else None
    return None if found is None else local_of(found).detach()


def _masks(e: Traces) -> str:
    masks = [share == 0 for share in e.shares]
    alike = e.place.kind == "parts" and all(m.shape == masks[0].shape and bool((m == masks[0]).all()) for m in masks)
    if alike and e.ranks > 1:
        said = "The ranks' masks are equal: each has drawn the same one for its own part"
        return f"{said}, where a mask must go by the position in the whole tensor."
    return "Other elements are dropped than on one rank: a mask must go by the position in the whole tensor."
