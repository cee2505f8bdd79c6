"""A scene as a file of Excalidraw, to be drawn on: every field that its format has, and a label bound to its box."""

from __future__ import annotations

import json
from typing import Any

from colrow.scene import LINE, Arrow, Box, Colour, Scene, Text, text_height, text_width

FONT = 2
"""Helvetica: known to every version, and its X is no x, as in the hand-written ones."""
UPDATED = 1
"""When an element was last changed. The same trace gives the same file, so it is not the time of day."""


def to_excalidraw(scene: Scene) -> str:
    elements: list[dict[str, Any]] = []
    for item in scene.items:
        elements += _elements(item, len(elements))
    page = {
        "type": "excalidraw",
        "version": 2,
        "source": "https://excalidraw.com",
        "elements": elements,
        "appState": {"gridSize": 20, "gridStep": 5, "gridModeEnabled": False, "viewBackgroundColor": "#ffffff"},
        "files": {},
    }
    return json.dumps(page, ensure_ascii=False, indent=1) + "\n"


def _elements(item: Box | Arrow | Text, number: int) -> list[dict[str, Any]]:
    if isinstance(item, Arrow):
        return [_arrow(item, number)]
    if isinstance(item, Text):
        return [_text(item, number, container=None)]
    box = _base("rectangle", number, item.colour, item.x, item.y, item.width, item.height)
    box["roundness"] = {"type": 3}
    if not item.text:
        return [box]
    label = _text(item.label(), number + 1, container=box["id"])
    return [{**box, "boundElements": [{"type": "text", "id": label["id"]}]}, label]


def _base(kind: str, number: int, colour: Colour, x: float, y: float, width: float, height: float) -> dict[str, Any]:
    """What all elements have. Seeds only make the strokes of a hand differ."""
    return {
        "id": f"colrow-{number:04}",
        "type": kind,
        "x": x,
        "y": y,
        "width": width,
        "height": height,
        "angle": 0,
        "strokeColor": colour.stroke,
        "backgroundColor": colour.fill,
        "fillStyle": "solid",
        "strokeWidth": 2,
        "strokeStyle": "solid",
        "roughness": 1,
        "opacity": 100,
        "groupIds": [],
        "frameId": None,
        "index": None,
        "roundness": None,
        "seed": 7919 * (number + 1),
        "version": 1,
        "versionNonce": 104729 * (number + 1),
        "isDeleted": False,
        "boundElements": None,
        "updated": UPDATED,
        "link": None,
        "locked": False,
    }


def _text(text: Text, number: int, container: str | None) -> dict[str, Any]:
    width, height = text_width(text.text, text.size), text_height(text.text, text.size)
    base = _base("text", number, Colour(text.colour.stroke), text.left, text.y, width, height)
    return {
        **base,
        "text": text.text,
        "originalText": text.text,
        "fontSize": text.size,
        "fontFamily": FONT,
        "textAlign": "center" if text.centred else "left",
        "verticalAlign": "middle" if container else "top",
        "containerId": container,
        "autoResize": True,
        "lineHeight": LINE,
    }


def _arrow(arrow: Arrow, number: int) -> dict[str, Any]:
    base = _base("arrow", number, arrow.colour, arrow.x, arrow.y, abs(arrow.dx), abs(arrow.dy))
    return {
        **base,
        "roundness": {"type": 2},
        "points": [[0, 0], [arrow.dx, arrow.dy]],
        "lastCommittedPoint": None,
        "startBinding": None,
        "endBinding": None,
        "startArrowhead": None,
        "endArrowhead": "arrow",
        "elbowed": False,
    }
