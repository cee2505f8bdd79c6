"""The oracle: the same weights in one process. Every parameter's gradient is compared, and the input's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import colrow
from colrow.models.tiny import randomize as randomize

FP64 = 1e-10
"""fp64 asks whether the algebra is right: rounding is near 1e-15 a step, a wrong factor or lost term of order 1."""
FP32 = 1e-5
"""fp32 over a few layers: sums of some hundred terms, taken in another order."""


def relative(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest wanted element (so that tiny elements do not blow it up), or to
    `least` if that is larger."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}")
    if want.numel() == 0:
        return 0.0
    difference = (got.detach().double() - want.detach().double()).abs().max()
    return float(difference / want.detach().double().abs().max().clamp(min=max(least, 1e-30)))


def check_grads(split: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Every gradient of the split model, whole, equals the reference's, by name; none is missing."""
    got = colrow.full_grads(split)
    want = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys(), f"gradients of {sorted(got.keys() ^ want.keys())} on one side only"
    # A gradient that is zero in theory (of a bias on k: softmax does not see it) is rounding on both sides, some 1e-17,
    # and two roundings have no digit in common. So nothing is divided by less than 1e-6 of the largest gradient: with a
    # tolerance of 1e-9 that still shows a term of 1e-15 of it, which is where rounding begins.
    least = 1e-6 * max((float(grad.abs().max()) for grad in want.values() if grad.numel()), default=0.0)
    errors = {name: relative(got[name], grad, least) for name, grad in want.items()}
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    assert errors[worst] <= tolerance, f"gradient of {worst}: relative error {errors[worst]:.3g} > {tolerance}"


def cotangent(y: Tensor, seed: int = 5) -> Tensor:
    """A random cotangent, the same for split and reference: a sum's ones hide transposed and lost terms."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)


def compare(
    build: Callable[[], nn.Module],
    args: tuple[Any, ...],
    tolerance: float = FP64,
    dtype: torch.dtype = torch.float64,
    plan: colrow.Plan | None = None,
    sequence_parallel: bool = True,
    mesh: Any = None,
) -> tuple[nn.Module, nn.Module]:
    """Split `build()` and compare outputs, input gradients and every parameter's gradient with one process."""
    from pool import mesh as default_mesh

    torch.manual_seed(0)
    reference = randomize(build()).to(dtype)
    split = colrow.parallelize(
        copy.deepcopy(reference), mesh or default_mesh(), plan, sequence_parallel=sequence_parallel
    )
    mine = [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]
    theirs = [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]
    want, got = reference(*theirs), split(*mine)
    assert relative(got, want) <= tolerance, f"output: relative error {relative(got, want):.3g} > {tolerance}"
    want.backward(cotangent(want))
    got.backward(cotangent(got))
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, Tensor) and a.is_floating_point():
            assert a.grad is not None and b.grad is not None, f"input {place} has no gradient"
            error = relative(a.grad, b.grad)
            assert error <= tolerance, f"gradient of input {place}: relative error {error:.3g} > {tolerance}"
    check_grads(split, reference, tolerance)
    return split, reference
