"""A plan made concrete: what each module of one model becomes at one degree, as values to print and compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from colrow.layout import I, Layout
from colrow.plan import Rule
from colrow.split import Split


@dataclass(frozen=True)
class Site:
    """What one module becomes.

    Attributes:
        name, rule: the module's full name and its rule (None: it owns nothing, or single parameters only).
        sharded: whether the stream around it is this rank's tokens.
        splits, grads: its own parameters by short name: how split, or, if whole, how read.
        src, dst: the layouts at its two ends, where the rule has any.
        patches: attributes to set on it.
    """

    name: str
    rule: Rule | None
    sharded: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict)
    grads: Mapping[str, Layout] = field(default_factory=dict)
    src: Layout = I
    dst: Layout = I
    patches: tuple[tuple[str, int], ...] = ()


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
