"""What mkdocs does to a page before it is rendered: see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"<code>[^<]*</code>")
_LEAD = re.compile(r"<p>(Returns|Cost|Shapes): ")
_OUTSIDE = re.compile(r"\[[^\]]*\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository, which are no pages of the site, become their paths."""
    return _OUTSIDE.sub(lambda link: f"`{link[1]}`", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The parts of a docstring that are one paragraph begin as its other parts do; `|` in code in a table is plain."""
    html = _CODE.sub(lambda code: code[0].replace(r"\|", "|"), html)
    return _LEAD.sub(r"<p><strong>\1:</strong> ", html)
