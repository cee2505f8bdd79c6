"""`colrow trace`: a step of a split model under observation, against the formula and against one device.

Each rank builds the model, splits it, takes a step to warm up, and one that is watched. The first rank also watches the
forward pass of the model whole.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from colrow import comm
from colrow.errors import DataError
from colrow.formula import Formula, Sums
from colrow.observe import Observer, Places
from colrow.parallelize import Recompute, find_plan, parallelize
from colrow.picture import picture
from colrow.resolve import resolve
from colrow.resolved import Resolved
from colrow.traced import Kept, Kind, Layer, Message, Padding, Part, Trace, Way
from colrow.trial import Meshes


class Source(Protocol):
    """Where the model and a batch of a given shape come from: the same on every rank."""

    def build(self, *, dropout: float, seed: int) -> nn.Module: ...

    def batch(self, model: nn.Module, *, seed: int, shape: tuple[int, int] | None = None) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Watching:
    """What to trace: the degree, the mode, the batch. `name` is what the user calls the model."""

    name: str
    tp: int = 2
    sequence_parallel: bool = True
    batch: int = 2
    sequence: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Recompute = "elementwise"
    seed: int = 0


@dataclass(frozen=True)
class _Seen:
    """A watched step."""

    observer: Observer
    kept: tuple[Kept, ...]
    seconds: float


def watch(source: Source, s: Watching) -> Trace | None:
    """One rank's part; the default process group must be there. The first rank returns the trace, the others None.

    Raises:
        DataError: a model without layers to look at.
    """
    meshes = Meshes.of(s.tp)
    model = source.build(dropout=0.0, seed=s.seed).to(comm.device(meshes.tp), getattr(torch, s.dtype)).train()
    batch = source.batch(model, seed=s.seed + 1, shape=(s.batch, s.sequence))
    resolved = resolve(model, find_plan(model), s.tp, sequence_parallel=s.sequence_parallel)
    places = Places(resolved)
    if not places.layers:
        given, fix = "its plan names no block", "Give the layers the rule Block()"
        raise DataError(f"--model {s.name}", given, "a trace is of a model's layers", fix)
    whole = copy.deepcopy(model) if comm.is_rank_zero() else None
    mode = {"sequence_parallel": s.sequence_parallel, "recompute": s.recompute}
    split = parallelize(model, meshes.tp, check_inputs=0, **mode)
    _step(split, places, batch)
    split.zero_grad()
    seen = _step(split, places, batch)
    every = comm.exchange([int(1e6 * sum(m.seconds for m in seen.observer.messages))], meshes.tp)
    if whole is None:
        return None
    one = _step(whole, places, batch, backward=False)
    shapes = {name: taken for name, (taken, _) in one.observer.shapes.items()}
    formula = Formula(whole, resolved, places, shapes, one.observer.beside, getattr(torch, s.dtype).itemsize)
    parts = _Parts(seen, one, formula, s.recompute)
    return Trace(
        model=s.name,
        tp=s.tp,
        sequence_parallel=s.sequence_parallel,
        batch=shapes[places.layers[0]][0],
        sequence=prod(shapes[places.layers[0]][1:-1]),
        dtype=s.dtype,
        layers=tuple(parts.layer(name) for name in places.layers),
        outside={kind: parts.part("", kind) for kind in ("embedding", "head", "other")},
        total=parts.part(None, None),
        messages=tuple(seen.observer.messages),
        kept=seen.kept,
        padding=_padding(resolved),
        step_seconds=seen.seconds,
        waiting_seconds=tuple(microseconds / 1e6 for (microseconds,) in every),
        picture=picture(seen.observer, seen.kept, parts.layer(places.layers[0]).total, shapes[places.layers[0]]),
    )


def _step(model: nn.Module, places: Places, batch: Mapping[str, Tensor], *, backward: bool = True) -> _Seen:
    """Forward and backward, watched."""
    began = time.perf_counter()
    with Observer(model, places) as observer:
        loss = _loss(model(**batch))
        seconds = time.perf_counter() - began
        kept = observer.kept(loss, batch.values())
        began = time.perf_counter()
        if backward:
            loss.backward()
    return _Seen(observer, kept, seconds + time.perf_counter() - began)


def _loss(out: Any) -> Tensor:
    """The loss that the model returns; of a class without one, a sum of its first output."""
    if isinstance(out, Tensor):
        return out if out.dim() == 0 else out.float().sum()
    if out.get("loss") is not None:
        return out.loss
    return (out.logits if "logits" in out else out[0]).float().sum()


class _Parts:
    """Sums of what was seen, by layer and kind."""

    def __init__(self, seen: _Seen, one: _Seen, formula: Formula, recompute: Recompute) -> None:
        self.messages: Sequence[Message] = seen.observer.messages
        self.kept, self.on_one, self.formula = seen.kept, one.kept, formula
        self.should_keep = one.kept if recompute == "none" else formula.lean(one.kept)
        self.should_send: Sums = formula.sent()
        self.copies: Sums = formula.copies()

    def layer(self, name: str) -> Layer:
        here = [*self.messages, *self.kept, *self.on_one]
        kinds: list[Kind] = list(dict.fromkeys(entry.kind for entry in here if entry.layer == name))
        return Layer(name, self.part(name, None), {kind: self.part(name, kind) for kind in sorted(kinds)})

    def part(self, layer: str | None, kind: Kind | None) -> Part:
        """The sums; None: over all layers, and what is outside; over all kinds."""

        def here(where: str, what: Kind) -> bool:
            return layer in (None, where) and kind in (None, what)

        messages = [m for m in self.messages if here(m.layer, m.kind)]
        every = (self.kept, self.on_one, self.should_keep)
        mine, theirs, due = ([k for k in kept if here(k.layer, k.kind)] for kept in every)
        return Part(
            forward=_count(messages, "forward"),
            backward=_count(messages, "backward"),
            sent=sum(m.sent for m in messages),
            saved=sum(k.bytes for k in mine),
            formula_sent=sum(size for at, size in self.should_send.items() if here(*at)),
            formula_saved=sum(map(self.formula.saved, due))
            + sum(size for at, size in self.copies.items() if here(*at)),
            saved_on_one=sum(k.bytes for k in theirs),
        )


def _count(messages: Iterable[Message], way: Way) -> dict[str, int]:
    found = Counter(message.verb for message in messages if message.way == way)
    return {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0} | found


def _padding(resolved: Resolved) -> tuple[Padding, ...]:
    """The padded parameters: zeros over all ranks, in per cent of their own numbers."""
    padded = [row for row in resolved.rows if row.padding]
    sizes = [(row.name, resolved.tp * prod(row.local_shape), prod(row.global_shape)) for row in padded]
    return tuple(Padding(name, held - own, 100 * (held - own) / own) for name, held, own in sizes)
