"""The modules between which the stream changes its layout: the model, its blocks, attention and MLP, the last norm.

    model        I            positions, embeddings, masks: everything at this level is whole
      block      I, or S      norms, dropout, residuals: token by token; with sequence parallelism on 1/t of them
        region   R            attention and MLP: column layers, ..., a row layer that leaves again
      last norm  S -> I       the end of the sequence-parallel stretch

Each is a mixin: `become` gives a module the class "mixin over the class it had", so that names, hooks, `isinstance` and
the author's `forward` stay.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from colrow import comm
from colrow.context import (
    Call,
    Shape,
    agreed_draws,
    current,
    enter,
    gather,
    mark,
    marked,
    noted,
    running,
    scatter,
    tokens_at,
)
from colrow.dropout import Dropout
from colrow.errors import RankError, ShapeError
from colrow.gradients import in_backward
from colrow.layout import I, R, S
from colrow.moves import forget_shard, move
from colrow.norm import SplitModule
from colrow.params import fingerprint, local


class Region(SplitModule):
    """Attention or MLP: the operator f at its entry, shared by all the column layers inside.

    Whole tensors passed beside its input (encoder states, say) go through f as well, where they take a gradient.

    Attributes:
        sharded: whether its input is this rank's tokens.
    """

    sharded: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.stream_first(args, kwargs)
        if not self.sharded:
            args, kwargs = _beside((args, kwargs), self.mesh)
            return super().forward(enter(x, self.mesh, None), *args, **kwargs)
        tokens = tokens_at(x, type(self).__name__, in_backward())
        whole = enter(x, self.mesh, tokens)
        args = tuple(whole if arg is x else arg for arg in args)  # attention(x, x, x), say
        kwargs = {name: whole if arg is x else arg for name, arg in kwargs.items()}
        with running(Call(tokens)):
            out = super().forward(whole, *args, **kwargs)
        forget_shard(whole)
        return out


class Block(SplitModule):
    """A transformer block. Under sequence parallelism its stream is this rank's tokens, (n, hidden).

    The first block that runs in a model's call opens the stream (I -> S), the last norm closes it. A block that is
    called by itself, outside the model, takes and returns whole activations.
    """

    sharded: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = self.stream_first(args, kwargs)
        if not self.sharded:
            return super().forward(x, *args, **kwargs)
        outer = current()
        alone = outer is None and not in_backward()
        known = outer.tokens if outer is not None else None if alone else marked(x, type(self).__name__)
        mark(x, known)
        if known is None:
            x, tokens = scatter(x, self.mesh)
        else:
            tokens = known
        args, kwargs = _beside((args, kwargs), self.mesh)
        with running(Call(tokens)), agreed_draws(self.mesh) if alone and _draws(self) else nullcontext():
            out = super().forward(x, *args, **kwargs)
        if outer is not None:
            outer.tokens = tokens
        if alone:
            return _close(out, self, tokens)
        first = out[0] if isinstance(out, tuple) and out else out
        if isinstance(first, Tensor):
            mark(first, tokens)
        return out


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
        if not self.sharded:
            return y
        tokens = tokens_at(x, type(self).__name__, in_backward())
        call = current()
        if call is not None:
            call.tokens = None
        return gather(y, self.mesh, tokens, I)


class Model(SplitModule):
    """The split model: its inputs and outputs are those of the unsplit one.

    Attributes:
        checks_left: the next so many calls check that the ranks were given the same inputs (-1: every call).
    """

    checks_left: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.checks_left:
            self.checks_left -= 1
            check_same_inputs(self, args, kwargs)
        with ExitStack() as stack, running(Call(until_done=stack)) as call:
            if _draws(self):
                stack.enter_context(agreed_draws(self.mesh))
            out = super().forward(*args, **kwargs)
            if call.tokens is not None:
                out = _close(out, self, call.tokens)
        return _whole(out, self.mesh)


def become(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Give `module` the class "`mixin` over the class it has", as `fully_shard` does: the object stays the same.

    A layer whose class adds to the `forward` it inherits (a scaled embedding) goes on adding: its class comes first,
    and what it calls with `super()` is the mixin's.
    """
    origin = type(module)
    if issubclass(mixin, origin):
        module.__class__ = mixin
        return
    bases = (origin, mixin) if _adds_to_forward(origin, mixin) else (mixin, origin)
    name = f"{mixin.__name__}[{origin.__name__}]"
    module.__class__ = type(name, bases, {"origin": origin, "__module__": origin.__module__})


