"""Attention, an MLP or experts as Y = act(X A) B: what is split, as values for a drawing.

A stands for all column layers beside each other, B for the row layer that ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from colrow.figures import shape
from colrow.traced import Kind, Layer, Linear, Part, Region, Trace
from colrow.words import KINDS, alike, counted, joined, total


@dataclass(frozen=True)
class Pair:
    """The column layers and the row layer that ends them: A and B.

    Attributes:
        outputs: the columns of each layer of A that every rank has, by rank.
        inputs: the rows of B that every rank has.
        left_out: further row layers of the region; each ends a pair of its own.
    """

    columns: tuple[Linear, ...]
    row: Linear
    outputs: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    left_out: int

    @property
    def names(self) -> list[str]:
        return [column.name.rpartition(".")[2] for column in self.columns]

    @property
    def takes(self) -> list[int]:
        """The rows of each layer of A."""
        return [column.whole[0] for column in self.columns]

    @property
    def gated(self) -> bool:
        """Whether A has two columns for each row of B: one of them belongs to the gate."""
        return sum(column.whole[1] for column in self.columns) == 2 * self.row.whole[0]

    def a_size(self, rank: int | None = None) -> str:
        """The size of A, or of a rank's part."""
        outs = tuple(column.whole[1] for column in self.columns) if rank is None else self.outputs[rank]
        if len(set(self.takes)) == 1:
            return f"{self.takes[0]} x {beside(outs)}"
        return f"[{' | '.join(f'{rows} x {out}' for rows, out in zip(self.takes, outs, strict=True))}]"

    def b_size(self, rank: int | None = None) -> str:
        return f"{self.row.whole[0] if rank is None else self.inputs[rank]} x {self.row.whole[1]}"

    def a_parts(self) -> list[str]:
        return _parts("A", [self.a_size(rank) for rank in range(len(self.inputs))])

    def b_parts(self) -> list[str]:
        return _parts("B", [self.b_size(rank) for rank in range(len(self.inputs))])


def pair(region: Region, ranks: int) -> Pair | None:
    """The first pair of the region; None if it has no split linear layers (experts may have none)."""
    rows, columns = (tuple(one for one in region.linears if one.role == role) for role in ("row", "column"))
    if not rows or not columns:
        return None
    row = rows[0]
    beside_it = tuple(column for column in columns if _parent(column) == _parent(row))
    columns = beside_it or columns  # of many experts those of one; BERT's row layers stand in modules of their own
    inputs = _dealt(row.whole[0], row.local[0], ranks)
    outputs = [
        (column.local[1],) * ranks  # more than B's share: key/value heads that the ranks have in common
        if column.local[1] * row.whole[0] > column.whole[1] * row.local[0]
        else _dealt(column.whole[1], column.local[1], ranks)
        for column in columns
    ]
    return Pair(columns, row, tuple(zip(*outputs, strict=True)), inputs, len(rows) - 1)


def _parent(linear: Linear) -> str:
    return linear.name.rpartition(".")[0]


def _dealt(whole: int, first: int, ranks: int) -> tuple[int, ...]:
    """Every rank's part, from that of the first: all get as many until they run out (see `layout.chunk_sizes`)."""
    return tuple(max(0, min(first, whole - rank * first)) for rank in range(ranks))


def beside(widths: tuple[int, ...]) -> str:
    """The widths of matrices that stand beside each other."""
    return str(widths[0]) if len(widths) == 1 else f"[{' | '.join(map(str, widths))}]"


def _parts(letter: str, sizes: list[str]) -> list[str]:
    """The parts of a matrix by rank, those of one size together: "A1 to A3: 64 x 4", "A4: 64 x 1"."""
    found, first = [], 1
    for size, group in groupby(sizes):
        last = first + len(list(group)) - 1
        between = " to " if last > first + 1 else ", "
        found.append(f"{letter}{first}{f'{between}{letter}{last}' if last > first else ''}: {size}")
        first = last + 1
    return found


def activation(region: Region) -> str:
    """What stands between A and B, as a function's name."""
    if region.kind == "attention":
        return "attention"
    return region.activation.partition(" (")[0].removesuffix("Activation") or "act"


def terms(pattern: str, ranks: int) -> str:
    """A sum over the ranks: `pattern` with the rank for `#`, from 1. From the fourth on only the last is written."""
    numbers = list(range(1, ranks + 1)) if ranks <= 4 else [1, 2, 0, ranks]
    return " + ".join(pattern.replace("#", str(n)) if n else "..." for n in numbers)


def all_ranks(ranks: int) -> str:
    return {1: "the one rank", 2: "both ranks"}.get(ranks, f"all {ranks} ranks")


