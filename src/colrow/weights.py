"""Which tensors of a folder make which tensor of a Hugging Face model, and the other way round.

Mostly the names are the same. Where a class keeps its weights in another form than its files (experts stacked, names of
an older version), transformers has the conversions; here they are applied to one group of tensors at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from colrow.errors import CheckpointError, near_misses
from colrow.folder import DTYPES, Folder
from colrow.params import at_rest
from colrow.split import Split


@dataclass(eq=False)
class Group:
    """Tensors of files that make one or several tensors of the model together.

    Attributes:
        first: the name that the conversion knows the result by.
        converter: transformers' conversion, without tensors.
        keys: what it takes, by its own patterns.
        made: results that nobody has taken yet.
    """

    first: str
    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_stack(self) -> bool:
        """Whether it makes one tensor (experts, ...), of a tensor for each expert, or of several side by side."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        match self.converter.operations:
            case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
                return len(self.converter.target_patterns) == 1
            case _:
                return False

    def cuts(self, split: Split) -> dict[str, Split]:
        """By pattern, how to cut each expert's tensor, so that they stack to a rank's slice; {} if they do not."""
        if not self.is_stack or split.dim == 0 or len(split.pieces) != len(self.keys):
            return {}
        if len(split.pieces) > 1 and split.dim != 1:
            return {}
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.keys]
        return {p: Split(split.dim - 1, (piece,), split.ranks) for p, piece in zip(patterns, split.pieces, strict=True)}


