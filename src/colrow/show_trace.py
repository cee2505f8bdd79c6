"""A trace in the terminal: what is sent and what is kept, by layer and part, beside the formula and one device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from colrow.figures import size
from colrow.show import Show
from colrow.traced import VERBS, Kept, Kind, Layer, Part, Trace

LARGEST = 8
"""Kept tensors that are listed."""


def show_trace(show: Show, trace: Trace, files: Sequence[str]) -> None:
    """Tables of one step, and what to do next. `files` are those that were written."""
    t, total = trace, trace.total
    mode = "tensor and sequence parallel" if t.sequence_parallel else "tensor parallel"
    show.line(
        f"{t.model}, tp {t.tp}, {mode}, {t.batch} x {t.sequence} tokens in {t.dtype}: one step, on the first rank\n"
    )
    rows = [("sent", "", "forward", "backward", "bytes", "by formula")]
    rows += [(name, kind, *_sent(part)) for name, kind, part in _rows(t) if part.sent or part.formula_sent]
    show.table([*rows, ("in all", "", *_sent(total))])
    show.line("")
    rows = [("kept for backward", "", "bytes", "by formula", "one device", "")]
    rows += [(name, kind, *_kept(part)) for name, kind, part in _rows(t) if part.saved or part.saved_on_one]
    show.table([*rows, ("in all", "", *_kept(total))])
    show.line("")
    rows = [("largest tensors that are kept", "by", "shape", "bytes", "")]
    show.table([*rows, *_largest(t.kept)])
    waiting = ", ".join(f"{1e3 * seconds:.1f}" for seconds in t.waiting_seconds)
    show.line(f"\nthe step took {1e3 * t.step_seconds:.1f} ms, of which the ranks were in collectives {waiting} ms")
    if t.padding:
        worst = max(t.padding, key=lambda row: row.percent)
        zeros = sum(row.entries for row in t.padding)
        show.line(
            f"padding: {zeros:,} zeros in {len(t.padding)} parameters, at most {worst.percent:.1f} % ({worst.name})"
        )
    show.line("\nnext:", style="bold")
    for line in _next_steps(t, files):
        show.line(f"  {line}")


def _rows(trace: Trace) -> Iterable[tuple[str, str, Part]]:
    """A line for every part: what is before the layers, layers that are alike together, what is after them."""
    outside: Mapping[Kind, Part] = trace.outside
    yield "embedding", "", outside["embedding"]
    for alike in _alike(trace.layers):
        first = alike[0]
        name = first.name if len(alike) == 1 else f"{_span(alike)}, each"
        for number, (kind, part) in enumerate(first.kinds.items()):
            yield name if number == 0 else "", kind, part
    yield "head and loss", "", outside["head"]
    yield "replicated gradients", "", outside["other"]


def _alike(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Neighbours that send and keep the same."""
    groups: list[list[Layer]] = []
    for layer in layers:
        if groups and groups[-1][0].kinds == layer.kinds and _stem(groups[-1][0]) == _stem(layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


def _stem(layer: Layer) -> str:
    return re.sub(r"\.\d+$", "", layer.name)


def _span(layers: Sequence[Layer]) -> str:
    """`model.layers.0-79`."""
    return f"{layers[0].name}-{layers[-1].name.rpartition('.')[2]}"


def _sent(part: Part) -> tuple[str, str, str, str]:
    return _verbs(part.forward), _verbs(part.backward), f"{part.sent:,.0f}", f"{part.formula_sent:,.0f}"


def _verbs(counts: Mapping[str, int]) -> str:
    """`2 all-gather, 2 reduce-scatter`."""
    return ", ".join(f"{counts[verb]} {verb.replace('_', '-')}" for verb in VERBS if counts.get(verb)) or "nothing"


def _kept(part: Part) -> tuple[str, str, str, str]:
    share = f"{part.saved / part.saved_on_one:.0%}" if part.saved_on_one else ""
    return f"{part.saved:,}", f"{part.formula_saved:,.0f}", f"{part.saved_on_one:,}", share


def _largest(kept: Sequence[Kept]) -> list[tuple[str, str, str, str, str]]:
    """Tensors that are alike in all layers count as one."""
    found: dict[tuple[str, str, str, int], int] = {}
    for row in kept:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.module) or "the model"
        key = (name, row.by.removesuffix("Backward0"), "x".join(map(str, row.shape)), row.bytes)
        found[key] = found.get(key, 0) + 1
    ordered = sorted(found.items(), key=lambda item: -item[0][3])[:LARGEST]
    return [(name, by, shape, size(b), f"x{n}" if n > 1 else "") for (name, by, shape, b), n in ordered]


def _next_steps(trace: Trace, files: Sequence[str]) -> list[str]:
    """What to type after a trace."""
    if files:
        return [f"open {file}" for file in files]
    again = f"colrow trace --model {trace.model} --tp {trace.tp}"
    other = " --no-sequence-parallel" if trace.sequence_parallel else ""
    return [
        f"{again} --html trace.html    the same as a page, with every tensor",
        f"{again} --svg layer.svg      a drawing of a layer (--excalidraw: to edit)",
        f"{again}{other}    the other mode, to compare",
    ]
