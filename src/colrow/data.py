"""Text -> tokens -> batches. A batch is a function of (seed, step, row), so a run that resumes needs only its step."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from colrow.context import mix
from colrow.errors import DataError

BYTES = 256
"""The size of the byte vocabulary."""
DEFAULT_LIMIT = 4_000_000
"""Bytes of the standard library's source that a run without --data reads."""
VALIDATION = 0.05
"""The share of the tokens, at the end of the text, that is kept for validation."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab(self) -> int: ...

    def encode(self, text: bytes) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def to_text(self) -> str:
        """What `tokenizer_from` makes the same tokenizer of."""
        ...


class Bytes:
    """Every byte is a token."""

    vocab = BYTES

    def encode(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[: len(text)].to(torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def to_text(self) -> str:
        return "bytes"


class Bpe:
    """Byte-pair encoding, from a `tokenizers.Tokenizer` in JSON."""

    def __init__(self, json: str) -> None:
        from tokenizers import Tokenizer as Hugging  # optional, and slow to import

        self._json, self._tokenizer = json, Hugging.from_str(json)

    @property
    def vocab(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: bytes) -> Tensor:
        lines = text.decode(errors="replace").splitlines(keepends=True)
        return torch.tensor(
            [i for line in self._tokenizer.encode_batch_fast(lines) for i in line.ids], dtype=torch.int32
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))

    def to_text(self) -> str:
        return self._json


def train_tokenizer(text: bytes, vocab: int) -> Tokenizer:
    """Bytes for a vocabulary of 256; else a BPE of at most `vocab` entries, learnt from the text.

    Raises:
        DataError: a vocabulary smaller than the bytes.
    """
    if vocab == BYTES:
        return Bytes()
    if vocab < BYTES:
        fix = "Give 256 for plain bytes, or more for a BPE"
        raise DataError("--vocab-size", f"{vocab} entries", "every byte needs one: 256 at least", fix)
    from tokenizers import Tokenizer as Hugging
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Hugging(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.decode(errors="replace").splitlines(keepends=True), trainer)
    return Bpe(tokenizer.to_str())


def tokenizer_from(text: str) -> Tokenizer:
    """The tokenizer that `to_text` has written."""
    return Bytes() if text == "bytes" else Bpe(text)


def read(paths: Sequence[Path]) -> bytes:
    """The text of files and folders, one after the other; without any, source files of Python's standard library.

    Of a folder, every text file in it counts, in order of its path; hidden ones do not. Of the standard library, the
    modules at its top, in order of name, up to `DEFAULT_LIMIT` bytes.

    Raises:
        DataError: a path that is not there or cannot be read, or one without text.
    """
    if not paths:
        return _standard_library(Path(sysconfig.get_path("stdlib")))
    return b"\n".join(_read_path(path) for path in paths)


def _standard_library(folder: Path) -> bytes:
    texts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        text = read_file(path)
        if size + len(text) > DEFAULT_LIMIT:
            break
        texts.append(text)
        size += len(text)
    if not texts:
        given = f"this Python keeps no source files in {folder}"
        raise DataError("--data", given, "without --data a run reads those", "Give --data a text file or a folder")
    return b"\n".join(texts)


def _read_path(path: Path) -> bytes:
    if not path.is_dir():
        text = read_file(path)
        if not text.strip():
            raise DataError(
                f"--data {path}", "the file is empty", "a run needs text to learn from", "Give another file"
            )
        return text
    inside = files(path)
    texts = [text for text in map(read_file, inside) if text.strip() and not is_binary(text)]
    if not texts:
        raise no_text(path, len(inside))
    return b"\n".join(texts)


def files(folder: Path) -> list[Path]:
    """Every file in a folder and below, in order of its path; hidden ones do not count."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(folder)))


def is_binary(content: bytes) -> bool:
    return b"\0" in content[:8192]


def no_text(folder: Path, count: int) -> DataError:
    """The error for a folder without text."""
    given = f"the folder holds {count} files, and none with text"
    return DataError(f"--data {folder}", given, "a folder must hold text files", "Give another folder, or a file")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def read_file(path: Path) -> bytes:
    """Raises: DataError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "Check the path and its permissions"
        raise DataError(f"--data {path}", f"it cannot be read ({reason})", "text files and folders", fix) from error


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and for validation, and the batches drawn from them."""

    train: Tensor
    validation: Tensor
    context: int

    def batch(self, seed: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (rows, context) each: rows of the step's whole batch, each at a place of its own.

        A row's place depends on nothing but (seed, step, row): however the rows of a step are dealt out to
        data-parallel ranks and micro-batches, the step sees the same text.
        """
        places = self.train.numel() - self.context
        return self._rows(self.train, [mix(seed, step, row) % places for row in rows])

    def validation_batches(self, size: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Up to `count` batches of `size` rows, spread evenly over the validation text: always the same."""
        places = self.validation.numel() - self.context
        rows = max(1, min(size * count, places // self.context))
        starts = [place * (places - 1) // max(1, rows - 1) for place in range(rows)]
        return [self._rows(self.validation, starts[i : i + size]) for i in range(0, rows, size)]

    def _rows(self, tokens: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([tokens[start : start + self.context + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


def corpus(tokens: Tensor, context: int) -> Corpus:
    """Split tokens: the last `VALIDATION` of them, and one context at least, for validation.

    Raises:
        DataError: too few tokens for one row of each.
    """
    held = max(int(tokens.numel() * VALIDATION), context + 1)
    if tokens.numel() < held + context + 1:
        given = f"the text has {tokens.numel()} tokens"
        allowed = f"training and validation need {context + 1} each with --context {context}"
        raise DataError("--data", given, allowed, "Give more text, or a smaller --context")
    return Corpus(tokens[:-held], tokens[-held:], context)
