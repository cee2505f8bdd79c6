"""A step of training under observation: what is sent, what autograd keeps, and in which module's code.

A forward pass is followed by hooks, which are taken off again. A node of the backward pass knows its number, and the
numbers tell which module was running when autograd created it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from colrow import comm, rules
from colrow.gradients import in_backward
from colrow.params import local_of
from colrow.resolved import Resolved, Site
from colrow.traced import Kept, Kind, Message, Shape

_REGIONS: dict[type[rules.Rule], Kind] = {rules.Attention: "attention", rules.Mlp: "mlp", rules.Moe: "experts"}


@dataclass(frozen=True)
class Place:
    """A module, what kind of part it is in, and the layer ("" outside the blocks)."""

    module: str
    kind: Kind
    layer: str


class Places:
    """Where each module of a model stands, by its name: the same for the split model and for the whole one."""

    def __init__(self, resolved: Resolved) -> None:
        self.sites: dict[str, Site] = {site.name: site for site in resolved.sites}
        self.layers = tuple(name for name, site in self.sites.items() if isinstance(site.rule, rules.Block))

    def of(self, name: str) -> Place:
        return Place(name, self._kind(name), self.above(name, rules.Block) or "")

    def above(self, name: str, *kinds: type[rules.Rule]) -> str | None:
        """The nearest module with such a rule that holds `name`, or is it."""
        parts = name.split(".")
        holders = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return next((at for at in holders if isinstance(self.rule(at), kinds)), None)

    def rule(self, name: str) -> rules.Rule | None:
        site = self.sites.get(name)
        return None if site is None else site.rule

    def _kind(self, name: str) -> Kind:
        region, own = self.above(name, *_REGIONS), self.rule(name)
        if region is not None:
            return next(kind for rule, kind in _REGIONS.items() if isinstance(self.rule(region), rule))
        if isinstance(own, rules.Column | rules.Row):  # a layer that stands in the block itself
            units = own.units if isinstance(own, rules.Column) else (own.unit,)
            return "mlp" if set(units) == {rules.FEATURES} else "attention"
        if self.above(name, rules.Block):
            return "stream"
        if isinstance(own, rules.Vocab):
            return "embedding"
        return "head" if isinstance(own, rules.Head | rules.LastNorm) else "other"


class Observer(comm.Watch):
    """Watches a model while it is entered: one forward pass, `kept`, one backward pass.

    Attributes:
        messages: the collectives, in order.
        shapes: of every module that ran, its first input and its first output.
        beside: of modules in the layers, the numbers of their further inputs that take a gradient and are no heads'.
    """

    def __init__(self, model: nn.Module, places: Places) -> None:
        super().__init__()
        self.model, self.places = model, places
        self.messages: list[Message] = []
        self.shapes: dict[str, tuple[Shape, Shape]] = {}
        self.beside: dict[str, int] = {}
        self._running: list[Place] = []
        self._since: list[tuple[int, Place]] = []
        self._layers_done = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            enter, leave = partial(self._enter, self.places.of(name)), partial(self._leave, name)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def sent(self, verb: str, size: float, seconds: float) -> None:
        at, way = self._here(), "backward" if in_backward() else "forward"
        self.messages.append(Message(verb, way, size, seconds, at.module, at.kind, at.layer))

    def kept(self, loss: Tensor, ignore: Iterable[Tensor]) -> tuple[Kept, ...]:
        """What the graph behind `loss` keeps, each memory once: not that of parameters, buffers and `ignore`."""
        found: list[Kept] = []
        for node, tensor in kept_tensors(loss, [*self.model.parameters(), *self.model.buffers(), *ignore]):
            at, dtype = self._at(self.number(node)), str(tensor.dtype).removeprefix("torch.")
            size, shape = tensor.untyped_storage().nbytes(), tuple(tensor.shape)
            found.append(Kept(at.module, at.kind, at.layer, node.name(), shape, dtype, size))
        return tuple(found)

    def _enter(self, place: Place, module: nn.Module, args: Any) -> None:
        if any(layer.startswith(f"{place.module}." if place.module else "") for layer in self.places.layers):
            self._layers_done = False  # a stack of layers starts with its embeddings
        self._running.append(place)
        self._note()

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        done = self._running.pop()
        self._layers_done |= done.module == done.layer
        self._note()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.numel()]
        given = _first(out)
        if tensors and given is not None and not in_backward():
            self.shapes.setdefault(name, (tuple(tensors[0].shape), tuple(given.shape)))
            further = {id(x): x.numel() for x in tensors[1:] if x.requires_grad and x.dim() < 4 and x is not tensors[0]}
            if further:
                self.beside.setdefault(name, sum(further.values()))

    def _note(self) -> None:
        self._since.append((self.next_node(), self._here()))

    def _here(self) -> Place:
        if self._running:
            place = self._running[-1]
            if place.kind != "other":
                return place
            return replace(place, kind="head" if self._layers_done else "embedding")
        return self._at(self.running_node())

    def _at(self, node: int | None) -> Place:
        """Where autograd created a node; the end of a pass belongs to the model."""
        place = 0 if node is None else bisect_right(self._since, node, key=lambda entry: entry[0])
        return self._since[place - 1][1] if place else Place("", "other", "")


def kept_tensors(loss: Tensor, ignore: Iterable[Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """What the graph behind `loss` keeps, each memory once, with the node that keeps it: the first, by time."""
    seen = {_memory(local_of(tensor)) for tensor in ignore}
    for node in sorted(_nodes(loss), key=comm.Watch.number):
        for tensor in map(local_of, _saved(node)):
            if _memory(tensor) not in seen and tensor.untyped_storage().nbytes():
                seen.add(_memory(tensor))
                yield node, tensor


def _nodes(loss: Tensor) -> Iterator[Any]:
    """The graph behind a tensor."""
    waiting: list[Any] = [loss.grad_fn]
    seen: dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen[id(node)] = node  # which keeps the number from being given again
            waiting += [before for before, _ in node.next_functions]
            yield node


def _saved(node: Any) -> Iterator[Tensor]:
    """The tensors that a node keeps: those that it names, and what a Function has put on its context."""
    named = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    for value in (*named, *getattr(node, "saved_tensors", ()), *getattr(node, "__dict__", {}).values()):
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor):
                yield tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _first(value: Any) -> Tensor | None:
    """The first tensor with elements in it."""
    if isinstance(value, Tensor):
        return value if prod(value.shape) else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for part in parts if (found := _first(part)) is not None), None)
