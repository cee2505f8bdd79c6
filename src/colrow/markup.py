"""HTML from values: what is not markup is escaped, so no name can break a page."""

from __future__ import annotations

from html import escape
from typing import Final

ALONE: Final = frozenset({"input", "meta"})
"""Elements without an end."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | bool) -> Markup:
    """An element. `class_` and `for_` are `class` and `for`, `aria_label` is `aria-label`; True is a bare attribute.

    >>> tag("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items() if value is not False)
    return Markup(f"<{name}{said}>" if name in ALONE else f"<{name}{said}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """The children one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def _attribute(key: str, value: str | bool) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
