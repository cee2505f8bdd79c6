"""The moves: what they compute, their adjoints, strides, and slices of any size. What they send: test_move_costs.

Tolerances. fp64 `FP64`: a wrong factor or a lost term is of order 1, rounding near 1e-15. fp32 1e-6: a sum of four
terms rounds to some 1e-7. 16-bit: half a unit in the last place, for the sum is taken in fp32 and rounded once. Moves
that only copy are compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from colrow import I, P, R, S, comm, move
from colrow.params import agree
from layouts import MOVES, STRIDES, inner, layout, make, part, summed
from oracle import FP64, relative
from pool import mesh as world

TOLERANCE = {torch.float64: FP64, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
RELABELLED = ("I -> R", "R -> I")
"""The result is x itself, in another layout."""
# (shape, dimension, slices by world size or None for torch.chunk's)
SHAPES: dict[str, tuple[tuple[int, ...], int, dict[int, tuple[int, ...]] | None]] = {
    "even": ((12, 3), 0, None),
    "13 rows": ((13, 3), 0, None),
    "1 row": ((1, 2, 2), 0, None),
    "13 in the middle": ((2, 13, 3), 1, None),
    "13 last": ((3, 2, 13), -1, None),
    "one dimension": ((5,), 0, None),
    "no rows": ((0, 3), 0, None),
    "no columns": ((4, 0), 0, None),
    "given slices": ((8, 2), 0, {1: (8,), 2: (5, 3), 3: (0, 7, 1), 4: (1, 0, 5, 2)}),
    "given slices, last": ((2, 3, 6), -1, {1: (6,), 2: (0, 6), 3: (1, 3, 2), 4: (2, 2, 0, 2)}),
}


def group(axis: str | None) -> DeviceMesh:
    return world() if axis is None else world((2, 2), ("dp", "tp"))[axis]


def check_forward_and_adjoint(name: str, case: str, dtype: torch.dtype, axis: str | None = None) -> None:
    """y = A x is the reference; x.grad = A* c is the dual move's reference; <A x, c> = <x, A* c>."""
    mesh, (shape, dim, given) = group(axis), SHAPES[case]
    sizes = None if given is None else given[mesh.size()]
    src, dst = (layout(at, dim) for at in MOVES[name])
    mine, whole = make(src, mesh, shape, 1, dtype, sizes)
    c, c_whole = make(dst.dual, mesh, shape, 2, dtype, sizes)
    want, want_grad = part(whole, dst, mesh, sizes), part(c_whole, src.dual, mesh, sizes)
    statements = [None, shape[dim], sizes] if sizes is None else [sizes] if dst.name == "S" else [None, sizes]
    for size in statements if "S" in MOVES[name] else [None]:
        stated = [layout(at, dim, size) for at in MOVES[name]]
        x = mine.clone().requires_grad_()
        y = move(x, mesh, src=stated[0], dst=stated[1])
        y.backward(c.clone())
        assert x.grad is not None and y.dtype == x.grad.dtype == dtype
        tolerance = TOLERANCE[dtype]
        got, got_grad = summed(y, dst, mesh), summed(x.grad, src.dual, mesh)
        assert relative(got, want) <= (tolerance if src == P else 0), f"{name}, {case}, {size}: forward"
        assert relative(got_grad, want_grad) <= (tolerance if dst == R else 0), f"{name}, {case}, {size}: backward"
        if dtype != torch.bfloat16:  # an inner product of bf16 is too coarse to say more than the lines above
            left, right = inner(y, c, dst, mesh), inner(x, x.grad, src, mesh)
            scale = sum(float(t.detach().double().norm()) for t in (whole, c_whole)) + 1
            assert abs(left - right) <= 10 * tolerance * scale**2, (
                f"{name}, {case}: <A x, c> {left} != <x, A* c> {right}"
            )


