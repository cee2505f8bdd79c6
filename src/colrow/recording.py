"""What goes into and comes out of a model's modules in one step, and the gradients there, in the order of time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.gradients import in_backward
from colrow.params import local_of, true_name
from colrow.places import End, Point

Key = tuple[str, int, End, bool]
"""A module's name, which of its calls, at which end, and whether it is the gradient."""


class Recorder:
    """While it is entered, copies of tensors at the modules' ends are kept in `found`.

    Arguments:
        model: whole, or split.
        points: the modules by name, and the ends that count.
        wanted: whether a tensor is to be kept; it is asked once for each, in the order in which they are there.
    """

    def __init__(self, model: nn.Module, points: Mapping[str, Point], wanted: Callable[[Key, Tensor], bool]) -> None:
        self.model, self.points, self.wanted = model, points, wanted
        self.found: dict[Key, Tensor] = {}
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            name = true_name(name)
            if name in self.points:
                before, after = self._before(name), self._after(name)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str):  # noqa: ANN202 - a hook
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if in_backward():  # a recomputation
                return None
            self._calls[name] = self._calls.get(name, 0) + 1
            x = args[0] if args else kwargs.get(_first_argument(module))
            if not isinstance(x, Tensor):
                return None
            self._note(name, "input", x)
            if not x.requires_grad or "input" not in self.points[name].gradients:
                return None
            view = x.view_as(x)  # so that what its other readers owe does not count
            self._watch(name, "input", view)
            return tuple(view if a is x else a for a in args), {at: view if a is x else a for at, a in kwargs.items()}

        return hook

    def _after(self, name: str):  # noqa: ANN202 - a hook
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            first = out[0] if isinstance(out, tuple | list) and out else out
            if in_backward() or not isinstance(first, Tensor):
                return
            self._note(name, "output", first)
            if first.requires_grad and "output" in self.points[name].gradients:
                self._watch(name, "output", first)

        return hook

    def _note(self, name: str, end: End, x: Tensor) -> None:
        if end in self.points[name].values and x.is_floating_point():
            self._keep((name, self._calls[name], end, False), x)

    def _watch(self, name: str, end: End, x: Tensor) -> None:
        key = (name, self._calls[name], end, True)
        x.register_hook(lambda grad: self._keep(key, grad))

    def _keep(self, key: Key, x: Tensor) -> None:
        if key not in self.found and self.wanted(key, x):
            self.found[key] = local_of(x).detach().clone()  # it may be changed in place afterwards


class Chunk:
    """Tells a recorder to keep what comes from the `start`-th on, up to `budget` bytes, and one at least."""

    def __init__(self, start: int, budget: int) -> None:
        self.start, self.budget, self.seen, self.used = start, budget, 0, 0

    def __call__(self, key: Key, x: Tensor) -> bool:
        self.seen += 1
        if self.seen <= self.start or self.used >= self.budget:
            return False
        self.used += x.numel() * x.element_size()
        return True


def _first_argument(module: nn.Module) -> str:
    """The name of the author's first argument."""
    own = getattr(type(module), "origin", type(module))
    return next((name for name in inspect.signature(own.forward).parameters if name != "self"), "")


def gather_shares(mine: Tensor | None, mesh: DeviceMesh) -> list[Tensor] | None:
    """Every rank's tensor, on all ranks of the axis; None if one has none."""
    shape = [-1] * 9 if mine is None else [mine.dim(), *mine.shape, *[0] * (8 - mine.dim())]
    every = comm.exchange(shape, mesh)
    if mine is None or any(numbers[0] < 0 for numbers in every):
        return None
    shapes = [torch.Size(numbers[1 : 1 + numbers[0]]) for numbers in every]
    sizes = [s.numel() for s in shapes]
    whole = comm.all_gather(mine.detach().flatten(), mesh, 0, sizes)
    return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
