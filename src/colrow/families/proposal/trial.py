"""What can be tried on small numbers need not be believed by its name: norms, and the repeating of key/value heads."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

_ERRORS = (RuntimeError, TypeError, AttributeError, ValueError, IndexError, NotImplementedError)


def works_by_vector(module: nn.Module, size: int) -> bool:
    """Whether a module does the same to each vector of this size, alone or among others; with parameters of ours."""
    trial, draw = copy(module), torch.Generator().manual_seed(0)
    trial.__dict__["_parameters"] = {
        name: None if param is None else torch.rand(param.shape, generator=draw, dtype=torch.float64) + 0.5
        for name, param in module._parameters.items()
    }
    x = torch.randn(2, 2, 2, size, generator=draw, dtype=torch.float64)
    try:
        with torch.no_grad():
            together = type(module).forward(trial, x)
            alone = [type(module).forward(trial, vector) for vector in x.view(8, 1, size)]
    except _ERRORS:
        return False
    return _equal(together, torch.cat(alone).view_as(x) if all(map(torch.is_tensor, alone)) else None)


def repeats_in_order(function: Callable[..., Any]) -> bool:
    """Whether it repeats heads (batch, heads, ...) one by one, [0 0 1 1], and not in turn, [0 1 0 1]."""
    x = torch.arange(24.0).view(1, 2, 3, 4)
    try:
        return _equal(function(x, 2), x.repeat_interleave(2, 1))
    except _ERRORS:
        return False


def _equal(got: object, want: Tensor | None) -> bool:
    if not isinstance(got, Tensor) or want is None or got.shape != want.shape:
        return False
    return torch.allclose(got.double(), want.double(), rtol=1e-4, atol=1e-5)
