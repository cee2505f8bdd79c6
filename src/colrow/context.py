"""What a running call of a split model must know: the shape of the tokens while the stream is sharded.

In the sequence-parallel stretch the stream is (tokens on this rank, hidden), and a module inside can no longer see the
batch and the sequence. Their shape lives in two places, and in neither between calls:

- in a `Call`, for as long as the model or the block runs;
- on the memory of the tensors that enter and leave a block (`mark`). Activation checkpointing keeps that memory and
  calls the block again in backward, where no call is running: the mark tells it what the forward pass knew.

So two models, two shapes, one block used twice, and any of them recomputed later do not meet.

Random draws need nothing of the kind: they are keyed from torch's default CPU generator, which checkpointing restores,
and which `agreed_draws` makes equal on the ranks for the time of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.errors import ShapeError
from colrow.layout import I, Layout, P, R, S
from colrow.moves import move

Shape = tuple[int, ...]
MASK = (1 << 63) - 1


@dataclass
class Call:
    """A running call.

    Attributes:
        tokens: the whole shape, without the hidden dimension, while the stream is sharded.
        until_done: a stack of what is to be left when the model's call ends; only a whole model's call has one.
        split_logits: whether `loss.SplitLogits` is on that stack.
        inference: whether the model was called without gradients. (A block alone cannot know: checkpointing calls it
            without them, and again with them.)
        whole: whether the stream stays whole in all of this call, as without sequence parallelism.
    """

    tokens: Shape | None = None
    until_done: ExitStack | None = None
    split_logits: bool = False
    inference: bool = False
    whole: bool = False


# Scoped to a call by `running`: the one way to reach code that somebody else wrote and that calls our modules.
_running: ContextVar[Call | None] = ContextVar("colrow_call", default=None)


def current() -> Call | None:
    """The innermost running call of a split model, if any."""
    return _running.get()


@contextmanager
def running(call: Call) -> Iterator[Call]:
    """Make `call` the current one."""
    token = _running.set(call)
    try:
        yield call
    finally:
        _running.reset(token)


def mark(x: Tensor, tokens: Shape | None) -> None:
    """Note on the memory of x what a recomputation that starts from x must know: the tokens' shape; None: x is whole.

    The note belongs to the storage, which a detached copy shares, and goes with it.
    """
    x.untyped_storage().colrow_tokens = (tokens,)  # pyright: ignore[reportAttributeAccessIssue]


def marked(x: Tensor, where: str) -> Shape | None:
    """The note on x's memory, in a recomputation."""
    if not hasattr(x.untyped_storage(), "colrow_tokens"):
        raise ShapeError(
            where,
            "a recomputation starts from a tensor that did not enter or leave a block",
            "under sequence parallelism checkpointing may begin at a block, or at attention or MLP in a block",
            "Checkpoint whole blocks, or split with sequence_parallel=False",
        )
    return noted(x)


def noted(x: Tensor) -> Shape | None:
    """The tokens' shape that x's memory is marked with, if it holds this rank's rows of them."""
    note = getattr(x.untyped_storage(), "colrow_tokens", (None,))
    return note[0]


def in_stream(x: Tensor) -> bool:
    """Whether x's memory is marked: it entered or left a block, or left a region."""
    return hasattr(x.untyped_storage(), "colrow_tokens")


def mark_heads(x: Tensor, heads: tuple[int, ...]) -> None:
    """Note on the memory of x that its dimension 1 holds this rank's heads, and how many every rank has."""
    x.untyped_storage().colrow_heads = heads  # pyright: ignore[reportAttributeAccessIssue]


def noted_heads(x: Tensor) -> tuple[int, ...] | None:
    """How many heads every rank has, if x's dimension 1 holds this rank's."""
    return getattr(x.untyped_storage(), "colrow_heads", None)


