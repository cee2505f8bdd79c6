"""A plan says what the parts of a model *mean*: glob -> rule, as one frozen value. How to split follows from it.

    Plan({
        "blocks.*":           Block(),
        "blocks.*.norm_*":    Norm(),
        "blocks.*.attn":      Attention(heads="n_head", kv_heads="n_kv_head"),
        "blocks.*.attn.qkv":  Column(HEADS, KV_HEADS, KV_HEADS),
        "blocks.*.attn.proj": Row(HEADS),
        ...
    })

Patterns name modules (or single parameters); `*` stands within one name between dots, `**` for any number of names. A
plan is *total*: every pattern matches something, every parameter has exactly one owner. `first | second` asks `second`
only for what `first` does not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import translate
from typing import ClassVar

from colrow.errors import PlanError, near_misses
from colrow.layout import Layout


class Unit(Enum):
    """What a sharded dimension is made of."""

    FEATURES = "features"
    """Independent features, as of an MLP's hidden layer: any of them may go to any rank."""
    HEADS = "heads"
    """Query heads, of the size and number that the Attention rule above names: dealt out whole."""
    KV_HEADS = "kv_heads"
    """Key/value heads: dealt out with their query heads; whole on every rank if there are fewer than ranks."""
    GROUPS = "groups"
    """A key/value head with its query heads before it, [q q k v | q q k v | ...]; [q k v | ...] if each has its own."""


FEATURES, HEADS, KV_HEADS, GROUPS = Unit.FEATURES, Unit.HEADS, Unit.KV_HEADS, Unit.GROUPS


@dataclass(frozen=True)
class Rule:
    """Base of the rules."""

    for_parameters: ClassVar[bool] = False
    """Whether it may be given to a single parameter as well as to a module."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Replicated(Rule):
    """Whole on every rank: any module or single parameter that is not split.

    `grad` overrides how its parameters are read (`I`: each rank computes the whole gradient; `R`: one term of it).
    By default that follows from the place: `I` on whole activations, `R` on this rank's tokens, and `R` inside
    attention or MLP, where a rank sees its own heads or features only.
    """

    for_parameters = True
    grad: Layout | None = None


@dataclass(frozen=True)
class Norm(Replicated):
    """LayerNorm, RMSNorm or a user's own: whole on every rank, computed token by token (or head by head)."""


@dataclass(frozen=True)
class LastNorm(Rule):
    """The norm after the last block, where the sequence-parallel stretch ends: its output is whole."""


@dataclass(frozen=True, init=False)
class Column(Rule):
    """A linear layer split by its outputs, which are made of these units: several for a fused projection.

    `Column()` is an MLP's first layer, `Column(FEATURES, FEATURES)` a fused [gate | up], `Column(HEADS, KV_HEADS,
    KV_HEADS)` a fused [q | k | v], and `Column(GROUPS)` one that is fused head by head, [q0 k0 v0 | q1 k1 v1 | ...].
    `head_dim` is the size of its heads where it is not that of the Attention rule.
    """

    units: tuple[Unit, ...]
    head_dim: int | None

    def __init__(self, *units: Unit, head_dim: int | None = None) -> None:
        object.__setattr__(self, "units", units or (FEATURES,))
        object.__setattr__(self, "head_dim", head_dim)

    def __str__(self) -> str:
        return f"Column({', '.join(unit.value for unit in self.units)})"


@dataclass(frozen=True)
class Row(Rule):
    """A linear layer split by its inputs, whose outputs are summed: the partner of one or more column layers.

    `head_dim` is the size of its heads where it is not that of the Attention rule.
    """

    unit: Unit = FEATURES
    head_dim: int | None = None

    def __str__(self) -> str:
        return f"Row({self.unit.value})"


@dataclass(frozen=True, init=False)
class Sliced(Rule):
    """Any module or parameter inside attention or an MLP that works on a rank's own slice as it does on the whole.

    Its own `forward` runs with the slice along dimension `dim`, which is made of these units: one bias for each head,
    `Sliced(0, HEADS, head_dim=1)`; the stacked weights of experts, `Sliced(1, FEATURES, FEATURES)` and `Sliced(2)`.
    """

    for_parameters = True
    dim: int
    units: tuple[Unit, ...]
    head_dim: int | None

    def __init__(self, dim: int, *units: Unit, head_dim: int | None = None) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "units", units or (FEATURES,))
        object.__setattr__(self, "head_dim", head_dim)

    def __str__(self) -> str:
        return f"Sliced({self.dim}: {', '.join(unit.value for unit in self.units)})"


@dataclass(frozen=True)
class Vocab(Rule):
    """A token embedding, split over the vocabulary."""


@dataclass(frozen=True)
class Head(Rule):
    """The output projection, split over the vocabulary; it may share its weight with a `Vocab` embedding, and its bias
    with a parameter elsewhere, which then has this rule too.

    Its logits are a DTensor, which `F.cross_entropy` (or an `nn.CrossEntropyLoss`) in the model takes as it is; where
    they leave the model without a loss they are made whole.
    """

    for_parameters = True


