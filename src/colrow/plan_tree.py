"""The parameters of a model as a tree of its modules, in which layers that are alike are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from colrow.figures import runs
from colrow.resolved import Row


@dataclass(frozen=True)
class Part:
    """One parameter.

    Attributes:
        row: what `resolve` says of it.
        why: the reason why it is whole on every rank; "" if it is split.
        waste: the share of what the ranks store of it that is padding.
    """

    row: Row
    why: str
    waste: float


@dataclass(frozen=True)
class Node:
    """A module, or a parameter (then it has a `part`), or several that are alike.

    Attributes:
        label: its name below the node above; a chain of only children is one node, `mlp.up`.
        bytes_per_rank: of all that it stands for.
        below: what it holds.
    """

    label: str
    bytes_per_rank: int
    part: Part | None = None
    below: tuple[Node, ...] = ()

    @property
    def kind(self) -> object:
        """Equal for nodes that differ in their label only."""
        if self.part is not None:
            return self.part.row.rule, self.part.row.global_shape, self.part.row.local_shape, self.part.why
        return tuple((node.label, node.kind) for node in self.below)

    def times(self, count: int) -> Node:
        """Standing for so many."""
        below = tuple(node.times(count) for node in self.below)
        return replace(self, bytes_per_rank=self.bytes_per_rank * count, below=below)

    def walk(self, first: str = "", rest: str = "") -> Iterator[tuple[str, Node]]:
        """It and all below, in order, each with the lines that draw the tree before its label."""
        yield first, self
        for i, node in enumerate(self.below):
            last = i == len(self.below) - 1
            yield from node.walk(f"{rest}{'└─ ' if last else '├─ '}", f"{rest}{'   ' if last else '│  '}")


Nested = dict[str, "Nested | Part"]


def fold(parts: Iterable[Part]) -> tuple[Node, ...]:
    """The tree, and in it one node for all numbered siblings that hold the same."""
    nested: Nested = {}
    for part in parts:
        *above, short = part.row.name.split(".")
        at = nested
        for name in above:
            below = at.setdefault(name, {})
            at = below if isinstance(below, dict) else {}
        at[short] = part
    return _nodes(nested)


def _nodes(nested: Mapping[str, Nested | Part]) -> tuple[Node, ...]:
    alike: dict[object, list[Node]] = {}
    for label, inside in nested.items():
        node = _node(label, inside)
        alike.setdefault((label.isdecimal() or label, node.kind), []).append(node)
    return tuple(_joined(_together(nodes)) for nodes in alike.values())


def _node(label: str, inside: Nested | Part) -> Node:
    if isinstance(inside, Part):
        return Node(label, inside.row.bytes_per_rank, inside)
    below = _nodes(inside)
    return Node(label, sum(node.bytes_per_rank for node in below), None, below)


def _together(nodes: list[Node]) -> Node:
    """One node for nodes that hold the same."""
    label = nodes[0].label if len(nodes) == 1 else runs(int(node.label) for node in nodes)
    return replace(nodes[0].times(len(nodes)), label=label)


def _joined(node: Node) -> Node:
    """A node with one child is a part of the child's label."""
    if len(node.below) != 1:
        return node
    return replace(node.below[0], label=f"{node.label}.{node.below[0].label}")
