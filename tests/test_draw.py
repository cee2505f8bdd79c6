"""The drawings tell what the two drawings tell that they are modelled on, with the run's own numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

import traces
from browser import opened
from colrow.draw import scene, to_excalidraw, to_svg
from colrow.matrices import pair
from colrow.scene import LOCAL, RANKS, SENT, WHOLE, Arrow, Box, Item, Text, moved, text_width
from colrow.traced import Linear, Trace

SPLIT_MLP = {  # a fact of the drawing "Y = GeLU(X A) B on two ranks": what ours must say for 26 tokens x 32 -> 128
    "the title": r"Y = GELU\(X A\) B on 2 ranks",
    "each rank owns half of the outputs of A and half of the inputs of B": (
        r"A split by columns \(each rank owns 64 of the 128 outputs\), B split by rows \(.* 64 of the 128 inputs\)"
    ),
    "A, h x 4h, is split by columns": r"A \(32 x 128\)\ncolumn split\nA1, A2: 32 x 64",
    "B, 4h x h, is split by rows": r"B \(128 x 32\)\nrow split\nB1, B2: 64 x 32",
    "X, tokens x h, is whole on every rank": r"X \(2 x 13 x 32\)\nfull copy on\nevery rank",
    "X A1 is tokens x 2h": r"\(2 x 13 x 64\)",
    "the activation needs no other rank": r"elementwise:\nno sync",
    "a product with B1 is a partial sum": r"partial sum",
    "the sum": r"all-reduce\nY = Y1 \+ Y2",
    "its result": r"full Y on\nboth ranks",
    "f": r"forward: identity\nbackward: all-reduce dL/dX\n\(X was used by both ranks\)",
    "g": r"forward: all-reduce\nbackward: identity\n\(dL/dY1 = dL/dY2 = dL/dY\)",
    "why not by rows: a sum before the activation": r"split A by rows\? X A = X1 A1 \+ X2 A2 .*BEFORE GELU",
    "why not by rows: it is not linear": r"GELU\(X1 A1 \+ X2 A2\) is not GELU\(X1 A1\) \+ GELU\(X2 A2\)",
    "the only sync is at the end": r"The column split puts the only sync at the end",
    "one all-reduce each way": r"per MLP block: 1 all-reduce forward \(g\), 1 all-reduce backward \(f\)",
    "attention is alike, four in a layer": r"Attention has the same shape, so 4 all-reduces per layer",
}
SHARDED_LAYER = {  # the same for "sequence parallelism in a layer on four ranks", 26 tokens x 32
    "what it is for": r"Sequence parallelism \(SP\): outside TP by shards of the sequence \(saves activation memory\)",
    "it goes with TP": r"Beside TP: norms, dropout and residuals by shards of the sequence, attention and MLP by TP",
    "norm and dropout by sequence": r"^Norm / dropout region: by shards of the sequence \(each rank",
    "the first rank's shard": r"rank 1: tokens 0 to 6\n7 x 32",
    "the second rank's": r"rank 2: tokens 7 to 13\n7 x 32",
    "the third rank's": r"rank 3: tokens 14 to 20\n7 x 32",
    "the last rank's": r"rank 4: tokens 21 to 25\n5 x 32",
    "into TP": r"all-gather \(into TP: the sequence is whole again\)\nbackward: reduce-scatter",
    "attention by TP": r"Attention region: by TP \(each rank holds a shard of the weights\)",
    "an MLP by TP": r"MLP region: by TP \(each rank holds a shard of the weights\)",
    "out of TP": r"reduce-scatter \(out of TP: back to shards of the sequence\)\nbackward: all-gather",
    "the next norm is sharded again": r"Next norm / dropout region: by shards of the sequence again",
    "the bytes of the all-reduce": r"all-gather send 5.0 kB a rank, the same bytes as one all-reduce .*5.0 kB",
    "less activation memory, measured": r"in this layer: 280.0 kB on one device, 70.0 kB on a rank \(25%\)",
}


@pytest.mark.parametrize("fact", SPLIT_MLP)
def test_the_drawing_of_an_mlp_tells(fact):
    assert found(traces.gpt(2), SPLIT_MLP[fact]), f"no text matches {SPLIT_MLP[fact]!r}"


@pytest.mark.parametrize("fact", SHARDED_LAYER)
def test_the_drawing_of_a_layer_under_sequence_parallelism_tells(fact):
    assert found(traces.gpt(4, sharded=True), SHARDED_LAYER[fact]), f"no text matches {SHARDED_LAYER[fact]!r}"


def found(trace: Trace, pattern: str) -> bool:
    return any(re.search(pattern, text, re.DOTALL) for text in scene(trace).texts())


def boxes(trace: Trace) -> list[Box]:
    return [item for item in scene(trace).items if isinstance(item, Box)]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_row_from_x_to_y_in_its_colour(rank):
    drawn, n, colour = boxes(traces.gpt(2)), rank + 1, RANKS[rank]
    (start,) = [box for box in drawn if box.text == f"X A{n}"][:1]
    row = sorted((box for box in drawn if box.y == start.y), key=lambda box: box.x)
    row = [box for box in row if box.x > 300 and box.height == start.height]  # the matrices stand on the left
    wanted = [
        ("X", WHOLE),
        (f"X A{n}", colour),
        ("GELU", LOCAL),
        (f"(.) B{n}", colour),
        (f"Y{n}", colour),
        ("Y", WHOLE),
    ]
    assert [(box.text, box.colour) for box in row] == wanted
    (total,) = [box for box in drawn if box.text.startswith("all-reduce")][:1]
    assert total.colour == SENT
    assert row[4].right < total.x < total.right < row[5].x
    assert total.y <= row[0].y and row[0].bottom <= total.bottom
    arrows = [item for item in scene(traces.gpt(2)).items if isinstance(item, Arrow) and item.y == start.middle[1]]
    assert len(arrows) == len(row), "an arrow between any two boxes, and the bar is one"


def test_under_sequence_parallelism_the_row_begins_and_ends_with_the_ranks_own_tokens():
    drawn = boxes(traces.gpt(4, sharded=True))
    (start,) = [box for box in drawn if box.text == "X A3"][:1]
    row = sorted((box for box in drawn if box.y == start.y and box.x > 300), key=lambda box: box.x)
    assert [box.text for box in row if box.height == start.height] == ["X", "X", "X A3", "GELU", "(.) B3", "Y3", "Y"]
    assert (row[0].colour, row[-1].colour) == (RANKS[2], RANKS[2])
    assert any(box.text.startswith("all-gather") for box in drawn)
    assert any(box.text.startswith("reduce-scatter") for box in drawn)


def test_it_draws_what_was_seen_and_not_what_should_be():
    seen = traces.gpt(2)
    regions = [replace(region, entry=("", ""), exit=("", "")) for region in seen.picture.regions]
    texts = "\n".join(scene(replace(seen, picture=replace(seen.picture, regions=tuple(regions)))).texts())
    assert "forward: identity\nbackward: identity" in texts
    assert "full Y" not in texts
    assert "not summed here" in texts


def test_uneven_parts_are_those_that_the_ranks_have():
    split = pair(traces.llama(8, sharded=False).picture.regions[1], 8)
    assert split is not None
    assert split.a_parts() == ["A1 to A7: 64 x [13 | 13]", "A8: 64 x [9 | 9]"]
    assert sum(split.inputs) == 100


def test_ranks_that_share_key_value_heads_all_read_some():
    split = pair(traces.llama(4).picture.regions[0], 4)
    assert split is not None
    assert split.a_parts() == ["A1 to A4: 64 x [16 | 16 | 16]"]
    assert found(traces.llama(4), "fewer key/value heads than 4 ranks")


def test_a_gate_stands_beside_what_it_multiplies():
    assert found(traces.llama(4), r"A is \[gate_proj \| up_proj\], .*SiLU\(X gate_proj\) times X up_proj")


def test_layers_may_be_defined_in_any_order():
    seen = traces.gpt(2).picture.regions[1]
    assert pair(replace(seen, linears=seen.linears[::-1]), 2) == pair(seen, 2)


def test_of_many_experts_the_first_is_drawn_and_the_others_are_counted():
    def expert(number: int) -> list[Linear]:
        name = f"layers.0.experts.{number}"
        return [
            traces.linear(f"{name}.up", "column", (32, 64), 2, (26,)),
            traces.linear(f"{name}.down", "row", (64, 32), 2, (26,)),
        ]

    seen = traces.region("experts", expert(0) + expert(1) + expert(2), 32, (26,), 2, sharded=False)
    split = pair(seen, 2)
    assert split is not None
    assert (split.names, split.a_parts(), split.left_out) == (["up"], ["A1, A2: 32 x 32"], 2)
    assert found(traces.trace([seen], 2), "experts.0.down and what feeds it; 2 more like it")


def test_latents_between_x_and_a_are_told():
    linears = [
        traces.linear("layers.0.attention.q_b", "column", (20, 40), 2, (26,)),
        traces.linear("layers.0.attention.kv_b", "column", (24, 64), 2, (26,)),
        traces.linear("layers.0.attention.out", "row", (40, 32), 2, (26,)),
    ]
    trace = traces.trace([traces.region("attention", linears, 32, (26,), 2, sharded=False)], 2)
    assert found(trace, r"A \(\[20 x 40 \| 24 x 64\]\)\ncolumn split\nA1, A2: \[20 x 20 \| 24 x 32\]")
    assert found(trace, "20 and 24 features, where X has 32")


def test_what_the_stream_sends_is_told_apart():
    trace = traces.gpt(4, sharded=True)
    first = trace.layers[0]
    stream = replace(first.kinds["stream"], backward={"all_gather": 1})
    layers = (replace(first, kinds={**first.kinds, "stream": stream}), *trace.layers[1:])
    text = r"6 all-gathers and 4 reduce-scatters per layer, in each of the 2 layers"
    assert found(trace, text + r"\.")
    assert found(replace(trace, layers=layers), text + "; besides, in the stream of layers.0: 1 all-gather")


def test_layers_that_differ_are_not_said_to_be_alike():
    trace = traces.gpt(2)
    mlp = replace(trace.layers[1].kinds["mlp"], forward={"all_reduce": 2})
    layers = (trace.layers[0], replace(trace.layers[1], kinds={**trace.layers[1].kinds, "mlp": mlp}))
    assert not found(replace(trace, layers=layers), "in each of the")


def attention_only() -> Trace:
    return traces.trace(traces.gpt(2).picture.regions[:1], 2)


def experts() -> Trace:
    return traces.trace([traces.region("experts", [], 32, (26,), 2, sharded=True)], 2, sharded=True)


def test_experts_without_linear_layers_are_a_share_for_each_rank():
    shares = [(box.text, box.colour) for box in boxes(experts()) if "share" in box.text and "experts" in box.text]
    assert shares == [("experts, share 1", RANKS[0]), ("experts, share 2", RANKS[1])]


TRACES = {
    "gpt on 2": traces.gpt(2),
    "gpt on 3": traces.gpt(3),
    "gpt on 1": traces.gpt(1),
    "gpt on 11": traces.gpt(11),
    "gpt on 64, sharded": traces.gpt(64, sharded=True),
    "gpt on 8, sharded": traces.gpt(8, sharded=True),
    "llama on 4": traces.llama(4),
    "llama on 8": traces.llama(8, sharded=False),
    "large sizes": traces.gpt(4, sharded=True, hidden=16384, inner=65536),
    "attention only": attention_only(),
    "experts": experts(),
    "no region": traces.trace([], 2),
    "no region, sharded": traces.trace([], 2, sharded=True),
}


@pytest.mark.parametrize("name", TRACES)
def test_nothing_overlaps_or_is_cut(name):
    drawn = scene(TRACES[name])
    texts = [item for item in drawn.items if isinstance(item, Text)]
    small = [item for item in drawn.items if isinstance(item, Box) and item.text]
    for a, b in combinations([*texts, *small], 2):
        assert not overlap(a, b), f"{a} and {b}"
    for box in small:
        label = box.label()
        assert box.x <= label.left and label.right <= box.right, f"{box} is too small"
    assert all(left_of(item) >= -24 and item.y >= 0 for item in drawn.items), "outside of the margin"


def left_of(item: Item) -> float:
    return item.left if isinstance(item, Text) else item.x


def overlap(a: Item, b: Item) -> bool:
    return left_of(a) < b.right and left_of(b) < a.right and a.y < b.bottom and b.y < a.bottom


def test_no_line_is_wider_in_a_browser_than_it_was_thought_to_be(tmp_path):
    script = """
    const lines = [...document.querySelectorAll("tspan")];
    seen.lines = lines.map((line) => [line.textContent, parseFloat(line.parentNode.getAttribute("font-size")),
                                      line.getComputedTextLength()]);"""
    page = f"<!doctype html><html><head></head><body>{to_svg(traces.llama(4))}</body></html>"
    result = opened(page, script, tmp_path)
    assert result["faults"] == []
    assert len(result["lines"]) > 100
    for line, size, width in result["lines"]:
        assert width <= 1.02 * text_width(line, size), line


def test_an_overlap_would_be_found():
    text = Text(10, 10, "some text")
    assert overlap(text, Box(40, 0, 50, 50, WHOLE))
    assert not overlap(text, *moved([text], 0, 40))


@pytest.mark.parametrize("name", TRACES)
def test_the_svg_is_well_formed_and_says_what_it_is(name):
    trace = replace(TRACES[name], model='<b>&"model"')
    root = ElementTree.fromstring(to_svg(trace))
    space = "{http://www.w3.org/2000/svg}"
    title, description = root.find(f"{space}title"), root.find(f"{space}desc")
    assert title is not None and title.text and '<b>&"model"' in title.text
    assert description is not None and description.text and f"{trace.tp} rank" in description.text
    assert root.get("role") == "img"
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert root.find(f"{space}rect[@fill='#ffffff'][@width='{width:g}'][@height='{height:g}']") is not None
    drawn = scene(trace)
    assert drawn.width < width and drawn.bottom < height


COMMON = (
    "id type x y width height angle strokeColor backgroundColor fillStyle strokeWidth strokeStyle roughness opacity "
    "groupIds frameId index roundness seed version versionNonce isDeleted boundElements updated link locked"
)
FIELDS = {  # of the public format: packages/element/src/types.ts in the repository of Excalidraw
    "rectangle": COMMON,
    "text": COMMON + " text originalText fontSize fontFamily textAlign verticalAlign containerId autoResize lineHeight",
    "arrow": COMMON + " points lastCommittedPoint startBinding endBinding startArrowhead endArrowhead elbowed",
}


@pytest.mark.parametrize("name", TRACES)
def test_the_excalidraw_file_has_the_fields_of_its_format(name):
    text = to_excalidraw(TRACES[name])
    page = json.loads(text)
    assert (page["type"], page["version"], page["files"]) == ("excalidraw", 2, {})
    elements = {element["id"]: element for element in page["elements"]}
    assert len(elements) == len(page["elements"]), "an id is there twice"
    for element in elements.values():
        assert element.keys() == set(FIELDS[element["type"]].split())
        assert element["fontFamily"] in range(1, 10) if element["type"] == "text" else True
        for bound in element["boundElements"] or ():
            assert elements[bound["id"]]["containerId"] == element["id"]
        if element.get("containerId"):
            assert {"type": "text", "id": element["id"]} in elements[element["containerId"]]["boundElements"]
    assert text == to_excalidraw(TRACES[name]), "the same trace, another file"


def test_both_files_have_the_same_texts():
    trace = traces.llama(4)
    texts = [element["text"] for element in json.loads(to_excalidraw(trace))["elements"] if element["type"] == "text"]
    assert texts == scene(trace).texts()
    in_svg = "".join(ElementTree.fromstring(to_svg(trace)).itertext())
    assert all(line in in_svg for text in texts for line in text.split("\n"))
