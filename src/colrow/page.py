"""A traced step as one HTML page: figures, the layer, memory, collectives, saved tensors. It needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from colrow import draw
from colrow.figures import size
from colrow.markup import Markup, join, tag
from colrow.matrices import all_ranks, pair, tokens_of
from colrow.scene import rank_colour, shown
from colrow.traced import Kind, Part, Region, Trace
from colrow.words import KINDS, counted, seconds, total, verb_name

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the page may load: nothing, and run what stands in it."""


def to_html(trace: Trace) -> str:
    """The page, whole. What it says of bytes is rank 1's, unless it says otherwise."""
    title = f"{trace.model} on {trace.tp} rank{'s' if trace.tp > 1 else ''}"
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"colrow trace: {title}"),
        tag("style", Markup(_asset("page.css"))),
    )
    body = tag(
        "main",
        _header(trace, title),
        _section("The layer", _layer(trace), _drawing(trace)),
        _section("Memory kept for backward", *_memory(trace)),
        _section("Collectives", tag("div", id="collectives"), _without_script()),
        _section("Saved tensors", tag("div", id="kept"), _without_script()),
        _section("Padding", _padding(trace)),
        _section("Waiting", *_waiting(trace)),
    )
    scripts = join(
        _data("trace", trace.as_json()), _data("kinds", dict(KINDS)), tag("script", Markup(_asset("page.js")))
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}\n{scripts}</body>\n</html>\n'


def _asset(name: str) -> str:
    return (files("colrow") / "assets" / name).read_text("utf-8")


def _data(name: str, value: Any) -> Markup:
    """Values for the script. Nothing in them can end the element they stand in."""
    return tag("script", Markup(json.dumps(value).replace("<", "\\u003c")), type="application/json", id=name)


def _section(title: str, *children: str) -> Markup:
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=f"h-{name}"), *children, aria_labelledby=f"h-{name}")


def _without_script() -> Markup:
    return tag("noscript", tag("p", "This table needs JavaScript; `colrow trace --json` has the same.", class_="note"))


