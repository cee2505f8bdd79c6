"""Gradients of parameters that are whole on every rank but used by each rank in its own way: summed once per backward.

A norm inside the sequence-sharded stretch sees its rank's tokens only, so each rank computes one term of the weight's
gradient. `local(..., grad=R)` says so, and the gradient arrives as a `Partial` DTensor. That is right already: whoever
reads it (an optimizer, FSDP2, clipping) will sum it. `PartialSums` makes it fast and plain: the terms of one backward
pass are summed at its end, in fp32, in one all-reduce.

How: a hook on the leaf takes the term and hands autograd a zero in its place; when the pass ends, the zero is filled
with the sum, or the sum is added to the gradient that the zero was accumulated into. So earlier micro-batches are
never summed again, `torch.autograd.grad` returns the sum as well, and a frozen parameter costs nothing. Code that
reads a gradient *during* the pass (a post-accumulate hook) sees it before the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.hooks import RemovableHandle

from colrow import comm
from colrow.dtensor import as_dtensor
from colrow.layout import I, P
from colrow.moves import move
from colrow.params import agree, local, local_of, shard
from colrow.split import Split


@dataclass
class _Term:
    """One parameter's part in a backward pass: this rank's term, and the zero that stands for the sum."""

    param: nn.Parameter
    mine: Tensor
    stand_in: Tensor
    accumulated: bool = False

    def settle(self, total: Tensor) -> None:
        self.stand_in.copy_(total)
        if self.accumulated and self.param.grad is not None:
            grad = local_of(self.param.grad)
            if grad.data_ptr() != self.stand_in.data_ptr():
                grad.add_(total)


@dataclass(eq=False)
class _Pass:
    """The terms of one backward pass. The engine alone keeps it alive, so a pass that fails leaves nothing behind."""

    mesh: DeviceMesh
    terms: dict[int, _Term] = field(default_factory=dict)

    def finish(self) -> None:
        by_dtype: dict[torch.dtype, list[_Term]] = {}
        for term in self.terms.values():
            by_dtype.setdefault(comm.sum_dtype(term.mine.dtype), []).append(term)
        for dtype, terms in by_dtype.items():
            bucket = comm.all_reduce(torch.cat([term.mine.flatten().to(dtype) for term in terms]), self.mesh)
            sums = bucket.split([term.mine.numel() for term in terms])
            for term, total in zip(terms, sums, strict=True):
                term.settle(total.view(term.mine.shape).to(term.mine.dtype))
        self.terms.clear()


class PartialSums:
    """Sums the partial gradients of the parameters it watches, once at the end of every backward pass.

    Arguments:
        mesh: the axis to sum over.

    Cost: one all-reduce per pass of all watched gradients that arrived partial (one more per dtype).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._handles: dict[int, list[RemovableHandle]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> PartialSums:
        return PartialSums(self.mesh)  # the copy's parameters are others, and not watched: their gradients stay Partial

    def __reduce__(self) -> tuple[type[PartialSums], tuple[DeviceMesh]]:
        return PartialSums, (self.mesh,)

    def watch(self, params: Iterable[nn.Parameter]) -> None:
        """Sum the partial gradients of these from now on. Watching again, after a change of dtype say, is harmless."""
        params = list(params)
        self.unwatch(params)
        for param in params:
            if param.requires_grad and isinstance(param, DTensor):
                hooks = param.register_hook(self._take(param)), param.register_post_accumulate_grad_hook(self._note)
                self._handles[id(param)] = list(hooks)

    def unwatch(self, params: Iterable[nn.Parameter]) -> None:
        """Leave these alone: nothing refers to them any more."""
        for param in params:
            for handle in self._handles.pop(id(param), ()):
                handle.remove()

    def _take(self, param: nn.Parameter):  # noqa: ANN202 - a hook
        weak = weakref.ref(param)

        def hook(grad: Tensor) -> Tensor:
            leaf = weak()
            if leaf is None or not isinstance(grad, DTensor) or not isinstance(grad.placements[-1], Partial):
                return grad
            if torch.is_grad_enabled():  # a graph of the backward pass is wanted: sum at once, differentiably
                total = move(local(grad, grad=P), self.mesh, src=P, dst=I)
                return DTensor.from_local(total, self.mesh, [Replicate()], run_check=False)
            mine = local_of(grad)
            term = _Term(leaf, mine, torch.zeros_like(mine))
            self._current_pass().terms[id(leaf)] = term
            return as_dtensor(term.stand_in, grad.device_mesh, Replicate(), grad.shape, mine.stride())

        return hook

    def _note(self, param: Tensor) -> None:
        for running in self._passes.values():
            if id(param) in running.terms:
                running.terms[id(param)].accumulated = True

    def _current_pass(self) -> _Pass:
        # Nothing public says which backward pass is running, or runs something at its end; DDP and FSDP2 use these two.
        number = torch._C._current_graph_task_id()
        running = self._passes.get(number)
        if running is None:
            running = _Pass(self.mesh)
            self._passes[number] = running
            torch.autograd.Variable._execution_engine.queue_callback(running.finish)
        return running


def in_backward() -> bool:
    """Whether a backward pass is running: then a call of a module is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Watched(nn.Module):
    """Base of every module that colrow splits: it knows its axis and its splits, and has partial gradients summed.

    Attributes:
        mesh: the tensor-parallel axis.
        splits: how each of its own parameters is split, by its short name; the others are whole on every rank.
        sums: who sums the gradients that arrive partial.
        where: its name in the model, for messages.
    """

    where: str = "a layer"
    mesh: DeviceMesh
    splits: dict[str, Split]
    sums: PartialSums

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to()`, `.double()`: torch swaps what is inside the tensors. A weak reference would forbid it; and the hooks
        # stay listed, but the new inside does not know of them until the lists are set again.
        self.sums.unwatch(self.parameters(recurse=False))
        try:
            super()._apply(fn, recurse)
        finally:
            for param in self.parameters(recurse=False):
                param._backward_hooks = param._backward_hooks
                param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
            self.sums.watch(self.parameters(recurse=False))
        return self

    def adopt(self, mesh: DeviceMesh, splits: dict[str, Split]) -> None:
        """Put the module's own parameters, equal on every rank or made so, at rest on `mesh`."""
        self.mesh, self.splits, self.sums, self.where = mesh, splits, PartialSums(mesh), type(self).__name__
        own = {name: param for name, param in self._parameters.items() if param is not None}
        for (name, param), whole in zip(own.items(), agree(list(own.values()), mesh), strict=True):
            self._parameters[name] = nn.Parameter(shard(whole, splits.get(name), mesh), param.requires_grad)
        self.sums.watch(self.parameters(recurse=False))
