"""Folders of named tensors that are whole or not there: safetensors and JSON, written beside their place and renamed.

    out/step-000030/
        checkpoint.json              which tensor is in which file, a hash of every file, and what the caller adds
        model-00001.safetensors      tensors of one part, by name
        optimizer-00001.safetensors

A kill at any moment leaves the folders that there were. One that is damaged later is found by its hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from colrow import comm
from colrow.errors import CheckpointError, near_misses

_INDEX, _FORMAT = "checkpoint.json", 1
_NAME = re.compile(r"step-(\d+)(\.replaced)?")
_FILE_BYTES = 2 << 30  # a file's tensors are in memory together


def find(folder: Path | str) -> list[Path]:
    """The checkpoints in `folder`, newest first, whole or not."""
    named = [(path, _NAME.fullmatch(path.name)) for path in Path(folder).glob("step-*")]
    found = [(int(match[1]), match[2] is None, path) for path, match in named if match]
    return [path for _, _, path in sorted(found, reverse=True)]


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file is there and has the hash that it was written with."""
    try:
        index = json.loads((path / _INDEX).read_text())
        for name, wanted in index["files"].items():
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if index.get("format") == _FORMAT else f"its format is {index.get('format')}, this reads {_FORMAT}"


def choose(path: Path) -> Path:
    """The checkpoint to load from `path`, one checkpoint or a folder of them: the newest that is whole, on every rank.

    The run's first rank looks; damaged ones are named on stderr.
    """
    chosen = comm.from_rank_zero(_choose(path) if comm.is_rank_zero() else "")
    if chosen.startswith("!"):
        where, given, allowed, fix = chosen[1:].split("\n")
        raise CheckpointError(where, given, allowed, fix)
    return Path(chosen)


def _choose(path: Path) -> str:
    """The path; or "!" and the four clauses of an error, one a line."""
    candidates = [path] if (path / _INDEX).exists() or _NAME.fullmatch(path.name) else find(path)
    if not candidates:
        fix = "Start without --resume, or name the --out folder of an earlier run"
        return f"!{path}\nthere is no checkpoint in it\na folder with step-NNNNNN folders is needed\n{fix}"
    for candidate in candidates:
        problem = damage(candidate)
        if problem is None:
            return str(candidate)
        print(f"colrow: {candidate} is damaged ({problem}); looking for the one before it", file=sys.stderr)
    allowed = f"all {len(candidates)} are damaged" if len(candidates) > 1 else "it is damaged"
    return f"!{candidates[0]}\n{damage(candidates[0])}\n{allowed}\nRestore it from a copy, or start without --resume"


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for old in find(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


class Writer:
    """Takes whole tensors one by one and writes them on the run's first rank; a failure is reported at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.active, self.problem = path, comm.is_rank_zero(), ""
        self.writing = path.with_name(path.name + ".writing")
        self.pending: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        self.files: dict[str, str] = {}
        self.tensors: dict[str, str] = {}
        if self.active:
            self._try(self._prepare)

    def add(self, part: str, name: str, value: Tensor) -> None:
        if self.active and not self.problem:
            pending = self.pending[part]
            pending[name] = value.cpu().contiguous()
            if sum(t.numel() * t.element_size() for t in pending.values()) >= _FILE_BYTES:
                self._try(self._flush, part)

    def finish(self, index: dict[str, Any]) -> Path:
        if self.active and not self.problem:
            self._try(self._close, index)
        problem = comm.from_rank_zero(self.problem)
        if problem:
            fix = "Free some space or choose another --out; the checkpoints before it are untouched"
            raise CheckpointError(str(self.path), problem, "the folder must be writable and have room", fix)
        return self.path

    def _try(self, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except (OSError, SafetensorError) as error:
            self.problem = f"it could not be written ({error})"

    def _prepare(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left_over in self.path.parent.glob("step-*.writing"):
            shutil.rmtree(left_over)
        self.writing.mkdir()

    def _flush(self, part: str) -> None:
        tensors = self.pending[part]
        if tensors:
            number = sum(file.startswith(part) for file in self.files) + 1
            file = f"{part}-{number:05d}.safetensors"
            save_file(tensors, self.writing / file)
            self.files[file] = _sync(self.writing / file)
            self.tensors |= {f"{part}/{name}": file for name in tensors}
            self.pending[part] = {}

    def _close(self, index: dict[str, Any]) -> None:
        for part in self.pending:
            self._flush(part)
        index |= {"format": _FORMAT, "tensors": self.tensors, "files": self.files}
        (self.writing / _INDEX).write_text(json.dumps(index, indent=1))
        _sync(self.writing / _INDEX)
        replaced = self.path.with_name(self.path.name + ".replaced")
        if self.path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.path.rename(replaced)
        self.writing.rename(self.path)
        shutil.rmtree(replaced, ignore_errors=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # the name itself must outlive a crash
        os.close(folder)


class Reader:
    """Reads the tensors of one checkpoint by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: dict[str, Any] = json.loads((path / _INDEX).read_text())

    def get(self, part: str, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One whole tensor, of the given shape if one is given."""
        file = self.index["tensors"].get(f"{part}/{name}")
        if file is None:
            near = near_misses(f"{part}/{name}", self.index["tensors"])
            fix = "Build the model with the options that it was saved with"
            raise CheckpointError(str(self.path), f"it has no {part} tensor '{name}'", f"there are {near}", fix)
        with safe_open(self.path / file, framework="pt") as tensors:
            value = tensors.get_tensor(name)
        if shape is not None and tuple(value.shape) != shape:
            given = f"'{name}' has shape {tuple(value.shape)} there and {shape} in the model"
            fix = "Build the model with the sizes that it was saved with"
            raise CheckpointError(str(self.path), given, "shapes must agree", fix)
        return value


def _sync(path: Path) -> str:
    """Force a file to the disk; its hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest
