"""Hugging Face folders in and out: each rank reads its own slices, and what is written is a plain folder again."""

from __future__ import annotations

import copy
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.adapter_files import is_adapted, save_adapters
from colrow.adapters import adapted
from colrow.checks import require_split
from colrow.errors import CheckpointError, PlanError
from colrow.folder import Folder
from colrow.folder_out import TOKENIZER_FILES, FolderWriter
from colrow.layout import check_mesh
from colrow.parallelize import Maker, Recompute, apply, check_recompute, resolve_alike
from colrow.params import splits, true_name, unshard
from colrow.rules import Plan
from colrow.split import Split
from colrow.state import require_equal_replicas
from colrow.together import together
from colrow.weights import Weights, as_saved, saved_together


def load_pretrained(
    path: Path | str,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    model_class: type[nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    sequence_parallel: bool = True,
    recompute: Recompute = "elementwise",
    check_inputs: int = 3,
) -> Any:
    """A split model from a Hugging Face folder. Each rank reads its own slices of the files, and nothing else.

    Arguments:
        path: a folder with config.json and *.safetensors, one file or several with an index. Nothing is downloaded.
        mesh, plan, sequence_parallel, recompute, check_inputs: as in `colrow.parallelize`.
        model_class: a class of transformers, Auto or not; the files may have more than it needs. Without it, the one
            that config.json names.
        dtype: of the weights; without it, the one that config.json names, or else the files'. Parts that the class
            keeps in fp32 stay so.

    Returns: the model, in eval mode, as `from_pretrained`. Tied weights are tied, buffers are whole and as they were
    built, frozen in no part.

    Cost: no collective while reading. Memory: this rank's shards, and one tensor more, or the few that are converted
    together (a layer's experts).

    Raises:
        CheckpointError: names the file or the tensor that is missing, damaged, of another shape, or too many.
        PlanError, RankError: as `colrow.parallelize`.
    """
    check_mesh(mesh, "colrow.load_pretrained")
    check_recompute(recompute, "colrow.load_pretrained")
    path = Path(path)
    with together(mesh, "colrow.load_pretrained"):
        config, folder = read_config(path), Folder(path)
        wanted = dtype or getattr(config, "dtype", None) or folder.main_dtype() or torch.float32
        model = _on_meta(path, config, model_class, wanted)
        _make_buffers(model, comm.device(mesh))
        weights = Weights(folder, model, partly=model_class is not None)
    resolved = resolve_alike(model, mesh, plan, sequence_parallel, weights.check)

    def values(module: nn.Module) -> tuple[dict[str, Maker], dict[str, Tensor]]:
        own = {short: param for short, param in module._parameters.items() if param is not None}
        buffers = {short: weights.buffer(buffer) for short, buffer in module._buffers.items() if buffer is not None}
        makers: dict[str, Maker] = {short: partial(weights.parameter, param, mesh=mesh) for short, param in own.items()}
        return makers, {short: buffer for short, buffer in buffers.items() if buffer is not None}

    with together(mesh, "colrow.load_pretrained"):
        apply(model, mesh, resolved, values, check_inputs, recompute)
    return model.eval()


def read_config(path: Path) -> Any:
    """The config of a folder.

    Raises:
        CheckpointError: none is there, it cannot be used, or the model wants code of its own or is quantised.
    """
    from transformers import AutoConfig

    where = str(path)
    if not (path / "config.json").is_file():
        given = "it is a file" if path.is_file() else "there is no such folder"
        given = "there is no config.json in it" if path.is_dir() else given
        raise CheckpointError(where, given, "a folder as save_pretrained writes it", "Give the folder of a model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if "trust_remote_code" in str(error):
            allowed, fix = "transformers builds the model by itself", "Give the folder of a model that it knows"
            raise CheckpointError(where, "the model wants code of its own (auto_map)", allowed, fix) from error
        given = f"its config.json cannot be used ({_short(error)})"
        allowed = "the config of a model that transformers knows, without code of its own"
        raise CheckpointError(where, given, allowed, "Give another folder") from error
    if getattr(config, "quantization_config", None):
        allowed, fix = "weights in a floating-point dtype", "Give the folder of the model before it was quantised"
        raise CheckpointError(where, "its weights are quantised (quantization_config)", allowed, fix)
    return config


def _on_meta(path: Path, config: Any, kind: Any, dtype: torch.dtype) -> Any:
    """The model without values, in its dtypes."""
    import transformers

    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    found: Any = kind or getattr(transformers, name, "")
    if not hasattr(found, "from_config") and not _is_a_model(found):
        allowed, fix = "it is one of transformers' models", "Pass model_class="
        raise CheckpointError(str(path), f"its class is {getattr(found, '__name__', name)}", allowed, fix)
    config.dtype, before = dtype, torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = found.from_config(config, dtype=dtype) if hasattr(found, "from_config") else found(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        given, fix = f"{found.__name__} cannot be built ({_short(error)})", "Correct config.json, or pass model_class="
        raise CheckpointError(str(path), given, "the config fits the class", fix) from error
    finally:
        torch.set_default_dtype(before)
    kept = list(model._keep_in_fp32_modules_strict) if dtype in (torch.float16, torch.bfloat16) else []
    kept += list(model._keep_in_fp32_modules) if dtype is torch.float16 else []
    for name, value in model.state_dict(keep_vars=True).items():
        if any(re.search(part.replace("*", ".*"), name) for part in kept):  # as transformers finds them
            value.data = value.data.float()
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    model.name_or_path = str(path)
    return model


def _is_a_model(found: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(found, type) and issubclass(found, PreTrainedModel)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _make_buffers(model: Any, device: torch.device) -> None:
    """Buffers as building the model in memory would have made them: transformers knows how, for each of its modules."""
    for param in model.parameters():
        param._is_hf_initialized = True  # or they would be initialised too
    for module in model.modules():
        for short, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[short] = torch.zeros_like(buffer, device=device)
    model.initialize_weights()


def save_pretrained(
    model: Any, path: Path | str, *, tokenizer: Any = None, file_bytes: int = 2 << 30, patience: float = 20.0
) -> None:
    """Write a split Hugging Face model as a plain folder, which everything else loads; of a `PeftModel`, the adapters.

    Arguments:
        path: the folder. It is written beside its place and renamed; a model's folder that is there is replaced. Of
            adapters, only their files are replaced.
        tokenizer: saved with it; without one, the tokenizer's files of the folder that the model was loaded from.
        file_bytes: the size of a file: the most that the first rank holds at a time, beside the tensor that is being
            gathered and the copies that this takes.
        patience: how many seconds ranks wait for those that have not called it yet.

    Cost: every rank of the run must call it. An all-gather of every shard, one tensor at a time.

    Raises:
        PlanError: the model is not split, or is none of transformers'.
        RankError: some ranks did not call it in time, or replicas have drifted apart.
        CheckpointError: it could not be written; what was there is as it was.
    """
    require_split(model, "colrow.save_pretrained")
    if is_adapted(model):
        comm.all_here("colrow.save_pretrained", patience)
        require_equal_replicas(model)
        save_adapters(model, Path(path), tokenizer)
        return
    if not _is_a_model(type(model)):
        given, fix = f"{type(model).__name__} is no model of transformers", "Use colrow.checkpoint.save"
        raise PlanError("colrow.save_pretrained", given, "a plain folder is of a model that transformers knows", fix)
    if adapted(dict(model.named_modules())):
        given, fix = "the model inside a PeftModel", "Save the PeftModel, or what its merge_and_unload() returns"
        raise PlanError("colrow.save_pretrained", given, "a plain folder is of a model without adapters", fix)
    path, start = Path(path), Path(model.name_or_path)
    if model.name_or_path and path.exists() and path.resolve() == start.resolve():
        fix = "Choose another folder, and move it afterwards"
        raise CheckpointError(str(path), "the model was loaded from there", "what it started from is kept", fix)
    comm.all_here("colrow.save_pretrained", patience)
    require_equal_replicas(model)
    tensors, by_name = {}, splits(model)
    for name, value in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(value), (true_name(name), value))
    named = dict(tensors.values())
    with FolderWriter(path, file_bytes) as writer:
        for group in saved_together(model, named):
            _write_group(writer, model, {name: (named[name], by_name.get(name)) for name in group})
        writer.attempt(_write_beside, model, writer.writing, tokenizer)
        writer.finish()


def _write_group(writer: FolderWriter, model: Any, group: dict[str, tuple[Tensor, Split | None]]) -> None:
    """Gather the tensors of one group and write them; they are let go with the end of this call."""
    whole = {name: unshard(value, split) for name, (value, split) in group.items()}
    for name, value in as_saved(model, whole).items() if writer.active else ():
        writer.add(name, value)


def _write_beside(model: Any, folder: Path, tokenizer: Any) -> None:
    """What belongs to the weights: config, generation config, the tokenizer's files."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    if hasattr(config, "auto_map"):  # it names code that is not in this folder
        del config.auto_map
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    for pattern in TOKENIZER_FILES:
        for file in Path(model.name_or_path).glob(pattern) if model.name_or_path else ():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
