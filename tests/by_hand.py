"""An MLP that somebody splits by hand, and the same MLP in one process: what the tests of the layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colrow import ColumnLinear, I, RowLinear, S
from colrow.layout import Layout
from layouts import part
from oracle import FP64, check_grads, cotangent, relative
from pool import mesh as world
from wire import CommDebug

Act = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    def __init__(self, up: nn.Linear, down: nn.Linear, act: Act) -> None:
        super().__init__()
        self.up, self.down, self.act = up, down, act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def stream(sequence_parallel: bool) -> Layout:
    """The layout of what enters and leaves the MLP."""
    return S(0) if sequence_parallel else I


def pair(
    sizes: tuple[int, int, int],
    act: Act,
    sequence_parallel: bool,
    dtype: torch.dtype = torch.float64,
    mesh: DeviceMesh | None = None,
    bias: bool = True,
) -> tuple[Mlp, Mlp]:
    """(split, reference): the same draws from the same seed."""
    (width, hidden, out), at = sizes, stream(sequence_parallel)
    where: dict[str, Any] = {"mesh": mesh or world(), "dtype": dtype, "bias": bias}
    torch.manual_seed(7)
    reference = Mlp(nn.Linear(width, hidden, bias, dtype=dtype), nn.Linear(hidden, out, bias, dtype=dtype), act)
    torch.manual_seed(7)
    split = Mlp(ColumnLinear(width, hidden, src=at, **where), RowLinear(hidden, out, dst=at, **where), act)
    return split, reference


def check_step(
    split: nn.Module,
    reference: nn.Module,
    shape: tuple[int, ...],
    sequence_parallel: bool,
    tolerance: float = FP64,
    dtype: torch.dtype = torch.float64,
    mesh: DeviceMesh | None = None,
) -> None:
    """The output, the input's gradient and every parameter's, under a random cotangent, equal those of one process."""
    mesh, at = mesh or world(), stream(sequence_parallel)
    whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    whole.requires_grad_()
    mine = part(whole.detach(), at, mesh).requires_grad_()
    want, got = reference(whole), split(mine)
    c = cotangent(want)
    assert relative(got, part(want.detach(), at, mesh)) <= tolerance, "output"
    want.backward(c)
    got.backward(part(c, at, mesh))
    assert whole.grad is not None and mine.grad is not None
    assert relative(mine.grad, part(whole.grad, at, mesh)) <= tolerance, "gradient of the input"
    check_grads(split, reference, tolerance)


def sent_by(mode: CommDebug) -> dict[str, int]:
    return {str(op).split(".")[1]: count for op, count in mode.get_comm_counts().items() if count}
