"""The drawing of a layer under sequence parallelism: bands of the stream, by tokens, and of TP, by weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from colrow.figures import size
from colrow.matrices import layer_of, pair, tokens_of
from colrow.scene import (
    GOOD,
    INK,
    MOVE,
    MUTED,
    SENT,
    STREAM,
    TP,
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
from colrow.words import BYTES, KINDS, counted, total, verb_name

LEAST: Final = 910
"""The width of the bands, unless what they hold needs more."""
GAP, PAD, CHIP, ARROW = 14, 14, 46, 50
SMALL = 12


def layer_items(trace: Trace) -> list[Item]:
    """The layer from its input to the next one's, from y = 0."""
    picture, regions = trace.picture, trace.picture.regions
    wide = max(LEAST, _needs(_token_chips(trace)), *(_needs(_weight_chips(trace, region)) for region in regions))
    head = "Sequence parallelism (SP): outside TP by shards of the sequence (saves activation memory)"
    about = "Beside TP: norms, dropout and residuals by shards of the sequence, attention and MLP by TP"
    names = [name.removeprefix(f"{picture.layer}.") for name in picture.norms]
    norms = f"; norms: {', '.join(names)}" if names else ""
    run = f"{picture.layer}: {picture.total_tokens} tokens x {picture.hidden}, {trace.dtype}, {trace.tp} ranks{norms}"
    bands: list[list[Item]] = []
    for number, region in enumerate(regions):
        title = "orm / dropout region: by shards of the sequence (each rank has its share)"
        bands += [
            _band(wide, ("Next n" if number else "N") + title, _token_chips(trace), STREAM, trace.tp),
            _crossing(wide, "f", _entry(region)),
            _band(wide, _holds(region), _weight_chips(trace, region), TP, trace.tp),
            _crossing(wide, "g", _exit(region)),
        ]
    last = "Next norm / dropout region: by shards of the sequence again" if regions else "Norm / dropout region"
    bands.append(_band(wide, last, _token_chips(trace), STREAM, trace.tp))
    items: list[Item] = [
        Text(0, 0, head, INK, 22),
        *lines([Text(0, 34, about, MUTED, 14), Text(0, 34, run, MUTED, 14)]),
    ]
    for band in bands:
        items += moved(band, 0, max(item.bottom for item in items) + 6 + (8 if band is bands[0] else 0))
    bottom = max(item.bottom for item in items) + 18
    return [*items, *lines([Text(0, bottom, line, GOOD, 14) for line in (*_bytes(trace), *_memory(trace))])]


def _band(wide: float, title: str, chips: Sequence[str], colour: Colour, ranks: int) -> list[Item]:
    """A band over all ranks, with a chip for each that is drawn."""
    each = (wide - 2 * PAD - GAP * (len(chips) - 1)) / len(chips)
    boxes = [
        Box(PAD + i * (each + GAP), 32, each, CHIP, rank_colour(rank), chip, SMALL)
        for i, (rank, chip) in enumerate(zip(shown(ranks), chips, strict=True))
    ]
    return [Box(0, 0, wide, CHIP + 44, colour), Text(PAD, 8, title, INK, 14), *boxes]


def _crossing(wide: float, operator: str, said: str) -> list[Item]:
    """An arrow from a band to the next one, with what is sent."""
    middle = wide / 2
    return [
        Text(middle - 34, 11, operator, MOVE, 22, centred=True),
        Arrow(middle, 2, 0, ARROW - 4, Colour(SENT.stroke)),
        Text(middle + 18, 8, said, Colour(SENT.stroke), 13),
    ]


def _entry(region: Region) -> str:
    forward, backward = region.entry
    where = " (into TP: the sequence is whole again)" if forward else " (into TP)"
    again = f", and {size(region.sent['again'])} to gather it again" if region.sent.get("again") else ""
    return f"{verb_name(forward)}{where}\nbackward: {verb_name(backward)}; {_sent(region, 'entry')}{again}"


def _exit(region: Region) -> str:
    forward, backward = region.exit
    where = " (out of TP: back to shards of the sequence)" if forward else " (out of TP)"
    return f"{verb_name(forward)}{where}\nbackward: {verb_name(backward)}; {_sent(region, 'exit')}"


def _sent(region: Region, place: str) -> str:
    return f"{size(region.sent.get(place, 0.0))} sent by a rank, forward and backward"


def _holds(region: Region) -> str:
    name = KINDS[region.kind]
    return f"{name[0].upper()}{name[1:]} region: by TP (each rank holds a shard of the weights)"


def _token_chips(trace: Trace) -> list[str]:
    tokens = trace.picture.tokens
    return [
        "..." if rank is None else f"rank {rank + 1}: {tokens_of(trace, rank)}\n{tokens[rank]} x {trace.picture.hidden}"
        for rank in shown(trace.tp)
    ]


def _weight_chips(trace: Trace, region: Region) -> list[str]:
    split = pair(region, trace.tp)
    return [
        "..."
        if rank is None
        else f"rank {rank + 1}: A{rank + 1} {split.a_size(rank)}\nB{rank + 1} {split.b_size(rank)}"
        if split
        else f"rank {rank + 1}: its share\nof the weights"
        for rank in shown(trace.tp)
    ]


def _needs(chips: Sequence[str]) -> float:
    """How wide a band with these chips must be."""
    return (max(text_width(chip, SMALL) for chip in chips) + 16 + GAP) * len(chips) - GAP + 2 * PAD


def _bytes(trace: Trace) -> list[str]:
    """What the first region sends, beside an all-reduce of the same activations; and the layer's count."""
    picture, said = trace.picture, []
    parts = [region.sent.get("exit", 0.0) for region in picture.regions if region.exit[0] == "reduce_scatter"]
    if parts:
        whole = picture.total_tokens * picture.hidden * BYTES[trace.dtype]
        reduced, sent = 2 * whole * (trace.tp - 1) / trace.tp, parts[0]
        same = (
            "the same bytes as" if abs(sent - reduced) < 0.005 * reduced else f"{sent / reduced:.2f} times the bytes of"
        )
        said.append(
            f"A reduce-scatter and its all-gather send {size(sent)} a rank, {same} "
            f"one all-reduce of {picture.total_tokens} x {picture.hidden} in {trace.dtype} ({size(reduced)})."
        )
    layer = layer_of(trace)
    if layer is not None:
        said.append(f"Counted in this run, in {layer.name}: {counted(total([layer.total]))}; ")
        said[-1] += f"{size(layer.total.sent)} sent by a rank."
    return said


def _memory(trace: Trace) -> list[str]:
    """Activations kept for backward, measured: in the layer, and outside of TP."""
    layer, picture, said = layer_of(trace), trace.picture, []
    rows = [("in this layer", picture.saved, picture.saved_on_one)]
    if layer is not None and "stream" in layer.kinds:
        rows.append(("of it outside TP", layer.kinds["stream"].saved, layer.kinds["stream"].saved_on_one))
    for where, here, on_one in rows:
        part = f" ({here / on_one:.0%})" if on_one else ""
        said.append(f"{where}: {size(on_one)} on one device, {size(here)} on a rank{part}")
    return [f"Activations kept for backward, measured {'; '.join(said)}."]
