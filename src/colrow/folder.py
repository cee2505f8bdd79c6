"""A Hugging Face folder of safetensors: which tensor is in which file, and slices of one without the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colrow.errors import CheckpointError, near_misses
from colrow.split import Split

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights are read from. (Files hold others too: of masks, and of quantised weights.)"""


class Folder:
    """The weights in a folder. Files are opened once and mapped; a tensor is read when it is asked for.

    Arguments:
        path: a folder as `save_pretrained` writes it.

    Raises:
        CheckpointError: no such folder, no safetensors, a damaged file, a tensor that two files have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}
        listed = self._listed()
        if listed and (path / ONE_FILE).exists() and path / ONE_FILE not in listed.values():
            given, fix = f"it has {ONE_FILE}, and {INDEX}, which does not name it", "Remove the one that is out of date"
            raise self._error(given, "the weights are in one file, or in those of the index", fix)
        alone = [path / ONE_FILE] if (path / ONE_FILE).exists() else sorted(path.glob("*.safetensors"))
        for file in sorted(set(listed.values())) or alone:
            self._add(file)
        if not self.files:
            self._refuse_empty()
        for key, file in listed.items():
            if self.files.get(key) != file:
                given = f"{INDEX} says that '{key}' is in {file.name}, and it is not"
                raise self._error(given, "the index and the files agree", "Copy the whole folder again")

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """The file's name of it, "F32" say."""
        return self._slice(key).get_dtype()

    def main_dtype(self) -> torch.dtype | None:
        """That of the first tensor which is a weight, where config.json says nothing."""
        return next((DTYPES[name] for key in self.files if (name := self.dtype(key)) in DTYPES), None)

    def read(self, key: str) -> Tensor:
        """The whole tensor, in the memory of the mapped file: copy what is to be kept."""
        with self._readable(self.files[key]):
            return self._open[self.files[key]].get_tensor(key)

    def read_slice(self, key: str, split: Split, rank: int, dtype: torch.dtype) -> Tensor:
        """One rank's entries, padded with zeros: runs of neighbours are read, and nothing else."""
        source, shape = self._slice(key), list(self.shape(key))
        shape[split.dim] = split.local_size
        mine = torch.zeros(shape, dtype=dtype)
        before = (slice(None),) * split.dim
        with self._readable(self.files[key]):
            for at, start, count in runs(split.index(rank).tolist()):
                mine.narrow(split.dim, at, count).copy_(source[(*before, slice(start, start + count))])
        return mine

    def _listed(self) -> dict[str, Path]:
        """What the index says, if there is one."""
        try:
            if not (self.path / INDEX).exists():
                return {}
            names = json.loads((self.path / INDEX).read_bytes())["weight_map"]
            listed = {str(key): self.path / str(name) for key, name in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            given = f"{INDEX} cannot be read ({type(error).__name__}: {error})"
            raise self._error(given, "it names a file for each tensor", "Copy the file again") from error
        outside = [file.name for file in listed.values() if file.parent != self.path]
        if outside:
            raise self._error(f"{INDEX} names {outside[0]}", "files are in the folder itself", "Correct the index")
        return listed

    def _add(self, file: Path) -> None:
        with self._readable(file):
            self._open[file] = tensors = safe_open(file, framework="pt")
            keys = list(tensors.keys())
        for key in keys:
            other = self.files.setdefault(key, file)
            if other != file:
                given = f"'{key}' is in {other.name} and in {file.name}"
                raise self._error(given, "each tensor is in one file", "Remove the file that does not belong there")

    def _slice(self, key: str) -> Any:
        with self._readable(self.files[key]):
            return self._open[self.files[key]].get_slice(key)

    def _refuse_empty(self) -> None:
        pickled = [*self.path.glob("*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")]
        given = f"its weights are pickled ({pickled[0].name})" if pickled else "there are no *.safetensors in it"
        fix = "Load it where you trust it, and save it with save_pretrained" if pickled else "Give another folder"
        raise self._error(given, "weights are read from safetensors, which hold nothing but numbers", fix)

    @contextmanager
    def _readable(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            given = f"{file.name} cannot be read ({' '.join(str(error).split())})"
            raise self._error(given, "each file is whole", "Copy that file again") from error

    def _error(self, given: str, allowed: str, fix: str) -> CheckpointError:
        return CheckpointError(str(self.path), given, allowed, fix)

    def missing(self, name: str, shape: tuple[int, ...]) -> CheckpointError:
        """The error for a tensor that the model needs and no file has."""
        near = near_misses(name, self.files)
        given = f"no file has '{name}', of shape {shape}"
        return self._error(
            given, f"there are {near}", "Give the folder of this model, or the class that it was saved as"
        )


def runs(index: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place, start, count) of every stretch of neighbours in a list of positions; -1 is skipped.

    >>> list(runs([4, 5, 6, -1, 0, 1]))
    [(0, 4, 3), (4, 0, 2)]
    """
    at = 0
    while at < len(index):
        end = at + 1
        while end < len(index) and index[at] >= 0 and index[end] == index[end - 1] + 1:
            end += 1
        if index[at] >= 0:
            yield at, index[at], end - at
        at = end
