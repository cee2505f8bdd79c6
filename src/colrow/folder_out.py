"""Writes a Hugging Face folder beside its place and renames it: it is whole, or the one before is still there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from colrow import comm
from colrow.errors import CheckpointError
from colrow.folder import INDEX, ONE_FILE

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
_REPLACED: Final = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    INDEX,
    "adapter_config.json",
    "adapter_model.safetensors",
    *TOKENIZER_FILES,
)
"""What a folder may hold that is replaced as a whole: what is written to it, and nothing else."""


class FolderWriter:
    """Takes whole tensors one by one and writes them on the run's first rank; a failure is reported at the end.

    Arguments:
        path: the folder; if there is one, it is replaced as a whole.
        file_bytes: the size of a file, and what is held in memory until it is written.
    """

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path, self.file_bytes = path.resolve(), file_bytes
        self.active, self.problem = comm.is_rank_zero(), ""
        self.writing = self.path.parent / f"{self.path.name}.writing"
        self.pending: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.bytes = self.size = 0
        self.attempt(self._prepare)

    def add(self, name: str, value: Tensor) -> None:
        """One whole tensor, under its name in the files."""
        if not self.active or self.problem:
            return
        value = value.detach().cpu().contiguous()
        more = value.numel() * value.element_size()
        if self.pending and self.size + more > self.file_bytes:
            self.attempt(self._flush)
        self.pending[name] = value
        self.size, self.bytes = self.size + more, self.bytes + more

    def attempt(self, action: Callable[..., Any], *args: Any) -> None:
        """Do something on the rank that writes; what goes wrong is said by `finish`."""
        if self.active and not self.problem:
            try:
                action(*args)
            except (OSError, SafetensorError, ValueError, TypeError) as error:  # transformers checks what it writes
                self.problem = f"it could not be written ({' '.join(str(error).split())})"

    def finish(self) -> None:
        """Put the folder in its place.

        Raises:
            CheckpointError: on every rank, if anything went wrong; the folder that was there is as it was.
        """
        self.attempt(self._close)
        problem = comm.from_rank_zero(self.problem)
        if problem:
            fix = "Mend that, or choose another folder; what was there is untouched"
            raise CheckpointError(str(self.path), problem, "the folder is new or a model's, and has room", fix)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing that is half written stays, whatever happened."""
        if self.active:
            shutil.rmtree(self.writing, ignore_errors=True)

    def _prepare(self) -> None:
        if self.path.exists():
            foreign = [file.name for file in self.path.iterdir() if file.is_dir() or not _is_replaced(file)]
            if foreign:
                raise FileExistsError(f"the folder holds '{foreign[0]}', which would be lost")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.writing, ignore_errors=True)
        self.writing.mkdir()

    def _flush(self) -> None:
        if not self.pending:
            return
        file = self.writing / f"{len(self.files) + 1:05d}.safetensors"
        save_file(self.pending, file, metadata={"format": "pt"})
        self.files.append(list(self.pending))
        self.pending, self.size = {}, 0

    def _close(self) -> None:
        self._flush()
        count, listed = len(self.files), {}
        for number, names in enumerate(self.files, 1):
            name = ONE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.writing / f"{number:05d}.safetensors").rename(self.writing / name)
            listed |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": listed}
            (self.writing / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for file in self.writing.iterdir():
            _sync(file)
        replaced = self.path.with_name(self.path.name + ".replaced")
        if self.path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.path.rename(replaced)
        try:
            self.writing.rename(self.path)
        except OSError:
            if replaced.exists():
                replaced.rename(self.path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        _sync(self.path.parent)


def _is_replaced(file: Path) -> bool:
    return any(file.match(pattern) for pattern in _REPLACED)


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
