"""How what the ranks hold at a module's two ends makes up what one process holds there.

The layouts of a split model say it: at a column layer's output each rank has some features, in the stream its tokens,
in attention its heads, at a row layer's output the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor, nn

from colrow.dropout import Dropout
from colrow.embedding import VocabEmbedding
from colrow.layout import I, P, R, S
from colrow.linear import ColumnLinear, RowLinear
from colrow.norm import Replicated, Router
from colrow.params import true_name
from colrow.region import Block, LastNorm, Region
from colrow.split import Heads, Piece, Split

End = Literal["input", "output"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """How shares make up a whole.

    Attributes:
        kind: every rank holds the same; or parts of dimension `dim`; or the terms of a sum.
        index: where each rank's entries stand in the whole; -1: padding.
        flat: whether the whole is seen as (tokens, hidden).
    """

    kind: Literal["same", "parts", "terms"]
    dim: int = 0
    index: tuple[Tensor, ...] = ()
    flat: bool = False

    def whole(self, want: Tensor) -> Tensor:
        """What one process holds, in the form in which it is joined."""
        return want.flatten(0, -2) if self.flat else want

    def join(self, shares: Sequence[Tensor], like: Tensor, *, add: bool) -> Tensor:
        """The whole, in the shape of `like`. `add`: what two ranks hold of one entry are terms, as gradients are."""
        if self.kind != "parts":
            return torch.stack(list(shares)).sum(0) if self.kind == "terms" else shares[0]
        whole = torch.zeros(like.shape, dtype=shares[0].dtype, device=shares[0].device)
        for index, share in zip(self.index, shares, strict=True):
            there = (index >= 0).nonzero().flatten().to(share.device)
            mine, at = share.index_select(self.dim, there), index.to(share.device)[there]
            whole.index_add_(self.dim, at, mine) if add else whole.index_copy_(self.dim, at, mine)
        return whole


SAME: Final = Place("same")
TERMS: Final = Place("terms")


@dataclass(frozen=True)
class Point:
    """A module that is looked at.

    Attributes:
        region: the attention, MLP or experts that it is in, if any.
        values, gradients: the ends at which each is looked at.
    """

    module: nn.Module
    region: Region | None
    values: tuple[End, ...]
    gradients: tuple[End, ...]

    @property
    def heads(self) -> Heads | None:
        return None if self.region is None else self.region.tp_heads


def points(model: nn.Module) -> dict[str, Point]:
    """The modules of a split model of which it is known what the ranks hold, by their true names."""
    found: dict[str, Point] = {}
    regions: dict[str, Region] = {}
    for name, module in model.named_modules():
        above = [name[:i] for i, letter in enumerate(name) if letter == "."]
        region = next((regions[at] for at in reversed(above) if at in regions), None)
        if isinstance(module, Region):
            regions[name] = module
        if isinstance(module, Region | Block | ColumnLinear | VocabEmbedding | Replicated | LastNorm | Dropout):
            values: tuple[End, ...] = ("input", "output") if isinstance(module, RowLinear) else ("output",)
            both = not isinstance(module, VocabEmbedding | Dropout)
            gradients: tuple[End, ...] = ("input", "output") if both else ("output",)
            found[true_name(name)] = Point(module, region, values, gradients)
    return found


def place(point: Point, end: End, shapes: Sequence[Shape], whole: Shape, *, gradient: bool) -> Place | None:
    """How the shares at one end of a module make up the whole tensor; None where that is not known."""
    module = point.module
    if isinstance(module, RowLinear):
        if end == "input":
            return _by_split(module.splits["weight"], shapes, whole)
        if module.dst == P:
            return SAME if gradient else TERMS
        return _stream(shapes, whole)
    if isinstance(module, ColumnLinear):
        if end == "output":
            return _by_split(module.splits["weight"], shapes, whole)
        if module.src != R:
            return _stream(shapes, whole)
        return TERMS if gradient else SAME
    in_stream = isinstance(module, Dropout) and module.src in (I, S(0))
    if point.region is None or isinstance(module, Region) or in_stream:
        return _stream(shapes, whole)
    if all(shape == whole for shape in shapes):
        outside = isinstance(module, Router) and end == "output"
        return TERMS if gradient and not outside else SAME
    return _cut(shapes, whole, point.heads)


def of_parameter(split: Split | None, *, partial: bool = False) -> Place:
    """How the local parts of a parameter at rest, or of its gradient, make up the whole."""
    if partial:
        return TERMS
    if split is None or not split.sharded:
        return SAME
    return Place("parts", split.dim, tuple(split.index(rank) for rank in range(split.ranks)))


def _by_split(split: Split, shapes: Sequence[Shape], whole: Shape) -> Place | None:
    """Features, by the split of the weight that makes or takes them; padding may be there or not."""
    index = [split.index(rank) for rank in range(split.ranks)]
    found = tuple(at if len(at) == shape[-1] else at[at >= 0] for at, shape in zip(index, shapes, strict=True))
    if any(len(at) != shape[-1] for at, shape in zip(found, shapes, strict=True)):
        return None
    return Place("parts", len(shapes[0]) - 1, found, flat=len(shapes[0]) < len(whole))


def _stream(shapes: Sequence[Shape], whole: Shape) -> Place | None:
    """Whole on every rank, or each rank's tokens."""
    if all(shape == whole for shape in shapes):
        return SAME
    rows = [shape[0] for shape in shapes if len(shape) == 2 and shape[1:] == whole[-1:]]
    if len(rows) == len(shapes) and sum(rows) == prod(whole[:-1]):
        return Place("parts", 0, _chunks(rows), flat=True)
    return None


def _cut(shapes: Sequence[Shape], whole: Shape, heads: Heads | None) -> Place | None:
    """Heads, or features, along the one dimension in which the shares differ from the whole."""
    mine = shapes[0]
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    differ = {dim for shape in shapes for dim in range(len(whole)) if shape[dim] != whole[dim]}
    if len(differ) != 1:
        return None
    dim = differ.pop()
    sizes = [shape[dim] for shape in shapes]
    if heads is not None:
        q, kv = sum(heads.true_heads), heads.kv.units
        ranks = range(len(shapes))
        if whole[dim] == q and mine[dim] == heads.local_heads:
            return Place("parts", dim, tuple(torch.tensor(heads.mine[rank]) for rank in ranks))
        if whole[dim] == kv and mine[dim] == heads.local_kv_heads:
            units: Piece = heads.kv
            return Place("parts", dim, tuple(torch.tensor(units.of_rank(rank, len(shapes))) for rank in ranks))
        return None
    return Place("parts", dim, _chunks(sizes)) if sum(sizes) == whole[dim] else None


def _chunks(sizes: Sequence[int]) -> tuple[Tensor, ...]:
    ends = list(accumulate(sizes))
    return tuple(torch.arange(end - size, end) for end, size in zip(ends, sizes, strict=True))
