"""Parameters at rest and in flight: storage, values, and the layout of the gradient."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import colrow
from colrow import ColumnLinear, I, P, R, RowLinear, S, VocabEmbedding, local
from colrow.params import agree, local_of, named_parts, read, shard, unshard
from colrow.split import Piece, Split
from pool import mesh as world

SPLITS: dict[str, tuple[tuple[int, ...], Split | None]] = {
    "rows": ((13, 3), Split(0, (Piece(13),), 1, trimmed=True)),
    "columns": ((3, 13), Split(1, (Piece(13),), 1, trimmed=True)),
    "5 heads of 2, fused": ((30, 4), Split(0, (Piece(5, 2),) * 3, 1)),
    "fewer units than ranks": ((1, 4), Split(0, (Piece(1),), 1)),
    "whole": ((4, 3), None),
}


def of_this_mesh(split: Split | None) -> Split | None:
    return None if split is None else Split(split.dim, split.pieces, world().size(), split.trimmed)


def round_trip() -> None:
    mesh = world()
    for case, (shape, split) in SPLITS.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            split = of_this_mesh(split)
            whole = torch.randn(shape).to(dtype)
            at_rest = shard(whole.t().contiguous().t(), split, mesh)
            mine = local_of(at_rest)
            assert isinstance(at_rest, DTensor) and at_rest.dtype == dtype, case
            assert at_rest.placements == ((Replicate() if split is None else Shard(split.dim)),), case
            assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size(), f"{case}: its part only"
            assert mine.is_contiguous(), case
            assert local_of(shard(whole, split, mesh)).data_ptr() != whole.data_ptr(), (
                f"{case}: a copy, not the caller's"
            )
            assert torch.equal(unshard(at_rest, split), whole), f"{case}: bit-equal"
            if split is None:
                assert torch.equal(at_rest.full_tensor(), whole), case
            else:  # what torch makes of it by itself: the true entries and the padding, in the ranks' order
                padded = at_rest.full_tensor()
                assert padded.shape[split.dim] == mesh.size() * split.local_size, case
                parts = [split.take(whole, rank) for rank in range(mesh.size())]
                assert torch.equal(padded, torch.cat(parts, split.dim)), case


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_parameter_is_the_same_after_rest(ranks: Any, size: int) -> None:
    ranks(size).run(round_trip, timeout=30)


def saved_bytes() -> None:
    mesh = world()
    for layer in (ColumnLinear(64, 256, mesh=mesh), RowLinear(64, 256, mesh=mesh), VocabEmbedding(256, 64, mesh=mesh)):
        mine = {name: local_of(value) for name, value in layer.state_dict().items()}
        file = io.BytesIO()
        torch.save(mine, file)
        total = sum(value.numel() * value.element_size() for value in mine.values())
        assert file.tell() <= total + 4096, "a view would drag all 64 KiB into the file; the format itself takes 2"


def test_MEM_2_a_saved_shard_is_as_large_as_the_shard(ranks: Any) -> None:
    ranks(4).run(saved_bytes, timeout=30)


def gradients() -> None:
    """Each rank adds its own number: the layout says what the whole gradient is."""
    mesh, rank = world(), world().get_local_rank()
    total = sum(range(1, mesh.size() + 1))
    whole = torch.zeros(4, 3)

    def grad_of(split: Split | None, at: Any, factor: float) -> DTensor:
        param = nn.Parameter(shard(whole, split, mesh))
        y = local(param, grad=at)
        assert type(y) is Tensor and y.requires_grad
        y.backward(torch.full_like(y, factor))
        assert isinstance(param.grad, DTensor)
        return param.grad

    partial = grad_of(None, R, rank + 1.0)
    assert partial.placements == (Partial(),) and bool((partial.full_tensor() == total).all())
    assert bool((unshard(partial, None) == total).all())
    invariant = grad_of(None, I, 7.0)
    assert invariant.placements == (Replicate(),) and bool((invariant.full_tensor() == 7).all())
    for dim, at in ((0, S(0)), (0, S(-2)), (1, S(1)), (1, S(-1))):
        split = Split(dim, (Piece(whole.shape[dim]),), mesh.size())
        sharded = grad_of(split, at, rank + 1.0)
        assert sharded.placements == (Shard(dim),) and bool((local_of(sharded) == rank + 1).all())
    plain = torch.ones(2, requires_grad=True)
    assert local(plain, grad=R) is plain


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gradient_arrives_in_the_dual_layout(ranks: Any, size: int) -> None:
    ranks(size).run(gradients, timeout=30)


def read_what_is_needed() -> Tensor:
    """k and v of one head, whole at rest: each rank reads its own; the gradient is the sum over the readers."""
    mesh = world()
    reads = tuple(((rank,) if rank < 2 else (-1,)) if rank else (0,) for rank in range(mesh.size()))
    split = Split(0, (Piece(2, 2, reads),), mesh.size())
    param = nn.Parameter(shard(torch.arange(8.0).view(4, 2), split, mesh))
    assert isinstance(param, DTensor) and param.placements == (Replicate(),), "whole at rest"
    mine = read(param, split, mesh, I)
    wanted = torch.arange(8.0).view(2, 2, 2)
    rank = mesh.get_local_rank()
    assert torch.equal(mine, wanted[rank] if rank < 2 else torch.zeros(2, 2))
    mine.backward(torch.full_like(mine, rank + 1.0))
    assert isinstance(param.grad, DTensor) and param.grad.placements == (Partial(),)
    return param.grad.full_tensor()


def test_a_rank_reads_what_it_needs_of_a_whole_parameter(ranks: Any) -> None:
    for grad in ranks(3).run(read_what_is_needed, timeout=30):
        assert grad.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]], "padding of the third rank gives nothing"


def agreed(case: str) -> list[Tensor]:
    mesh, rank = world(), float(world().get_rank())
    tensors = [torch.ones(3), torch.full((2, 2), rank), torch.tensor(rank, dtype=torch.bfloat16), torch.empty(0)]
    if case == "nan":
        tensors = [torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, rank])]
    got = agree(tensors, mesh)
    assert case == "nan" or got[0] is tensors[0], "equal everywhere: nothing is sent or copied"
    assert tensors[1].reshape(-1)[-1] == rank, "the arguments are left alone"
    return got


def test_tensors_that_differ_are_taken_from_the_first_rank(ranks: Any) -> None:
    for got in ranks(3).run(agreed, "plain", timeout=30):
        assert [x.tolist() for x in got] == [[1, 1, 1], [[0, 0], [0, 0]], 0, []]
        assert got[2].dtype == torch.bfloat16
    for first, second in ranks(3).run(agreed, "nan", timeout=30):
        assert first.isnan().tolist() == second.isnan().tolist() == [True, False] and second[1] == 0


def names() -> list[str]:
    mesh = world()
    model = nn.Sequential(ColumnLinear(3, 4, mesh=mesh), RowLinear(4, 3, mesh=mesh), nn.LayerNorm(3))
    model.append(model[1])  # used twice: one parameter, under its first name
    return [f"{name} {None if split is None else split.dim}" for name, _, split in named_parts(model)]


def test_every_parameter_once_with_its_split(ranks: Any) -> None:
    assert ranks(2).run(names, timeout=30)[0] == [
        "0.weight 0", "0.bias 0", "1.weight 1", "1.bias None", "2.weight None", "2.bias None",
    ]  # fmt: skip


WRONG = {
    "a shard as R": "a parameter at rest as S(0) read as R",
    "a shard as I": "a parameter at rest as S(0) read as I",
    "another dimension": "a parameter at rest as S(0) read as S(1)",
    "whole as S": "a parameter at rest as R read as S(0)",
}


def wrong(case: str) -> None:
    layer = ColumnLinear(4, 4, mesh=world())
    row = RowLinear(4, 4, mesh=world())
    param, grad = {
        "a shard as R": (layer.weight, R),
        "a shard as I": (layer.weight, I),
        "another dimension": (layer.weight, S(1)),
        "whole as S": (row.bias, S(0)),
    }[case]
    local(param, grad=grad)


@pytest.mark.parametrize("case", WRONG)
def test_reading_a_parameter_as_what_it_is_not(ranks: Any, case: str) -> None:
    errors = ranks(2).run(wrong, case, expect_errors=True, timeout=30)
    text = f"colrow.local: {WRONG[case]}; shards are read as S(dim), the others as R or I. Correct grad=."
    assert {(error.type_name, error.message) for error in errors} == {("ShapeError", text)}


def test_the_public_name() -> None:
    assert colrow.local is local and colrow.P is P
