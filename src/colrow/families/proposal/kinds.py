"""What the values of a module's code are to a split, and what comes of them: the rules that `reading` applies.

Each step of the code must be one that is known to do with this rank's heads, features or tokens what it does with the
whole. Any other step raises `Unclear`: that code was not understood is an answer, and a guess is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Kind(Enum):
    """What a value is."""

    OTHER = "another value"
    ONE = "1"
    REST = "-1"
    SIZE = "a size that every rank has"
    HEAD_DIM = "the size of a head"
    COUNT = "a number that a split changes"
    HIDDEN = "the hidden size"
    STREAM = "the stream"
    FEATURES = "features"
    BY_TOKEN = "heads (batch, sequence, heads, size)"
    HEADS = "heads"
    """(batch, heads, ...): each head by itself."""
    PROBABILITIES = "attention's probabilities"
    FUSED = "the pieces of a fused layer"
    OUT = "the output"


@dataclass(frozen=True)
class Given:
    """An argument beside the stream, or a buffer: a mask, positions."""

    name: str


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor of this kind."""

    of: Kind


@dataclass(frozen=True)
class Role:
    """What a child does when it is called: from a tensor of one of these kinds to a value; None: of the same kind."""

    takes: tuple[Kind, ...]
    gives: Any = None


class Unclear(Exception):  # noqa: N818 - an answer, which becomes a doubt
    """A step that is not known to be right when it is split, in a few words; and rules that one could write."""

    def __init__(self, why: str, *rules: str) -> None:
        super().__init__(why)
        self.rules = rules


STREAM, FEATURES, HEADS, OUT, OTHER = Kind.STREAM, Kind.FEATURES, Kind.HEADS, Kind.OUT, Kind.OTHER
BY_TOKEN: Final = Kind.BY_TOKEN
SIZE, COUNT, HEAD_DIM, REST = Kind.SIZE, Kind.COUNT, Kind.HEAD_DIM, Kind.REST
PROBABILITIES, FUSED, HIDDEN = Kind.PROBABILITIES, Kind.FUSED, Kind.HIDDEN

COLUMN: Final = Role((STREAM,), FEATURES)
FUSED_COLUMN: Final = Role((STREAM,), FUSED)
ROW: Final = Role((FEATURES,), OUT)
HEAD_NORM: Final = Role((HEADS, BY_TOKEN))
ELEMENTWISE: Final = Role((FEATURES,))
TOKENWISE: Final = Role((STREAM,))
DROPOUT: Final = Role((FEATURES, PROBABILITIES, OUT, STREAM))
CLOSES: Final = Role((STREAM,), OTHER)

_TENSORS = (STREAM, FEATURES, BY_TOKEN, HEADS, PROBABILITIES, FUSED, OUT)
_ELEMENTWISE = ("silu", "gelu", "relu", "relu6", "sigmoid", "tanh", "softplus", "square", "clamp", "clamp_", "pow")
_AS_IT_IS = ("to", "float", "type_as", "contiguous")
_LAST_TWO = ([2, 3], [3, 2], [-1, -2], [-2, -1])
ATTENDS = ("attention_interface", "eager_attention_forward", "scaled_dot_product_attention")


_BESIDE_HEADS = ("mask", "bias", "position", "cache", "output_attentions")
"""Arguments of attention that are the same for all heads, or cut to a rank's."""


def flat(value: Any) -> list[Any]:
    """The values in nested tuples."""
    return [part for item in value for part in flat(item)] if isinstance(value, tuple) else [value]


def changed(*values: Any) -> list[Any]:
    """Those of the values that a split changes."""
    kinds = (*_TENSORS, COUNT, HIDDEN)
    return [v for v in flat(values) if v in kinds or isinstance(v, Shape)]


def joined(one: Any, other: Any) -> Any:
    """What a name is after two ways through the code."""
    if one == other:
        return one
    if not changed(one) or not changed(other):
        return one if changed(one) else other
    raise Unclear(f"it goes on with {named(one)} or {named(other)}")


def named(value: Any) -> str:
    return (
        value.value if isinstance(value, Kind) else f"'{value.name}'" if isinstance(value, Given) else "several values"
    )


def dimension(of: Kind, place: int) -> Kind:
    """Entry `place` of the shape of a tensor."""
    if of is HEADS:
        return COUNT if place in (1, -3) else HEAD_DIM if place in (-1, 3) else SIZE
    if of is BY_TOKEN:
        return COUNT if place in (2, -2) else HEAD_DIM if place in (-1, 3) else SIZE
    if of in (STREAM, FEATURES):
        return SIZE if place in (0, 1) else HIDDEN if of is STREAM else COUNT
    raise Unclear(f"it reads the shape of {of.value}")