def heading(split: Pair | None, region: Region, ranks: int) -> str:
    formula = f": Y = {activation(region)}(X A) B" if split else ""
    return f"Tensor-parallel {KINDS[region.kind]}{formula} on {ranks} rank{'s' if ranks > 1 else ''}"


def owned(split: Pair, region: Region, hidden: int) -> list[str]:
    """What is split by columns and by rows, and what A is made of."""
    ranks = len(split.inputs)
    columns, rows = [sum(outputs) for outputs in split.outputs], split.inputs
    whole = sum(column.whole[1] for column in split.columns)
    said = [
        f"A split by columns (each rank owns {_of(columns)} of the {whole} outputs), "
        f"B split by rows (each rank owns {_of(rows)} of the {split.row.whole[0]} inputs)"
    ]
    if len(split.columns) > 1:
        said.append(f"A is [{' | '.join(split.names)}], B is {split.row.name.rpartition('.')[2]}")
        if split.gated and region.kind != "attention":
            first, other = split.names[:2]
            said[-1] += f"; act(X A) is {activation(region)}(X {first}) times X {other}, element by element"
    elif split.gated and region.kind != "attention":
        said.append(f"A is a gate and its values side by side: act(X A) is {activation(region)}(gate) times value")
    if set(split.takes) != {hidden}:
        takes = joined(list(map(str, split.takes)))
        said.append(f"A takes what whole layers have made of X: {takes} features, where X has {hidden}")
    if sum(columns) > whole:
        said.append(f"fewer key/value heads than {ranks} ranks: each reads those that its query heads need")
    if split.left_out:
        said.append(f"drawn: {split.row.name} and what feeds it; {split.left_out} more like it are in {region.name}")
    return said


def _of(parts: list[int] | tuple[int, ...]) -> str:
    """One rank's part: the number if it is every rank's."""
    return str(parts[0]) if len(set(parts)) == 1 else f"{min(parts)} to {max(parts)}"


def why_columns(region: Region, ranks: int) -> str:
    """Why A is not split by rows."""
    act = "softmax" if region.kind == "attention" else activation(region)
    inside = "attention's softmax" if region.kind == "attention" else act
    return (
        f"Why not split A by rows? X A = {terms('X# A#', ranks)} would have to be summed BEFORE {inside},\n"
        f"because {act}({terms('X# A#', ranks)}) is not {terms(f'{act}(X# A#)', ranks)}. "
        "The column split puts the only sync at the end."
    )


def counts(trace: Trace, region: Region) -> list[str]:
    """How many collectives were counted in the region, and in its layer."""
    layer = layer_of(trace)
    part = layer.kinds.get(region.kind) if layer else None
    if layer is None or part is None:
        return []
    f, g = ("", "") if trace.sequence_parallel else (" (f)", " (g)")
    said = [
        f"Counted in this run, per {KINDS[region.kind]} block: {counted(part.forward)} forward{g}, "
        f"{counted(part.backward)} backward{f}."
    ]
    return [*said, _in_layer(trace, layer, region, part)]


def _in_layer(trace: Trace, layer: Layer, region: Region, part: Part) -> str:
    """The count of the layer's regions, and of the stream's collectives if there are any: the first layer may begin
    a sharded stretch."""
    inner: list[tuple[Kind, Part]] = [(kind, other) for kind, other in layer.kinds.items() if kind != "stream"]
    ways = (part.forward, part.backward)
    same = [KINDS[kind] for kind, other in inner if kind != region.kind and (other.forward, other.backward) == ways]
    shared = f"{joined(same)} {'has' if len(same) == 1 else 'have'} the same shape, so " if same else ""
    many = f", in each of the {len(trace.layers)} layers" if len(trace.layers) > 1 and alike(trace.layers) else ""
    line = f"{shared}{counted(total(other for _, other in inner))} per layer{many}{_in_stream(layer)}."
    return line[0].upper() + line[1:]


def _in_stream(layer: Layer) -> str:
    """What the stream itself sends in this layer, if anything."""
    stream = layer.kinds.get("stream")
    sent = total([stream]) if stream else {}
    return f"; besides, in the stream of {layer.name}: {counted(sent)}" if any(sent.values()) else ""


def layer_of(trace: Trace) -> Layer | None:
    """The layer that the picture shows."""
    return next((layer for layer in trace.layers if layer.name == trace.picture.layer), None)


def tokens_of(trace: Trace, rank: int) -> str:
    """Which tokens of the sequence a rank holds."""
    own, first = trace.picture.tokens[rank], sum(trace.picture.tokens[:rank])
    return f"tokens {first} to {first + own - 1}" if own > 1 else f"token {first}" if own else "no token"


def activations(region: Region, last: str) -> str:
    """The shape of activations inside the region with `last` features."""
    return f"({shape(region.whole[:-1], ' x ')} x {last})"
