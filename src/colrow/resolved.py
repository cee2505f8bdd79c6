"""A plan made concrete: what each module of one model becomes at one degree, as values to print and compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colrow.layout import I, Layout
from colrow.rules import Rule
from colrow.split import Heads, Split


class OwnConfig:
    """A config as one module sees it on one rank: some numbers are the rank's, the rest is the model's, which is not
    touched."""

    def __init__(self, config: Any, own: Mapping[str, int]) -> None:
        vars(self).update(own)
        vars(self)["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in vars(self):  # as copying asks, before there is anything
            raise AttributeError(name)
        return getattr(vars(self)["_config"], name)

    def __repr__(self) -> str:
        return f"OwnConfig({ {name: value for name, value in vars(self).items() if name != '_config'} })"


@dataclass(frozen=True)
class Site:
    """What one module becomes.

    Attributes:
        name, rule: the module's full name and its rule (None: it owns nothing, or single parameters only).
        sharded: whether the stream around it is this rank's tokens.
        splits, grads: its own parameters by short name: how split, or, if whole, how read.
        src, dst: the layouts at its two ends, where the rule has any.
        patches: attributes to set on it.
        transposed: whether a linear layer keeps its weight as (in, out).
        heads: attention's heads.
        stack: whether it holds blocks, and may be called by itself.
        partners: of a column or row layer: the part of the model in which its partner is.
    """

    name: str
    rule: Rule | None
    sharded: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict)
    grads: Mapping[str, Layout] = field(default_factory=dict)
    src: Layout = I
    dst: Layout = I
    patches: tuple[tuple[str, Any], ...] = ()
    transposed: bool = False
    heads: Heads | None = None
    stack: bool = False
    partners: str = ""


@dataclass(frozen=True)
class Row:
    """One parameter of a resolved plan, for people: sizes are numbers of elements per dimension, bytes at rest."""

    name: str
    rule: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    padding: int
    bytes_per_rank: int


@dataclass(frozen=True)
class Resolved:
    """A plan made concrete for one model, degree and mode. Print it; `parallelize` carries it out."""

    tp: int
    sequence_parallel: bool
    sites: tuple[Site, ...]
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        cells = [("parameter", "rule", "whole", "per rank")]
        cells += [
            (r.name, r.rule, "x".join(map(str, r.global_shape)), "x".join(map(str, r.local_shape))) for r in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
