"""Which entries of a parameter a rank holds: true sizes on one side, even and zero-padded shards on the other.

A dimension is a row of *pieces* (q, k and v in a fused projection; one piece otherwise), a piece a row of equal
*units* (heads, features, vocabulary entries). Units are dealt out whole, ceil(units / ranks) to each rank, and padded
with zeros, so that every shard has the same shape. Five heads in a fused [q|k|v] on two ranks:

    true     q0 q1 q2 q3 q4 | k0 k1 k2 k3 k4 | v0 v1 v2 v3 v4
    rank 0   q0 q1 q2       | k0 k1 k2       | v0 v1 v2
    rank 1   q3 q4 --       | k3 k4 --       | v3 v4 --
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colrow.errors import PlanError
from colrow.layout import chunk_sizes


@dataclass(frozen=True)
class Piece:
    """`units` units of `width` entries each.

    `reads[rank]`, if given, names the units that a rank reads of a piece that stays whole at rest (-1: zeros). A rank
    gets a multiple of `align` units, the last of which may be padding: fused kernels want that.
    """

    units: int
    width: int = 1
    reads: tuple[tuple[int, ...], ...] | None = None
    align: int = 1

    @property
    def size(self) -> int:
        return self.units * self.width

    def of_rank(self, rank: int, ranks: int) -> list[int]:
        """The units of one rank, padded with -1."""
        if self.reads is not None:
            return list(self.reads[rank])
        per = -(-self.units // ranks)
        per += -per % self.align
        return [unit if unit < self.units else -1 for unit in range(rank * per, (rank + 1) * per)]


@dataclass(frozen=True)
class Split:
    """How dimension `dim`, made of `pieces`, falls to `ranks` ranks.

    `trimmed`: a rank computes with its true entries only, not with the padding. So it is for features and vocabulary,
    which any function may follow; heads keep their padding, since every rank computes the same number of whole heads.
    """

    dim: int
    pieces: tuple[Piece, ...]
    ranks: int
    trimmed: bool = False

    @property
    def sharded(self) -> bool:
        """Whether each rank stores its own entries; otherwise all store the whole and read what they need."""
        return all(piece.reads is None for piece in self.pieces)

    @property
    def true_size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def local_size(self) -> int:
        """Entries that a rank computes with, padding included: the same on every rank."""
        return sum(len(piece.of_rank(0, self.ranks)) * piece.width for piece in self.pieces)

    def valid(self, rank: int) -> int:
        """Entries of this rank's (first) piece that are not padding: they come first."""
        piece = self.pieces[0]
        return chunk_sizes(piece.units, self.ranks)[rank] * piece.width

    def index(self, rank: int) -> Tensor:
        """The true position of each local entry, shape (local_size,); -1 where there is padding."""
        start, parts = 0, []
        for piece in self.pieces:
            units = torch.tensor(piece.of_rank(rank, self.ranks), dtype=torch.long)
            entries = start + units[:, None] * piece.width + torch.arange(piece.width)
            parts.append(entries.masked_fill(units[:, None] < 0, -1).flatten())
            start += piece.size
        return torch.cat(parts)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's entries of a whole tensor, in storage of their own; padding is zero. Differentiable."""
        index = self.index(rank)
        mine = whole.index_select(self.dim, index.clamp(min=0).to(whole.device))
        if bool((index >= 0).all()):
            return mine
        shape = [1] * whole.dim()
        shape[self.dim] = -1
        return mine.masked_fill((index < 0).view(shape).to(whole.device), 0)

    def trim(self, shard: Tensor, rank: int) -> Tensor:
        """A view of the shard without its padding, if this split trims and the padding is at the end."""
        if not self.trimmed or len(self.pieces) > 1 or shard.shape[self.dim] == self.valid(rank):
            return shard
        return shard.narrow(self.dim, 0, self.valid(rank))

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor, true sizes and order, from every rank's shard: the inverse of `take`."""
        shape = list(shards[0].shape)
        shape[self.dim] = self.true_size
        whole = shards[0].new_zeros(shape)
        for rank, shard in enumerate(shards):
            index = self.index(rank).to(shard.device)
            there = (index >= 0).nonzero().flatten()
            whole.index_copy_(self.dim, index[there], shard.index_select(self.dim, there))
        return whole


