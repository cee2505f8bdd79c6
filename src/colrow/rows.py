"""The drawing of `matrices`: the split as matrices, beside them one row of boxes a rank, and what f and g do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from colrow.figures import size
from colrow.matrices import (
    Pair,
    activation,
    activations,
    all_ranks,
    beside,
    counts,
    heading,
    owned,
    pair,
    terms,
    tokens_of,
    why_columns,
)
from colrow.scene import (
    GOOD,
    INK,
    LOCAL,
    MOVE,
    MUTED,
    SENT,
    WHOLE,
    Arrow,
    Box,
    Colour,
    Item,
    Text,
    lines,
    moved,
    rank_colour,
    shown,
    text_width,
)
from colrow.traced import Region, Trace
from colrow.words import KINDS, verb_name

BOX = 58
ARROW = 46
SMALL = 12


@dataclass(frozen=True)
class Cell:
    text: str
    colour: Colour
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """A column of boxes, one for each rank that is drawn; or a bar across all ranks.

    Attributes:
        operator: "f" or "g" if it is one, with what that does.
    """

    cells: tuple[Cell | None, ...]
    bar: bool = False
    operator: tuple[str, str] | None = None

    @property
    def width(self) -> float:
        return max(BOX, *(text_width(cell.text, 15) + 18 for cell in self.cells if cell))

    @property
    def note_width(self) -> float:
        return max(text_width(cell.note, SMALL) for cell in self.cells if cell)


def region_items(trace: Trace, region: Region) -> list[Item]:
    """The whole drawing of a region, from y = 0."""
    split = pair(region, trace.tp)
    items: list[Item] = [Text(0, 0, heading(split, region, trace.tp), INK, 22)]
    none = f"The weights of {region.name} are split, but not as linear layers: only what is sent is drawn."
    said = owned(split, region, trace.picture.hidden) if split else [none]
    items += lines([Text(0, 38, line, GOOD, 14) for line in said])
    top = items[-1].bottom + 26
    panel = _panel(trace, region, split) if split else []
    left = max((item.right for item in panel), default=0.0) + (70 if panel else 0)
    items += moved(panel, 0, top)
    items += moved(_rows(trace, region, split, max(item.bottom for item in panel) if panel else 0), left, top)
    bottom = max(item.bottom for item in items) + 24
    closing = [Text(0, bottom, why_columns(region, trace.tp), INK, 14)] if split else []
    closing += [Text(0, bottom, line, GOOD, 14) for line in counts(trace, region)]
    return [*items, *lines(closing)]


def _panel(trace: Trace, region: Region, split: Pair) -> list[Item]:
    """A, B and X as rectangles with their sizes."""
    drawn = shown(trace.tp)
    band = 34 if len(drawn) > 3 else 60
    a_side, b_side = band * len(drawn), (28 if len(drawn) > 3 else 60) * len(drawn)
    top = 34
    tall = max(90, b_side)
    step = b_side / len(drawn)
    columns = [
        Box(i * band, (tall - 90) / 2, band, 90, rank_colour(rank), _named("A", rank), 15)
        for i, rank in enumerate(drawn)
    ]
    rows = [
        Box(0, (tall - b_side) / 2 + i * step, 90, step, rank_colour(rank), _named("B", rank), 15)
        for i, rank in enumerate(drawn)
    ]
    x = [Box(0, (tall - 90) / 2, 70, 90, WHOLE, "X", 15)]
    a_name = f"A ({split.a_size()})"
    captions = (
        "\n".join([a_name, "column split", *split.a_parts()]),
        "\n".join([f"B ({split.b_size()})", "row split", *split.b_parts()]),
        f"X {activations(region, str(trace.picture.hidden))}\nfull copy on\nevery rank",
    )
    items: list[Item] = [Text(0, 0, "the split, as matrices", INK, 15)]
    left = 0.0
    for boxes, side, caption in zip((columns, rows, x), (a_side, 90, 70), captions, strict=True):
        slot = max(side, text_width(caption, SMALL))
        items += moved(boxes, left + (slot - side) / 2, top)
        items.append(Text(left + slot / 2, top + tall + 8, caption, INK, SMALL, centred=True))
        left += slot + 28
    return items


def _named(letter: str, rank: int | None) -> str:
    return "..." if rank is None else f"{letter}{rank + 1}"


def _rows(trace: Trace, region: Region, split: Pair | None, least: float) -> list[Item]:
    """The ranks' rows, from left to right, and f and g under them, not above `least`."""
    drawn, stages = shown(trace.tp), _stages(trace, region, split)
    tops = _tops(drawn, stages)
    rows = list(zip(drawn, tops, strict=True))
    bottom = tops[-1] + BOX
    items: list[Item] = [
        Text(0, top - 22, f"rank {rank + 1}", rank_colour(rank), 15) for rank, top in rows if rank is not None
    ]
    notes: list[Text] = []
    right, slot = None, 0.0
    for stage in stages:
        half = max(stage.width, stage.note_width) / 2
        middle = half if right is None else max(right + ARROW + stage.width / 2, slot + 14 + half)
        x = middle - stage.width / 2
        if right is not None:
            items += [Arrow(right + 3, top + BOX / 2, x - right - 6) for rank, top in rows if rank is not None]
        if stage.bar and (cell := stage.cells[0]):
            items.append(Box(x, tops[0], stage.width, bottom - tops[0], cell.colour, cell.text, 15))
        else:
            items += _boxes(stage, tops, x)
        if stage.operator:
            notes += _operator(*stage.operator, middle)
        right, slot = x + stage.width, middle + half
    low = max([least, *(item.bottom for item in items)]) + 12
    return items + moved(notes, 0, low)


