"""Modules whose parameters are whole on every rank: LayerNorm, RMSNorm, a user's own, a router, position embeddings.

Such a module computes what it always did. Tensor parallelism adds only the layout of its parameters' gradient, and that
depends on where the module is: on whole activations every rank computes the same gradient (`I`), on this rank's tokens
or heads each computes one term of it (`R`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from colrow.context import current, mark, require_whole
from colrow.embedding import row_error
from colrow.errors import ShapeError
from colrow.gradients import Watched
from colrow.layout import I, Layout, R
from colrow.moves import move
from colrow.params import read
from colrow.recompute import Recomputed, note


class SplitModule(Watched):
    """A module that somebody else wrote, running as part of a split model. Its class is made by `become`.

    Its own `forward` sees the parameters it owns directly as local tensors.

    Attributes:
        grads: how each of its own parameters is read (`I` or `R`), by its short name.
    """

    origin: ClassVar[type[nn.Module]]
    grads: dict[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        view = self._in_flight()
        before = {} if view is self else dict(vars(view))
        out = self.origin.forward(view, *args, **kwargs)
        if view is not self:  # what the author's code has set on itself stays: a counter, the last router logits, ...
            vars(self).update({name: v for name, v in vars(view).items() if before.get(name, before) is not v})
        return out

    def stream_first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The stream, which is the author's first argument, passed by place or by name; and the other arguments."""
        if args:
            return args[0], args[1:], kwargs
        name = argument_names(type(self))[0]
        if name not in kwargs:
            given, fix = f"it was called without '{name}'", "Pass the activations first"
            raise ShapeError(self.where, given, "its first argument is the stream", fix)
        return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}

    def _in_flight(self) -> Any:
        """The module as its author knows it: of the original class, with local tensors for its own parameters."""
        mine = self._local_parameters()
        return self._seen_with(mine) if mine else self

    def _local_parameters(self) -> dict[str, Tensor]:
        """Its own parameters, by short name, as this rank computes with them."""
        return {
            name: read(param, self.splits.get(name), self.mesh, self.grads.get(name, I))
            for name, param in self._parameters.items()
            if param is not None
        }

    def _seen_with(self, params: Mapping[str, Tensor]) -> Any:
        """A view: it shares everything but these (submodules, buffers, hooks) with the module, which is not touched. So
        the same module can run twice at a time, as recomputation in backward does."""
        view = object.__new__(self.origin)
        view.__dict__.update(self.__dict__)
        view.__dict__["_parameters"] = dict.fromkeys(self._parameters) | dict(params)
        return view


class Replicated(SplitModule):
    """A module of which every parameter is whole on every rank, read as its rule says.

    Attributes:
        sharded: whether it is in the sequence-parallel stretch; outside, its input must be whole.
        tp_again: whether its output may be made again in backward, from its input: it is a norm.
    """

    sharded: bool
    tp_again: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.sharded and I in self.grads.values():
            require_whole(self.where)
        try:
            out, call = self._out(*args, **kwargs), current()
        except IndexError as error:
            if not isinstance(self, nn.Embedding):
                raise
            names = argument_names(type(self))
            raise row_error(self, {names[i]: arg for i, arg in enumerate(args)} | kwargs, self.where) from error
        if self.sharded and call is not None and isinstance(out, Tensor) and out.dim() == 2:  # the stream, not heads
            mark(out, call.tokens)  # attention or MLP may be checkpointed inside a checkpointed block
        return out

    def _out(self, *args: Any, **kwargs: Any) -> Any:
        """What the author's `forward` gives. A norm keeps its input and nothing else; what takes its output keeps
        nothing."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not (self.tp_again and isinstance(x, Tensor) and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        mine = self._local_parameters()

        def make(x: Tensor, *params: Tensor) -> Tensor:
            return self.origin.forward(self._seen_with(dict(zip(mine, params, strict=True))), x)

        keeps_little = self.origin.forward is nn.LayerNorm.forward  # by torch's own node
        y = make(x, *mine.values()) if keeps_little else Recomputed.apply(make, x, *mine.values())
        return note(y, make, x, *mine.values())


class Sliced(SplitModule):
    """A module whose own `forward` does on this rank's slice of its parameters what it does on the whole of them."""


class Router(Replicated):
    """The router of a mixture of experts, (logits, ...).

    Each rank uses it with its own part of the experts, so its gradient is a sum of terms. The logits are for a reader
    outside, who uses them whole: R -> I.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple) or not isinstance(out[0], Tensor):
            given, fix = f"an output of type {type(out).__name__}", "Give it the rule Replicated()"
            raise ShapeError(self.where, given, "a router returns (logits, ...)", fix)
        return (move(out[0], self.mesh, src=R, dst=I), *out[1:])


@lru_cache(maxsize=1024)
def argument_names(module: type[SplitModule]) -> tuple[str, ...]:
    """The names of the arguments of the author's `forward`."""
    return tuple(inspect.signature(module.origin.forward).parameters)[1:]  # the first is self