def _header(trace: Trace, title: str) -> Markup:
    """What was run, and its figures."""
    whole = trace.total
    mode = "tensor and sequence parallel" if trace.sequence_parallel else "tensor parallel"
    layers = f"{len(trace.layers)} layer{'s' if len(trace.layers) != 1 else ''}"
    run = f"One training step: {mode}, batch {trace.batch} x {trace.sequence}, {trace.dtype}, {layers}."
    waiting = sum(trace.waiting_seconds) / max(1, len(trace.waiting_seconds))
    ways = f"forward {counted(whole.forward)}; backward {counted(whole.backward)}"
    part = f"{_share(whole.saved, whole.saved_on_one)} of the {size(whole.saved_on_one)} on one device"
    cards = [
        ("kept for backward, on a rank", size(whole.saved), part),
        ("sent by a rank", size(whole.sent), f"the formula gives {size(whole.formula_sent)}"),
        ("collectives", str(sum(total([whole]).values())), ways),
        ("the step took", seconds(trace.step_seconds), f"in collectives {seconds(waiting)}, the ranks' mean"),
    ]
    figures = (
        tag("div", tag("dt", name), tag("dd", figure, class_="figure"), tag("dd", note, class_="note"))
        for name, figure, note in cards
    )
    about = "Bytes are those of rank 1. Ranks count from 1, as the parts A1, A2 of a matrix do; rank 1 is 0 to torch."
    return join(
        tag("h1", title),
        tag("p", run),
        tag("p", about, class_="note"),
        tag("dl", *figures, class_="cards"),
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _layer(trace: Trace) -> Markup:
    """The first layer as places under each other, and what is sent between them."""
    picture, parts = trace.picture, next((la.kinds for la in trace.layers if la.name == trace.picture.layer), {})
    norms = ", ".join(name.rpartition(".")[2] for name in picture.norms)
    stream = _place("stream", "Norms, dropout, residuals", norms, _tokens(trace), parts.get("stream"))
    rows = [stream]
    for region in picture.regions:
        name = KINDS[region.kind]
        inner = _weights(trace, region)
        rows += [
            _between("f", *region.entry, region.sent.get("entry", 0.0), region.sent.get("again", 0.0)),
            _place("tp", name[0].upper() + name[1:], region.name, inner, parts.get(region.kind)),
            _between("g", *region.exit, region.sent.get("exit", 0.0)),
            _place("stream", "Norms, dropout, residuals", "", _tokens(trace), None),
        ]
    intro = f"{picture.layer}, the first of {len(trace.layers)}: {picture.total_tokens} tokens x {picture.hidden}."
    return join(tag("p", intro), tag("ol", *rows, class_="layer"))


def _place(style: str, name: str, what: str, chips: Iterable[Markup], part: Part | None) -> Markup:
    kept = f"keeps {size(part.saved)} on a rank, {size(part.saved_on_one)} on one device" if part else ""
    note = "; ".join(filter(None, (what, kept)))
    return tag(
        "li",
        tag("h3", name),
        tag("p", note, class_="note") if note else Markup(),
        tag("ul", *chips, class_="chips"),
        class_=f"place {style}",
    )


def _between(operator: str, forward: str, backward: str, sent: float, again: float = 0.0) -> Markup:
    """What f or g sends."""
    said = f"{size(sent)} sent by a rank" if sent else "nothing sent"
    more = f"; gathered again in backward, {size(again)}" if again else ""
    ways = f"forward: {verb_name(forward)}; backward: {verb_name(backward)}; {said}{more}"
    return tag(
        "li",
        tag("span", "↓", class_="arrow", aria_hidden="true"),
        tag("em", operator),
        tag("span", ways),
        class_="sent",
    )


def _tokens(trace: Trace) -> list[Markup]:
    picture = trace.picture
    if not trace.sequence_parallel:
        return [_chip(None, all_ranks(trace.tp), f"all {picture.total_tokens} tokens, whole")]
    return [
        _chip(rank, f"rank {rank + 1}", f"{tokens_of(trace, rank)}: {picture.tokens[rank]} x {picture.hidden}")
        if rank is not None
        else _chip(None, "...", "")
        for rank in shown(trace.tp)
    ]


def _weights(trace: Trace, region: Region) -> list[Markup]:
    split = pair(region, trace.tp)
    chips = []
    for rank in shown(trace.tp):
        if rank is None:
            chips.append(_chip(None, "...", ""))
        elif split is None:
            chips.append(_chip(rank, f"rank {rank + 1}", "its share of the weights"))
        else:
            parts = f"A{rank + 1} {split.a_size(rank)}, B{rank + 1} {split.b_size(rank)}"
            chips.append(_chip(rank, f"rank {rank + 1}", parts))
    return chips


def _chip(rank: int | None, name: str, says: str) -> Markup:
    stroke, fill = rank_colour(rank)
    return tag("li", tag("strong", name), says, style=f"border-color:{stroke};background:{fill}")


def _drawing(trace: Trace) -> Markup:
    frame = tag("div", Markup(draw.to_svg(trace)), class_="drawing", tabindex="0", role="region", aria_label="Drawing")
    return tag("details", tag("summary", "The same as a drawing, with the matrices"), frame)


def _memory(trace: Trace) -> list[Markup]:
    """A bar for one device, for a rank, and for what the formula gives, by kind of place."""
    sums: dict[Kind, list[float]] = {}
    parts: list[Mapping[Kind, Part]] = [*(layer.kinds for layer in trace.layers), trace.outside]
    for kinds in parts:
        for kind, part in kinds.items():
            row = sums.setdefault(kind, [0.0, 0.0, 0.0])
            for i, count in enumerate((part.saved_on_one, part.saved, part.formula_saved)):
                row[i] += count
    most = max((max(row) for row in sums.values()), default=0.0)
    bars: list[Markup] = []
    for kind, (one, here, formula) in sums.items():
        if not one + here + formula:
            continue
        three = (
            _bar("one", one, most, f"{size(one)} on one device"),
            _bar("here", here, most, f"{size(here)} on a rank{f', {_share(here, one)}' if one else ''}"),
            _bar("formula", formula, most, f"{size(formula)} by the formula"),
        )
        bars += [tag("dt", KINDS[kind]), tag("dd", *three)]
    text = f"All {len(trace.layers)} layers together, and what stands outside of them."
    return [tag("p", text), tag("dl", *bars, class_="bars")]


def _bar(style: str, count: float, most: float, says: str) -> Markup:
    width = f"width:{100 * count / most if most else 0:.2f}%"
    bar = tag("span", tag("i", class_=style, style=width, hidden=not count), aria_hidden="true")
    return tag("div", bar, tag("span", says), class_="bar")


def _padding(trace: Trace) -> Markup:
    if not trace.padding:
        return tag("p", f"No parameter is padded: {trace.tp} divides all that is split.")
    rows = [
        tag(
            "tr",
            tag("td", row.name, class_="name"),
            tag("td", str(row.entries), class_="number"),
            tag("td", f"{row.percent:.1f}%", class_="number"),
        )
        for row in trace.padding
    ]
    names = ("parameter", "name"), ("zeros", "number"), ("of its own entries", "number")
    head = tag("thead", tag("tr", *(tag("th", name, scope="col", class_=style) for name, style in names)))
    table = tag("table", head, tag("tbody", *rows))
    about = "Parameters that are filled with zeros, so that every rank holds as much. The zeros change no result."
    return join(tag("p", about), tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Padding"))


def _waiting(trace: Trace) -> list[Markup]:
    """How long every rank was in collectives, against the step."""
    bars: list[Markup] = []
    for rank, wait in enumerate(trace.waiting_seconds):
        says = f"{seconds(wait)}, {_share(wait, trace.step_seconds)} of the step"
        bars += [tag("dt", f"rank {rank + 1}"), tag("dd", _bar("wait", wait, trace.step_seconds, says))]
    about = f"Time in collectives, the wait for slower ranks included; the step took {seconds(trace.step_seconds)}."
    return [tag("p", about), tag("dl", *bars, class_="bars")]