def every_shape(name: str, dtype: torch.dtype) -> None:
    for case in SHAPES:
        check_forward_and_adjoint(name, case, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_move_is_its_reference_and_its_backward_the_adjoint(
    ranks: Any, size: int, name: str, dtype: torch.dtype
) -> None:
    ranks(size).run(every_shape, name, dtype, timeout=30)


def on_both_axes(axis: str) -> None:
    for name in MOVES:
        for case in ("13 rows", "13 last", "given slices"):
            check_forward_and_adjoint(name, case, torch.float64, axis)


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_MESH_2_one_axis_of_a_two_axis_mesh(ranks: Any, axis: str) -> None:
    ranks(4).run(on_both_axes, axis, timeout=30)  # tp: ranks {0, 1} and {2, 3}; dp: {0, 2} and {1, 3}


def broadcast_on_both_axes() -> list[float]:
    rank = torch.full((3,), float(world().get_rank()))
    mesh = world((2, 2), ("dp", "tp"))
    made_equal = agree([rank, torch.zeros(2)], mesh["tp"])
    return [float(comm.broadcast(rank, mesh[axis])[0]) for axis in ("tp", "dp")] + [float(made_equal[0][2])]


def test_MESH_3_a_broadcast_starts_from_the_first_rank_of_its_own_group(ranks: Any) -> None:
    assert ranks(4).run(broadcast_on_both_axes, timeout=30) == [[0, 0, 0], [0, 1, 0], [2, 0, 2], [2, 1, 2]]


def check_strides(name: str) -> None:
    """Every stride of the input and of the incoming gradient; x is not written to; y has memory of its own."""
    mesh, (src, dst) = world(), (layout(at, 0) for at in MOVES[name])
    for forward, lay_out in STRIDES.items():
        for backward, lay_out_grad in STRIDES.items():
            mine, whole = make(src, mesh, (13, 4, 6), 3, torch.float64)
            c, c_whole = make(dst.dual, mesh, (13, 4, 6), 4, torch.float64)
            whole, c_whole = (
                STRIDES[s](w) if s == "expanded" else w for s, w in ((forward, whole), (backward, c_whole))
            )
            x, c = lay_out(mine), lay_out_grad(c)
            before, version = x.clone(), x._version
            x.requires_grad_()
            y = move(x, mesh, src=src, dst=dst)
            (grad,) = torch.autograd.grad(y, x, c)
            where = f"{name}, x {forward}, gradient {backward}"
            assert relative(summed(y, dst, mesh), part(whole, dst, mesh)) <= FP64, f"{where}: forward"
            got = summed(grad, src.dual, mesh)
            assert relative(got, part(c_whole, src.dual, mesh)) <= FP64, f"{where}: backward"
            assert torch.equal(x, before) and x._version == version, f"{where}: the input was written to"
            if name not in RELABELLED and mesh.size() > 1:  # one rank copies nothing
                assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{where}: y is a view of x"
            if dst.name == "S" and mesh.size() > 1:
                assert y.untyped_storage().nbytes() == y.numel() * 8, f"{where}: a slice keeps the whole alive"


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_CONT_3_any_strides_forward_and_backward(ranks: Any, size: int, name: str) -> None:
    ranks(size).run(check_strides, name, timeout=30)


def changed_in_place(name: str) -> None:
    """The owner of a result may change it, as any torch function's: x and the gradients know nothing of it."""
    mesh, (src, dst) = world(), (layout(at, 0) for at in MOVES[name])
    mine, whole = make(src, mesh, (13, 4), 3, torch.float64)
    c, c_whole = make(dst.dual, mesh, (13, 4), 4, torch.float64)
    x = mine.clone().requires_grad_()
    y = move(x, mesh, src=src, dst=dst)
    y.mul_(3)
    y.backward(c)
    assert torch.equal(x, mine) and x.grad is not None
    assert relative(summed(y, dst, mesh), 3 * part(whole, dst, mesh)) <= FP64
    assert relative(summed(x.grad, src.dual, mesh), 3 * part(c_whole, src.dual, mesh)) <= FP64


@pytest.mark.parametrize("name", [name for name in MOVES if name not in RELABELLED])
@pytest.mark.parametrize("size", [2, 3])
def test_a_result_can_be_changed_in_place(ranks: Any, size: int, name: str) -> None:
    ranks(size).run(changed_in_place, name, timeout=30)


def transposed_after_f() -> None:
    mesh = world()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64) + mesh.get_local_rank()
    (move(x, mesh, src=I, dst=R).transpose(0, 1) @ weight).sum().backward()  # the gradient arrives transposed, stride 0
    total = torch.stack([weight - mesh.get_local_rank() + rank for rank in range(mesh.size())]).sum((0, 2))
    assert x.grad is not None and relative(x.grad, total[:, None].expand(4, 6)) <= FP64
    y = move(weight.t(), mesh, src=P, dst=I)  # a strided input at the exit
    base = weight - mesh.get_local_rank()
    assert relative(y, (base * mesh.size() + sum(range(mesh.size()))).t()) <= FP64


