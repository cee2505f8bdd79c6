"""What a tensor on the tensor-parallel axis *is* on each rank: four layouts, and the dual of each.

    layout    rank 0   rank 1    its gradient is
    R         x        x         P   every rank used x: each holds one term of the gradient
    I         x        x         I   every rank computed the same from x: each holds the whole gradient
    S(dim)    x[:n]    x[n:]     S   each rank holds the gradient of its slice
    P         x0       x1        R   the value is x0 + x1: every term has the same gradient

R and I hold the same bits. They differ in what the backward pass owes: forgetting that leaves the loss right and the
gradients wrong. (Terms of `spmd_types`: replicate, invariant, shard, partial.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from colrow.errors import LayoutError, ShapeError


@dataclass(frozen=True)
class Layout:
    """Base of the four layouts; use the values `R`, `I`, `P` and `S(dim)`."""

    name: str

    @property
    def dual(self) -> Layout:
        """The layout of the gradient of a value in this layout."""
        return {"R": P, "P": R}.get(self.name, self)

    @property
    def placement(self) -> Placement:
        """The DTensor placement that holds the same bits (R and I are both `Replicate`)."""
        return Partial() if self.name == "P" else Replicate()

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class S(Layout):
    """Shard: rank r holds the r-th slice of dimension `dim`.

    Arguments:
        dim: the tensor's dimension (negative counts from the end).
        size: the size of the whole dimension, cut by the rule of `torch.chunk`; or the size of every rank's slice, as
            a tuple. Without it a gather asks the other ranks first (one small extra collective): slices may be uneven,
            and a rank cannot know that from its own.
    """

    name: str = "S"
    dim: int = 0
    size: int | tuple[int, ...] | None = None

    def __init__(self, dim: int, size: int | tuple[int, ...] | None = None) -> None:
        object.__setattr__(self, "name", "S")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "size", size)

    @property
    def placement(self) -> Placement:
        return Shard(self.dim)

    def sizes(self, ranks: int) -> tuple[int, ...] | None:
        """The size of every rank's slice, if it is known."""
        if isinstance(self.size, int):
            return chunk_sizes(self.size, ranks)
        if self.size is not None and len(self.size) != ranks:
            raise ShapeError(repr(self), f"{len(self.size)} slices", f"the mesh has {ranks} ranks", "Give one per rank")
        return self.size

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.size is None else f"S({self.dim}, size={self.size})"


R: Final = Layout("R")
I: Final = Layout("I")  # noqa: E741 - the name that the field uses
P: Final = Layout("P")


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """How `size` things fall to the ranks: ceil(size / ranks) each until they run out (`torch.chunk`, DTensor).

    >>> chunk_sizes(13, 4)
    (4, 4, 4, 1)
    """
    per = -(-size // ranks)
    return tuple(max(0, min(per, size - rank * per)) for rank in range(ranks))


def check_layout(layout: object, where: str) -> Layout:
    """Return `layout` if it is one of the four, or say which there are."""
    if isinstance(layout, Layout):
        return layout
    raise LayoutError(where, f"{layout!r} is not a layout", "there are R, I, P and S(dim)", "Write colrow.S(0), say")


def check_mesh(mesh: object, where: str) -> DeviceMesh:
    """Return `mesh` if it is one axis that this rank is on; an N-D mesh is an error that names the axis to take."""
    if not isinstance(mesh, DeviceMesh):
        given = f"a {type(mesh).__name__} where the mesh should be"
        raise LayoutError(where, given, "a one-axis DeviceMesh is needed", 'Call init_device_mesh("cpu", (2,))')
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        axis = "tp" if names is None or "tp" in names else names[-1]
        given = f"a mesh of {mesh.ndim} axes {names or tuple(mesh.shape)}"
        unnamed = "" if names else ", after naming the axes with mesh_dim_names"
        raise LayoutError(where, given, "one axis is split at a time", f'Pass mesh["{axis}"]{unnamed}')
    if mesh.get_coordinate() is None:
        given = "this rank is not on the mesh"
        raise LayoutError(where, given, f"it has the ranks {mesh.mesh.tolist()}", "Call only on those ranks")
    return mesh
