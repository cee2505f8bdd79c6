"""Adapters (`peft`) out and in: a plain PEFT folder, with nothing of the base model in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from colrow import comm
from colrow.checks import require_split
from colrow.errors import CheckpointError, PlanError, near_misses
from colrow.gradients import Watched
from colrow.parallelize import parallelize
from colrow.params import local_of, shard_like, splits, true_name, unshard
from colrow.together import together

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` for which the base model stays as it was."""


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a `PeftModel`. (Without importing `peft`, which may not be installed.)"""
    return hasattr(type(model), "get_base_model")


def save_adapters(model: Any, path: Path, tokenizer: Any) -> None:
    """Write all adapters of a split `PeftModel` as it would itself: "default" into the folder, others into folders of
    their names in it. Other files there stay.

    Cost: an all-gather of every shard of the adapters, one tensor at a time. The first rank holds them whole.
    """
    named = {true_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    by_name, whole = splits(model), {}
    for name in {name: None for key in model.peft_config for name in _names(model, key, named).values()}:
        value = unshard(named[name], by_name.get(name))
        if comm.is_rank_zero():
            whole[name] = value.cpu()
    problem = ""
    if comm.is_rank_zero():
        try:
            _write(model, path, whole, tokenizer)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            problem = f"it could not be written ({_short(error)})"
    problem = comm.from_rank_zero(problem)
    if problem:
        raise CheckpointError(str(path), problem, "a folder with room", "Mend that, or choose another folder")


def _names(model: Any, adapter: str, named: Mapping[str, Any]) -> dict[str, str]:
    """Which tensors belong to an adapter: from their names in its files to those in the model."""
    from peft import get_peft_model_state_dict

    own: dict[str, Any] = {name: name for name in named}  # peft chooses by the names, and does not look at the values
    found: Any = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter, save_embedding_layers=False)
    return found


def _write(model: Any, path: Path, whole: dict[str, Tensor], tokenizer: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path, prefix="writing-") as folder:
        made = Path(folder)
        model.save_pretrained(folder, state_dict=whole, save_embedding_layers=False)
        (made / "README.md").unlink(missing_ok=True)  # one that is there may be the user's
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for file in [file for file in made.rglob("*") if file.is_file()]:
            target = path / file.relative_to(made)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)


def load_adapter(model: Any, path: Path | str, *, name: str = "default", trainable: bool = False) -> Any:
    """Add a saved adapter to a split model. (`PeftModel.from_pretrained` knows the sizes of whole models only.)

    Arguments:
        model: a split model, or a split `PeftModel` that has adapters of other names.
        path: a folder as `peft` or `colrow.save_pretrained` writes it. Nothing is downloaded.
        trainable: whether it will be trained; otherwise it is frozen, and the model is put into eval mode.

    Returns: the `PeftModel`. Of two adapters the first stays active: call its `set_adapter`.

    Cost: every rank of the axis must call it, and reads all of the adapter's files.

    Raises:
        CheckpointError: names the file or the tensor that is missing, damaged, of another shape, or too many.
        PlanError: an adapter that cannot stand beside split layers. The model is as it was.
    """
    from peft import get_peft_model

    require_split(model, "colrow.load_adapter")
    mesh, path = next(module.mesh for module in model.modules() if isinstance(module, Watched)), Path(path)
    with together(mesh, "colrow.load_adapter"):
        config, tensors = _read(path)
        if name in getattr(model, "peft_config", {}):
            fix = "Give another name=, or delete that one first"
            raise CheckpointError(str(path), f"the model has an adapter '{name}'", "each has a name of its own", fix)
    config.inference_mode, config.init_lora_weights = not trainable, True  # the values come from the file
    before = {param: param.requires_grad for param in model.parameters()}
    if is_adapted(model):
        added = model
        added.add_adapter(name, config)
    else:
        added = get_peft_model(model, config, adapter_name=name)
    try:
        parallelize(added, mesh)
        with together(mesh, "colrow.load_adapter"):
            _fill(added, name, tensors, path)
    except (CheckpointError, PlanError):
        if added is model:
            added.delete_adapter(name)
        else:
            added.unload()
        for param, flag in before.items():
            param.requires_grad_(flag)
        raise
    return added if trainable else added.eval()


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's config and its tensors, by their names in the file."""
    from peft import PeftConfig

    missing = [file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()]
    if missing:
        allowed, fix = f"a folder with {CONFIG} and {WEIGHTS}", "Give the folder of an adapter"
        raise CheckpointError(str(path), f"there is no {missing[0]} in it", allowed, fix)
    try:
        config, tensors = PeftConfig.from_pretrained(str(path)), load_file(path / WEIGHTS)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        given, fix = f"it cannot be read ({_short(error)})", "Copy the folder again"
        raise CheckpointError(str(path), given, "the files of an adapter, whole", fix) from error
    own: Any = config
    variants = [f.name for f in dataclasses.fields(own) if f.metadata.get("is_lora_variant")]
    variants += ["target_parameters", "layer_replication", "trainable_token_indices"]
    used = [option for option in variants if getattr(own, option, None)]
    if str(own.peft_type).rpartition(".")[2] != "LORA" or used:
        given = f"an adapter of type {own.peft_type}" + (f" with {used[0]}" if used else "")
        raise PlanError(str(path), given, "adapters beside split layers are plain LoRA", "Merge it in one process")
    if own.init_lora_weights not in _KEEPS_THE_BASE:
        given = f"an adapter with init_lora_weights={own.init_lora_weights!r}, for which peft changes the base model"
        raise PlanError(str(path), given, "the base model is the one that is split", "Merge it in one process")
    return config, tensors


def _fill(model: Any, adapter: str, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy an adapter's tensors into the model; all are checked before the first."""
    parameters = {true_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    by_name, names = splits(model), _names(model, adapter, parameters)
    tensors = {key: value for key, value in tensors.items() if ".base_layer." not in key}  # peft may save embeddings
    for key in [*names, *tensors]:
        if key not in tensors or key not in names:
            given = f"'{key}' is {'not in the file' if key not in tensors else 'not in the model'}"
            near = near_misses(key, list(tensors if key not in tensors else names))
            raise CheckpointError(str(path), given, f"there are {near}", "Give the adapter of this model")
        value, split = parameters[names[key]], by_name.get(names[key])
        shape = list(value.shape)
        if split is not None:
            shape[split.dim] = split.true_size
        if list(tensors[key].shape) != shape:
            given = f"'{key}' has shape {tuple(tensors[key].shape)} in the file and {tuple(shape)} in the model"
            raise CheckpointError(str(path), given, "both have the same shapes", "Give the adapter of this model")
    with torch.no_grad():
        for key, name in names.items():
            value = parameters[name]
            local_of(value).copy_(local_of(shard_like(tensors[key], by_name.get(name), value)))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