@dataclass(frozen=True)
class Attention(Rule):
    """The attention module: one gather at its entry. Says its numbers of heads, or the attributes that hold them.

    On each rank the attributes are set to what the rank computes. `kv_heads` may be left out where all heads have their
    own keys and values. `groups` names an attribute with the number of query heads for each key/value head, `width`
    one with heads x head size. `config` names numbers of `self.config` that the module reads itself, as pairs of the
    config's name and "heads" or "kv_heads": it then sees a config of its own, and the model's is not touched.

    Arguments of its `forward`: a mask or bias of shape (batch, heads, ...) is cut to the rank's heads; `per_head` names
    others, of shape (batch x heads, ...), to be cut as well. `residual` names one that is added to its output.
    """

    heads: str | int
    kv_heads: str | int | None = None
    head_dim: str | int = "head_dim"
    groups: str | None = None
    width: str | None = None
    config: tuple[tuple[str, str], ...] = ()
    per_head: tuple[str, ...] = ()
    residual: str | None = None


@dataclass(frozen=True)
class Mlp(Rule):
    """A module that holds column and row layers: one gather at its entry. (Without it, each column layer gathers.)

    `residual` names an argument of its `forward` that is added to its output.
    """

    residual: str | None = None


@dataclass(frozen=True)
class Moe(Rule):
    """A mixture of experts: one gather at its entry, one sum at its exit, for all that its experts give."""


@dataclass(frozen=True)
class Router(Replicated):
    """Inside `Moe`: returns (logits, ...). The logits may be read outside, for an auxiliary loss; the experts use the
    rest."""


@dataclass(frozen=True)
class Block(Rule):
    """A transformer block: norms, dropout and residuals, token by token, around attention and MLP.

    `last`: no norm follows it that could have the rule `LastNorm`, so its own output is whole.
    """

    last: bool = False


@dataclass(frozen=True)
class Drop(Rule):
    """An `nn.Dropout` inside attention or MLP: `HEADS` for probabilities (batch, heads, ...), `FEATURES` between a
    column and a row layer (..., features), None after the row layer. Elsewhere dropout needs no rule."""

    unit: Unit | None = None


class Plan:
    """A total map from the parts of a model to rules; immutable. See the module's first lines.

    Arguments:
        rules: pattern -> rule. Within one plan, two patterns may not give one module two different rules.
    """

    __slots__ = ("layers",)
    layers: tuple[tuple[tuple[str, Rule], ...], ...]

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        for pattern, rule in rules.items():
            if not isinstance(rule, Rule):
                kinds = ", ".join(kind.__name__ for kind in Rule.__subclasses__())
                given = f"{rule!r} is not a rule"
                raise PlanError(f"plan, pattern '{pattern}'", given, f"the rules are {kinds}", "Write Column(), say")
        object.__setattr__(self, "layers", (tuple(rules.items()),))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Plan is immutable; combine plans with |")

    def __or__(self, other: Plan) -> Plan:
        return _of(self.layers + other.layers)

    def __reduce__(self) -> tuple[object, ...]:
        return _of, (self.layers,)  # copying and pickling would set attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.layers == other.layers

    def __hash__(self) -> int:
        return hash(self.layers)

    def __repr__(self) -> str:
        layers = [", ".join(f"{pattern!r}: {rule}" for pattern, rule in layer) for layer in self.layers]
        return " | ".join(f"Plan({{{layer}}})" for layer in layers)

    def matches(self, names: Iterable[str]) -> bool:
        """Whether any of its patterns names one of these."""
        patterns = [glob(pattern) for layer in self.layers for pattern, _ in layer]
        return any(pattern.match(name) for pattern in patterns for name in names)

    def match(self, modules: Iterable[str], params: Iterable[str]) -> dict[str, Rule]:
        """The rule of every module or parameter that has one, by name.

        Raises:
            PlanError: a pattern that matches nothing (with near misses), or two rules for one name.
        """
        modules, params = list(modules), list(params)
        found: dict[str, Rule] = {}
        for layer in self.layers:
            mine: dict[str, tuple[str, Rule]] = {}
            for pattern, rule in layer:
                names = [*modules, *params] if rule.for_parameters else modules
                wanted = glob(pattern)
                hits = [name for name in names if wanted.match(name)]
                if not hits:
                    given = f"it matches no {'module or parameter' if rule.for_parameters else 'module'}"
                    near = near_misses(pattern, [name for name in names if name])
                    raise PlanError(f"plan, pattern '{pattern}'", given, f"there are {near}", "Correct the pattern")
                for name in hits:
                    other, theirs = mine.setdefault(name, (pattern, rule))
                    if theirs != rule:
                        given = f"'{other}' says {theirs} and '{pattern}' says {rule}"
                        raise PlanError(name, given, "one part of a model has one rule", "Narrow one of the patterns")
            found = {name: rule for name, (_, rule) in mine.items()} | found
        return found


def _of(layers: tuple[tuple[tuple[str, Rule], ...], ...]) -> Plan:
    plan = object.__new__(Plan)
    object.__setattr__(plan, "layers", layers)
    return plan


def glob(pattern: str) -> re.Pattern[str]:
    """`*` within one name between dots, `**` for any number of names."""
    if not pattern:
        return re.compile(r"\Z")
    parts = []
    for part in pattern.split("."):
        inner = translate(part)[len("(?s:") : -len(r")\Z")].replace(".", "[^.]")  # `?` too stays within one name
        parts.append(r"[^.]+(?:\.[^.]+)*" if part == "**" else "(?=[^.])" + inner)  # which is not empty
    return re.compile(r"\.".join(parts) + r"\Z")