def binary(one: Any, other: Any, *, matmul: bool = False, scales: bool = False) -> Any:
    """An elementwise operation (one that `scales` is linear), or a product of matrices."""
    kinds = {*changed(one, other)}
    if matmul and kinds <= {HEADS, PROBABILITIES} and changed(one) and changed(other):
        return HEADS
    plain = [v for v in (one, other) if not changed(v)]
    if not kinds:
        return next((v for v in (one, other) if isinstance(v, Given)), SIZE if SIZE in plain else one)
    if matmul or len(kinds) > 1 or isinstance(one, tuple) or isinstance(other, tuple):
        raise Unclear(f"it combines {named(one)} with {named(other)}")
    (kind,) = kinds
    beside = next((v.name for v in plain if isinstance(v, Given)), "")
    if beside and not (kind in (HEADS, PROBABILITIES) and ("mask" in beside or "bias" in beside)):
        raise Unclear(f"it combines {named(kind)} with '{beside}'")
    if kind in (HEADS, BY_TOKEN, FEATURES, COUNT, PROBABILITIES) or (kind is OUT and scales and plain):
        return kind
    raise Unclear(f"it computes with {named(kind)}")


def view(kind: Kind, sizes: list[Any]) -> Kind:
    """`view` or `reshape`: (batch, sequence, features) to (batch, sequence, heads, size), or back."""
    *before, last = sizes or [OTHER]
    tokens = before[:-1]
    if kind is FEATURES and (last is HEAD_DIM or (last is REST and before[-1:] == [COUNT])):
        if before[-1] in (COUNT, REST) and tokens and all(size is SIZE for size in tokens):
            return BY_TOKEN
    if kind in (FEATURES, BY_TOKEN) and last in (COUNT, REST) and before and all(size is SIZE for size in before):
        return FEATURES
    raise Unclear(f"it gives {named(kind)} a shape that is not known to hold on every rank")


def method(kind: Any, name: str, args: list[Any], numbers: list[int | None]) -> Any:
    """`tensor.name(...)`; `numbers` are the arguments that are written out."""
    if name in _AS_IT_IS and kind in _TENSORS and not changed(*args):
        return kind
    if name in ("view", "reshape"):
        return view(kind, flat(tuple(args)))
    if name == "size" and kind in _TENSORS:
        return Shape(kind) if not numbers else dimension(kind, numbers[0] if numbers[0] is not None else 9)
    if name == "flatten" and kind is BY_TOKEN and numbers in ([2], [-2]):
        return FEATURES
    if name == "chunk" and kind is FUSED and numbers == [2, -1]:
        return (FEATURES, FEATURES)
    if (name == "transpose" and numbers in ([1, 2], [2, 1])) or (name == "permute" and numbers == [0, 2, 1, 3]):
        if kind in (HEADS, BY_TOKEN):
            return BY_TOKEN if kind is HEADS else HEADS
    if name == "transpose" and kind is HEADS and numbers in _LAST_TWO:
        return kind
    if name == "masked_fill" and kind is HEADS and not changed(*args):
        return kind
    if name == "update" and kind not in _TENSORS and args[:2] == [HEADS, HEADS] and not changed(*args[2:]):
        return (HEADS, HEADS)
    if name == "append" and kind not in _TENSORS:
        return OTHER
    return function(name, [kind, *args], [None, *numbers]) if kind in _TENSORS else _unknown(name, [kind, *args])


def function(name: str, args: list[Any], numbers: list[int | None]) -> Any:
    """`name(...)` of torch or of the module's file."""
    tensors = changed(*args)
    one = tensors[0] if len(tensors) == 1 and tensors[0] is args[0] else None
    if not tensors:
        return SIZE if args and all(arg is SIZE for arg in args) else OTHER
    if name in _ELEMENTWISE and one in (FEATURES, HEADS, BY_TOKEN):
        return one
    if name == "dropout" and one in (FEATURES, PROBABILITIES, OUT, STREAM):
        return one
    if name == "softmax" and one in (HEADS, PROBABILITIES) and numbers[1:] == [-1]:
        return PROBABILITIES
    rotated = args[: len(tensors)]
    if name.startswith("apply_rotary") and tensors == rotated and rotated in ([HEADS] * 2, [BY_TOKEN] * 2):
        return tuple(rotated)
    if name == "repeat_kv" and args[:2] == [HEADS, COUNT]:
        return HEADS
    if name == "matmul":
        return binary(args[0], args[1], matmul=True)
    beside = [arg.name for arg in args if isinstance(arg, Given)]
    if name in ATTENDS and all(any(word in at for word in _BESIDE_HEADS) for at in beside) and tensors == [HEADS] * 3:
        return HEADS if name.startswith("scaled") else (BY_TOKEN, PROBABILITIES)
    if name == "cat" and {*flat(args[0])} in ({HEADS}, {BY_TOKEN}) and numbers[1:] == [-1]:
        return flat(args[0])[0]
    return _unknown(name, args)


def _unknown(name: str, args: list[Any]) -> Any:
    tensors = changed(*args)
    if tensors:
        raise Unclear(f"it calls {name} with {named(tensors[0])}")
    return next((arg for arg in args if isinstance(arg, Given)), OTHER)
