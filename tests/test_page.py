"""The page of a trace: it needs nothing else, no name can break it, and its tables sort and filter in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import traces
from browser import opened
from colrow.markup import join, tag
from colrow.page import to_html
from colrow.traced import Kept, Trace

NASTY = "</script><script>alert('x')</script><b>&amp;\"'"


class Elements(HTMLParser):
    """The start tags of a page and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def nasty() -> Trace:
    trace = traces.gpt(2)
    kept = replace(trace.kept[0], module=NASTY, by=NASTY)
    padding = replace(trace.padding[0], name=NASTY)
    picture = replace(trace.picture, layer=NASTY, norms=(NASTY,))
    return replace(trace, model=NASTY, kept=(kept,), padding=(padding,), picture=picture)


@pytest.mark.parametrize("trace", [traces.gpt(2), traces.llama(4), traces.gpt(11, sharded=True), traces.trace([], 1)])
def test_the_page_needs_nothing_else(trace):
    page = to_html(trace)
    for name, attributes in Elements(page).tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action"}, name
    assert not re.search(r"@import|url\(", page.replace("url(#", ""))
    (policy,) = [found["content"] for _, found in Elements(page).tags if "http-equiv" in found]
    assert policy is not None and policy.startswith("default-src 'none'")


def test_no_name_becomes_markup():
    page = Elements(to_html(nasty()))
    assert [name for name, _ in page.tags].count("script") == 3
    assert "b" not in [name for name, _ in page.tags]
    assert NASTY in page.texts, "the parameter's name is a text"


def test_the_page_carries_the_whole_trace():
    page = Elements(to_html(nasty()))
    (data,) = [text for text in page.texts if text.startswith('{"model"')]
    assert json.loads(data) == json.loads(json.dumps(nasty().as_json()))


def test_what_is_not_markup_is_escaped():
    assert tag("p", "1 < 2", tag("b", '"'), title='a"b', hidden=True, open=False) == (
        '<p title="a&quot;b" hidden>1 &lt; 2<b>&quot;</b></p>'
    )
    assert join(tag("i"), "<") == "<i></i>&lt;"


def test_the_page_says_what_each_rank_holds_and_what_is_sent():
    text = " ".join(Elements(to_html(traces.llama(4))).texts)
    for said in (
        "tokens 21 to 25: 5 x 64",
        "A4 64 x [25 | 25], B4 25 x 64",
        "forward: all-gather; backward: reduce-scatter; 10.0 kB sent by a rank; gathered again in backward, 5.0 kB",
        "forward: reduce-scatter; backward: all-gather; 10.0 kB sent by a rank",
        "240.0 kB on one device",
        "60.0 kB on a rank, 25%",
        "54.0 kB by the formula",
        "layers.0.mlp.up.weight",
        "12.5%",
        "40.0 ms, 16% of the step",
    ):
        assert said in text


def test_without_padding_it_says_so():
    assert "No parameter is padded" in to_html(replace(traces.gpt(2), padding=()))


PRESS = """
const all = (id, what) => [...document.querySelectorAll(`#${id} ${what}`)];
const rows = (id) => all(id, "tbody tr").map((row) => [...row.cells].map((cell) => cell.textContent));
const button = (id, text) => all(id, "button").find((one) => one.textContent === text);
const sorts = (id) => all(id, "th").map((head) => head.getAttribute("aria-sort"));
const said = () => document.querySelector("output").textContent;
const note = (id) => seen.steps.push({ rows: rows(id), sorts: sorts(id), said: said() });
seen.steps = [];
note("kept");
button("kept", "bytes").click(); note("kept");
button("kept", "module").click(); note("kept");
button("kept", "MLP").click(); note("kept");
const input = document.querySelector("#kept input");
input.value = "LAYERS.1 26x32"; input.dispatchEvent(new Event("input")); note("kept");
note("collectives");
button("collectives", "each layer").click(); note("collectives");
seen.pressed = button("collectives", "each layer").getAttribute("aria-pressed");
"""


def test_the_tables_sort_and_filter_in_a_browser(tmp_path):
    trace = traces.gpt(2)
    extra = Kept("", "other", "", "MulBackward0", (3,), "int64", 24)
    result = opened(to_html(replace(trace, kept=(*trace.kept, extra))), PRESS, tmp_path)
    assert result["faults"] == []
    first, by_bytes, by_module, mlp, words, together, each = result["steps"]
    sizes = [row[-1] for row in first["rows"]]
    assert sizes == ["6.7 kB"] * 4 + ["3.3 kB"] * 4 + ["24 B"]
    assert first["sorts"] == ["none"] * 5 + ["descending"]
    assert first["said"] == "9 of 9 tensors, 40.0 kB"
    assert [row[-1] for row in by_bytes["rows"]] == sizes[::-1]
    assert by_bytes["sorts"] == ["none"] * 5 + ["ascending"]
    names = [row[0] for row in by_module["rows"]]
    assert names == sorted(names) and "(the model)" in names
    assert by_module["sorts"] == ["ascending"] + ["none"] * 5
    assert {row[1] for row in mlp["rows"]} == {"MLP"}
    assert mlp["said"] == "4 of 9 tensors, 20.0 kB"
    assert [row[0] for row in words["rows"]] == ["layers.1.mlp.down"]
    assert sorted(together["rows"]) == [
        ["all layers", region, way, "all-reduce", "2", "6.7 kB"]
        for region in ("MLP", "attention")
        for way in ("backward", "forward")
    ]
    assert len(each["rows"]) == 8
    assert {(row[0], row[4], row[5]) for row in each["rows"]} == {(f"layers.{n}", "1", "3.3 kB") for n in (0, 1)}
    assert result["pressed"] == "true"


def test_a_narrow_window_is_not_scrolled_sideways_and_nasty_names_are_texts(tmp_path):
    script = "seen.wide = document.documentElement.scrollWidth;"
    result = opened(to_html(nasty()), script, tmp_path, "--window-size=500,900")
    assert result["faults"] == []
    assert result["wide"] <= 500
