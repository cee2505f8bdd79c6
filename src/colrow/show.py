"""What a training run tells a person: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from colrow.resolved import Resolved


@dataclass(frozen=True)
class StepNumbers:
    """One training step in numbers; `step` counts from 1."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s  {size(self.memory)} a rank"


class Show:
    """The one place that prints.

    Arguments:
        talks: whether this rank is the one that does.
        to_stderr: leave stdout to the machine that reads it.
    """

    def __init__(self, *, talks: bool, to_stderr: bool) -> None:
        self.console = Console(stderr=to_stderr, quiet=not talks, highlight=False, soft_wrap=True)

    def line(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def split(self, resolved: Resolved) -> None:
        """What is split and how: one line for the parameters of all blocks that are alike."""
        rows = [("parameter", "", "rule", "whole", "per rank")]
        rows += [(name, f"x{n}" if n > 1 else "", *rest) for (name, *rest), n in groups(resolved).items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for number, row in enumerate(rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join(cells).rstrip(), style="" if number else "bold")
        here, whole = sum(row.bytes_per_rank for row in resolved.rows), whole_bytes(resolved)
        mode = "tensor and sequence parallel" if resolved.sequence_parallel else "tensor parallel"
        part = f"{size(here)} of {size(whole)} of parameters ({here / whole:.0%})"
        self.line(f"{mode}, tp {resolved.tp}: each rank holds {part}\n")

    @contextmanager
    def training(self, start: int, total: int) -> Iterator[Training]:
        """The progress of steps `start` to `total`."""
        if not self.console.is_terminal or self.console.quiet:
            yield Training(self, None, start, total)
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield Training(self, bar, start, total)


class Training:
    """A running progress bar; or, without one, a line now and then."""

    def __init__(self, show: Show, bar: Progress | None, start: int, total: int) -> None:
        self.show, self.bar, self.total = show, bar, total
        self.every = max(1, (total - start) // 10)
        self.task = None if bar is None else bar.add_task("", total=total, completed=start)

    def step(self, numbers: StepNumbers) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=numbers.step, description=str(numbers))
        elif numbers.step % self.every == 0 or numbers.step == self.total:
            self.show.line(f"step {numbers.step:>5} of {self.total}  {numbers}")

    def validation(self, step: int, loss: float, before: float | None) -> None:
        change = "" if before is None else f"  ({loss - before:+.4f})"
        self.show.line(f"step {step:>5}  validation loss {loss:.4f}{change}", style="bold")


def groups(resolved: Resolved) -> dict[tuple[str, str, str, str], int]:
    """(name with `*` for numbers, rule, whole shape, shape per rank) -> how many parameters, in order."""
    found: dict[tuple[str, str, str, str], int] = {}
    for row in resolved.rows:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name)
        key = (name, row.rule, shape(row.global_shape), shape(row.local_shape))
        found[key] = found.get(key, 0) + 1
    return found


def whole_bytes(resolved: Resolved) -> int:
    """The bytes of the parameters on one device."""
    total = 0
    for row in resolved.rows:
        whole = mine = 1
        for a, b in zip(row.global_shape, row.local_shape, strict=True):
            whole, mine = whole * a, mine * b
        total += row.bytes_per_rank * whole // mine
    return total


def shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def size(count: float) -> str:
    """Bytes for people.

    >>> size(1_650_000)
    '1.6 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
