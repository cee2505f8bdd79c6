"""Dropout by global position: the same elements fall at any degree, in activations that are whole or split.

Masks are compared bit by bit. Statistics: of n draws the kept fraction has a standard deviation of sqrt(p (1-p) / n);
the limits are five of them, and the seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import colrow
from colrow import Dropout, I, S, move
from colrow.layout import Layout
from layouts import part
from pool import mesh as world

LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "whole": (I, (26, 8)),
    "tokens": (S(0), (26, 8)),
    "tokens, stated": (S(0, size=13), (13, 2, 3)),
    "5 heads": (S(1), (2, 5, 7, 7)),
    "features": (S(-1), (2, 13, 10)),
    "one token": (S(0), (1, 8)),
    "one dimension": (S(0), (9,)),
    "no tokens": (S(0), (0, 8)),
}


def dropped(case: str, p: float, calls: int, seed: int) -> list[Tensor]:
    """`calls` successive outputs for an input of ones, gathered."""
    at, shape = LAYOUTS[case]
    layer, mesh = Dropout(p, mesh=world(), src=at), world()
    colrow.seed(mesh, seed)
    outputs = []
    for _ in range(calls):
        y = layer(part(torch.ones(shape), at, mesh))
        outputs.append(y if at == I else move(y, mesh, src=at, dst=I))
    return outputs


@pytest.mark.parametrize("case", LAYOUTS)
def test_masks_are_bit_equal_at_every_degree(ranks: Any, case: str) -> None:
    want = ranks(1).run(dropped, case, 0.3, 2, 5, timeout=30)[0]
    for size in (2, 3, 4):
        for outputs in ranks(size).run(dropped, case, 0.3, 2, 5, timeout=30):
            assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, want, strict=True)), f"{size} ranks"
    if want[0].numel() > 20:
        assert not torch.equal(want[0], want[1]), "another mask at every call"
        assert set(want[0].unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}


@pytest.mark.parametrize("case", ["tokens", "features"])
def test_whole_and_split_activations_drop_the_same_elements(ranks: Any, case: str) -> None:
    _, shape = LAYOUTS[case]
    split = ranks(3).run(dropped, case, 0.5, 1, 5, timeout=30)[0][0]
    whole = ranks(1).run(dropped_whole, shape, timeout=30)[0]
    assert torch.equal(split, whole)


def dropped_whole(shape: tuple[int, ...]) -> Tensor:
    colrow.seed(world(), 5)
    return Dropout(0.5, mesh=world())(torch.ones(shape))


def many_draws() -> list[Tensor]:
    colrow.seed(world(), 1)
    return [Dropout(p, mesh=world())(torch.ones(512, 1024)) != 0 for p in (0.1, 0.5, 0.9)]


def test_statistics(ranks: Any) -> None:
    for p, kept in zip((0.1, 0.5, 0.9), ranks(1).run(many_draws, timeout=30)[0], strict=True):
        keep = kept.double()
        n, sigma = keep.numel(), (p * (1 - p)) ** 0.5
        assert abs(float(keep.mean()) - (1 - p)) < 5 * sigma / n**0.5, "the rate"
        for rows in (keep.mean(0), keep.mean(1)):  # no row and no column is special
            assert float((rows - (1 - p)).abs().max()) < 6 * sigma * (rows.numel() / n) ** 0.5
        centred = (keep - (1 - p)) / sigma
        for dim, lag in ((0, 1), (1, 1), (1, 2), (0, 64), (1, 512), (1, 7)):
            product = centred.narrow(dim, 0, keep.shape[dim] - lag) * centred.narrow(dim, lag, keep.shape[dim] - lag)
            assert abs(float(product.mean())) < 5 / product.numel() ** 0.5, f"neighbours {lag} apart on {dim}"


def agreement_of_shards() -> float:
    """RNG-1: how often the masks of two ranks' token shards agree, place by place."""
    mesh = world()
    mask = (Dropout(0.5, mesh=mesh, src=S(0))(torch.ones(2 * 64 // mesh.size(), 64)) != 0).float()
    masks = move(mask[None], mesh, src=S(0), dst=I)
    same = [(masks[a] == masks[b]).float().mean() for a in range(mesh.size()) for b in range(a)]
    return float(torch.stack(same).sub(0.5).abs().max())


@pytest.mark.parametrize("size", [2, 4])
def test_RNG_1_shards_of_the_sequence_drop_different_elements(ranks: Any, size: int) -> None:
    assert max(ranks(size).run(agreement_of_shards, timeout=30)) < 0.05


def seeded_by_rank() -> tuple[Tensor, Tensor, Tensor]:
    mesh = world()
    torch.manual_seed(100 + mesh.get_rank())
    whole = Dropout(0.5, mesh=mesh)(torch.ones(64, 64))
    heads = Dropout(0.5, mesh=mesh, src=S(1))(torch.ones(2, 4, 16, 16))
    return whole, heads, torch.rand(())


def test_RNG_2_a_trainer_that_seeds_by_rank_does_no_harm(ranks: Any) -> None:
    (whole, heads, after), (whole_1, heads_1, after_1) = ranks(2).run(seeded_by_rank, timeout=30)
    assert torch.equal(whole, whole_1), "a whole activation stays the same on all ranks"
    assert abs(float((heads == heads_1).float().mean()) - 0.5) < 0.05, "heads of different ranks differ"
    assert after != after_1, "and the trainer's own streams are left as they were"


def replicas() -> tuple[Tensor, Tensor]:
    mesh = world((2, 2), ("dp", "tp"))
    colrow.seed(mesh["tp"], 3)
    first = Dropout(0.5, mesh=mesh["tp"])(torch.ones(64, 64))
    return first, torch.rand(())


def test_data_parallel_replicas_drop_different_elements(ranks: Any) -> None:
    masks, draws = zip(*ranks(4).run(replicas, timeout=30), strict=True)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3]), "one axis, one mask"
    assert abs(float((masks[0] == masks[2]).float().mean()) - 0.5) < 0.05
    assert draws[0] == draws[1] != draws[2] == draws[3]


def edges() -> None:
    mesh, x = world(), torch.randn(6, 4, requires_grad=True)
    assert Dropout(0.0, mesh=mesh)(x) is x and Dropout(0.5, mesh=mesh).eval()(x) is x
    y = Dropout(1.0, mesh=mesh)(x)
    y.sum().backward()
    assert not bool(y.any()) and x.grad is not None and not bool(x.grad.any())
    before = x.detach().clone()
    Dropout(0.5, inplace=True, mesh=mesh)(x)
    assert torch.equal(x, before), "never in place"
    hole = torch.full((64, 64), torch.inf)
    assert set(Dropout(0.5, mesh=mesh)(hole).unique().tolist()) == {0.0, torch.inf}, "a dropped infinity is a zero"
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        z = Dropout(0.5, mesh=mesh)(torch.ones(9, 9, dtype=dtype).t())
        assert z.dtype == dtype and set(z.unique().tolist()) <= {0.0, 2.0}
    assert Dropout(0.5, mesh=mesh)(torch.ones(())).shape == ()
    assert repr(Dropout(0.1, mesh=mesh, src=S(0))) == f"Dropout(p=0.1, inplace=False, src=S(0), tp={mesh.size()})"


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_everything_and_evaluation(ranks: Any, size: int) -> None:
    ranks(size).run(edges, timeout=30)


def backward_uses_the_mask(at: Layout) -> None:
    mesh = world()
    x = part(torch.randn(13, 8, dtype=torch.float64), at, mesh).requires_grad_()
    y = Dropout(0.4, mesh=mesh, src=at)(x)
    kept = (y != 0).double() / 0.6
    (dx,) = torch.autograd.grad(y, x, c := torch.randn_like(y), create_graph=True)
    assert torch.allclose(dx, c * kept, rtol=1e-14, atol=0), "two roundings: x / 0.6, and here 1 / 0.6 first"
    (y.square() * c).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x * kept**2 * c, rtol=1e-13, atol=0)


