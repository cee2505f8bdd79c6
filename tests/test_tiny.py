"""Tiny models of every family: random in every part, small, and split in each of their classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import colrow
from colrow.families import FAMILIES as PLANS
from colrow.models.tiny import ALIASES, FAMILIES, batch, tiny, tiny_config
from colrow.parallelize import find_plan

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
OWN = "colrow-gpt"


def test_every_family_that_has_a_plan_is_built_in_and_on_the_page() -> None:
    assert set(FAMILIES) == set(PLANS) - {OWN}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(FAMILIES), "make families writes the page anew"
    assert "inf" not in PAGE.read_text() and "nan" not in PAGE.read_text()


@pytest.mark.parametrize("name", [*FAMILIES, *ALIASES])
def test_a_tiny_model_is_random_in_every_part_and_has_a_loss(name: str) -> None:
    model: Any = tiny(name)
    assert sum(p.numel() for p in model.parameters()) < 100_000
    same = [n for n, p in model.named_parameters() if p.numel() > 1 and (p.std() == 0 or (p == 0).all())]
    assert not same, f"zeros and ones hide faults: {same}"
    given = batch(model)
    loss = model(**given).loss
    loss.backward()
    unread = [n for n, p in model.named_parameters() if p.grad is None]
    assert not unread and loss.isfinite() and (given.keys() >= {"labels"})


def test_a_model_of_words_has_padding_that_no_label_counts() -> None:
    given = batch(tiny("llama"))
    padded = given["attention_mask"] == 0
    assert padded.any() and (given["labels"][padded] == -100).all() and (given["labels"][~padded] >= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_unless_it_is_asked_for_and_then_on_everywhere(family: str) -> None:
    for probability in (0.0, 0.25):
        config = tiny_config(family, dropout=probability).to_dict()
        found = {name: value for name, value in config.items() if "drop" in name and name != "layerdrop"}
        assert set(found.values()) - {None} == {probability}, found
        drops = {module.p for module in tiny(family, dropout=probability).modules() if isinstance(module, nn.Dropout)}
        assert drops <= {probability}


@pytest.mark.parametrize(("family", "kind"), [(name, kind) for name, f in FAMILIES.items() for kind in f.kinds])
def test_each_class_of_a_family_has_a_total_plan(family: str, kind: str) -> None:
    model = tiny(family, kind)
    rows = colrow.resolve(model, find_plan(model), 3).rows
    assert {row.name for row in rows} >= {name for name, _ in model.named_parameters()}


def test_changes_go_by_the_usual_names() -> None:
    config = tiny_config("falcon", intermediate_size=30, num_key_value_heads=1)
    assert (config.ffn_hidden_size, config.num_kv_heads) == (30, 1)
    other = tiny("smollm", num_hidden_layers=1)
    assert other.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (72, 72)
    assert other.get_parameter("lm_head.weight") is other.get_parameter("model.embed_tokens.weight")


def test_transformers_is_imported_when_a_model_is_asked_for_and_not_before() -> None:
    code = "import sys, colrow.cli; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
