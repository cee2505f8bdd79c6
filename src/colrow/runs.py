"""The folder of a training run: its options, its tokenizer, its metrics, and the checkpoints beside them.

runs/gpt/
    options.json      what the run was started with; `--resume` starts from it
    tokenizer.json    how its text became tokens, where the run has made the tokenizer
    metrics.jsonl     a line a step
    step-000300/      checkpoints: see `storage`
    model/            a finetuned model, as a Hugging Face folder
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colrow import comm
from colrow.data import Tokenizer, tokenizer_from
from colrow.errors import CheckpointError, DataError
from colrow.storage import find

RUNS = Path("runs")
"""Where runs without `--out` go."""
_OPTIONS, _TOKENIZER, _METRICS = "options.json", "tokenizer.json", "metrics.jsonl"


def latest() -> Path:
    """The run in `RUNS` that was started or continued last.

    Raises:
        CheckpointError: there is none.
    """
    found = [path.parent for path in RUNS.glob(f"*/{_OPTIONS}") if find(path.parent)]
    if not found:
        given = f"there is no run in {RUNS.resolve()}"
        raise CheckpointError("--resume", given, "a run must have saved before it goes on", "Start one, or give --out")
    return max(found, key=lambda folder: (folder / _OPTIONS).stat().st_mtime)


def saved_options(folder: Path) -> dict[str, Any]:
    """The options that the run in `folder` was started with.

    Raises:
        CheckpointError: there is no run in it.
    """
    try:
        return json.loads((folder / _OPTIONS).read_text())
    except (OSError, ValueError) as error:
        given, fix = f"it has no readable {_OPTIONS}", "Give the --out of an earlier run, or start one without --resume"
        raise CheckpointError(str(folder), given, "--resume goes on with a run's folder", fix) from error


def open_folder(
    out: Path | None, options: dict[str, Any], tokenizer: Tokenizer | None, *, resume: bool, name: str = "gpt"
) -> Path:
    """Make the run's folder, with its options and its tokenizer. The first rank does; every rank learns how it went.

    Arguments:
        out: the folder; without one, a new one in `RUNS`, called `name`, that of the model.
        tokenizer: one that the run has made, if any.

    Raises:
        CheckpointError: the folder holds another run, or there is none to resume.
        DataError: it cannot be written.
    """
    kinds = {kind.__name__: kind for kind in (CheckpointError, DataError)}
    answer: dict[str, Any] = {}
    if comm.is_rank_zero():
        try:
            answer = {"out": str(_open(out, options, tokenizer, resume, name))}
        except (CheckpointError, DataError) as error:
            answer = {"kind": type(error).__name__, "clauses": [error.where, error.given, error.allowed, error.fix]}
    answer = json.loads(comm.from_rank_zero(json.dumps(answer)))
    if "kind" in answer:
        raise kinds[answer["kind"]](*answer["clauses"])
    return Path(answer["out"])


def _open(out: Path | None, options: dict[str, Any], tokenizer: Tokenizer | None, resume: bool, name: str) -> Path:
    if resume:
        folder = latest() if out is None else out
        if not find(folder):
            given, fix = "it holds no checkpoint", "Give the --out of an earlier run, or start one without --resume"
            raise CheckpointError(str(folder), given, "--resume goes on from a checkpoint", fix)
    else:
        folder = _unused(name) if out is None else out
        if find(folder):
            given, fix = "it holds the checkpoints of a run", "Add --resume to go on with it, or give another --out"
            raise CheckpointError(str(folder), given, "a new run needs a folder of its own", fix)
        if folder.is_dir() and any(folder.iterdir()) and not (folder / _OPTIONS).exists():
            given, fix = "it exists and is no run's", "Give --out a new folder"
            raise CheckpointError(str(folder), given, "a new run needs a folder of its own", fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _OPTIONS, json.dumps(options, indent=1) + "\n")
        if not resume:
            if tokenizer is not None:
                _write(folder / _TOKENIZER, tokenizer.to_text())
            (folder / _METRICS).unlink(missing_ok=True)
    except OSError as error:
        given = f"it cannot be written ({error.strerror or error})"
        raise DataError(f"--out {folder}", given, "a run needs a folder to save in", "Give another --out") from error
    return folder


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a kill in between leaves what there was."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def _unused(name: str) -> Path:
    number = 1
    while (path := RUNS / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run in `folder`.

    Raises:
        CheckpointError: it is missing.
    """
    try:
        return tokenizer_from((folder / _TOKENIZER).read_text())
    except OSError as error:
        given = f"{_TOKENIZER} cannot be read ({error.strerror})"
        fix = "Put it back, or start a new run"
        raise CheckpointError(str(folder), given, "the model understands its own tokens only", fix) from error


def forget_metrics_after(folder: Path, step: int) -> None:
    """A resumed run does some steps again: drop what was noted of them."""
    path = folder / _METRICS
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        _write(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))


def note(folder: Path, numbers: dict[str, Any]) -> None:
    """Add a line to the metrics."""
    with (folder / _METRICS).open("a") as file:
        file.write(json.dumps(numbers) + "\n")
