"""Tensors in a layout, with the truth beside them: what the tests of the moves are made of. Only `inner` communicates.

`make` gives this rank's part of a tensor and the whole tensor (the sum, for P), both from a seed. `inner` is the inner
product of a tensor and one in its dual layout: under it each move has one adjoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from colrow.layout import I, Layout, P, R, S, chunk_sizes

MOVES: dict[str, tuple[str, str]] = {
    f"{src} -> {dst}": (src, dst) for src, dst in ["IR", "PI", "SR", "PS", "IS", "SI", "PR", "RI", "IP"]
}


def layout(name: str, dim: int = 0, size: Any = None) -> Layout:
    return {"R": R, "I": I, "P": P}.get(name) or S(dim, size=size)


def slices(mesh: DeviceMesh, shape: Sequence[int], dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(sizes) if sizes is not None else chunk_sizes(shape[dim], mesh.size())


def part(whole: Tensor, at: Layout, mesh: DeviceMesh, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part of a whole tensor in R, I or S."""
    if not isinstance(at, S):
        return whole.clone()
    rank, cuts = mesh.get_local_rank(), slices(mesh, whole.shape, at.dim, sizes)
    return whole.narrow(at.dim, sum(cuts[:rank]), cuts[rank]).clone()


def make(
    at: Layout, mesh: DeviceMesh, shape: Sequence[int], seed: int, dtype: Any, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(this rank's part, the whole). Every axis of a larger mesh gets other numbers: crossed groups must show."""
    seed = 1000 * seed + 100 * int(mesh.mesh.flatten()[0])
    terms = []
    for rank in range(mesh.size() if at == P else 1):
        generator = torch.Generator().manual_seed(seed + rank)
        terms.append(torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype))
    if at == P:
        return terms[mesh.get_local_rank()], torch.stack(terms).double().sum(0).to(dtype)
    return part(terms[0], at, mesh, sizes), terms[0]


def summed(x: Tensor, at: Layout, mesh: DeviceMesh) -> Tensor:
    """The value that a tensor in layout `at` stands for on this rank: the sum of the terms, for P."""
    if at != P or mesh.size() == 1:
        return x
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


def inner(x: Tensor, y: Tensor, at: Layout, mesh: DeviceMesh) -> float:
    """<x, y> of x in layout `at` and y in its dual: I counts once; slices and terms add up over the ranks."""
    total = (x.detach().double() * y.detach().double()).sum()
    if at != I and mesh.size() > 1:
        dist.all_reduce(total, group=mesh.get_group())
    return float(total)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def column_slice(x: Tensor) -> Tensor:
    """The same numbers as a window into a larger tensor full of nan."""
    larger = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), torch.nan)
    window = larger[..., 1 : 1 + 2 * x.shape[-1] : 2]
    window.copy_(x)
    return window


def expanded(x: Tensor) -> Tensor:
    """Stride 0 along the middle dimension; the numbers become constant along it."""
    middle = x.dim() // 2
    return x.narrow(middle, 0, min(1, x.shape[middle])).expand(x.shape)


STRIDES = {"plain": Tensor.clone, "transposed": transposed, "column slice": column_slice, "expanded": expanded}
