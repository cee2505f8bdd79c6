"""Layouts, splits and fingerprints: what needs no second rank. All comparisons are exact: entries are only copied."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import colrow
from colrow.errors import ColrowError, LayoutError, PlanError, ShapeError, near_misses
from colrow.layout import I, Layout, P, R, S, check_layout, check_mesh, chunk_sizes
from colrow.params import fingerprint
from colrow.split import Piece, Split, fused, split_heads
from pool import mesh


def test_duals_and_names() -> None:
    assert (R.dual, P.dual, I.dual) == (P, R, I)
    for shard in (S(0), S(-1, size=13), S(1, size=(3, 4))):
        assert shard.dual is shard and shard.dual.dual is shard
    assert [repr(layout) for layout in (R, I, P, S(0), S(-1, size=13), S(1, size=(3, 4)))] == [
        "R", "I", "P", "S(0)", "S(-1, size=13)", "S(1, size=(3, 4))",
    ]  # fmt: skip
    assert [str(layout.placement) for layout in (R, I, P, S(1))] == ["R", "R", "P(sum)", "S(1)"]
    assert S(0) == S(0) != S(1) and S(0) != S(0, size=4) and R != I and hash(S(0)) == hash(S(0))
    assert colrow.S is S and colrow.R is R and colrow.I is I and colrow.P is P


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_the_rule_of_slices_is_that_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    assert chunk_sizes(size, ranks) == tuple(chunks[:ranks] + [0] * (ranks - len(chunks)))
    assert S(0, size=size).sizes(ranks) == chunk_sizes(size, ranks)


def test_sizes_of_a_shard() -> None:
    assert S(0).sizes(3) is None
    assert S(0, size=(5, 0, 2)).sizes(3) == (5, 0, 2)
    with pytest.raises(ShapeError, match=r"S\(0, size=\(5, 2\)\): 2 slices; the mesh has 3 ranks"):
        S(0, size=(5, 2)).sizes(3)


PIECES = st.lists(st.builds(Piece, units=st.integers(1, 7), width=st.integers(1, 3)), min_size=1, max_size=3)


@given(pieces=PIECES, ranks=st.integers(1, 5), dim=st.integers(-2, 1), other=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_join_undoes_take(pieces: list[Piece], ranks: int, dim: int, other: int) -> None:
    split = Split(dim, tuple(pieces), ranks)
    shape = [other, other]
    shape[dim] = split.true_size
    whole = torch.arange(1, 1 + shape[0] * shape[1], dtype=torch.float32).view(shape)
    shards = [split.take(whole, rank) for rank in range(ranks)]
    assert torch.equal(split.join(shards), whole)
    seen = torch.zeros(split.true_size, dtype=torch.long)
    for rank, shard in enumerate(shards):
        index = split.index(rank)
        assert shard.shape[dim] == split.local_size == index.numel()
        assert bool((shard.index_select(dim, (index < 0).nonzero().flatten()) == 0).all()), "padding must be zero"
        assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size(), "a shard owns just its storage"
        assert shard.is_contiguous()
        assert int((index[: split.valid(rank)] >= 0).all()), "the true entries of the first piece come first"
        seen[index[index >= 0]] += 1
    assert bool((seen == 1).all()), "every entry belongs to one rank"


@given(units=st.integers(1, 9), width=st.integers(1, 3), ranks=st.integers(1, 5), trimmed=st.booleans())
def test_trim_leaves_out_the_padding(units: int, width: int, ranks: int, trimmed: bool) -> None:
    split = Split(1, (Piece(units, width),), ranks, trimmed=trimmed)
    whole = torch.arange(1, 1 + 2 * units * width).view(2, -1)
    parts = [split.trim(split.take(whole, rank), rank) for rank in range(ranks)]
    if trimmed:
        assert torch.equal(torch.cat(parts, 1), whole)
    else:
        assert {part.shape[1] for part in parts} == {split.local_size}


def test_take_of_five_heads_in_a_fused_projection() -> None:
    q, k, v = (torch.arange(5) + start for start in (10, 20, 30))
    split = Split(0, (Piece(5), Piece(5), Piece(5)), 2)
    assert split.take(torch.cat([q, k, v]), 0).tolist() == [10, 11, 12, 20, 21, 22, 30, 31, 32]
    assert split.take(torch.cat([q, k, v]), 1).tolist() == [13, 14, 0, 23, 24, 0, 33, 34, 0]


def test_take_is_differentiable_and_padding_gets_nothing() -> None:
    split = Split(0, (Piece(3),), 2)
    whole = torch.ones(3, requires_grad=True)
    split.take(whole, 1).backward(torch.tensor([2.0, 7.0]))
    assert whole.grad is not None and whole.grad.tolist() == [0.0, 0.0, 2.0]


HEADS: dict[str, tuple[tuple[int, int, int], tuple[int, int], Any, list[list[int]]]] = {
    # (heads, kv heads, ranks): heads per rank, the kv heads that each rank reads (None: it owns them), units of q
    "5 heads, tp 2": ((5, 5, 2), (3, 3), None, [[0, 1, 2], [3, 4, -1]]),
    "6 heads, 3 kv, tp 2": ((6, 3, 2), (4, 2), None, [[0, 1], [2, -1]]),
    "8 heads, 2 kv, tp 4": ((8, 2, 4), (2, 1), ((0,), (0,), (1,), (1,)), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "6 heads, 2 kv, tp 4": ((6, 2, 4), (2, 2), ((0, 0), (0, 1), (1, 1), (-1, -1)), [[0, 1], [2, 3], [4, 5], [-1, -1]]),
    "4 heads, 2 kv, tp 3": ((4, 2, 3), (2, 1), ((0,), (1,), (-1,)), [[0, 1], [2, 3], [-1, -1]]),
    "4 heads, 1 kv, tp 4": ((4, 1, 4), (1, 1), ((0,),) * 4, [[0], [1], [2], [3]]),
    "3 heads, 3 kv, tp 4": ((3, 3, 4), (1, 1), None, [[0], [1], [2], [-1]]),
    "1 head, tp 4": ((1, 1, 4), (1, 1), None, [[0], [-1], [-1], [-1]]),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_fall_to_ranks(case: str) -> None:
    (heads, kv_heads, ranks), local, reads, units = HEADS[case]
    got = split_heads(heads, kv_heads, 8, ranks, "attn")
    assert (got.local_heads, got.local_kv_heads) == local
    assert got.kv.reads == reads
    assert [got.q.of_rank(rank, ranks) for rank in range(ranks)] == units
    assert (got.q.size, got.kv.size) == (heads * 8, kv_heads * 8), "true sizes do not depend on the ranks"


def test_KV_4_ten_key_value_heads_on_four_ranks() -> None:
    got = split_heads(40, 10, 1, 4, "attn")
    assert (got.local_heads, got.local_kv_heads, got.kv.reads) == (12, 3, None)
    assert got.q == Piece(10, 4), "whole groups of four query heads"
    assert got.kv.of_rank(3, 4) == [9, -1, -1]


@given(kv_heads=st.integers(1, 6), group=st.integers(1, 6), ranks=st.integers(1, 6))
@settings(max_examples=200)
def test_every_query_head_meets_its_own_key_value_head(kv_heads: int, group: int, ranks: int) -> None:
    heads = kv_heads * group
    got = split_heads(heads, kv_heads, 1, ranks, "attn")
    per_group = got.local_heads // got.local_kv_heads  # what attention computes with: query head i reads kv head i // n
    served = []
    for rank in range(ranks):
        q = Split(0, (got.q,), ranks).index(rank).tolist()
        kv = Split(0, (got.kv,), ranks).index(rank).tolist()
        assert (len(q), len(kv)) == (got.local_heads, got.local_kv_heads), "the same numbers on every rank"
        for place, head in enumerate(q):
            assert head < 0 or kv[place // per_group] == head // group
        served += [head for head in q if head >= 0]
    assert served == list(range(heads))


def test_heads_that_are_no_multiple_of_key_value_heads() -> None:
    for heads, kv_heads in ((5, 2), (4, 0)):
        with pytest.raises(
            PlanError, match=f"attn: {heads} heads with {kv_heads} key/value heads; heads must be a mul"
        ):
            split_heads(heads, kv_heads, 8, 2, "attn")


def test_pieces_that_share_a_parameter_are_all_whole_if_one_is() -> None:
    owned, read = Piece(4), Piece(2, 1, ((0,), (1,)))
    assert fused((owned, owned), 2) == (owned, owned)
    assert fused((owned, read), 2) == (Piece(4, 1, ((0, 1), (2, 3))), read)
    split = Split(0, fused((owned, read), 2), 2)
    assert not split.sharded and Split(0, (owned,), 2).sharded
    assert split.take(torch.tensor([10, 11, 12, 13, 20, 21]), 1).tolist() == [12, 13, 21]


def test_an_error_has_four_clauses_and_travels() -> None:
    error = ShapeError("here", "this", "that is allowed", "Do it")
    assert str(error) == "here: this; that is allowed. Do it."
    assert isinstance(error, ColrowError) and isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ShapeError and str(again) == str(error)
    assert (again.where, again.given, again.allowed, again.fix) == ("here", "this", "that is allowed", "Do it")


def test_near_misses() -> None:
    names = ["attn.q", "attn.k", "mlp.up", "mlp.down"]
    assert near_misses("mlp.upp", names).startswith("'mlp.up'")
    assert near_misses("zzzz", names) == "'attn.q', 'attn.k', 'mlp.up'"
    assert near_misses("x", []) == ""
    assert near_misses("a", ["a", "a"]) == "'a'"


@pytest.mark.parametrize("wrong", ["S", 0, None, torch.zeros(2)], ids=["str", "int", "None", "tensor"])
def test_what_is_not_a_layout(wrong: Any) -> None:
    with pytest.raises(LayoutError, match=r"^here: .* is not a layout; there are R, I, P and S\(dim\)\. Write"):
        check_layout(wrong, "here")
    assert isinstance(check_layout(S(0), "here"), Layout)


def test_what_is_not_a_mesh() -> None:
    with pytest.raises(LayoutError, match=r"^here: a str where the mesh should be; a one-axis DeviceMesh is needed\. "):
        check_mesh("tp", "here")


def meshes_refused() -> list[str]:
    texts = []
    for shape, names in (((1, 1), ("dp", "tp")), ((1, 1), ("data", "model"))):
        try:
            check_mesh(mesh(shape, names), "here")
        except LayoutError as error:
            texts.append(str(error))
    return texts


def test_MESH_2_a_mesh_of_two_axes_names_the_axis_to_take(ranks: Any) -> None:
    (texts,) = ranks(1).run(meshes_refused, timeout=30)
    assert texts == [
        "here: a mesh of 2 axes ('dp', 'tp'); one axis is split at a time. Pass mesh[\"tp\"].",
        "here: a mesh of 2 axes ('data', 'model'); one axis is split at a time. Pass mesh[\"model\"].",
    ]


def prints(*tensors: Tensor) -> int:
    return len({fingerprint(x) for x in tensors})


def test_fingerprints_of_equal_tensors_are_equal() -> None:
    x = torch.randn(5, 7)
    assert prints(x, x.clone(), x.t().contiguous().t(), torch.cat([x, x])[:5], x.requires_grad_()) == 1
    assert 0 <= fingerprint(x) < 2**63
    assert fingerprint(torch.empty(0)) == 0 and fingerprint(torch.empty(3, device="meta")) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_fingerprint_depends_on_every_element_and_its_place(dtype: torch.dtype) -> None:
    x = (torch.arange(257) % 2).to(dtype)
    flipped = []
    for place in range(257):
        other = x.clone()
        other[place] = 1 - other[place].to(torch.float32)
        flipped.append(other)
    assert prints(x, *flipped) == 258
    assert prints(x, x.roll(1), x.flip(0)) == 2, "the sequence 0 1 0 ... 0 reads the same backwards"


def test_a_fingerprint_tells_a_number_from_its_complement() -> None:
    ids = torch.tensor([99, 3])
    assert prints(ids, torch.tensor([-100, 3]), ~ids, torch.tensor([99, -4])) == 4, "-100 is ~99: an ignored label"
    assert prints(torch.tensor([0.0]), torch.tensor([-0.0])) == 2, "bits, not values"


def test_a_fingerprint_of_more_than_one_block() -> None:
    x = torch.zeros((1 << 22) + 3, dtype=torch.int64)
    one, two, three = x.clone(), x.clone(), x.clone()
    one[1], two[(1 << 22) + 1], three[-1] = 5, 5, 5
    assert prints(x, one, two, three) == 4
