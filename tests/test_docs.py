"""The pages in docs/ say what is so: code runs, quoted files are the files, links lead somewhere, names exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import colrow
from colrow import cli
from test_readme import ROOT, blocks, commands, run_block, targets

PAGES = sorted((ROOT / "docs").glob("*.md"))
CODE = [pytest.param(body, id=page.stem) for page in PAGES for body in blocks(page.read_text("utf-8"), "python")]


def test_the_family_of_the_page_is_the_file() -> None:
    (quoted,) = blocks((ROOT / "docs" / "adding-a-family.md").read_text("utf-8"), "py")
    assert quoted == (ROOT / "src" / "colrow" / "families" / "vit.py").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing


@pytest.mark.parametrize("source", CODE)
def test_a_python_block_runs(source: str, tmp_path: Path) -> None:
    done = run_block(source, tmp_path)
    assert done.returncode == 0, f"{source}\n--- its output ---\n{done.stdout}{done.stderr}"


def test_every_command_exists(capfd: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    names = commands(text, "colrow")
    assert {"plan", "verify", "train"} <= set(names)
    for name in names:
        with pytest.raises(SystemExit) as left:
            cli.run([name, "--help"])
        assert left.value.code == 0, capfd.readouterr().err
    assert set(commands(text, "make")) <= targets((ROOT / "Makefile").read_text("utf-8"))


def test_every_page_has_a_place() -> None:
    listed = re.findall(r": ([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_reference_has_every_public_name() -> None:
    public = {
        name
        for name, value in vars(colrow).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
    }
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    shown = re.findall(r"^ +heading: colrow\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(public)
    for where in re.findall(r"^::: (.*)$", text, re.MULTILINE):
        module, _, name = where.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name), where
