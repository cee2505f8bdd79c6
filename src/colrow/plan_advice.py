"""Why a parameter stays whole, and choices that cost more than they need to, each with what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from colrow import rules
from colrow.figures import folded, percent, share, size
from colrow.plan_tree import Part
from colrow.resolved import Resolved, Site
from colrow.rules import Unit
from colrow.split import Heads, Split

MUCH_PADDING = 0.10
"""A share of padding that is worth a word."""
LARGE = 0.05
"""A share of a rank's bytes that is worth a word if it is whole on every rank for no better reason than its rule."""

NORM = "a norm: it works token by token, over all features"
ROUTER = "a router: every rank holds a part of every expert, and routes all tokens"
TABLE = "a table that is looked up whole, as of positions: no rule splits it"
ADAPTER = "an adapter's factor whose sizes are not split"
ROW_BIAS = "a row layer's bias: it is added once, after the sum over the ranks"
LATENT = "inside attention, but made of no heads: all heads read it"
BY_RULE = "its rule is Replicated: no rule splits it"
_NORMS = (rules.Norm, rules.LastNorm)


@dataclass(frozen=True)
class Advice:
    """A choice that costs more than it needs to.

    Attributes:
        kind: a word for scripts: "kv_heads", "heads", "idle_ranks", "vocabulary", "padding" or "large_whole".
        where: the modules or parameters; layers that are alike are one name, `layers.0-79.attn`.
        given: what was found.
        fix: what to do.
    """

    kind: str
    where: str
    given: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.given}. {self.fix}."


class Places:
    """Where each parameter of a resolved plan stands: its site, its split, the attention above it."""

    def __init__(self, resolved: Resolved) -> None:
        self.sites: Mapping[str, Site] = {site.name: site for site in resolved.sites}
        self.tp = resolved.tp

    def site(self, name: str) -> Site:
        return self.sites[name.rpartition(".")[0]]

    def split(self, name: str) -> Split | None:
        return self.site(name).splits.get(name.rpartition(".")[2])

    def is_split(self, name: str) -> bool:
        """Whether each rank stores its own entries of a parameter."""
        split = self.split(name)
        return split is not None and split.sharded

    def attention(self, name: str) -> Site | None:
        """The attention module that a parameter is in."""
        parts = name.split(".")
        above = (self.sites.get(".".join(parts[:i])) for i in range(len(parts) - 1, 0, -1))
        return next((site for site in above if site is not None and site.heads is not None), None)


def why_whole(name: str, module: nn.Module, places: Places) -> str:
    """The reason why a parameter is whole on every rank. `module` holds it."""
    rule, split, attention = places.site(name).rule, places.split(name), places.attention(name)
    if split is not None and attention is not None and attention.heads is not None:
        return f"{_kv_heads(attention.heads, split, places.tp)}: a rank reads the heads that its query heads need"
    if ".lora_" in name:
        return ADAPTER
    if isinstance(rule, _NORMS):
        return NORM
    if isinstance(rule, rules.Router):
        return ROUTER
    if isinstance(rule, rules.Row):
        return ROW_BIAS
    if isinstance(module, nn.Embedding):
        return TABLE
    return LATENT if attention is not None else BY_RULE


def _kv_heads(heads: Heads, split: Split, tp: int) -> str:
    """`split` is that of a projection which makes key/value heads, perhaps fused with query heads."""
    fused = split.true_size > heads.kv.size
    count = heads.kv.units
    said = f"{count} key/value head{'' if count == 1 else 's'} for {tp} ranks"
    return f"{said}, fused with the query heads" if fused else said