@pytest.mark.parametrize("at", [I, S(0), S(-1)], ids=str)
def test_backward_uses_the_same_mask(ranks: Any, at: Layout) -> None:
    ranks(2).run(backward_uses_the_mask, at, timeout=30)


def recomputed(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Both streams drop; the gradients, and what the generator gives afterwards."""
    mesh = world()
    colrow.seed(mesh, 9)
    whole_drop, token_drop = Dropout(0.5, mesh=mesh), Dropout(0.5, mesh=mesh, src=S(0))

    def block(x: Tensor) -> Tensor:
        y = move(whole_drop(x).sin(), mesh, src=I, dst=S(0))
        return move(token_drop(y).exp(), mesh, src=S(0, size=13), dst=I)

    x = torch.linspace(-1, 1, 13 * 8).view(13, 8).requires_grad_()
    y = x * 1.0
    for _ in range(2):
        y = block(y) if kind == "none" else checkpoint(block, y, use_reentrant=kind == "reentrant")
        assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    return y, x.grad, torch.rand(3)


def test_AC_1_recomputation_draws_the_same(ranks: Any) -> None:
    want = ranks(2).run(recomputed, "none", timeout=30)
    for kind in ("reentrant", "non-reentrant"):
        for got, wanted in zip(ranks(2).run(recomputed, kind, timeout=30), want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), kind


def wrong_dimension() -> None:
    Dropout(0.5, mesh=world(), src=S(0, size=13))(torch.ones(2, 3))


def test_a_slice_that_is_too_small_is_an_error(ranks: Any) -> None:
    errors = ranks(2).run(wrong_dimension, expect_errors=True, timeout=30)
    assert {error.type_name for error in errors} == {"ShapeError"}
    assert errors[0].message.startswith(
        "Dropout: an input of shape (2, 3); S(0, size=13) leaves 7 entries to this rank"
    )
