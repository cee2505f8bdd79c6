"""Whole values of a module's parameters and buffers, one module at a time: from memory, or initialised from `meta`.

A model built under `torch.device("meta")` has no values yet. They come from `reset_parameters` of each module that owns
some, called in the order of `model.modules()` on whole tensors: what building the model in memory would have drawn from
the same generator, if it builds its modules in that order. Only one module is whole at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colrow.errors import PlanError


def check_resettable(model: nn.Module) -> None:
    """Refuse a model on meta with a module that could not be initialised, before anything is touched."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors):
        return
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(t.is_meta for t in own) and not callable(getattr(module, "reset_parameters", None)):
            given = f"{type(module).__name__} has values on meta and no reset_parameters()"
            fix = "Give it a reset_parameters() that fills its parameters and buffers, or build the model in memory"
            raise PlanError(name or type(model).__name__, given, "each module on meta initialises its own", fix)


def whole_values(module: nn.Module, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole parameters and buffers that the module owns directly, by short name, initialised if they are on meta.

    The module itself is not changed: `reset_parameters` works on a view of it.
    """
    params = {name: p.detach() for name, p in module._parameters.items() if p is not None}
    buffers = {name: b for name, b in module._buffers.items() if b is not None}
    if not any(t.is_meta for t in [*params.values(), *buffers.values()]):
        return params, buffers
    view = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    view._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
        for name, p in module._parameters.items()
    }
    view._buffers = {
        name: None if b is None else torch.empty_like(b, device=device) for name, b in module._buffers.items()
    }
    reset = getattr(view, "reset_parameters")  # noqa: B009 - checked by `check_resettable`
    with torch.no_grad():
        reset()
    params = {name: p.detach() for name, p in view._parameters.items() if p is not None}
    return params, {name: b for name, b in view._buffers.items() if b is not None}
