"""Documents -> tokens -> rows: what a language model with a tokenizer of its own is finetuned on.

A text file is a document; JSONL and parquet hold one a line. Documents follow one another, each ended by the eos token,
and are cut into rows. Labels are the tokens themselves; those of a prompt are not learnt.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colrow.context import mix
from colrow.data import VALIDATION, files, is_binary, no_text, read_file
from colrow.errors import DataError

IGNORED = -100
"""The label of a token that is not learnt."""
_JSONL, _PARQUET = (".jsonl", ".ndjson"), ".parquet"
_ALLOWED = 'a line has {"text": ...} or {"prompt": ..., "completion": ...}, of strings'


@dataclass(frozen=True)
class Document:
    """A text that is learnt, after a prompt that is not."""

    text: str
    prompt: str = ""


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """The documents in files and folders, in order.

    Of a folder, every text, JSONL and parquet file in it counts, in order of its path; hidden ones do not.

    Raises:
        DataError: names the file, and the line, that is missing, empty, binary or wrong.
    """
    if not paths:
        fix = "Give --data a text file, a *.jsonl or a folder"
        raise DataError("--data", "none is given", "finetuning needs text to learn from", fix)
    return [document for path in paths for document in _read_path(path)]


def _read_path(path: Path) -> list[Document]:
    inside = files(path) if path.is_dir() else [path]
    found = [document for file in inside for document in _read_file(file, skip_binary=path.is_dir())]
    if not found and path.is_dir():
        raise no_text(path, len(inside))
    if not found:
        raise DataError(f"--data {path}", "the file is empty", "a run needs text to learn from", "Give another file")
    return found


def _read_file(path: Path, *, skip_binary: bool) -> Iterator[Document]:
    if path.suffix == _PARQUET:
        rows = _parquet(path)
        yield from _documents(((f"--data {path}, row {number}", row) for number, row in enumerate(rows, 1)))
        return
    content = read_file(path)
    try:
        text = "" if is_binary(content) else content.decode()
    except UnicodeDecodeError:
        text = ""
    if not text and content and not skip_binary:
        raise DataError(f"--data {path}", "it is binary", "text in UTF-8", "Convert it, or give another file")
    if path.suffix in _JSONL:
        lines = enumerate(text.split("\n"), 1)
        yield from _documents((f"--data {path}, line {number}", line) for number, line in lines if line.strip())
    elif text.strip():
        yield Document(text)


def _parquet(path: Path) -> Iterable[Any]:
    where = f"--data {path}"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(where, "datasets is not installed", "it reads parquet files", "pip install datasets")
    from datasets import Dataset, disable_progress_bars  # pyright: ignore[reportMissingImports] - optional

    disable_progress_bars()
    try:
        return Dataset.from_parquet(str(path), keep_in_memory=True)
    except (OSError, ValueError, RuntimeError) as error:
        given = f"it cannot be read ({' '.join(str(error).split())[:200]})"
        raise DataError(where, given, "a whole parquet file", "Copy it again") from error


def _documents(rows: Iterable[tuple[str, Any]]) -> Iterator[Document]:
    """A document for each (place, row); a row is a dict, or one in JSON."""
    for where, row in rows:
        fix = "Correct the line, or leave it out"
        try:
            values = json.loads(row) if isinstance(row, str) else row
        except ValueError as error:
            raise DataError(where, f"it is no JSON ({error})", _ALLOWED, fix) from error
        wanted = ("text",) if isinstance(values, dict) and "text" in values else ("prompt", "completion")
        found = [values.get(name) for name in wanted] if isinstance(values, dict) else []
        strings = [value for value in found if isinstance(value, str)]
        if len(strings) < len(wanted):
            given = f"it has the keys {sorted(map(str, values))}" if isinstance(values, dict) else "it is no object"
            raise DataError(where, given, _ALLOWED, fix)
        if strings[-1].strip():
            yield Document(strings[-1], "".join(strings[:-1]))


def tokenize(documents: Sequence[Document], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """The tokens of all documents, one after the other, and their labels.

    A text gets the special tokens that the tokenizer puts around one (a bos, say); each document ends with its eos.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    firsts = tokenizer([d.prompt or d.text for d in documents], return_attention_mask=False)["input_ids"]
    prompted = [d.text for d in documents if d.prompt]
    rest = iter(tokenizer(prompted, add_special_tokens=False)["input_ids"] if prompted else ())
    ids, labels = [], []
    for document, first in zip(documents, firsts, strict=True):
        first = first[:-1] if end and first[-1:] == end else first
        learnt = (next(rest) if document.prompt else first) + end
        before = first if document.prompt else []
        ids.append(torch.tensor(before + learnt, dtype=torch.int32))
        labels.append(torch.tensor([IGNORED] * len(before) + learnt, dtype=torch.int32))
    return torch.cat(ids), torch.cat(labels)


@dataclass(frozen=True)
class Rows:
    """Rows of tokens and their labels, (rows, context) each, for training and for validation.

    A step takes the next `per_step` rows; all are seen before any is seen again, in an order that is new each time.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    per_step: int

    def batch(self, seed: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
        """Tokens and labels of the step's `rows`. They depend on nothing but (seed, step, row)."""
        count = len(self.train[0])
        places = [divmod(step * self.per_step + row, count) for row in rows]
        orders = {n: torch.randperm(count, generator=_generator(mix(seed, n))) for n in {n for n, _ in places}}
        return _take(self.train, [int(orders[n][place]) for n, place in places])

    def validation_batches(self, size: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Up to `count` batches of `size` rows, spread evenly over those for validation: always the same."""
        held = len(self.validation[0])
        rows = min(size * count, held)
        places = [place * held // rows for place in range(rows)]
        return [_take(self.validation, places[i : i + size]) for i in range(0, rows, size)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _take(pair: tuple[Tensor, Tensor], places: list[int]) -> tuple[Tensor, Tensor]:
    return pair[0][places].long(), pair[1][places].long()


def pack(ids: Tensor, labels: Tensor, context: int, per_step: int) -> Rows:
    """Cut tokens into rows. What is left at the end is dropped, and so is a row in which nothing is learnt.

    The last `VALIDATION` of the rows, and one at least, are for validation.

    Raises:
        DataError: too few tokens for one row of each.
    """
    whole = ids.numel() // context * context
    rows, targets = ids[:whole].view(-1, context), labels[:whole].view(-1, context).clone()
    targets[:, 0] = IGNORED  # a model predicts the second token first
    learnt = (targets != IGNORED).any(1)
    rows, targets = rows[learnt], targets[learnt]
    if len(rows) < 2:
        given = f"its {ids.numel()} tokens make {len(rows)} rows of {context} in which something is learnt"
        allowed = "training and validation need one each"
        raise DataError("--data", given, allowed, "Give more text, or a smaller --context")
    held = max(1, int(len(rows) * VALIDATION))
    return Rows((rows[:-held], targets[:-held]), (rows[-held:], targets[-held:]), per_step)
