"""`colrow.check` accepts a parallel module whose layouts fit, and refuses one whose layouts do not, without ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colrow
from colrow import ColumnLinear, I, P, R, RowLinear, S, local, move

X = torch.randn(5, 8)


class MLP(nn.Module):
    src: Any = I
    dst: Any = I

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.up = mesh, ColumnLinear(8, 32, mesh=mesh, src=self.src)
        self.down = RowLinear(32, 8, mesh=mesh, dst=self.dst)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Sequence(MLP):
    src = dst = S(0)


class Terms(MLP):
    dst = P


class WithoutF(MLP):
    """The column layer's weight is used by hand, and its input is in I."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(F.linear(x, local(self.up.weight, grad=S(0)))))


class WrongGain(Sequence):
    """A parameter that meets this rank's tokens is read as if every rank computed the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * local(self.down.bias, grad=I))


class RightGain(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * local(self.down.bias, grad=R))


class WrongEnd(Terms):
    """Terms that are not summed leave as if they were."""

    def forward(self, x: Tensor) -> Tensor:
        return move(super().forward(x), self.mesh, src=I, dst=R)


@pytest.mark.parametrize(
    ("kind", "takes", "gives"),
    [(MLP, I, I), (Sequence, S(0), S(0)), (Terms, I, P), (RightGain, S(0), S(0))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_layouts_that_fit_are_accepted(kind: Any, takes: Any, gives: Any, ranks: int) -> None:
    colrow.check(kind, (X, takes), gives=gives, ranks=ranks)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("kind", "takes", "gives", "says"),
    [
        (WithoutF, I, I, "WithoutF: tensors in I and S, or P meet; S goes with S and R, I with I alone"),
        (WrongGain, S(0), S(0), "WrongGain: tensors in S, or P and I meet"),
        (MLP, I, R, "MLP: its output is in I; it was to be in R. End it with colrow.move"),
        (MLP, I, S(0), "MLP: its output is in I; it was to be in S"),
        (WrongEnd, I, R, "WrongEnd: "),
        (Sequence, I, S(0), "Sequence: it uses a tensor that has no layout: one that it has made itself, or a slice"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_layouts_that_do_not_fit_are_refused(kind: Any, takes: Any, gives: Any, says: str) -> None:
    with pytest.raises(colrow.LayoutError) as raised:
        colrow.check(kind, (X, takes), gives=gives)
    assert str(raised.value).startswith(says), raised.value
    assert not dist.is_initialized()


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(colrow.LayoutError, match=r"pip install 'colrow\[check\]'"):
        colrow.check(MLP, (X, I), gives=I)
