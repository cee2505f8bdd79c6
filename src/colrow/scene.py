"""A drawing as boxes, arrows and texts: made once, written as SVG or for Excalidraw.

Lengths are in pixels, x to the right and y down. A text's place is its top, at its left end or its middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

LINE: Final = 1.25
"""The height of a line of text, in font sizes."""
MOST: Final = 8
"""Ranks that are drawn each by itself."""


class Colour(NamedTuple):
    stroke: str
    fill: str = "transparent"


INK: Final = Colour("#1e1e1e")
MUTED: Final = Colour("#868e96")
GOOD: Final = Colour("#2b8a3e")
MOVE: Final = Colour("#7048e8")  # f and g
WHOLE: Final = Colour("#1e1e1e", "#dee2e6")
LOCAL: Final = Colour("#2f9e44", "#b2f2bb")  # elementwise
SENT: Final = Colour("#e03131", "#ffc9c9")  # a collective
STREAM: Final = Colour("#f08c00", "#fff9db")
TP: Final = Colour("#1971c2", "#e7f5ff")
FOLDED: Final = Colour("#868e96", "#f8f9fa")
RANKS: Final = (
    Colour("#1971c2", "#a5d8ff"),
    Colour("#e8590c", "#ffd8a8"),
    Colour("#0b7285", "#99e9f2"),
    Colour("#a61e4d", "#fcc2d7"),
    Colour("#8a6100", "#ffec99"),
    Colour("#6b4f43", "#eaddd7"),
    Colour("#4f7010", "#d8f5a2"),
    Colour("#364fc7", "#bac8ff"),
)


def rank_colour(rank: int | None) -> Colour:
    """A colour of its own for each rank that is drawn: see `shown`."""
    return FOLDED if rank is None else RANKS[min(rank, len(RANKS) - 1)]


def shown(ranks: int) -> list[int | None]:
    """The ranks to draw; None stands for those that are left out."""
    return list(range(ranks)) if ranks <= MOST else [0, 1, 2, None, ranks - 1]


@dataclass(frozen=True)
class Box:
    """A rectangle with a text in its middle."""

    x: float
    y: float
    width: float
    height: float
    colour: Colour
    text: str = ""
    size: float = 16

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2

    def label(self) -> Text:
        """Its text, in its middle."""
        x, y = self.middle
        return Text(x, y - text_height(self.text, self.size) / 2, self.text, self.colour, self.size, centred=True)


@dataclass(frozen=True)
class Arrow:
    """A straight arrow from (x, y) by (dx, dy)."""

    x: float
    y: float
    dx: float
    dy: float = 0.0
    colour: Colour = MUTED

    @property
    def right(self) -> float:
        return max(self.x, self.x + self.dx)

    @property
    def bottom(self) -> float:
        return max(self.y, self.y + self.dy)


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    colour: Colour = INK
    size: float = 14
    centred: bool = False

    @property
    def width(self) -> float:
        return text_width(self.text, self.size)

    @property
    def height(self) -> float:
        return text_height(self.text, self.size)

    @property
    def left(self) -> float:
        return self.x - self.width / 2 if self.centred else self.x

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


Item = Box | Arrow | Text


@dataclass
class Scene:
    """A drawing that grows downward.

    Attributes:
        title: what it is, for those who list it.
        description: the same for those who cannot see it.
    """

    title: str
    description: str
    items: list[Item] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max((item.right for item in self.items), default=0.0)

    @property
    def bottom(self) -> float:
        return max((item.bottom for item in self.items), default=0.0)

    def texts(self) -> list[str]:
        return [item.text for item in self.items if not isinstance(item, Arrow) and item.text]

    def below(self, items: Iterable[Item], gap: float) -> None:
        """Add items drawn from y = 0, under what is there."""
        self.items += moved(items, 0.0, self.bottom + gap if self.items else 0.0)


def moved(items: Iterable[Item], dx: float, dy: float) -> list[Item]:
    return [replace(item, x=item.x + dx, y=item.y + dy) for item in items]


def lines(texts: Sequence[Text]) -> list[Text]:
    """The texts under each other, from y of the first."""
    y, placed = texts[0].y if texts else 0.0, []
    for text in texts:
        placed.append(replace(text, y=y))
        y += text.height + 0.4 * text.size
    return placed


def text_width(text: str, size: float) -> float:
    """How wide the widest line is at most: a viewer's font is not known here, so this is that of a wide one."""
    return max(sum(_width(letter) for letter in line) for line in text.split("\n")) * size


def text_height(text: str, size: float) -> float:
    return (text.count("\n") + 1) * LINE * size


def _width(letter: str) -> float:
    """Of a letter, in font sizes."""
    if letter in "iIljtfr.,:;'!|()[] ":
        return 0.36
    if letter in "mwMW":
        return 0.9
    return 0.7 if letter.isupper() else 0.6
