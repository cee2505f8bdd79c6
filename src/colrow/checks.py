"""What must hold of a model whatever its plan says: before it is split, and before its shards are spoken of."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from colrow import comm
from colrow.dropout import Dropout
from colrow.errors import PlanError, RankError
from colrow.gradients import Watched


def check_model(model: nn.Module) -> None:
    """Refuse a model that no plan could split: split already, quantised, on several devices, of clashing dtypes.

    Raises:
        PlanError: names the module or the parameter. The model is as it was.
    """
    for name, module in model.named_modules():
        if isinstance(module, Watched | Dropout):
            given = f"{name or 'the model'} is split already ({type(module).__name__})"
            raise PlanError("colrow.parallelize", given, "a model is split once", "Build it anew to split it again")
    for name, param in model.named_parameters():
        _check_kind(name, param)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None or getattr(model, "is_quantized", False):
        # packed weights may be buffers, which look like any other
        raise _quantised(type(model).__name__, f"a quantised model ({type(quantizer).__name__})")
    _check_devices(model)
    for name, module in model.named_modules():
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            given = f"a weight in {_short(weight.dtype)} and a bias in {_short(bias.dtype)}"
            fix = f"Cast one of them, model.get_submodule('{name}').to(torch.{_short(weight.dtype)})"
            raise PlanError(name or type(model).__name__, given, "the two of one module have one dtype", fix)


def check_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model whose parameters differ between the ranks in dtype, in being on meta, or in being frozen.

    Their collectives would not fit together. The ranks must hold the same parameters. Cost: an all-gather of a number
    a parameter.

    Raises:
        RankError: names the first one that differs, on every rank.
    """
    kinds = {name: (_short(p.dtype), p.is_meta, p.requires_grad) for name, p in model.named_parameters()}
    every = comm.exchange([zlib.crc32(repr(kind).encode()) for kind in kinds.values()], mesh) if kinds else []
    for name, codes in zip(kinds, zip(*every, strict=True), strict=False):
        if len(set(codes)) > 1:
            odd = [rank for rank, code in enumerate(codes) if code != codes[0]]
            given = f"it is of another kind on ranks {odd} than on rank 0: another dtype, or on meta, or frozen"
            fix = "Build the model in the same way on every rank; the first rank's values count"
            raise RankError(name, given, "each parameter has one dtype, one kind of memory, one requires_grad", fix)


def require_split(model: nn.Module, verb: str) -> None:
    """Refuse a model that no part of colrow has split."""
    if not any(isinstance(module, Watched) for module in model.modules()):
        given, fix = f"{type(model).__name__} is not split yet", "Call colrow.parallelize(model, mesh['tp']) first"
        raise PlanError(verb, given, "it is for a model that parallelize has split", fix)


def _check_kind(name: str, param: Tensor) -> None:
    """A floating-point tensor, plain: a subclass may hold less, or more, than its shape says."""
    if isinstance(param, DTensor):
        fix = "Split a plain model, and apply fully_shard or another library's parallelism afterwards"
        raise PlanError(name, "a DTensor", "weights are whole and plain before the split", fix)
    if isinstance(param, UninitializedParameter):
        fix = "Call the model once, so that lazy modules know their sizes"
        raise PlanError(name, "a parameter without a shape", "sizes must be known before the split", fix)
    if type(param) is not nn.Parameter:
        raise _quantised(name, f"a weight of class {type(param).__name__}, {_short(param.dtype)}")
    if not (param.is_floating_point() or param.is_complex()) or param.element_size() == 1:
        raise _quantised(name, f"a weight in {_short(param.dtype)}")


def _quantised(where: str, given: str) -> PlanError:
    fix = "Dequantise the model first, model.dequantize(), or load it in bfloat16"
    return PlanError(where, given, "plain floating-point weights of 16 bits or more can be split", fix)


def _check_devices(model: nn.Module) -> None:
    """One device for all parameters; those on meta beside it must be of modules that can initialise their own.

    Buffers may be elsewhere: some stay in memory when a model is built on meta.
    """
    first: dict[torch.device, str] = {}
    for name, module in model.named_modules():
        offloaded = hasattr(module, "_hf_hook")  # accelerate keeps its values elsewhere: they must not be drawn anew
        resets = callable(getattr(module, "reset_parameters", None)) and not offloaded
        for short, param in module.named_parameters(name, recurse=False):
            if not (param.is_meta and resets):
                first.setdefault(param.device, short)
    if len(first) > 1:
        (here, one), (there, other), *_ = first.items()
        fix = "Load or move all of it to one device: without device_map, without offloading, with all files present"
        raise PlanError(other, f"it is on {there}, and '{one}' is on {here}", "a model is split from one device", fix)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