def _adds_to_forward(origin: type[nn.Module], mixin: type[nn.Module]) -> bool:
    """Whether a layer's class has a `forward` of its own around the one that `mixin` replaces."""
    layers = [base for base in (nn.Linear, nn.Embedding) if issubclass(mixin, base) and issubclass(origin, base)]
    return any(origin.forward is not base.forward for base in layers) and calls_super(origin)


def calls_super(origin: type[nn.Module]) -> bool:
    """Whether a class's `forward` calls the one it overrides."""
    return "__class__" in origin.forward.__code__.co_freevars  # what `super()` without arguments needs


def check_same_inputs(model: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An error on every rank if the ranks of the axis were given different inputs. Cost: an all-gather of 128 bytes."""
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    tensors = [(name, value.detach()) for name, value in named if isinstance(value, Tensor)][:8]
    names = [name for name, _ in tensors] + ["?"] * (8 - len(tensors))
    shapes = [zlib.crc32(repr((name, x.shape, x.dtype)).encode()) for name, x in tensors] + [0] * (8 - len(tensors))
    prints = [fingerprint(x) for _, x in tensors] + [0] * (8 - len(tensors))
    every = comm.exchange([*shapes, *prints], model.mesh)
    for place, kind in [*((i, "shape or dtype") for i in range(8)), *((8 + i, "content") for i in range(8))]:
        alike: dict[int, list[int]] = {}
        for rank, numbers in enumerate(every):
            alike.setdefault(numbers[place], []).append(rank)
        if len(alike) > 1:
            raise RankError(
                f"{type(model).__name__}, input {names[place % 8]}",
                f"the ranks were given tensors of different {kind} (alike are ranks {list(alike.values())})",
                "all ranks of one tensor-parallel axis work on the same batch",
                "Seed the sampler by the data-parallel rank, not by the global rank",
            )


def _beside(value: Any, mesh: DeviceMesh) -> Any:
    """I -> R for what comes beside the stream and takes a gradient (encoder states, a conditioning vector, ...).

    It is whole, but each rank uses it with its own heads or tokens, so the ranks' gradients are terms of a sum.
    """
    if isinstance(value, Tensor):
        return move(value, mesh, src=I, dst=R) if value.requires_grad and not isinstance(value, DTensor) else value
    if type(value) in (tuple, list):
        return type(value)(_beside(item, mesh) for item in value)
    if type(value) is dict:
        return {name: _beside(item, mesh) for name, item in value.items()}
    return value


def _draws(module: nn.Module) -> bool:
    """Whether a call will draw random numbers."""
    return any(isinstance(m, Dropout) and m.training and m.p > 0 for m in module.modules())


def _close(out: Any, module: SplitModule, tokens: Shape) -> Any:
    """Whole outputs of a module that ended inside the sequence-parallel stretch: S -> I."""
    if isinstance(out, Tensor):
        return gather(out, module.mesh, tokens, I)
    if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        return (gather(out[0], module.mesh, tokens, I), *out[1:])
    given = f"an output of type {type(out).__name__}"
    fix = "Give the norm after the last block the rule LastNorm()"
    raise ShapeError(type(module).__name__, given, "the stream ends in a tensor, or a tuple that starts with one", fix)


def _whole(out: Any, mesh: DeviceMesh) -> Any:
    """What leaves the model made whole (S -> I): split logits, and tensors of the stream, which are marked.

    Containers keep their type. Beside a loss, logits stay a DTensor, of the true global shape: nobody may want them.
    """
    if isinstance(out, DTensor):
        placement = out.placements[-1]
        if not isinstance(placement, Shard):
            return out
        src = S(placement.dim, size=out.shape[placement.dim])
        return move(local(out, grad=S(placement.dim)), out.device_mesh, src=src, dst=I)
    if isinstance(out, Tensor):
        tokens = noted(out)
        return out if tokens in (None, tuple(out.shape[:-1])) else gather(out, mesh, tokens, I)
    if type(out) in (tuple, list):
        return type(out)(_whole(item, mesh) for item in out)
    if isinstance(out, dict):  # and the output classes of transformers, which are dicts
        beside_a_loss = out.get("loss") is not None
        for name, item in list(out.items()):
            if not (beside_a_loss and isinstance(item, DTensor)):
                out[name] = _whole(item, mesh)
    return out
