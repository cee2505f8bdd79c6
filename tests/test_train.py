"""A run is the same at any degree: split, accumulated, replicated or resumed, it has the losses of one process."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import colrow
from colrow import train as training
from colrow.errors import CheckpointError, DataError
from colrow.options import TrainOptions
from oracle import FP32
from pool import Pool

Ranks = Callable[[int], Pool]
TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(400))


def trained(options: TrainOptions) -> tuple[Any, str]:
    """The result on this rank, and what was shown."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        result = training.train(options)
    return result, shown.getvalue()


def with_wrong_gradients(options: TrainOptions) -> str:
    """What is shown if one gradient of the split model is wrong."""
    right, calls = colrow.full_grads, []

    def wrong(model: Any) -> dict[str, Any]:
        calls.append(model)
        grads = right(model)
        return grads if len(calls) > 1 else grads | {"norm.weight": grads["norm.weight"] * 2}

    colrow.full_grads = wrong
    try:
        return trained(options)[1]
    finally:
        colrow.full_grads = right


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    """A tiny run, with dropout; `out` is set by `losses`."""
    (tmp_path / "text").write_text(TEXT)
    return TrainOptions(
        data=(tmp_path / "text",), out=tmp_path / "run", steps=10, batch=4, warmup=2, layers=2, width=32, context=16,
        dropout=0.1, sample=0, eval_every=100,
    )  # fmt: skip


def losses(ranks: Ranks, size: int, options: TrainOptions, name: str) -> list[float]:
    """The losses of all steps of a run on `size` ranks, in a folder of its own beside the text."""
    options = replace(options, out=options.data[0].parent / name)
    result, _ = ranks(size).run(trained, options)[0]
    lines = [json.loads(line) for line in (Path(options.out or "") / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, result["steps"] + 1))
    assert lines[-1]["loss"] == result["loss_last"]
    return [line["loss"] for line in lines]


def close(got: list[float], want: list[float]) -> bool:
    return len(got) == len(want) and all(abs(a - b) <= FP32 * abs(b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": False}, {"gated": True, "rotary": True, "dropout": 0.0}])
def test_losses_are_equal_at_every_degree(ranks: Ranks, options: TrainOptions, changes: dict[str, Any]) -> None:
    options = replace(options, **changes)
    want = losses(ranks, 1, options, "one")
    assert want[-1] < want[0] - 0.3
    for tp in (2, 3):
        assert close(losses(ranks, tp, replace(options, tp=tp), f"tp{tp}"), want), f"tp {tp}"


def test_accumulation_is_a_larger_batch(ranks: Ranks, options: TrainOptions) -> None:
    options = replace(options, tp=2, dropout=0.0)
    want = losses(ranks, 2, replace(options, batch=4, accumulate=1), "whole")
    assert close(losses(ranks, 2, replace(options, batch=1, accumulate=4), "parts"), want)


def test_replicas_are_a_larger_batch(ranks: Ranks, options: TrainOptions) -> None:
    options = replace(options, tp=2, dropout=0.0)
    want = losses(ranks, 2, replace(options, batch=4), "one replica")
    assert close(losses(ranks, 4, replace(options, batch=2), "two replicas"), want)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks: Ranks, options: TrainOptions) -> None:
    options = replace(options, tp=2, save_every=4, steps=8)
    want = losses(ranks, 2, options, "run")
    folder = options.data[0].parent / "run"
    shutil.rmtree(folder / "step-000008")
    shutil.copytree(folder, folder.with_name("other"))
    assert losses(ranks, 2, replace(options, resume=True), "run") == want, "bit-equal at the same degree"
    assert close(losses(ranks, 3, replace(options, resume=True, tp=3), "other"), want), "to rounding at another"
    more = losses(ranks, 2, replace(options, resume=True), "run")
    assert more[:8] == want and len(more) == 16, "a complete run does as many steps again"


def test_the_first_step_is_compared_with_one_process(ranks: Ranks, options: TrainOptions) -> None:
    text = ranks(2).run(trained, replace(options, tp=2, steps=1))[0][1]
    found = re.search(r"first step equals one process: .* largest relative gradient difference (\S+)", text)
    assert found and float(found[1]) < 1e-4, text


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions_train_and_equal_one_process(ranks: Ranks, options: TrainOptions, dtype: Any) -> None:
    result, text = ranks(2).run(trained, replace(options, tp=2, dtype=dtype, lr=0.01))[0]
    assert "first step equals one process" in text, text
    assert result["loss_last"] < result["loss_first"] - 0.3


def test_numbers_that_are_not_finite_stop_the_run_before_they_spoil_it(ranks: Ranks, options: TrainOptions) -> None:
    raised = ranks(2).run(trained, replace(options, tp=2, lr=1e30), expect_errors=True)
    assert {e.type_name for e in raised} == {"ColrowError"}
    assert "the norm of the gradients is" in raised[0].message


def test_a_wrong_gradient_is_seen_in_the_first_step(ranks: Ranks, options: TrainOptions) -> None:
    text = ranks(2).run(with_wrong_gradients, replace(options, tp=2, steps=1))[0]
    assert "first step DIFFERS from one process" in text, text


def test_one_rank_talks_and_tells_what_there_is_to_know(ranks: Ranks, options: TrainOptions) -> None:
    options = replace(options, tp=2, steps=2, sample=5, vocab_size=300)
    (result, text), (_, silence) = ranks(2).run(trained, options)
    assert silence == ""
    for part in (
        "Column(heads, kv_heads, kv_heads)",
        "validation loss",
        "a sample of 5 tokens",
        "--resume",
        result["checkpoint"],
    ):
        assert part in text, f"{part} not in:\n{text}"
    assert set(result) == {"steps", "loss_first", "loss_last", "tokens_per_second", "checkpoint"}
    assert Path(result["checkpoint"]).is_dir()


def wrong(kind: str, options: TrainOptions) -> TrainOptions:
    text = options.data[0]
    match kind:
        case "tp":
            return replace(options, tp=3)
        case "text":
            text.write_text("short")
        case "out":
            return replace(options, out=text / "below a file")
        case "taken":
            (text.parent / "run" / "step-000001").mkdir(parents=True)
        case _:
            return replace(options, resume=True)
    return options


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("tp", DataError, "--tp: 3 with 2 ranks"),
        ("text", DataError, "--data: the text has 5 tokens"),
        ("out", DataError, "it cannot be written"),
        ("taken", CheckpointError, "it holds the checkpoints of a run"),
        ("nothing to resume", CheckpointError, "tokenizer.json cannot be read"),
    ],
)
def test_wrong_use_is_the_same_error_on_every_rank(
    ranks: Ranks, options: TrainOptions, kind: str, error: type[Exception], says: str
) -> None:
    raised = ranks(2).run(trained, wrong(kind, replace(options, tp=2)), expect_errors=True)
    assert {e.type_name for e in raised} == {error.__name__}
    assert len({e.message for e in raised}) == 1 and says in raised[0].message
