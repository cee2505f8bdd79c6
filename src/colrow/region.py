"""The modules between which the stream changes its layout: blocks, attention, MLP and experts, the last norm.

    model        I            positions, embeddings, masks: everything at this level is whole
      block      I, or S      norms, dropout, residuals: token by token; with sequence parallelism on 1/t of them
        region   R            attention, MLP, experts: column layers, ..., a row layer that leaves again
      last norm  S -> I       the end of the sequence-parallel stretch

Each is a mixin: `become` gives a module the class "mixin over the class it had", so that names, hooks, `isinstance` and
the author's `forward` stay.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from colrow.context import (
    Call,
    Shape,
    agreed_draws,
    current,
    enter,
    gather,
    leave,
    mark,
    mark_heads,
    marked,
    noted_heads,
    running,
    scatter,
    stays_whole,
    tokens_at,
)
from colrow.dropout import FunctionalDropout, may_drop
from colrow.errors import ShapeError
from colrow.gradients import in_backward
from colrow.layout import I, R, S
from colrow.moves import forget_shard, move
from colrow.norm import SplitModule, argument_names
from colrow.recompute import Lean
from colrow.split import Heads

FEW: Final = 64
"""Tokens of a call without gradients that are not worth sharding: a step of decoding, or a short prompt."""


class Region(SplitModule):
    """Attention, an MLP or experts: the operator f at its entry, shared by all the column layers inside.

    Whole tensors passed beside its input (encoder states, say) go through f as well, where they take a gradient; what
    speaks of every head (a mask, a bias) is cut to this rank's.

    Attributes:
        sharded: whether its input is this rank's tokens.
        tp_heads: attention's heads on every rank; None elsewhere.
        tp_per_head: names of arguments (batch x heads, ...).
        tp_residual: the name of an argument that is in the stream, as the output is.
        tp_sums: whether what its layers give are terms, to be summed by g at its exit.
        tp_again: whether its activations may be made again in backward.
    """

    sharded: bool
    tp_heads: Heads | None = None
    tp_per_head: tuple[str, ...] = ()
    tp_residual: str | None = None
    tp_sums: bool = False
    tp_again: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.stream_first(args, kwargs)
        sharded = self.sharded and not stays_whole()
        tokens = tokens_at(x, self.where, in_backward()) if sharded else None
        whole = enter(x, self.mesh, tokens)
        names = argument_names(type(self))[1:]
        args = tuple(self._beside(names[i] if i < len(names) else "", arg, x, whole) for i, arg in enumerate(args))
        kwargs = {name: self._beside(name, arg, x, whole) for name, arg in kwargs.items()}
        with running(Call(tokens)) if sharded else nullcontext(), self._dropout(), self._lean():
            out = super().forward(whole, *args, **kwargs)
        if sharded:
            forget_shard(whole)
        if self.tp_sums:
            out = leave(out, self.mesh, tokens)
            mark(out, tokens)
        self._mark_heads(out)
        return out

    def _beside(self, name: str, value: Any, x: Tensor, whole: Tensor) -> Any:
        """An argument other than the input, in the layout that the module's code expects."""
        if name == self.tp_residual and name:
            return value
        if value is x:  # attention(x, x, x), say
            return whole
        if not self.sharded:  # under sequence parallelism the block has done it
            value = beside(value, self.mesh)
        return value if self.tp_heads is None else self._own_heads(name, value)

    def _own_heads(self, name: str, value: Any) -> Any:
        """This rank's heads of a tensor that has all: a mask or bias (batch, heads, ...), or (batch x heads, ...)."""
        if self.tp_heads is None or not isinstance(value, Tensor) or noted_heads(value) is not None:
            return value
        mine, total = self.tp_heads.mine[self.mesh.get_local_rank()], sum(self.tp_heads.true_heads)
        index = torch.tensor(mine, device=value.device).clamp(min=0)
        if name in self.tp_per_head and value.dim() == 3:
            return value.unflatten(0, (-1, total)).index_select(1, index).flatten(0, 1)
        speaks_of_heads = value.dim() == 4 and 1 < total == value.shape[1]
        if speaks_of_heads and ("mask" in name or "bias" in name or name in self.tp_per_head):
            return value.index_select(1, index)
        return value

    def _dropout(self) -> AbstractContextManager[Any]:
        if not self.training or not may_drop(self):
            return nullcontext()
        heads = None if self.tp_heads is None else self.tp_heads.true_heads
        return FunctionalDropout(self.mesh, S(0) if self.sharded else I, heads, features=heads is None)

    def _lean(self) -> AbstractContextManager[Any]:
        lean = self.tp_again and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return Lean() if lean else nullcontext()

    def _mark_heads(self, out: Any) -> None:
        """Note on what comes beside the output (probabilities, a position bias) that it is of this rank's heads."""
        if self.tp_heads is not None and isinstance(out, tuple):
            for item in out[1:]:
                if isinstance(item, Tensor) and item.dim() == 4 and item.shape[1] == self.tp_heads.local_heads:
                    mark_heads(item, self.tp_heads.true_heads)


