"""One family of errors. Every message has four clauses: where, what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ColrowError(ValueError):
    """Something that the caller can mend, said in four clauses.

    Arguments:
        where: the full name of the module, parameter, option or verb.
        given: what was found there, in the caller's own terms.
        allowed: what would have been accepted.
        fix: the next thing to type.
    """

    def __init__(self, where: str, given: str, allowed: str, fix: str) -> None:
        self.where, self.given, self.allowed, self.fix = where, given, allowed, fix
        super().__init__(f"{where}: {given}; {allowed}. {fix}.")

    def __reduce__(self) -> tuple[Any, ...]:  # four arguments, so that it crosses process boundaries
        return type(self), (self.where, self.given, self.allowed, self.fix)


class PlanError(ColrowError):
    """A plan that does not fit the model: raised before the model is touched."""


class LayoutError(ColrowError):
    """A layout, a move or a mesh that does not exist in the table of moves."""


class ShapeError(ColrowError):
    """Sizes that contradict each other or the layout they were given with."""


class RankError(ColrowError):
    """The ranks disagree (other inputs, other weights, another order of calls), or one of them has left."""


class DataError(ColrowError):
    """Text, tokens or options that a run cannot use."""


class CheckpointError(ColrowError):
    """A checkpoint that is missing, damaged, cannot be written, or belongs to another model."""


def near_misses(name: str, candidates: Iterable[str], count: int = 3) -> str:
    """The candidates closest to `name`, ready for a message: `'a', 'b'`; or all of a few; or nothing."""
    pool = list(dict.fromkeys(candidates))
    close = difflib.get_close_matches(name, pool, n=count, cutoff=0.4) or pool[:count]
    return ", ".join(f"'{c}'" for c in close)
