"""What the README shows works: every Python block runs, every command exists.

A ```python block whose first line is `# run on N ranks` is started on N ranks by torchrun; any other runs as it is.
"""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colrow.launch import leave

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
LIMIT = 120  # seconds for one block


def blocks(text, language):
    return [body for name, body in FENCE.findall(text) if name == language]


def launch(file, source):
    """The command that runs a block, as a reader would."""
    ranks = re.match(r"# run on (\d+) ranks?\n", source)
    if ranks is None:
        return [sys.executable, str(file)]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, "--standalone", "--nproc-per-node", ranks[1], __file__, str(file)]


def run_block(source, folder):
    file = folder / "block.py"
    file.write_text(source, "utf-8")
    return subprocess.run(launch(file, source), cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)


def on_a_rank(file):
    """Run a block to its end. What follows is torch's: with gloo an orderly end of the interpreter may abort."""
    runpy.run_path(file, run_name="__main__")
    leave(0)


def commands(text, program):
    """The first word after `program` on every line of every sh block, without options or comments."""
    lines = [line.split("#")[0].split() for body in blocks(text, "sh") for line in body.splitlines()]
    lines = [line[1:] if line[:1] == ["$"] else line for line in lines]
    return sorted({line[1] for line in lines if line[:1] == [program] and len(line) > 1 and line[1][0] != "-"})


def targets(makefile):
    return set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("source", blocks(README, "python"))
def test_a_python_block_runs(source, tmp_path):
    done = run_block(source, tmp_path)
    assert done.returncode == 0, f"{source}\n--- its output ---\n{done.stdout}{done.stderr}"


def test_every_make_target_exists():
    shown = commands(README, "make")
    assert {"train", "test"} <= set(shown)
    assert set(shown) <= targets((ROOT / "Makefile").read_text("utf-8"))


@pytest.mark.parametrize("name", commands(README, "colrow"))
def test_every_subcommand_exists(name):
    colrow = shutil.which("colrow", path=str(Path(sys.executable).parent))
    assert colrow, "the command colrow is not installed beside this Python"
    done = subprocess.run([colrow, name, "--help"], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


SAMPLE = """
```python
# run on 2 ranks
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_world_size() != 2:
    raise SystemExit(3)
dist.destroy_process_group()
```
text
```python
raise ValueError("a block that fails")
```
```sh
make train   # and not: make nothing
$ colrow plan --tp 2
colrow --help
```
"""


def test_blocks_and_commands_are_found():
    assert len(blocks(SAMPLE, "python")) == 2
    assert commands(SAMPLE, "make") == ["train"]
    assert commands(SAMPLE, "colrow") == ["plan"]
    assert targets("test: x ## run\n\techo\n.PHONY: y\n") == {"test"}


def test_a_block_for_two_ranks_gets_two(tmp_path):
    done = run_block(blocks(SAMPLE, "python")[0], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_block_that_fails_is_seen(tmp_path):
    done = run_block(blocks(SAMPLE, "python")[1], tmp_path)
    assert done.returncode != 0
    assert "a block that fails" in done.stderr


if __name__ == "__main__":  # under torchrun, on a rank: see `launch`
    on_a_rank(sys.argv[1])
