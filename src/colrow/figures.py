"""Numbers, sizes and numbered names as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

MOST_RUNS = 4
"""Runs of numbers that one label shows; of more, the first ones and the last."""


def shape(sizes: Iterable[int], times: str = "x") -> str:
    return times.join(map(str, sizes))


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


def percent(share: float) -> str:
    """A share of a whole.

    >>> percent(0.0004), percent(0.125)
    ('<0.1%', '12.5%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def share(part: float, of: float) -> float:
    """Zero of nothing."""
    return part / of if of else 0.0


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Lines with columns as wide as they need; those named in `right` end together."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in cells).rstrip()


def runs(numbers: Iterable[int]) -> str:
    """Numbers, with those that follow each other joined.

    >>> runs([0, 1, 2, 5])
    '0-2,5'
    """
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    said = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found]
    return ",".join(said if len(said) <= MOST_RUNS else [*said[: MOST_RUNS - 1], "..", said[-1]])


def folded(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ in their numbers only, under one label: `layers.0-79.norm.weight`."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    found: dict[str, list[str]] = {}
    for members in by_pattern.values():
        places = zip(*(name.split(".") for name in members), strict=True)
        label = [runs(map(int, parts)) if parts[0].isdecimal() else parts[0] for parts in places]
        found[".".join(label)] = members
    return found
