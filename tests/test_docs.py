"""The pages in docs/ say what is so: quoted files are the files, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_readme import ROOT, blocks

PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_family_of_the_page_is_the_file() -> None:
    (quoted,) = blocks((ROOT / "docs" / "adding-a-family.md").read_text("utf-8"), "py")
    assert quoted == (ROOT / "src" / "colrow" / "families" / "vit.py").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing
