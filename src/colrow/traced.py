"""What `trace` has seen of one training step, as values to print, to draw and to compare.

Bytes are those of one rank, the first, unless a name says otherwise. A *region* is attention, an MLP or experts; what
stands in a layer outside of them (norms, dropout, residuals) is its stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Shape = tuple[int, ...]
Way = Literal["forward", "backward"]
Kind = Literal["stream", "attention", "mlp", "experts", "embedding", "head", "other"]
VERBS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class Message:
    """A collective.

    Attributes:
        verb: one of `VERBS`.
        sent: the bytes that this rank sends, by the ring's count: see `comm`.
        seconds: how long this rank was in it, its peers' delay included.
        module: the innermost module in whose code it is; "" for the model's own, and for the sum of the gradients of
            replicated parameters.
        kind, layer: where that module is; the layer is a block's name, or "" outside the blocks.
    """

    verb: str
    way: Way
    sent: float
    seconds: float
    module: str
    kind: Kind
    layer: str


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps for the backward pass, counted once and with all of its memory.

    Attributes:
        module: the innermost module that was running when it was first kept.
        by: the operation that keeps it, "MulBackward0".
    """

    module: str
    kind: Kind
    layer: str
    by: str
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Part:
    """Sums over one kind of place in a layer, over a layer, or over the model.

    Attributes:
        forward, backward: collectives by verb.
        formula_sent, formula_saved: what the formula gives for `sent` and `saved`.
        saved_on_one: what one device keeps here.
    """

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    sent: float
    saved: int
    formula_sent: float
    formula_saved: float
    saved_on_one: int

    def as_json(self) -> dict[str, Any]:
        return {
            "forward": dict(self.forward),
            "backward": dict(self.backward),
            "bytes_sent_per_rank": self.sent,
            "saved_bytes_per_rank": self.saved,
            "formula": {"bytes_sent_per_rank": self.formula_sent, "saved_bytes_per_rank": self.formula_saved},
            "single_device": {"saved_bytes": self.saved_on_one},
        }


@dataclass(frozen=True)
class Layer:
    """A block, and its parts by kind: the stream, attention, ..."""

    name: str
    total: Part
    kinds: Mapping[Kind, Part]


@dataclass(frozen=True)
class Linear:
    """A split linear layer as it ran on this rank.

    Attributes:
        whole, local: (in, out) of its weight: its true size, and that of this rank's part without padding.
        takes, gives: its activations on this rank.
    """

    name: str
    role: Literal["column", "row"]
    whole: tuple[int, int]
    local: tuple[int, int]
    takes: Shape
    gives: Shape


@dataclass(frozen=True)
class Region:
    """Attention, an MLP or experts of the first layer, as it ran on this rank.

    Attributes:
        takes, gives: the stream at its two ends: (tokens of this rank, hidden) under sequence parallelism, else
            (..., hidden).
        whole: the activations inside, after f.
        activation: what stands between column and row layers, "GELUActivation", if it is a module or in the config.
        entry, exit: the verbs that f and g sent, (forward, backward); "" where nothing was sent.
        again: how often what f gathered was gathered again in backward.
        sent: bytes by "entry", "exit", "again", forward and backward together.
    """

    name: str
    kind: Kind
    takes: Shape
    whole: Shape
    gives: Shape
    linears: tuple[Linear, ...]
    activation: str
    entry: tuple[str, str]
    exit: tuple[str, str]
    again: int
    sent: Mapping[str, float]


@dataclass(frozen=True)
class Picture:
    """The first layer, to be drawn.

    Attributes:
        tokens: how many tokens each rank has in the stream; without sequence parallelism each has all.
        total_tokens: how many there are.
        norms: the names of the modules with parameters in the stream.
        saved_on_one, saved: bytes kept for backward in this layer on one device, and on this rank.
    """

    layer: str
    hidden: int
    tokens: tuple[int, ...]
    total_tokens: int
    norms: tuple[str, ...]
    regions: tuple[Region, ...]
    saved_on_one: int
    saved: int


@dataclass(frozen=True)
class Padding:
    """A parameter that is padded with zeros, so that every rank holds as much: entries, and per cent of its own."""

    name: str
    entries: int
    percent: float


@dataclass(frozen=True)
class Trace:
    """One step of training, watched. See the module's first lines.

    Attributes:
        model: as the user named it.
        batch, sequence: the shape of its input; for images the sequence is the number of patches.
        outside: what is in no layer, by kind: embedding, head (with the loss), other (with the replicated gradients).
        messages: in the order in which they were sent.
        kept: in the order in which they were kept.
        step_seconds: forward and backward. waiting_seconds: in collectives, of every rank.
    """

    model: str
    tp: int
    sequence_parallel: bool
    batch: int
    sequence: int
    dtype: str
    layers: tuple[Layer, ...]
    outside: Mapping[Kind, Part]
    total: Part
    messages: tuple[Message, ...]
    kept: tuple[Kept, ...]
    padding: tuple[Padding, ...]
    step_seconds: float
    waiting_seconds: tuple[float, ...]
    picture: Picture

    def as_json(self) -> dict[str, Any]:
        """As `colrow trace --json` prints it."""
        total = self.total.as_json()
        return {
            "model": self.model,
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "batch": self.batch,
            "sequence": self.sequence,
            "dtype": self.dtype,
            "layers": [
                {"name": layer.name, **layer.total.as_json(), "kinds": _parts(layer.kinds)} for layer in self.layers
            ],
            "outside": _parts(self.outside),
            "total": {name: total[name] for name in total if name not in ("formula", "single_device")},
            "single_device": total["single_device"],
            "formula": total["formula"],
            "step_seconds": self.step_seconds,
            "waiting_seconds": list(self.waiting_seconds),
            "padding": [asdict(row) for row in self.padding],
            "kept": [asdict(row) for row in self.kept],
            "messages": [asdict(row) for row in self.messages],
        }


def _parts(parts: Mapping[Kind, Part]) -> dict[str, Any]:
    return {kind: part.as_json() for kind, part in parts.items()}