def _tops(drawn: list[int | None], stages: list[Stage]) -> list[float]:
    """Where each row begins: as far apart as the notes under the boxes need."""
    tall = max((cell.note.count("\n") + 1 if cell.note else 0) for stage in stages for cell in stage.cells if cell)
    tops, y = [], 34.0
    for rank in drawn:
        tops.append(y)
        y += 34 if rank is None else BOX + 40 + 15 * tall
    return tops


def _boxes(stage: Stage, tops: list[float], x: float) -> list[Item]:
    items: list[Item] = []
    for cell, top in zip(stage.cells, tops, strict=True):
        if cell is None:
            items.append(Text(x + stage.width / 2, top - 14, "...", MUTED, 15, centred=True))
            continue
        items.append(Box(x, top, stage.width, BOX, cell.colour, cell.text, 15))
        if cell.note:
            colour = Colour(cell.colour.stroke)
            items.append(Text(x + stage.width / 2, top + BOX + 4, cell.note, colour, SMALL, centred=True))
    return items


def _operator(name: str, does: str, middle: float) -> list[Text]:
    return [Text(middle, 0, name, MOVE, 22, centred=True), Text(middle, 30, does, MOVE, SMALL, centred=True)]


def _stages(trace: Trace, region: Region, split: Pair | None) -> list[Stage]:
    """From the stream, through f, the matrices and g, to the stream."""
    ranks, out = trace.tp, region.exit[0]
    f, g = ("f", _f_does(region, ranks)), ("g", _g_does(region, ranks))
    if region.entry[0]:
        before = [
            _each(ranks, lambda r: Cell("X", rank_colour(r), tokens_of(trace, r))),
            Stage((Cell(f"{verb_name(region.entry[0])}\nX whole", SENT),), bar=True, operator=f),
            _each(ranks, lambda r: Cell("X", WHOLE, "full copy")),
        ]
    else:
        before = [_each(ranks, lambda r: Cell("X", WHOLE), f)]
    stages = before + _inside(region, split, ranks)
    if not out:
        return [*stages, _each(ranks, lambda r: Cell(f"Y{r + 1}", rank_colour(r), "not summed here"), g)]
    total = f"{verb_name(out)}\nY = {terms('Y#', ranks)}"
    stages += [
        _each(ranks, lambda r: Cell(f"Y{r + 1}", rank_colour(r))),
        Stage((Cell(total, SENT),), bar=True, operator=g),
    ]
    if out == "reduce_scatter":
        return [*stages, _each(ranks, lambda r: Cell("Y", rank_colour(r), tokens_of(trace, r)))]
    on = f"full Y on\n{all_ranks(ranks)}"
    return [*stages, _each(ranks, lambda r: Cell("Y", WHOLE, on if r == ranks - 1 else ""))]


def _inside(region: Region, split: Pair | None, ranks: int) -> list[Stage]:
    """The matrices of every rank, and what stands between them."""
    if split is None:
        return [_each(ranks, lambda r: Cell(f"{KINDS[region.kind]}, share {r + 1}", rank_colour(r), "partial sum"))]
    if region.kind == "attention":
        note = "own heads only:\nno sync"
    else:
        other = f"X {split.names[1]}" if len(split.names) == 2 else "the other half"
        note = f"times {other},\nelementwise:\nno sync" if split.gated else "elementwise:\nno sync"
    wide = [activations(region, beside(outputs)) for outputs in split.outputs]
    return [
        _each(ranks, lambda r: Cell(f"X A{r + 1}", rank_colour(r), wide[r])),
        _each(ranks, lambda r: Cell(activation(region), LOCAL, note)),
        _each(ranks, lambda r: Cell(f"(.) B{r + 1}", rank_colour(r), "partial sum")),
    ]


def _each(ranks: int, make: Callable[[int], Cell], operator: tuple[str, str] | None = None) -> Stage:
    return Stage(tuple(None if rank is None else make(rank) for rank in shown(ranks)), operator=operator)


def _f_does(region: Region, ranks: int) -> str:
    """What was seen at the entry."""
    forward, backward = region.entry
    said = [f"forward: {verb_name(forward)}", f"backward: {verb_name(backward)}{' dL/dX' if backward else ''}"]
    if backward:
        said.append(f"(X was used by {all_ranks(ranks)})")
    if region.again:
        times = "once" if region.again == 1 else f"{region.again} times"
        said.append(f"gathered again {times} in backward")
    return "\n".join([*said, *_sent(region, "entry", "again")])


def _g_does(region: Region, ranks: int) -> str:
    """What was seen at the exit."""
    forward, backward = region.exit
    said = [f"forward: {verb_name(forward)}", f"backward: {verb_name(backward)}{' dL/dY' if backward else ''}"]
    if forward and not backward:
        same = ["dL/dY1", "dL/dY2"][:ranks] if ranks <= 2 else ["dL/dY1", "...", f"dL/dY{ranks}"]
        said.append(f"({' = '.join([*same, 'dL/dY'])})")
    return "\n".join([*said, *_sent(region, "exit")])


def _sent(region: Region, *places: str) -> list[str]:
    """The bytes that a rank sends at these places in a step."""
    count = sum(region.sent.get(place, 0.0) for place in places)
    return [f"{size(count)} sent by a rank"] if count else []
