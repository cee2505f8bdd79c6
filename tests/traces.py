"""Traces made by hand, as `colrow trace` would have measured them: for the tests of drawings and of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Literal

from colrow.layout import chunk_sizes
from colrow.traced import Kept, Kind, Layer, Linear, Message, Padding, Part, Picture, Region, Shape, Trace, Way

FLOAT = 4
Role = Literal["column", "row"]


def linear(name: str, role: Role, whole: tuple[int, int], ranks: int, tokens: Shape, mine: int | None = None) -> Linear:
    """A split linear layer of the first rank; `mine`: how much of the split dimension that has."""
    mine = chunk_sizes(whole[role == "column"], ranks)[0] if mine is None else mine
    part = (whole[0], mine) if role == "column" else (mine, whole[1])
    return Linear(name, role, whole, part, (*tokens, part[0]), (*tokens, part[1]))


def region(
    kind: Kind, linears: Sequence[Linear], hidden: int, tokens: Shape, ranks: int, sharded: bool, activation: str = ""
) -> Region:
    piece = prod(tokens) * hidden * FLOAT * (ranks - 1) / ranks
    ends = (chunk_sizes(prod(tokens), ranks)[0], hidden) if sharded else (*tokens, hidden)
    return Region(
        name=f"layers.0.{kind}",
        kind=kind,
        takes=ends,
        whole=(*tokens, hidden),
        gives=ends,
        linears=tuple(linears),
        activation=activation,
        entry=("all_gather", "reduce_scatter") if sharded else ("", "all_reduce"),
        exit=("reduce_scatter", "all_gather") if sharded else ("all_reduce", ""),
        again=int(sharded),
        sent={"entry": 2 * piece, "exit": 2 * piece, "again": piece if sharded else 0.0},
    )


def messages(seen: Region, layer: str) -> list[Message]:
    ways: tuple[Way, Way] = ("forward", "backward")
    piece = seen.sent["exit"] / 2
    found = [
        Message(verb, way, piece * (2 if verb == "all_reduce" else 1), 0.001, seen.name, seen.kind, layer)
        for way, verbs in zip(ways, zip(seen.entry, seen.exit, strict=True), strict=True)
        for verb in verbs
        if verb
    ]
    again = Message("all_gather", "backward", piece, 0.001, seen.name, seen.kind, layer)
    return found + [again] * seen.again


def part(sent: Sequence[Message], saved: int, on_one: int) -> Part:
    ways = (Counter(message.verb for message in sent if message.way == way) for way in ("forward", "backward"))
    count = sum(message.sent for message in sent)
    return Part(*ways, sent=count, saved=saved, formula_sent=count, formula_saved=saved * 0.9, saved_on_one=on_one)


def trace(regions: Sequence[Region], tp: int, *, sharded: bool = False, model: str = "gpt", layers: int = 2) -> Trace:
    """A trace of a model with such layers: batch 2, sequence 13."""
    hidden, tokens = (regions[0].takes[-1] if regions else 8), 26
    found, sent, kept = [], [], []
    for number in range(layers):
        name = f"layers.{number}"
        kinds: dict[Kind, Part] = {"stream": part([], 40_000 // tp if sharded else 40_000, 40_000)}
        for seen in regions:
            own = messages(seen, name)
            kinds[seen.kind] = part(own, 120_000 // tp, 120_000)
            sent += own
            kept += [
                Kept(f"{name}.{seen.kind}.up", seen.kind, name, "AddmmBackward0", (26, 64), "float32", 26 * 64 * FLOAT),
                Kept(f"{name}.{seen.kind}.down", seen.kind, name, "MmBackward0", (26, 32), "float32", 26 * 32 * FLOAT),
            ]
        total = part(
            [message for message in sent if message.layer == name],
            sum(kind.saved for kind in kinds.values()),
            sum(kind.saved_on_one for kind in kinds.values()),
        )
        found.append(Layer(name, total, kinds))
    outside: dict[Kind, Part] = {"embedding": part([], 5_000, 5_000), "head": part([], 9_000, 18_000)}
    saved, on_one = sum(layer.total.saved for layer in found), sum(layer.total.saved_on_one for layer in found)
    return Trace(
        model=model,
        tp=tp,
        sequence_parallel=sharded,
        batch=2,
        sequence=13,
        dtype="float32",
        layers=tuple(found),
        outside=outside,
        total=part(sent, saved + 14_000, on_one + 23_000),
        messages=tuple(sent),
        kept=tuple(kept),
        padding=(Padding("layers.0.mlp.up.weight", 512, 12.5),),
        step_seconds=0.25,
        waiting_seconds=tuple(0.01 * (rank + 1) for rank in range(tp)),
        picture=Picture(
            layer="layers.0",
            hidden=hidden,
            tokens=chunk_sizes(tokens, tp) if sharded else (tokens,) * tp,
            total_tokens=tokens,
            norms=("norm_1", "norm_2")[: len(regions)],
            regions=tuple(regions),
            saved_on_one=found[0].total.saved_on_one if found else 0,
            saved=found[0].total.saved if found else 0,
        ),
    )


def gpt(tp: int = 2, *, sharded: bool = False, hidden: int = 32, inner: int = 128) -> Trace:
    """Attention with a fused [q | k | v] and an MLP with a GeLU."""
    tokens = (26,) if sharded else (2, 13)
    attention = [
        linear("layers.0.attention.qkv", "column", (hidden, 3 * hidden), tp, tokens),
        linear("layers.0.attention.out", "row", (hidden, hidden), tp, tokens),
    ]
    mlp = [
        linear("layers.0.mlp.up", "column", (hidden, inner), tp, tokens),
        linear("layers.0.mlp.down", "row", (inner, hidden), tp, tokens),
    ]
    return trace(
        [
            region("attention", attention, hidden, tokens, tp, sharded),
            region("mlp", mlp, hidden, tokens, tp, sharded, "GELUActivation"),
        ],
        tp,
        sharded=sharded,
    )


def llama(tp: int = 4, *, sharded: bool = True, hidden: int = 64, inner: int = 100) -> Trace:
    """Separate q, k and v with two key/value heads of 16, and a gated MLP."""
    tokens = (26,) if sharded else (2, 13)
    kv = 16 * (1 if tp >= 2 else 2)
    attention = [
        linear("layers.0.self_attn.q_proj", "column", (hidden, hidden), tp, tokens),
        linear("layers.0.self_attn.k_proj", "column", (hidden, 32), tp, tokens, kv),
        linear("layers.0.self_attn.v_proj", "column", (hidden, 32), tp, tokens, kv),
        linear("layers.0.self_attn.o_proj", "row", (hidden, hidden), tp, tokens),
    ]
    mlp = [
        linear("layers.0.mlp.gate_proj", "column", (hidden, inner), tp, tokens),
        linear("layers.0.mlp.up_proj", "column", (hidden, inner), tp, tokens),
        linear("layers.0.mlp.down_proj", "row", (inner, hidden), tp, tokens),
    ]
    return trace(
        [
            region("attention", attention, hidden, tokens, tp, sharded),
            region("mlp", mlp, hidden, tokens, tp, sharded, "SiLUActivation"),
        ],
        tp,
        sharded=sharded,
        model="llama",
    )
