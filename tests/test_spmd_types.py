"""An independent oracle: the type checker of `spmd_types` follows our layers and agrees on every layout.

The checker knows nothing of this library but the types of its three autograd Functions, stated below. It infers the
rest, operation by operation, and refuses an invariant activation that meets a sharded weight without f, or a partial
sum that leaves without g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colrow import ColumnLinear, I, P, R, RowLinear, S, VocabEmbedding, VocabHead, local, move
from colrow import vocab_cross_entropy as cross_entropy
from colrow.layout import Layout
from colrow.static import following, typed
from pool import mesh

TYPES: dict[Any, Layout] = {spmd.I: I, spmd.V: S(0)}


@contextmanager
def _checking() -> Iterator[Any]:
    with following(mesh()):
        yield mesh().get_group()


def _typed(x: Tensor, kind: Any) -> Tensor:
    return typed(x, TYPES[kind], mesh())


def _kind(x: Tensor) -> str:
    (kind,) = spmd.get_local_type(x).values()  # there is one axis
    return kind.name


def _mlp(src: Layout, dst: Layout, kind: Any, wanted: str) -> None:
    up, down = ColumnLinear(8, 32, mesh=mesh(), src=src), RowLinear(32, 8, mesh=mesh(), dst=dst)
    x = torch.randn(10 if kind is spmd.I else 5, 8, requires_grad=True)
    with _checking():
        y = down(F.gelu(up(_typed(x, kind))))
        assert _kind(y) == wanted, _kind(y)


@pytest.mark.parametrize(
    ("src", "dst", "kind", "wanted"),
    [(I, I, spmd.I, "I"), (S(0, size=10), S(0), spmd.V, "V"), (I, S(0), spmd.I, "V"), (S(0, size=10), I, spmd.V, "I")],
    ids=["tp", "sp", "into sp", "out of sp"],
)
def test_an_mlp_has_the_layouts_that_it_states(ranks: Any, src: Layout, dst: Layout, kind: Any, wanted: str) -> None:
    ranks(2).run(_mlp, src, dst, kind, wanted, timeout=30)


def _vocabulary() -> None:
    embed, head = VocabEmbedding(64, 8, mesh=mesh()), VocabHead(8, 64, mesh=mesh(), src=I)
    ids = torch.arange(12)
    with _checking():
        x = embed(_typed(ids, spmd.I))
        assert _kind(x) == "I", _kind(x)
        logits = ColumnLinear.forward(head, x)  # this rank's columns, before they become a DTensor
        assert _kind(logits) == "V", _kind(logits)
        assert _kind(cross_entropy(logits, _typed(ids, spmd.I), mesh(), vocab=64, reduction="none")) == "I"


def test_embedding_head_and_loss_have_the_layouts_that_they_state(ranks: Any) -> None:
    ranks(2).run(_vocabulary, timeout=30)


def _without_f(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    return F.linear(x, local(up.get_parameter("weight"), grad=S(0)))


def _without_g(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
    return move(down(F.gelu(up(x))), mesh(), src=I, dst=R)


def _refused(broken: Callable[[Tensor, nn.Module, nn.Module], Tensor]) -> str:
    up, down = ColumnLinear(8, 32, mesh=mesh()), RowLinear(32, 8, False, mesh=mesh(), dst=P)
    x = torch.randn(5, 8, requires_grad=True)
    with _checking():
        try:
            broken(_typed(x, spmd.I), up, down)
        except spmd.SpmdTypeError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize("broken", [_without_f, _without_g])
def test_the_checker_refuses_a_missing_move(ranks: Any, broken: Any) -> None:
    for said in ranks(2).run(_refused, broken, timeout=30):
        assert said != "accepted", said
