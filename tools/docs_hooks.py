"""What mkdocs does to a page before it is rendered: see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[[^\]]*\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository, which are no pages of the site, become their paths."""
    return _OUTSIDE.sub(lambda link: f"`{link[1]}`", markdown)
