"""A plan in numbers, before anything is split: bytes per rank, what stays whole and why, padding, odd choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from colrow.figures import folded, percent, shape, share, size, table
from colrow.plan_advice import Advice
from colrow.plan_tree import Node, Part, fold
from colrow.resolved import Row


@dataclass(frozen=True)
class Totals:
    """Sums over all parameters; `parameters` and `trainable` are numbers of elements of the whole model.

    `adamw_bytes_per_rank` and `adamw_float32_bytes_per_rank` are estimates of what training holds beside activations:
    weights, gradients and AdamW's two moments, in the model's own dtype and all in float32. What is frozen counts once.
    """

    parameters: int
    trainable: int
    whole_bytes: int
    bytes_per_rank: int
    sharded_bytes_per_rank: int
    replicated_bytes: int
    padding_bytes_per_rank: int
    adamw_bytes_per_rank: int
    adamw_float32_bytes_per_rank: int


@dataclass(frozen=True)
class PlanReport:
    """What becomes of a model at one degree. Print it, or read its numbers.

    Attributes:
        tp: the number of ranks.
        sequence_parallel: whether norms, dropout and residuals are to be on 1/tp of the tokens.
        dtype: that of the parameters; "mixed" if there are several.
        rows: every parameter: name, rule, whole shape, shape on a rank, padding, bytes on a rank.
        totals: the sums.
        replicated: name -> why, for every parameter that is whole on every rank.
        waste: name -> the share of what the ranks store of it that is padding, for every parameter that is padded.
        warnings: choices that cost more than they need to, each with what to do.
    """

    tp: int
    sequence_parallel: bool
    dtype: str
    rows: tuple[Row, ...]
    totals: Totals
    replicated: Mapping[str, str]
    waste: Mapping[str, float]
    warnings: tuple[Advice, ...]

    def __str__(self) -> str:
        return "\n".join(text for text, _ in self.lines())

    def lines(self, *, brief: bool = False) -> Iterator[tuple[str, str]]:
        """What it says to people, line by line, each with a style: a tree, sums, what is whole or padded, warnings.

        `brief`: the tree, and what a rank holds.
        """
        yield from self._tree()
        yield "", ""
        headline, *sums = self._sums()
        yield headline
        if brief:
            return
        yield from sums
        for *heading, rows in (
            ("whole on every rank", "on a rank", "why", self._whole()),
            ("padded", "padding", "of what is stored", self._padded()),
        ):
            if rows:
                yield "", ""
                yield from _styled(table([tuple(heading), *rows]))
        if self.warnings:
            yield f"\n{len(self.warnings)} to look at:", "bold yellow"
            yield from ((f"  {warning}", "") for warning in self.warnings)

    def tree(self) -> tuple[Node, ...]:
        """The rows as a tree of modules, in which layers that are alike are one node."""
        return fold(Part(row, self.replicated.get(row.name, ""), self.waste.get(row.name, 0.0)) for row in self.rows)

    def _tree(self) -> Iterator[tuple[str, str]]:
        rows = [("parameter", "rule", "whole", "on a rank", "bytes", "share", "")]
        for top in self.tree():
            rows += [self._branch(drawn + node.label, node) for drawn, node in top.walk()]
        yield from _styled(table(rows, right=(4, 5)))

    def _branch(self, label: str, node: Node) -> tuple[str, ...]:
        cost = size(node.bytes_per_rank), percent(share(node.bytes_per_rank, self.totals.bytes_per_rank))
        if node.part is None:
            return label, "", "", "", *cost, ""
        row, waste = node.part.row, node.part.waste
        note = "whole" if node.part.why else f"{percent(waste)} padding" if waste else ""
        shapes = shape(row.global_shape), shape(row.local_shape)
        return label, row.rule, *shapes, *cost, note

    def _sums(self) -> Iterator[tuple[str, str]]:
        sums = self.totals
        mode = "tensor and sequence parallel" if self.sequence_parallel else "tensor parallel"
        dtype = "the model's dtypes" if self.dtype == "mixed" else self.dtype
        held = percent(share(sums.bytes_per_rank, sums.whole_bytes))
        part = f"{size(sums.bytes_per_rank)} of {size(sums.whole_bytes)} ({held})"
        yield f"{mode}, tp {self.tp}, {dtype}: each rank holds {part} of {sums.parameters:,} parameters", "bold"
        padding = f"{size(sums.padding_bytes_per_rank)} of it padding, {percent(self.padding_share)}"
        estimate = f"{size(sums.adamw_float32_bytes_per_rank)} in float32"
        if self.dtype != "float32":
            estimate = f"{size(sums.adamw_bytes_per_rank)} in {dtype}, {estimate}"
        yield f"  split          {size(sums.sharded_bytes_per_rank)} on a rank ({padding})", ""
        yield f"  whole          {size(sums.replicated_bytes)} on every rank", ""
        yield f"  AdamW, about   {estimate}: an estimate of weights, gradients and two moments, no activations", ""

    @property
    def padding_share(self) -> float:
        """The share of a rank's bytes that is padding."""
        return share(self.totals.padding_bytes_per_rank, self.totals.bytes_per_rank)

    def _whole(self) -> list[tuple[str, str, str]]:
        cost = {row.name: row.bytes_per_rank for row in self.rows}
        by_why: dict[str, list[str]] = {}
        for name, why in self.replicated.items():
            by_why.setdefault(why, []).append(name)
        return [
            (f"  {label}", size(sum(cost[name] for name in names)), why)
            for why, members in by_why.items()
            for label, names in folded(members).items()
        ]

    def _padded(self) -> list[tuple[str, str, str]]:
        by_name = {row.name: row for row in self.rows}
        return [
            (f"  {label}", size(sum(by_name[name].bytes_per_rank * self.waste[name] for name in names)), percent(part))
            for part in dict.fromkeys(self.waste.values())
            for label, names in folded(name for name, waste in self.waste.items() if waste == part).items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values, as `colrow plan --json` prints them."""
        by_name = {row.name: row for row in self.rows}
        return {
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "dtype": self.dtype,
            "parameters": [asdict(row) for row in self.rows],
            "replicated_bytes": self.totals.replicated_bytes,
            "sharded_bytes_per_rank": self.totals.sharded_bytes_per_rank,
            "totals": asdict(self.totals) | {"padding_share": self.padding_share},
            "replicated": [
                {"name": name, "why": why, "bytes_per_rank": by_name[name].bytes_per_rank}
                for name, why in self.replicated.items()
            ],
            "padded": [{"name": name, "padding": by_name[name].padding, "waste": w} for name, w in self.waste.items()],
            "warnings": [asdict(warning) for warning in self.warnings],
        }


def _styled(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """The lines of a table, the first one in bold."""
    return ((line, "" if number else "bold") for number, line in enumerate(lines))