@dataclass(frozen=True)
class Heads:
    """Attention heads on one rank: the pieces of the q and the k/v projections, and how many heads a rank computes."""

    q: Piece
    kv: Piece
    groups: Piece
    """A projection fused by key/value head: [its query heads, k, v | ...]."""
    local_heads: int
    local_kv_heads: int
    head_dim: int
    mine: tuple[tuple[int, ...], ...]
    """The query heads of every rank, padded with -1."""

    @property
    def true_heads(self) -> tuple[int, ...]:
        """How many query heads of every rank are not padding."""
        return tuple(sum(head >= 0 for head in heads) for heads in self.mine)


def split_heads(heads: int, kv_heads: int, head_dim: int, ranks: int, where: str) -> Heads:
    """Deal `heads` query heads and `kv_heads` key/value heads out to `ranks` ranks.

    - As many key/value heads as ranks, or one for each query head: whole groups are dealt out, padded with zero heads.
      A zero head gives a zero output and keeps zero gradients, so padding changes nothing.
    - Fewer: query heads are dealt out, k and v stay whole at rest, and a rank reads the key/value heads that its query
      heads need: the one that they share, or else one for each query head.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise PlanError(
            where,
            f"{heads} heads with {kv_heads} key/value heads",
            "heads must be a multiple of key/value heads",
            "Correct the attributes that the plan's Attention rule names",
        )
    group = heads // kv_heads
    if kv_heads >= ranks or group == 1:
        q, kv = Piece(kv_heads, group * head_dim), Piece(kv_heads, head_dim)
        dealt = [kv.of_rank(rank, ranks) for rank in range(ranks)]
        mine = tuple(tuple(g * group + i if g >= 0 else -1 for g in units for i in range(group)) for units in dealt)
        per = len(dealt[0])
        return Heads(q, kv, Piece(kv_heads, (group + 2) * head_dim), per * group, per, head_dim, mine)
    q = Piece(heads, head_dim)
    mine = tuple(tuple(q.of_rank(rank, ranks)) for rank in range(ranks))
    needs = [tuple(head // group if head >= 0 else -1 for head in units) for units in mine]
    shared = all(len(set(units) - {-1}) <= 1 for units in needs)
    reads = tuple((max(units),) if shared else units for units in needs)
    groups = Piece(kv_heads * (group + 2), head_dim, _fused_by_group(mine, reads, group))
    return Heads(q, Piece(kv_heads, head_dim, reads), groups, len(mine[0]), len(reads[0]), head_dim, mine)


def _fused_by_group(
    mine: Sequence[tuple[int, ...]], reads: Sequence[tuple[int, ...]], group: int
) -> tuple[tuple[int, ...], ...]:
    """Which heads of [q.. k v | q.. k v | ...] each rank reads: for each key/value head its query heads, k and v."""
    found = []
    for heads, kv_heads in zip(mine, reads, strict=True):
        per, row = len(heads) // len(kv_heads), []
        for place, kv in enumerate(kv_heads):
            own = heads[place * per : (place + 1) * per]
            row += [head // group * (group + 2) + head % group if head >= 0 else -1 for head in own]
            row += [kv * (group + 2) + group + i if kv >= 0 else -1 for i in (0, 1)]
        found.append(tuple(row))
    return tuple(found)


def fused(pieces: Sequence[Piece], ranks: int) -> tuple[Piece, ...]:
    """Pieces that share one parameter: if one of them must stay whole at rest, all do, and each rank reads its own."""
    if all(piece.reads is None for piece in pieces):
        return tuple(pieces)
    return tuple(
        Piece(p.units, p.width, p.reads or tuple(tuple(p.of_rank(rank, ranks)) for rank in range(ranks)))
        for p in pieces
    )
