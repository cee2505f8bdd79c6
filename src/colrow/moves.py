"""The moves between layouts, and the one autograd Function that makes them. This file is the library.

A gradient's layout is the dual of its value's (R <-> P, I <-> I, S <-> S), so the adjoint of a move is a move:
(src -> dst) turns into (dst.dual -> src.dual). Every tensor- or sequence-parallel layer is made of these.

    move      forward          adjoint             in the papers
    I -> R    nothing          P -> I              f (Megatron-LM, arXiv:1909.08053, figure 3)
    P -> I    all-reduce       I -> R              g
    S -> R    all-gather       P -> S              f with sequence parallelism (arXiv:2205.05198, figure 5)
    P -> S    reduce-scatter   S -> R              g with sequence parallelism
    I -> S    slice            S -> I              into the sequence-parallel stretch
    S -> I    all-gather       I -> S              out of it
    P -> R    all-reduce       P -> R
    R -> I    nothing          I -> P              out of a region, for a reader outside (a router's logits)
    I -> P    first rank's     R -> I
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from colrow import comm
from colrow.errors import LayoutError, ShapeError
from colrow.layout import Layout, S, check_layout, check_mesh, chunk_sizes

Sizes = tuple[int, ...]


def move(x: Tensor, mesh: DeviceMesh, *, src: Layout, dst: Layout) -> Tensor:
    """Bring `x`, which is in layout `src` on the axis `mesh`, into layout `dst`.

        I -> R   rank 0: x         rank 1: x         ->   x         x            (the same bits, another gradient)
        P -> I   rank 0: x0        rank 1: x1        ->   x0+x1     x0+x1
        S -> R   rank 0: x[:n]     rank 1: x[n:]     ->   x         x
        P -> S   rank 0: x0        rank 1: x1        ->   (x0+x1)[:n]   (x0+x1)[n:]
        I -> S   rank 0: x         rank 1: x         ->   x[:n]     x[n:]
        I -> P   rank 0: x         rank 1: x         ->   x         0            (so that the sum is x)

    Arguments:
        x: a local tensor: any strides, any dtype, empty or uneven slices too. It is never written to.
        mesh: one axis of a DeviceMesh, `mesh["tp"]`.
        src, dst: two of `R`, `I`, `P`, `S(dim)`. A slice of unstated size is asked for: see `S`.

    Cost: one collective, as the table says; its adjoint in backward. Differentiable any number of times.

    Raises:
        LayoutError: no such layout or move, or a mesh of several axes.
        ShapeError: slices that do not fit together.
    """
    check_mesh(mesh, "colrow.move")
    if isinstance(x, DTensor):
        fix = "Read it with colrow.local(x, grad=), or let it move itself: x.redistribute(), x.full_tensor()"
        raise LayoutError("colrow.move", f"a DTensor in {x.placements}", "x must be this rank's plain tensor", fix)
    src, dst = check_layout(src, "colrow.move(src=)"), check_layout(dst, "colrow.move(dst=)")
    if src == dst:
        return x
    if (src.name, dst.name) not in MOVES:
        legal = ", ".join(f"{a} -> {b}" for a, b in MOVES)
        given = f"there is no move {src} -> {dst}"
        raise LayoutError("colrow.move", given, f"the moves are {legal}", "Go through one of them, or through two")
    sizes = _slices(x, mesh, src, dst)
    return Move.apply(x, mesh, src, dst, sizes)


class Move(torch.autograd.Function):
    """A move, whose backward is the adjoint move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
        ctx.mesh, ctx.src, ctx.dst, ctx.sizes = mesh, src, dst, sizes
        if src.name == "S" and dst.name == "R":
            ctx.shard = x  # for `shard_of`, until `forget_shard`
        y = MOVES[src.name, dst.name](x, mesh, src, dst, sizes)
        if y is x:  # nothing to do, or nothing to do on an axis of one rank
            return x.view_as(x) if {src.name, dst.name} == {"I", "R"} else x.clone()
        return y.detach()  # not a view of a buffer, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Move.apply(grad, ctx.mesh, ctx.dst.dual, ctx.src.dual, ctx.sizes), None, None, None, None