@pytest.mark.parametrize("size", [2, 3])
def test_CONT_1_a_strided_gradient_is_summed(ranks: Any, size: int) -> None:
    ranks(size).run(transposed_after_f, timeout=30)


def finite_differences(name: str, case: str) -> None:
    """Derivatives of sum(c * A(x)^2) and second ones of sum(c * A(x)^3), by central differences over all ranks at once.

    A difference of a square, or of the gradient of a cube, is exact at any step, so there is nothing to tune. A step
    goes in a random direction over the union of the ranks: a wrong derivative is blind to it with probability 0.
    """
    mesh, (shape, dim, given) = world(), SHAPES[case]
    sizes = None if given is None else given[mesh.size()]
    src, dst = (layout(at, dim, sizes or shape[dim]) for at in MOVES[name])
    x = make(src, mesh, shape, 1, torch.float64, sizes)[0]
    c = make(dst.dual, mesh, shape, 2, torch.float64, sizes)[0]

    def value(x: Tensor) -> float:
        return inner(move(x, mesh, src=src, dst=dst).square(), c, dst, mesh)

    def gradient(x: Tensor, power: int, create_graph: bool = False) -> Tensor:
        y = move(x, mesh, src=src, dst=dst) ** power
        return torch.autograd.grad(y, x, c, create_graph=create_graph)[0]

    for direction in (3, 4):
        v = make(src, mesh, shape, direction, torch.float64, sizes)[0]
        slope = (value(x + v) - value(x - v)) / 2
        got = inner(v, gradient(x.clone().requires_grad_(), 2), src, mesh)
        assert abs(got - slope) <= FP64 * (1 + abs(slope)), f"{name}, {case}: slope {got}, wanted {slope}"
        at = x.clone().requires_grad_()
        curve = torch.autograd.grad(gradient(at, 3, create_graph=True), at, v)[0]
        ahead, behind = (gradient((x + step * v).requires_grad_(), 3) for step in (1, -1))
        assert relative(curve, (ahead - behind) / 2) <= FP64, f"{name}, {case}: second derivative"


def every_derivative(name: str) -> None:
    for case in ("13 rows", "13 last", "1 row", "given slices"):
        finite_differences(name, case)


@pytest.mark.parametrize("name", [name for name in MOVES if name != "I -> P"])  # the square of a term is no term
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_AG_2_DB_1_derivatives_by_finite_differences_over_all_ranks(ranks: Any, size: int, name: str) -> None:
    ranks(size).run(every_derivative, name, timeout=30)


def rounded_once(dtype: torch.dtype) -> None:
    """Whole numbers, so that the sum in fp32 is exact: what comes out is the truth rounded once, bit for bit."""
    mesh = world()
    terms = [torch.randint(-40, 40, (256,), generator=torch.Generator().manual_seed(r)) for r in range(mesh.size())]
    large = {torch.bfloat16: 1000, torch.float16: 8000}[dtype]  # neighbours are 4 apart
    terms = [(term + large * (rank == 0)).to(dtype) for rank, term in enumerate(terms)]
    truth = torch.stack(terms).double().sum(0).to(dtype)
    step_by_step = terms[0]
    for term in terms[1:]:
        step_by_step = step_by_step + term
    assert mesh.size() == 2 or not torch.equal(step_by_step, truth), "the sample must be able to show the fault"
    mine = terms[mesh.get_local_rank()]
    for dst in (I, R):
        assert torch.equal(move(mine, mesh, src=P, dst=dst), truth), f"P -> {dst}"
    assert torch.equal(move(mine, mesh, src=P, dst=S(0)), part(truth, S(0), mesh)), "P -> S"
    for at in (I, S(0)):  # backward sums of I -> R and S -> R
        x = part(truth, at, mesh).requires_grad_()
        move(x, mesh, src=at, dst=R).backward(mine)
        assert x.grad is not None and torch.equal(x.grad, part(truth, at, mesh)), f"backward of {at} -> R"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_PREC_1_sixteen_bit_terms_are_summed_in_fp32(ranks: Any, size: int, dtype: torch.dtype) -> None:
    ranks(size).run(rounded_once, dtype, timeout=30)


def one_and_a_thousand() -> float:
    mesh = world()
    return float(move(torch.full((1,), 1e3 if mesh.get_local_rank() == 0 else 1.0).bfloat16(), mesh, src=P, dst=I))


def test_PREC_1_small_addends_are_not_lost(ranks: Any) -> None:
    assert ranks(4).run(one_and_a_thousand, timeout=30) == [1004.0] * 4, "1003, rounded; one by one it stays 1000"
