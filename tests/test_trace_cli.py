"""`colrow trace` as a user meets it: tables, one JSON object, files, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colrow import cli


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["trace", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    seen = numbers(capsys, "--model", "llama", "--tp", "2")
    assert (seen["tp"], seen["sequence_parallel"]) == (2, True)
    for layer in seen["layers"]:
        assert layer["forward"] == {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2}
        assert layer["saved_bytes_per_rank"] > 0 and layer["bytes_sent_per_rank"] > 0
    total, formula = seen["total"], seen["formula"]
    assert total["bytes_sent_per_rank"] == pytest.approx(formula["bytes_sent_per_rank"])
    assert total["saved_bytes_per_rank"] == pytest.approx(formula["saved_bytes_per_rank"], rel=0.02)
    assert seen["single_device"]["saved_bytes"] > 2 * total["saved_bytes_per_rank"]


def test_sizes_and_modes_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "llama", "--tp", "2", "--no-sequence-parallel", "--batch", "3", "--sequence", "9"]
    seen = numbers(capsys, *asked, "--recompute", "none")
    assert (seen["batch"], seen["sequence"], seen["sequence_parallel"]) == (3, 9, False)
    n = 3 * 9 * 32 * 4
    assert [layer["bytes_sent_per_rank"] for layer in seen["layers"]] == [4 * n] * 2
    lean = numbers(capsys, *asked)["total"]["saved_bytes_per_rank"]
    assert lean < seen["total"]["saved_bytes_per_rank"]


def test_tables_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"layer.{kind}" for kind in ("html", "svg", "excalidraw")}
    options = [part for kind, file in files.items() for part in (f"--{kind}", str(file))]
    assert cli.run(["trace", "--model", "gpt", "--tp", "2", "--no-sequence-parallel", *options]) == 0
    out = capsys.readouterr().out
    assert "gpt, tp 2, tensor parallel, 2 x 16 tokens in float32" in out
    assert "attention 1 all-reduce 1 all-reduce 8,192 8,192" in " ".join(out.split())
    assert all(f"open {file}" in out for file in files.values())
    assert files["html"].read_text("utf-8").startswith("<!doctype html>")
    assert "all-reduce" in files["svg"].read_text("utf-8")
    assert json.loads(files["excalidraw"].read_text("utf-8"))["type"] == "excalidraw"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch: 0; a positive number is needed"),
        (["--svg", "no/such/folder/a.svg"], "there is no folder"),
        (["--model", "lama"], "such as 'llama'"),
        (["--tp", "0"], "--tp: 0"),
    ],
)
def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.run(["trace", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