def advise(resolved: Resolved, parts: Iterable[Part], bytes_per_rank: int) -> tuple[Advice, ...]:
    """The odd choices of a plan at its degree; equal ones in many layers are one. On one rank there is no choice."""
    if resolved.tp == 1:
        return ()
    places, parts = Places(resolved), list(parts)
    found: dict[tuple[str, str, str], dict[str, int]] = {}  # (kind, given, fix) -> bytes by name
    for kind, name, given, fix, cost in [*_of_heads(resolved), *_of_parts(parts, places)]:
        by_name = found.setdefault((kind, given, fix), {})
        by_name[name] = by_name.get(name, 0) + cost
    advice = []
    for (kind, given, fix), by_name in found.items():
        for where, names in folded(by_name).items():
            cost = sum(by_name[name] for name in names)
            if kind == "large_whole" and cost < LARGE * bytes_per_rank:
                continue
            part = f", {size(cost)} of each rank's {size(bytes_per_rank)} ({percent(share(cost, bytes_per_rank))})"
            advice.append(Advice(kind, where, given + (part if cost else ""), fix))
    return tuple(advice)


Finding = tuple[str, str, str, str, int]
"""(kind, name, given, fix, bytes on a rank)."""


def _of_heads(resolved: Resolved) -> Iterator[Finding]:
    """Heads that are padded."""
    for site in resolved.sites:
        if site.heads is None:
            continue
        true, slots = sum(site.heads.true_heads), site.heads.local_heads * resolved.tp
        idle, fix = site.heads.true_heads.count(0), _degrees(site.heads, true, resolved.tp)
        if idle:
            given = f"{true} heads on {resolved.tp} ranks: {idle} without a head, computing padding only"
            yield "idle_ranks", site.name, given, fix, 0
        elif slots > true:
            padding = f"{slots - true} of {slots} ({percent((slots - true) / slots)}) zero padding"
            given = f"{true} heads on {resolved.tp} ranks: each computes {site.heads.local_heads}, {padding}"
            yield "heads", site.name, given, fix, 0


def _degrees(heads: Heads, true: int, tp: int) -> str:
    """The degrees next to `tp` at which no head is padded."""
    kv = heads.kv.units
    most = 2 * tp
    fits = [d for d in range(2, most + 1) if (kv % d == 0 if d <= kv or kv == true else true % d == 0)]
    near = [max((d for d in fits if d < tp), default=0), min((d for d in fits if d > tp), default=0)]
    if not any(near):
        return f"No tp from 2 to {most} avoids it; the results are the same"
    return f"No head is padded at tp={' or '.join(str(d) for d in near if d)}"


def _of_parts(parts: Iterable[Part], places: Places) -> Iterator[Finding]:
    """Parameters that are whole, or padded."""
    for part in parts:
        name, row, split = part.row.name, part.row, places.split(part.row.name)
        rule, attention = places.site(name).rule, places.attention(name)
        if part.why and split is not None and attention is not None and attention.heads is not None:
            kv = attention.heads.kv.units
            given = f"{_kv_heads(attention.heads, split, places.tp)}: whole on every rank"
            fix = f"At tp={kv} or less they are split" if kv > 1 else "No tp splits one head; count its bytes"
            yield "kv_heads", attention.name, given, fix, row.bytes_per_rank
        elif part.why in (TABLE, LATENT, BY_RULE):
            fix = "Give it a rule that splits it, if one fits what it means, or count its bytes on every rank"
            yield "large_whole", name, f"{part.why}; it is large", fix, row.bytes_per_rank
        elif part.why or not row.padding or split is None:
            continue
        elif isinstance(rule, rules.Vocab | rules.Head):
            given = f"{split.true_size} entries on {places.tp} ranks: {row.padding} ({percent(part.waste)}) are padding"
            fix = f"Padding enters no softmax and no file; a multiple of {places.tp} has none"
            yield "vocabulary", name, given, fix, 0
        elif part.waste > MUCH_PADDING and _of_features(rule):
            given = f"{split.true_size} features on {places.tp} ranks: {percent(part.waste)} of the storage is padding"
            fix = f"A width that is a multiple of {places.tp} has none"
            yield "padding", name, given, fix, 0


def _of_features(rule: rules.Rule | None) -> bool:
    """Whether what is split is features: padded heads are spoken of once, at their attention."""
    units = (rule.unit,) if isinstance(rule, rules.Row) else getattr(rule, "units", ())
    return set(units) == {Unit.FEATURES}
