"""The token embedding, split over the vocabulary (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from colrow.context import leave
from colrow.errors import LayoutError, PlanError, ShapeError
from colrow.gradients import Watched
from colrow.layout import I, Layout, R, S, check_layout, check_mesh
from colrow.params import read
from colrow.split import Piece, Split


class VocabEmbedding(Watched, nn.Embedding):
    """An embedding whose rows are split: each rank looks up the tokens it holds, gives zeros for the rest, and sums.

    Arguments:
        num_embeddings: the true vocabulary size; the ranks need not divide it.
        padding_idx: as in `nn.Embedding`: that row's gradient is zero.
        mesh: one axis of a DeviceMesh.
        dst: the output's layout: `I`, whole, or `S(0)`, this rank's tokens of all of them, (n, dim).

    Shapes: input (...) token ids, the same on every rank; output (..., dim) or (n, dim), `dst`. Weight at rest
    (vocabulary, dim), `Shard(0)`, zero-padded.

    Cost: an all-reduce of the output forward, nothing backward; with `S(0)` a reduce-scatter and an all-gather.

    Raises:
        ShapeError: a token id outside the vocabulary (on the CPU; on an accelerator the device asserts, as torch's).
        PlanError: `max_norm`, `scale_grad_by_freq` or `sparse`, which need the whole table.
    """

    dst: Layout

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh,
        dst: Layout = I,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_mesh(mesh, type(self).__name__)
        if check_layout(dst, "VocabEmbedding(dst=)") != I and not (isinstance(dst, S) and dst.dim == 0):
            raise LayoutError("VocabEmbedding", f"dst={dst}", "dst may be I or S(0)", "Move the output afterwards")
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.dst = dst
        self.adopt(mesh, {"weight": Split(0, (Piece(num_embeddings),), mesh.size(), trimmed=True)})

    def forward(self, input: Tensor) -> Tensor:
        split, rank = self.splits["weight"], self.mesh.get_local_rank()
        check_ids(input, split.true_size, self.where)
        weight = read(self.weight, split, self.mesh, R)
        start, rows = rank * split.local_size, weight.shape[0]
        elsewhere = (input < start) | (input >= start + rows)
        # An id outside the whole vocabulary stays out of range, so that an accelerator's own check finds it.
        bad = (input < 0) | (input >= split.true_size)
        table = weight if rows else F.pad(weight, (0, 0, 0, 1))  # part of the graph: backward may have a collective
        ids = (input - start).masked_fill(elsewhere, 0).masked_fill(bad, table.shape[0])
        padding = self.padding_idx
        row = padding - start if padding is not None and start <= padding < start + rows else None
        found = F.embedding(ids, table, row).masked_fill(elsewhere[..., None], 0)
        return leave(found, self.mesh, tokens=tuple(input.shape) if isinstance(self.dst, S) else None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dst={self.dst}, tp={self.mesh.size()}"


def check_ids(ids: Tensor, vocab: int, where: str, ignore: int | None = None) -> None:
    """An error that names the first id outside the vocabulary. Only where looking costs no synchronisation."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    bad = (ids < 0) | (ids >= vocab)
    if ignore is not None:
        bad &= ids != ignore
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        given = f"token id {int(ids[place])} at {place}"
        raise ShapeError(where, given, f"the vocabulary has ids 0 to {vocab - 1}", "Use the tokenizer of this model")


def row_error(table: nn.Embedding, arguments: Mapping[str, Any], where: str) -> ShapeError:
    """What to raise where a whole embedding (of positions, say) was asked for a row that it does not have."""
    ids = arguments.get("position_ids", arguments.get("input"))
    asked = f"indices {int(ids.min())} to {int(ids.max())}" if isinstance(ids, Tensor) else "an index past its end"
    offset = getattr(table, "offset", 0)  # OPT and BART keep rows before the first position
    allowed = f"its table has rows for {-offset} to {table.num_embeddings - offset - 1}"
    return ShapeError(where, asked, allowed, "Shorten the sequences, or build the model with more positions")


def check_options(embedding: nn.Embedding, where: str) -> None:
    """Refuse the options of an `nn.Embedding` that need the whole table on one rank."""
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, name)]
    if given:
        fix = "Build the embedding without it, or leave it whole with Replicated()"
        raise PlanError(where, f"an embedding with {given[0]}", "a split embedding has none of these options", fix)