class Weights:
    """The weights that a folder has for a model on meta.

    Arguments:
        folder: the files.
        model: a `PreTrainedModel` on meta; its parameters say the shapes and dtypes that are wanted.
        partly: whether the files may have more than the model, as a language model has more than its base model.
    """

    def __init__(self, folder: Folder, model: Any, *, partly: bool) -> None:
        self.folder, self.model, self.partly = folder, model, partly
        self.names: dict[int, list[str]] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            self.names.setdefault(id(value), []).append(name)
        self.sources: dict[str, str | Group] = {}
        self.unexpected: list[str] = []
        self._assign(model.state_dict())

    def check(self, model: nn.Module) -> None:
        """Every parameter is there, once, in its shape, in a dtype that is read; nothing is left over.

        Raises:
            CheckpointError: names the tensor, and what the files have.
        """
        for name, param in model.named_parameters():
            found = self._found(param)
            if not found:
                raise self.folder.missing(name, tuple(param.shape))
            for source in found.values():
                self._check_one(name, param, source)
            self._check_ties(found)
        for name, buffer in model.named_buffers():
            for source in self._found(buffer).values():
                self._check_shape(name, buffer, source)
        if not self.partly:
            self._check_unexpected(model)

    def _check_unexpected(self, model: nn.Module) -> None:
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        left = [key for key in self.unexpected if not any(pattern.search(key) for pattern in ignored)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            given = f"{type(model).__name__} has no place for '{left[0]}'{more}"
            fix = "Load it as the class that config.json names, or as the one that has such a part: model_class="
            raise CheckpointError(str(self.folder.path), given, "every tensor in the files belongs to the model", fix)

    def parameter(self, param: Tensor, split: Split | None, mesh: DeviceMesh) -> DTensor:
        """A parameter at rest: this rank's slice of it is read, and converted to its dtype."""
        name, source = next(iter(self._found(param).items()))
        return at_rest(self._read(name, source, param, split, mesh), split, mesh)

    def buffer(self, buffer: Tensor) -> Tensor | None:
        """A persistent buffer, if the files have it."""
        for name, source in self._found(buffer).items():
            return self._whole(name, source, buffer.dtype).to(buffer.dtype, copy=True)
        return None

    def _found(self, value: Tensor) -> dict[str, str | Group]:
        """Where the files have a tensor of the model: under one of its names, or, tied, under several."""
        return {name: self.sources[name] for name in self.names.get(id(value), ()) if name in self.sources}

    def _read(self, name: str, source: str | Group, param: Tensor, split: Split | None, mesh: DeviceMesh) -> Tensor:
        rank = mesh.get_local_rank()
        if split is not None and split.sharded:
            if isinstance(source, str):
                return self.folder.read_slice(source, split, rank, param.dtype)
            if cuts := source.cuts(split):
                (mine,) = self._convert(source, param.dtype, cuts, rank).values()
                return mine
        whole = self._whole(name, source, param.dtype)
        if tuple(whole.shape) != tuple(param.shape):
            raise self._other_shape(name, tuple(whole.shape), tuple(param.shape))
        if split is not None and split.sharded:
            return split.take(whole, rank).to(param.dtype)
        return whole.to(param.dtype, copy=True)  # the file may change later

    def _whole(self, name: str, source: str | Group, dtype: torch.dtype) -> Tensor:
        if isinstance(source, str):
            return self.folder.read(source)
        if name not in source.made:
            source.made = self._convert(source, dtype, {}, 0)
        return source.made.pop(name)

    def _convert(self, group: Group, dtype: torch.dtype, cuts: Mapping[str, Split], rank: int) -> dict[str, Tensor]:
        """The tensors of the model that a group makes; with `cuts`, a rank's slice. The dtype is changed first."""
        converter = copy.deepcopy(group.converter)
        for pattern, keys in group.keys.items():
            for key in keys:
                if pattern in cuts:
                    value = self.folder.read_slice(key, cuts[pattern], rank, dtype)
                else:
                    value = self.folder.read(key).to(dtype)
                converter.add_tensor(group.first, key, pattern, value)
        try:
            made = converter.convert(group.first, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError) as error:
            keys = [key for some in group.keys.values() for key in some]
            given = f"'{group.first}' cannot be made of {near_misses(group.first, keys)} ({error})"
            fix = "Give the folder whose config.json belongs to these files"
            raise CheckpointError(str(self.folder.path), given, "their shapes fit together", fix) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _assign(self, wanted: dict[str, Tensor]) -> None:
        """Give each tensor in the files to a tensor of the model, as transformers does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        conversions = get_model_conversion_mapping(self.model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix, buffers = self.model.base_model_prefix, {name for name, _ in self.model.named_buffers()}
        groups: dict[str, Group] = {}
        for key in sorted(self.folder.files, key=_natural):
            name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                if name not in buffers:  # one that the model makes by itself was a part of older files
                    self.unexpected.append(key)
            elif pattern is None:
                self.sources[name] = key
            else:
                group = groups.setdefault(name, Group(name, by_pattern[pattern]))
                group.keys.setdefault(pattern, []).append(key)
                for target in by_pattern[pattern].target_patterns:
                    self.sources[name.replace(by_pattern[pattern].target_patterns[0], target)] = group
        self.model._weight_conversions = [c for c in conversions if c.was_used()]  # for saving, as from_pretrained does

    def _check_one(self, name: str, param: Tensor, source: str | Group) -> None:
        keys = [source] if isinstance(source, str) else [key for some in source.keys.values() for key in some]
        for key in keys:
            if self.folder.dtype(key) not in DTYPES:
                given = f"'{key}' is stored as {self.folder.dtype(key)}"
                fix = "Give the folder of the model before it was quantised"
                raise CheckpointError(str(self.folder.path), given, f"weights are read from {', '.join(DTYPES)}", fix)
        self._check_shape(name, param, source)

    def _check_shape(self, name: str, value: Tensor, source: str | Group) -> None:
        wanted = tuple(value.shape)
        if isinstance(source, str):
            if self.folder.shape(source) != wanted:
                raise self._other_shape(name, self.folder.shape(source), wanted)
        elif source.is_stack:
            rows, rest = divmod(wanted[1], len(source.keys))
            for keys in source.keys.values():
                if len(keys) != wanted[0] or rest:
                    raise self._other_shape(name, (len(keys), *self.folder.shape(keys[0])), wanted)
                for key in keys:
                    if self.folder.shape(key) != (rows, *wanted[2:]):
                        raise self._other_shape(key, self.folder.shape(key), (rows, *wanted[2:]))

    def _check_ties(self, found: Mapping[str, str | Group]) -> None:
        """A tensor that the model has once, and the files under several names, must be the same under each. All of it
        is compared, in the mapped files: every rank finds the same."""
        (name, first), *others = found.items()
        for other, twin in others:
            if isinstance(first, str) and isinstance(twin, str):
                if not torch.equal(self.folder.read(first), self.folder.read(twin)):
                    given = f"'{name}' and '{other}' are one tensor in the model and two in the files"
                    fix = "Set tie_word_embeddings to false in config.json, if they are meant to differ"
                    raise CheckpointError(str(self.folder.path), given, "tied weights are equal", fix)

    def _other_shape(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> CheckpointError:
        given = f"'{name}' has shape {shape} in {self.folder.path} and {wanted} in the model"
        fix = "Give the folder whose config.json belongs to these files"
        return CheckpointError(name, given, "files and config say the same shapes", fix)


def saved_together(model: Any, names: Iterable[str]) -> list[list[str]]:
    """The names in groups: those that become one tensor of the files, or several, together."""
    from transformers.core_model_loading import WeightConverter, apply_converters

    reverse = [c.reverse_transform() for c in _conversions(model)[::-1]]
    converters = [c for c in reverse if isinstance(c, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(apply_converters(name, converters)[0], []).append(name)
    return list(groups.values())


def as_saved(model: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of one group in the form in which files keep them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(named)))


def _conversions(model: Any) -> list[Any]:
    """What loading has done to the tensors of files: as it was, or, for a model that was built, as it is by default."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    return [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]


def _natural(key: str) -> list[tuple[int, str]]:
    """Numbers in the order of numbers: a stack of experts is made in this order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
