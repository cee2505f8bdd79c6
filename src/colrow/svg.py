"""A scene as an SVG file that needs nothing else: no font, no script, no network."""

from __future__ import annotations

from html import escape
from itertools import count
from math import hypot

from colrow.scene import LINE, Arrow, Box, Colour, Scene, Text

MARGIN = 24
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
HEAD = 7
"""The length of an arrow's head."""


def to_svg(scene: Scene) -> str:
    """The scene on white, as large as it is, scalable, with its title and description for those who cannot see it."""
    width, height = round(scene.width + 2 * MARGIN), round(scene.bottom + 2 * MARGIN)
    body = "\n".join(_element(item) for item in scene.items)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
     role="img" aria-labelledby="title description" font-family="{FONT}">
<title id="title">{escape(scene.title)}</title>
<desc id="description">{escape(scene.description)}</desc>
<rect width="{width}" height="{height}" fill="#ffffff"/>
<g transform="translate({MARGIN} {MARGIN})" stroke-width="1.5">
{body}
</g>
</svg>
"""


def _element(item: Box | Arrow | Text) -> str:
    if isinstance(item, Text):
        return _text(item)
    if isinstance(item, Arrow):
        return _arrow(item)
    place = f'x="{item.x:g}" y="{item.y:g}" width="{item.width:g}" height="{item.height:g}" rx="6"'
    box = f"<rect {place} {_paint(item.colour)}/>"
    return box + "\n" + _text(item.label()) if item.text else box


def _arrow(arrow: Arrow) -> str:
    """A line and the two strokes of its head, without a marker: not all viewers colour those."""
    x, y, length = arrow.x + arrow.dx, arrow.y + arrow.dy, hypot(arrow.dx, arrow.dy)
    along, across = HEAD * arrow.dx / length, HEAD * arrow.dy / length
    one = f"{x - along - across / 2:g} {y - across + along / 2:g}"
    other = f"{x - along + across / 2:g} {y - across - along / 2:g}"
    path = f"M{arrow.x:g} {arrow.y:g} L{x:g} {y:g} M{one} L{x:g} {y:g} L{other}"
    return f'<path d="{path}" stroke="{arrow.colour.stroke}" fill="none"/>'


def _paint(colour: Colour) -> str:
    return f'stroke="{colour.stroke}" fill="{colour.fill if colour.fill != "transparent" else "none"}"'


def _text(text: Text) -> str:
    """Lines of a text: a tspan each, on its own baseline."""
    step = LINE * text.size
    baseline = text.y + 0.93 * text.size
    spans = "".join(
        f'<tspan x="{text.x:g}" y="{y:g}">{escape(line)}</tspan>'
        for line, y in zip(text.text.split("\n"), count(baseline, step), strict=False)
    )
    anchor = ' text-anchor="middle"' if text.centred else ""
    return f'<text font-size="{text.size:g}" fill="{text.colour.stroke}"{anchor}>{spans}</text>'
