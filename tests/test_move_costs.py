"""What a move sends, refuses, and compiles to. What it computes: test_moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import colrow
from colrow import I, P, R, S, comm, move
from layouts import MOVES, layout, make
from pool import mesh as world
from wire import CommDebug

SENT = {  # move: forward, backward
    "I -> R": ({}, {"allreduce_": 1}),
    "P -> I": ({"allreduce_": 1}, {}),
    "S -> R": ({"_allgather_base_": 1}, {"alltoall_base_": 1}),
    "P -> S": ({"alltoall_base_": 1}, {"_allgather_base_": 1}),
    "I -> S": ({}, {"_allgather_base_": 1}),
    "S -> I": ({"_allgather_base_": 1}, {}),
    "P -> R": ({"allreduce_": 1}, {"allreduce_": 1}),
    "R -> I": ({}, {}),
    "I -> P": ({}, {}),
}


def sent_by(mode: CommDebug) -> dict[str, int]:
    return {str(op).split(".")[1]: count for op, count in mode.get_comm_counts().items() if count}


def collectives(name: str, stated: bool) -> tuple[dict[str, int], dict[str, int]]:
    mesh = world()
    src, dst = (layout(at, 0, 13 if stated else None) for at in MOVES[name])
    x, c = (
        make(src, mesh, (13, 2), 1, torch.float32)[0].requires_grad_(),
        make(dst.dual, mesh, (13, 2), 2, torch.float32)[0],
    )
    with CommDebug() as forward:
        y = move(x, mesh, src=src, dst=dst)
    with CommDebug() as backward:
        y.backward(c)
    return sent_by(forward), sent_by(backward)


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_move_sends_what_the_table_says(ranks: Any, size: int, name: str) -> None:
    want = SENT[name] if size > 1 else ({}, {})
    assert ranks(size).run(collectives, name, True, timeout=30) == [want] * size
    forward, backward = ranks(size).run(collectives, name, False, timeout=30)[0]
    asked = size > 1 and MOVES[name][0] == "S"  # slices of unstated size: one more, of a few integers
    assert forward == {op: count + asked for op, count in want[0].items()} and backward == want[1]


def the_same_layout() -> bool:
    x = torch.ones(3)
    return all(move(x, world(), src=at, dst=at) is x for at in (R, I, P, S(0)))


def test_no_move_is_no_copy(ranks: Any) -> None:
    assert ranks(2).run(the_same_layout, timeout=30) == [True, True]


WRONG: dict[str, tuple[str, str]] = {
    "R -> P": (
        "LayoutError",
        "colrow.move: there is no move R -> P; the moves are I -> R, P -> I, S -> R, P -> S, I -> S, S -> I, P -> R, "
        "R -> I, I -> P. Go through one of them, or through two.",
    ),
    "S(0) -> P": ("LayoutError", "colrow.move: there is no move S(0) -> P; the moves are "),
    "S(0) -> S(1)": ("LayoutError", "colrow.move: there is no move S(0) -> S(1); the moves are "),
    "no layout": ("LayoutError", "colrow.move(dst=): 'R' is not a layout; there are R, I, P and S(dim). Write "),
    "no mesh": ("LayoutError", "colrow.move: a NoneType where the mesh should be; a one-axis DeviceMesh is needed. "),
    "two axes": (
        "LayoutError",
        "colrow.move: a mesh of 2 axes ('dp', 'tp'); one axis is split at a time. Pass mesh[\"tp\"].",
    ),
    "no dimension": ("ShapeError", "colrow.move: S(2) of a tensor of shape (4, 3); it has 2 dimensions. Name one "),
    "a scalar": ("ShapeError", "colrow.move: S(0) of a tensor of shape (); it has 0 dimensions. Name one of them."),
    "other slices": (
        "ShapeError",
        "colrow.move: slices of shapes [(4, 3), (4, 4), (4, 5), (4, 6)]; they may differ in dimension 0 only. "
        "Give every rank a slice of one tensor.",
    ),
    "other dimensions": ("ShapeError", "colrow.move: slices of shapes [(4,), (4, 1), (4, 1, 1), (4, 1, 1, 1)]; "),
    "too few sizes": ("ShapeError", "S(0, size=(2, 2)): 2 slices; the mesh has 4 ranks. Give one per rank."),
    "a DTensor": ("LayoutError", "colrow.move: a DTensor in (Shard(dim=0),); x must be this rank's plain tensor. "),
}


def wrong(case: str) -> None:
    mesh, x = world(), torch.ones(4, 3)
    rank = mesh.get_local_rank()
    arguments: dict[str, tuple[Tensor, Any, Any, Any]] = {
        "R -> P": (x, mesh, R, P),
        "S(0) -> P": (x, mesh, S(0), P),
        "S(0) -> S(1)": (x, mesh, S(0), S(1)),
        "no layout": (x, mesh, I, "R"),
        "no mesh": (x, None, I, R),
        "two axes": (x, world((2, 2), ("dp", "tp")), I, R),
        "no dimension": (x, mesh, I, S(2)),
        "a scalar": (x[0, 0], mesh, P, S(0)),
        "other slices": (torch.ones(4, 3 + rank), mesh, S(0), R),
        "other dimensions": (torch.ones(4, *[1] * rank), mesh, S(0), I),
        "too few sizes": (x, mesh, S(0, size=(2, 2)), I),
        "a DTensor": (DTensor.from_local(x, mesh, [Shard(0)]), mesh, S(0), I),
    }
    given, on, src, dst = arguments[case]
    move(given, on, src=src, dst=dst)


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_moved_is_one_error_on_every_rank(ranks: Any, case: str) -> None:
    kind, text = WRONG[case]
    errors = ranks(4).run(wrong, case, expect_errors=True, timeout=30)
    assert len({(error.type_name, error.message) for error in errors}) == 1, errors
    assert errors[0].type_name == kind and errors[0].message.startswith(text), errors[0].message


def through_all_moves(x: Tensor, mesh: DeviceMesh) -> Tensor:
    y = move(x, mesh, src=P, dst=I).sin()
    y = move(y * y, mesh, src=I, dst=S(0)).exp()
    y = move(y, mesh, src=S(0, size=5), dst=R) * (1 + mesh.get_local_rank())
    y = move(y, mesh, src=P, dst=S(0, size=5)).cos()
    y = move(y, mesh, src=S(0, size=5), dst=I)
    y = move(y, mesh, src=I, dst=R) * (2 + mesh.get_local_rank())
    return move(y, mesh, src=P, dst=R)


def compiled_equals_eager() -> None:
    compiled = torch.compile(through_all_moves, fullgraph=True, backend="aot_eager")
    comm.use_transport(world(), "torch")  # which is in what is compiled
    results = []
    for fn in (through_all_moves, compiled):
        x = (torch.arange(15, dtype=torch.float64).view(5, 3) / 7 + world().get_local_rank()).requires_grad_()
        y = fn(x, world())
        y.backward(torch.ones_like(y) + world().get_local_rank())
        results.append((y.detach(), x.grad))
    comm.use_transport(world(), "auto")
    (y, dx), (y_compiled, dx_compiled) = results
    assert torch.equal(y, y_compiled) and torch.equal(dx, dx_compiled), "the same operations in the same order"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_COMP_1_a_function_of_moves_compiles_as_one_graph(ranks: Any, size: int) -> None:
    ranks(size).run(compiled_equals_eager, timeout=60)


def moved_whole_numbers() -> list[int]:
    mesh = world()
    mine = torch.arange(2) + 10 * mesh.get_local_rank()
    return [*move(mine, mesh, src=S(0), dst=I).tolist(), *move(mine, mesh, src=P, dst=I).tolist()]


def test_whole_numbers_move_too(ranks: Any) -> None:
    assert ranks(2).run(moved_whole_numbers, timeout=30) == [[0, 1, 10, 11, 10, 12]] * 2


def moves_without_a_graph() -> bool:
    with torch.no_grad():
        y = move(torch.ones(4, requires_grad=True), world(), src=I, dst=S(0))
    with torch.inference_mode():
        z = move(torch.ones(4), world(), src=P, dst=I)
    return not y.requires_grad and bool((z == 2).all()) and colrow.move is move


def test_moves_in_no_grad_and_inference_mode(ranks: Any) -> None:
    assert ranks(2).run(moves_without_a_graph, timeout=30) == [True, True]