@contextmanager
def first_ranks_draws(mesh: DeviceMesh) -> Iterator[None]:
    """For a while every rank draws what the axis's first rank would draw by itself, from its default generators.

    Afterwards that rank's generators have gone on, and the others' are as they were. Cost: a broadcast of each state.
    """
    device, generators = comm.device(mesh), [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(comm.broadcast(state.to(device), mesh).cpu())
    try:
        yield
    finally:
        if mesh.get_local_rank():
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def agreed_draws(mesh: DeviceMesh) -> Iterator[None]:
    """For a while torch's default CPU generator is equal on the ranks of the axis, and another in every replica.

    Its state comes from one draw, the first rank's, so `torch.manual_seed` rules it, and a generator that ran ahead on
    one rank cannot make replicated activations differ. Afterwards the generator is one draw further than before.

    Cost: a broadcast of eight bytes.
    """
    seed = mix(agreed_key(mesh), comm.first_rank(mesh))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def agreed_key(mesh: DeviceMesh) -> int:
    """63 random bits, the first rank's. Cost: a broadcast of eight bytes."""
    return int(comm.broadcast(torch.tensor([draw()], device=comm.device(mesh)), mesh))


def draw() -> int:
    """63 random bits from torch's default CPU generator."""
    return int(torch.randint(MASK, (), dtype=torch.int64))


def mix(*numbers: int) -> int:
    """A 63-bit hash of integers (splitmix64's finaliser over a running sum)."""
    state = 0
    for number in numbers:
        state = (state + (number & MASK) + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state & MASK


def scatter(x: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Shape]:
    """I -> S: whole activations (..., hidden) to this rank's tokens (n, hidden), and the tokens' shape."""
    shape = tuple(x.shape[:-1])
    return move(x.reshape(-1, x.shape[-1]), mesh, src=I, dst=S(0)), shape


def gather(x: Tensor, mesh: DeviceMesh, tokens: Shape, dst: Layout) -> Tensor:
    """S -> R or S -> I: this rank's tokens (n, hidden) to whole activations (..., hidden)."""
    whole = move(x, mesh, src=S(0, size=prod(tokens)), dst=dst)
    return whole.view(*tokens, x.shape[-1])


def enter(x: Tensor, mesh: DeviceMesh, tokens: Shape | None) -> Tensor:
    """The operator f, at a block's entry: whole activations in layout R, from the stream (I, or S under SP).

    Cost: nothing forward and an all-reduce backward; under SP an all-gather and a reduce-scatter.
    """
    return move(x, mesh, src=I, dst=R) if tokens is None else gather(x, mesh, tokens, R)


def leave(y: Tensor, mesh: DeviceMesh, tokens: Shape | None) -> Tensor:
    """The operator g, at a block's exit: partial sums (..., hidden) back into the stream.

    Cost: an all-reduce forward and nothing backward; under SP a reduce-scatter and an all-gather.
    """
    if tokens is None:
        return move(y, mesh, src=P, dst=I)
    return move(y.reshape(-1, y.shape[-1]), mesh, src=P, dst=S(0))


def stays_whole() -> bool:
    """Whether the stream is whole in the running call, also where the plan would have it sharded."""
    call = current()
    return call is not None and call.whole


def known_tokens(layout: Layout) -> Layout:
    """S(0) with its size, where the running call knows how many tokens there are; I where it keeps them whole."""
    call = current()
    if layout == S(0) and stays_whole():
        return I
    if call is None or call.tokens is None or layout != S(0):
        return layout
    return S(0, size=prod(call.tokens))


def require_whole(where: str) -> None:
    """An error if the stream is sharded here: the caller's input would be this rank's tokens, taken for all of them."""
    call = current()
    if call is not None and call.tokens is not None:
        raise ShapeError(
            where,
            "it was called while the stream is this rank's tokens",
            "outside the blocks modules work on whole activations",
            "End the stretch before it: give the norm after the last block the rule LastNorm()",
        )


def tokens_at(x: Tensor, where: str, recomputing: bool) -> Shape:
    """The tokens' shape for a module inside the sequence-parallel stretch that was called with x, and a mark on x."""
    call = current()
    tokens = call.tokens if call is not None else marked(x, where) if recomputing else None
    if tokens is None:
        raise ShapeError(
            where,
            "it was called outside the sequence-parallel stretch",
            "its input there is this rank's tokens, and the block that holds it knows their shape",
            "Call the whole model, or the block, or split with sequence_parallel=False",
        )
    mark(x, tokens)
    return tokens