def _keep(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    return x


def _reduce(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    return comm.all_reduce(x, mesh)


def _gather(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    return comm.all_gather(x, mesh, _dim(src), sizes)


def _reduce_scatter(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    return comm.reduce_scatter(x, mesh, _dim(dst), sizes)


def _slice(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    rank = mesh.get_local_rank()
    return x.narrow(_dim(dst), sum(sizes[:rank]), sizes[rank]).clone()  # a view would keep the whole tensor alive


def _first(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, sizes: Sizes) -> Tensor:
    return x if mesh.get_local_rank() == 0 else torch.zeros_like(x)


MOVES: Final[dict[tuple[str, str], Callable[[Tensor, DeviceMesh, Layout, Layout, Sizes], Tensor]]] = {
    ("I", "R"): _keep,
    ("P", "I"): _reduce,
    ("S", "R"): _gather,
    ("P", "S"): _reduce_scatter,
    ("I", "S"): _slice,
    ("S", "I"): _gather,
    ("P", "R"): _reduce,
    ("R", "I"): _keep,
    ("I", "P"): _first,
}


def _dim(layout: Layout) -> int:
    return layout.dim if isinstance(layout, S) else 0


def _slices(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout) -> Sizes:
    """The size of every rank's slice in this move (empty if neither side is sharded), checked against x."""
    shard = src if isinstance(src, S) else dst if isinstance(dst, S) else None
    if shard is None:
        return ()
    if not -x.dim() <= shard.dim < x.dim():
        given = f"{shard} of a tensor of shape {tuple(x.shape)}"
        raise ShapeError("colrow.move", given, f"it has {x.dim()} dimensions", "Name one of them")
    sizes = shard.sizes(mesh.size())
    if sizes is None:
        sizes = _agree(x, mesh, shard) if shard is src else chunk_sizes(x.shape[shard.dim], mesh.size())
    have, need = x.shape[shard.dim], sizes[mesh.get_local_rank()] if shard is src else sum(sizes)
    if have != need:
        given = f"a tensor of shape {tuple(x.shape)} for the move {src} -> {dst}"
        allowed = f"dimension {shard.dim} must have {need} entries on this rank (slices {list(sizes)})"
        raise ShapeError("colrow.move", given, allowed, f"Give the size of the whole dimension, S({shard.dim}, size=n)")
    return sizes


def _agree(x: Tensor, mesh: DeviceMesh, shard: S) -> Sizes:
    """Ask every rank for its slice; one that differs in more than its size is an error on all of them."""
    dim = shard.dim % x.dim()
    longest = 16  # dimensions; the lists must have one length
    every = comm.exchange([x.dim(), *x.shape, *[0] * (longest - x.dim())], mesh)
    shapes = [tuple(numbers[1 : 1 + numbers[0]]) for numbers in every]
    rest = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) > 1:
        given = f"slices of shapes {shapes}"
        raise ShapeError(
            "colrow.move", given, f"they may differ in dimension {dim} only", "Give every rank a slice of one tensor"
        )
    return tuple(shape[dim] for shape in shapes)


def shard_of(x: Tensor) -> tuple[Any, Tensor] | None:
    """If `x` was gathered from a shard (S -> R), or is a view of such a tensor: the gather's node and the shard.

    It is read off the autograd graph, so nothing travels beside the tensor. A layer that saves the shard and gathers it
    again in backward keeps 1/t of the bytes (arXiv:2205.05198, section 4.2.2).
    """
    node = _gather_node(x)
    if node is None or node.shard is None or node.shard.shape[-1] != x.shape[-1] or _dim(node.src) != 0:
        return None
    return node, node.shard


def forget_shard(x: Tensor) -> None:
    """No layer will ask for the shard of `x` any more: let the graph not keep it, so that checkpointing can free it.

    (A weak reference would do it by itself, but at a time that differs between ranks; and who gathers again in backward
    must not depend on that.)
    """
    node = _gather_node(x)
    if node is not None:
        node.shard = None


def _gather_node(x: Tensor) -> Any:
    node, place = x.grad_fn, x.output_nr
    # the last is what a module's full backward hooks (and tools that count collectives by them) put before its inputs
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "BackwardHookFunctionBackward"):
        node, place = node.next_functions[place]
    return node if hasattr(node, "shard") else None
