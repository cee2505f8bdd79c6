"""What a step must send and keep, from the plan and the sizes alone: the papers' formulas, for any model with a plan.

With T tokens of n = T x hidden x bytes, t ranks, a factor u = (t-1)/t, per attention, MLP or experts:

                          sent forward          sent backward             kept, of what one device keeps
    TP                    g: 2 n u              f: 2 n u                  norms, inputs: all; the rest: 1/t
    TP + SP               f: n u, g: n u        f: n u, g: n u, n u       all: 1/t

(arXiv:1909.08053, section 3; arXiv:2205.05198, equations 2 to 4.) So four all-reduces a layer, 16 u bytes a token and
hidden number in 16 bits. The last n u is the second gather of what was not kept. Slices are rounded up to whole tokens
and heads; all-reduces of 16-bit numbers are sent in 32 bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from colrow import rules
from colrow.layout import R, chunk_sizes
from colrow.observe import Place, Places
from colrow.resolved import Resolved, Site
from colrow.split import Split
from colrow.traced import Kept, Kind, Shape

Sums = dict[tuple[str, Kind], float]
"""By layer and kind."""


@dataclass(frozen=True)
class Formula:
    """For one model, degree, mode and batch.

    Attributes:
        model: the whole model.
        shapes: of each module that ran, its input on one device.
        beside: of blocks and regions, the numbers of other inputs that take a gradient.
        width: bytes of a number. Sums of numbers of two bytes are sent in four.
    """

    model: nn.Module
    resolved: Resolved
    places: Places
    shapes: Mapping[str, Shape]
    beside: Mapping[str, int]
    width: int

    @property
    def t(self) -> int:
        return self.resolved.tp

    def sent(self) -> Sums:
        """Bytes that the first rank sends in one step, by layer and kind."""
        sums: Sums = defaultdict(float)
        for site in self.resolved.sites:
            at = self.places.of(site.name)
            where = (at.layer, at.kind)
            match site.rule:
                case rules.Block() if site.sharded and site.name in self._first_blocks():
                    sums[where] += self._gather(site.name)  # into the stretch, backward
                    end = self._end(site.name)
                    sums[end.layer, end.kind] += self._gather(site.name)  # out of it, forward
                case rules.Attention() | rules.Mlp():
                    sums[where] += self._f(at.layer, site.sharded) + self._again(site)
                case rules.Moe():
                    sums[where] += self._f(at.layer, site.sharded) + self._again(site) + self._g(at.layer, site.sharded)
                case rules.Column() if site.src != R:
                    sums[where] += self._f(at.layer, site.sharded) + (self._gather(at.layer) if site.sharded else 0)
                case rules.Row() if site.dst.name != "P":
                    sums[where] += self._g(at.layer, site.sharded)
                case rules.Vocab() if site.name in self.shapes:
                    sums["", "embedding"] += self._reduce(self._tokens(self._first) * self._hidden(self._first))
                case rules.Head() if "weight" in site.splits:
                    tokens = self._tokens(self.places.layers[-1])
                    sums["", "head"] += self._reduce(tokens * self._hidden(self.places.layers[-1]))
                    sums["", "head"] += self._reduce(tokens, 4) + self._reduce(2 * tokens, 4)
                case _:
                    pass
            applies = rules.Block if site.sharded else rules.Attention  # f, to what comes beside: encoder states, say
            residual = getattr(site.rule, "residual", None)  # that is in the stream, and needs nothing
            if isinstance(site.rule, applies) and residual is None:
                sums[where] += self._reduce(self.beside.get(site.name, 0))
        sums["", "other"] += self._reduce(self._summed())
        return sums

    def copies(self) -> Sums:
        """Bytes of weights that a rank copies: its own part of what stays whole, k and v of fewer heads than ranks."""
        sums: Sums = defaultdict(float)
        for site in self.resolved.sites:
            at = self.places.of(site.name)
            for short, split in site.splits.items():
                if not split.sharded and short == "weight":
                    size = self.model.get_submodule(site.name).get_parameter(short).numel() * self.width
                    sums[at.layer, at.kind] += size * split.local_size / split.true_size
        return sums

    def _first_blocks(self) -> dict[str, str]:
        """The first block of every stack, with the stack's name."""
        stacks: dict[str, str] = {}
        for name in self.places.layers:
            stacks.setdefault(name.rpartition(".")[0], name)
        return {name: stack for stack, name in stacks.items()}

    def _end(self, first: str) -> Place:
        """Where the stretch ends that starts with this block: at a norm beside the blocks, or with the last one."""
        stack = self._first_blocks()[first]
        holder = stack.rpartition(".")[0]
        norms = (site.name for site in self.resolved.sites if isinstance(site.rule, rules.LastNorm))
        last = [name for name in self.places.layers if name.rpartition(".")[0] == stack][-1]
        return self.places.of(next((norm for norm in norms if norm.rpartition(".")[0] == holder), last))

    def lean(self, kept: Sequence[Kept]) -> list[Kept]:
        """What is left of what one device keeps where norms and activations are made again: a norm's input (and, by
        torch's own node, two numbers a token), an activation's inputs, and nothing for those who take their outputs."""
        left: list[Kept] = []
        acts = {(k.layer, k.kind): k for k in kept if k.by in ("GeluBackward0", "SiluBackward0") and k.kind == "mlp"}
        products = {
            at: k.bytes >= 2 * self.width * prod(k.shape) for at, k in acts.items()
        }  # [gate | up] is kept as one
        for row in kept:
            at, rule = (row.layer, row.kind), self.places.rule(row.module)
            product = row.by == "MulBackward0" and at in acts
            norm = isinstance(rule, rules.Norm) and "Norm" not in row.by
            if norm and any(k.module == row.module for k in left):
                continue
            if (row.layer and isinstance(rule, rules.Column)) or (isinstance(rule, rules.Row) and at in acts):
                continue
            if product and products[at]:  # its other factor is there
                continue
            products |= {at: True} if product else {}
            left.append(row)
        return left

    def saved(self, kept: Kept) -> float:
        """Bytes that the first rank keeps of what one device keeps."""
        if not kept.shape:
            return kept.bytes
        if not kept.layer:
            return kept.bytes * self._outside(kept)
        stream = self._tokens_share(kept.layer) if self.places.sites[kept.layer].sharded else 1.0
        taken = isinstance(self.places.rule(kept.module), rules.Column)
        if kept.shape[-1] == self._hidden(kept.layer) and (taken or kept.kind == "stream"):
            return kept.bytes * stream
        inside = None if taken else self._inside(kept)
        return kept.bytes * (inside if inside is not None else stream if kept.kind == "stream" else 1.0)

    def _outside(self, kept: Kept) -> float:
        """The share of what is kept outside the layers: the last norm's tokens, columns of the vocabulary."""
        site = self.places.sites.get(kept.module)
        if site is not None and isinstance(site.rule, rules.LastNorm):
            return self._tokens_share(self.places.layers[-1]) if site.sharded else 1.0
        vocab = (
            site.splits["weight"] for site in self.resolved.sites if isinstance(site.rule, rules.Head) and site.splits
        )
        shares = (self._share(split) for split in vocab if split.true_size == kept.shape[-1] and kept.kind == "head")
        return next(shares, 1.0)

    def _inside(self, kept: Kept) -> float | None:
        """The share of a tensor that is split by heads or features; None: of one that is not."""
        shape, batch = kept.shape, self.shapes[kept.layer][0]
        for site in self.resolved.sites:
            at = self.places.of(site.name)
            if at.layer != kept.layer or kept.kind not in (at.kind, "stream"):
                continue
            if site.heads is not None and len(shape) in (3, 4):
                total, kv = sum(site.heads.true_heads), site.heads.kv.units
                found = {total: site.heads.local_heads / total, kv: site.heads.local_kv_heads / kv}
                counts = shape[1:3] if len(shape) == 4 else (shape[0] // batch,)
                if share := next((found[count] for count in counts if count in found), None):
                    return share
            for split in site.splits.values():
                if shape[-1] in (split.true_size, *(piece.size for piece in split.pieces)):
                    return self._share(split)
        return None

    def _share(self, split: Split) -> float:
        """The first rank's part of what is split so."""
        if split.trimmed:
            return split.valid(0) / split.true_size
        return split.local_size / split.true_size

    def _tokens(self, layer: str) -> int:
        return prod(self.shapes[layer][:-1])

    def _tokens_share(self, layer: str) -> float:
        return chunk_sizes(self._tokens(layer), self.t)[0] / self._tokens(layer)

    def _hidden(self, layer: str) -> int:
        return self.shapes[layer][-1]

    @property
    def _first(self) -> str:
        return self.places.layers[0]

    def _reduce(self, numbers: float, width: int = 0) -> float:
        """An all-reduce."""
        return 2 * numbers * max(width or self.width, 4) * (self.t - 1) / self.t

    def _gather(self, layer: str) -> float:
        """An all-gather of the stream, padded to equal slices."""
        return chunk_sizes(self._tokens(layer), self.t)[0] * (self.t - 1) * self._hidden(layer) * self.width

    def _scatter(self, layer: str) -> float:
        """A reduce-scatter into the stream."""
        tokens = self._tokens(layer)
        return (tokens - chunk_sizes(tokens, self.t)[0]) * self._hidden(layer) * self.width

    def _f(self, layer: str, sharded: bool) -> float:
        if sharded:
            return self._gather(layer) + self._scatter(layer)
        return self._reduce(self._tokens(layer) * self._hidden(layer))

    _g = _f

    def _again(self, region: Site) -> float:
        """The second gather, where a column layer takes what the region has gathered."""
        layer, takes = self.places.of(region.name).layer, False
        for site in self.resolved.sites:
            if site.name.startswith(f"{region.name}.") and isinstance(site.rule, rules.Column) and site.src == R:
                shape = self.model.get_submodule(site.name).get_parameter("weight").shape
                takes |= shape[0 if site.transposed else 1] == self._hidden(layer)
        return self._gather(layer) if region.sharded and takes else 0.0

    def _summed(self) -> int:
        """The numbers in the bucket of gradients that are summed at the end of the pass."""
        total, seen = 0, set[int]()
        for site in self.resolved.sites:
            for short, layout in site.grads.items():
                split, param = site.splits.get(short), self.model.get_submodule(site.name).get_parameter(short)
                partial = not split.sharded if split is not None else layout == R
                if partial and param.requires_grad and id(param) not in seen:
                    seen.add(id(param))
                    total += param.numel()
        return total