class Block(SplitModule):
    """A transformer block. Under sequence parallelism its stream is this rank's tokens, (n, hidden).

    The first block that runs in a model's call opens the stream (I -> S); the last norm closes it, or the last block.
    A block that is called by itself, outside the model, takes and returns whole activations.

    Attributes:
        tp_last: whether its output is whole.
    """

    sharded: bool
    tp_last: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.stream_first(args, kwargs)
        if not self.sharded:
            with self._dropout():
                return super().forward(x, *args, **kwargs)
        outer = current()
        alone = outer is None and not in_backward()
        agreed = agreed_draws(self.mesh) if alone and may_drop(self) else nullcontext()
        if self._stays_whole(x, outer):
            with self._dropout():
                return super().forward(x, *args, **kwargs)
        known = outer.tokens if outer is not None else None if alone else marked(x, self.where)
        mark(x, known)
        if known is None:
            x, tokens = scatter(x, self.mesh)
        else:
            tokens = known
        args, kwargs = beside((args, kwargs), self.mesh)
        with running(Call(tokens)), agreed, self._dropout():
            out = super().forward(x, *args, **kwargs)
        if outer is not None:
            outer.tokens = None if self.tp_last else tokens
        if alone or self.tp_last:
            return close(out, self, tokens)
        first = out[0] if isinstance(out, tuple) and out else out
        if isinstance(first, Tensor):
            mark(first, tokens)
        return out

    def _stays_whole(self, x: Tensor, call: Call | None) -> bool:
        """Without gradients sequence parallelism saves next to nothing; on few tokens its four collectives cost more
        time than two all-reduces. So the stream is not sharded for them, in this block and in those that follow."""
        if call is None or call.whole or call.tokens is not None:
            return call is not None and call.whole
        call.whole = call.inference and prod(x.shape[:-1]) <= FEW
        return call.whole

    def _dropout(self) -> AbstractContextManager[Any]:
        if not self.training or not may_drop(self, inside=False):
            return nullcontext()
        return FunctionalDropout(self.mesh, S(0) if self.sharded else I, None, features=False)


class LastNorm(SplitModule):
    """The norm after the last block: on this rank's tokens, and then out of the sequence-parallel stretch (S -> I).

    Its output is whole and may have readers of any kind: a classifier, or a head split over the vocabulary, which
    applies f. (A gather in layout R would do for that head alone; for the others it would multiply gradients by t.
    And it would save nothing: a reduce-scatter and a second gather send the bytes of f's all-reduce.)

    Attributes:
        sharded: whether its input is this rank's tokens.
    """

    sharded: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.stream_first(args, kwargs)
        y = super().forward(x, *args, **kwargs)
        if not self.sharded or stays_whole():
            return y
        tokens = tokens_at(x, self.where, in_backward())
        call = current()
        if call is not None:
            call.tokens = None
        return gather(y, self.mesh, tokens, I)


def beside(value: Any, mesh: DeviceMesh) -> Any:
    """I -> R for what comes beside the stream and takes a gradient (encoder states, a conditioning vector, ...).

    It is whole, but each rank uses it with its own heads or tokens, so the ranks' gradients are terms of a sum. What is
    of this rank's heads already (a position bias that an earlier block has made) stays as it is.
    """
    if isinstance(value, Tensor):
        plain = value.requires_grad and not isinstance(value, DTensor) and noted_heads(value) is None
        return move(value, mesh, src=I, dst=R) if plain else value
    if type(value) in (tuple, list):
        return type(value)(beside(item, mesh) for item in value)
    if type(value) is dict:
        return {name: beside(item, mesh) for name, item in value.items()}
    return value


def close(out: Any, module: SplitModule, tokens: Shape) -> Any:
    """Whole outputs of a module that ended inside the sequence-parallel stretch: S -> I."""
    if isinstance(out, Tensor):
        return gather(out, module.mesh, tokens, I)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return (gather(out[0], module.mesh, tokens, I), *out[1:])
    given = f"an output of type {type(out).__name__}"
    fix = "Give the norm after the last block the rule LastNorm()"
    raise ShapeError(module.where, given, "the stream ends in a tensor, or a tuple that starts with one", fix)
