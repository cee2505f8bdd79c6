"""The command line as a user meets it: one JSON object, one line for a mistake, and Ctrl-C that loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import colrow
from colrow import cli
from colrow.families import FAMILIES
from colrow.models import GPT
from colrow.options import TrainOptions
from colrow.parallelize import find_plan

COMMAND = [sys.executable, "-m", "colrow"]
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2", "--sample", "0"]


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text to learn from, in a folder of its own that is also the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text"
    path.write_text("one two three four five six seven eight nine ten\n" * 40)
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def until_step(folder: Path, step: int) -> None:
    """Wait until the run in `folder` has noted `step`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and f'"step": {step},' in (folder / "metrics.jsonl").read_text():
            return
        time.sleep(0.05)
    raise TimeoutError(f"no step {step} in {folder}")


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that a command has started, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_json_is_all_there_is_on_stdout_and_resume_goes_on() -> None:
    code, out, err = finish(start("train", "--tp", "2", "--steps", "3", "--json", "--data", "text", *TINY))
    assert code == 0, err
    first = json.loads(out)
    assert set(first) == {"steps", "loss_first", "loss_last", "tokens_per_second", "checkpoint"}
    assert first["steps"] == 3 and Path(first["checkpoint"]) == Path("runs/gpt/step-000003")
    assert "first step equals one process" in err
    code, out, err = finish(start("train", "--resume", "--tp", "1", "--json"))
    assert code == 0, err
    assert json.loads(out)["steps"] == 6, "the options come from the run's folder"
    assert "going on from step 3" in err


def test_ctrl_c_saves_and_leaves_cleanly() -> None:
    process = start("train", "--tp", "2", "--steps", "100000", "--data", "text", "--json", *TINY)
    until_step(Path("runs/gpt"), 3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, err
    assert "Traceback" not in err and "asked to stop: saved after step" in err
    result = json.loads(out)
    assert result["steps"] >= 3 and Path(result["checkpoint"]).name == f"step-{result['steps']:06d}"


def test_a_killed_rank_ends_the_run_within_seconds_and_loses_nothing() -> None:
    process = start("train", "--tp", "2", "--steps", "100000", "--save-every", "1", "--data", "text", *TINY)
    until_step(Path("runs/gpt"), 5)  # it is saving most of the time
    pids = ranks_of(process)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = finish(process, seconds=15)
    assert code == 1
    assert "rank 1 was killed by signal 9" in err and "Traceback" not in err
    assert not any(alive(pid) for pid in pids)
    code, out, err = finish(start("train", "--resume", "--steps", "1", "--json"))
    assert code == 0, err
    assert json.loads(out)["steps"] >= 5


def test_a_mistake_that_only_the_ranks_can_see_is_one_line() -> None:
    code, out, err = finish(start("train", "--tp", "2", "--json", "--data", "text", *TINY, "--context", "4096"))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("colrow: error: --data: the text has 1960 tokens"), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "0"], "--tp: 0; a positive number is needed"),
        (["--tp", "1000"], "--tp: 1000 ranks; at most 64"),
        (["--steps", "-3"], "--steps: -3;"),
        (["--lr", "nan"], "--lr: nan;"),
        (["--dropout", "1.5"], "--dropout: 1.5; a probability below 1"),
        (["--width", "30", "--heads", "4"], "--width: 30 for 4 heads"),
        (["--vocab-size", "100"], "--vocab-size: 100"),
        (["--resume"], "--resume: there is no run in"),
        (["--resume", "--out", "nowhere"], "nowhere: it has no readable options.json"),
        (["--data", "missing"], "--data missing: it cannot be read (No such file or directory)"),
        (["--data", "empty"], "--data empty: the file is empty"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("empty").touch()
    assert cli.run(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"colrow: error: {says}"), err


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train", "--tp", "two"], ["train", "--widht", "3"]])
def test_an_option_that_does_not_exist_is_exit_code_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.run(arguments)
    out, err = capfd.readouterr()
    assert left.value.code == 2 and out == "" and "Traceback" not in err


def test_help_teaches(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, part in (
        (["--help"], "colrow train --tp 2"),
        (["train", "--help"], "--resume"),
        (["train", "--help"], "--model DIR"),
        (["generate", "-h"], "--max-new-tokens"),
        (["plan", "-h"], "--tp"),
        (["verify", "-h"], "colrow verify --model llama --tp 3"),
        (["families", "-h"], "--json"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.run(arguments)
        assert left.value.code == 0 and part in capfd.readouterr().out


def test_the_plan_in_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--tp", "3", "--layers", "2", "--heads", "5", "--width", "40", "--json"]) == 0
    plan: dict[str, Any] = json.loads(capfd.readouterr().out)
    contract = {"tp", "parameters", "replicated_bytes", "sharded_bytes_per_rank"}
    more = {"sequence_parallel", "dtype", "totals", "replicated", "padded", "warnings"}
    assert set(plan) == contract | more and plan["tp"] == 3
    by_name = {row["name"]: row for row in plan["parameters"]}
    with torch.device("meta"):
        model = GPT(TrainOptions(layers=2, heads=5, width=40).gpt(256))
    assert by_name.keys() == {name for name, _ in model.named_parameters()}
    assert by_name["blocks.0.attention.qkv.weight"] == {
        "name": "blocks.0.attention.qkv.weight",
        "rule": "Column(heads, kv_heads, kv_heads)",
        "global_shape": [120, 40],
        "local_shape": [48, 40],
        "padding": 24,
        "bytes_per_rank": 48 * 40 * 4,
    }
    total = sum(row["bytes_per_rank"] for row in plan["parameters"])
    assert plan["replicated_bytes"] + plan["sharded_bytes_per_rank"] == total
    norms = [row["bytes_per_rank"] for name, row in by_name.items() if "norm" in name]
    assert plan["replicated_bytes"] >= sum(norms) > 0
    assert str(colrow.resolve(model, find_plan(model), 3)).count("\n") == len(by_name)


def test_the_plan_for_people(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--tp", "2"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "blocks.0-3" in out and "256x128" in out


def test_the_plan_of_a_large_model_needs_its_config_alone(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **sizes}
    Path("config.json").write_text(json.dumps(config))
    assert cli.run(["plan", "--model", "config.json", "--tp", "3", "--json"]) == 0
    plan: dict[str, Any] = json.loads(capfd.readouterr().out)
    by_name = {row["name"]: row for row in plan["parameters"]}
    assert by_name["model.layers.79.self_attn.q_proj.weight"] == {
        "name": "model.layers.79.self_attn.q_proj.weight",
        "rule": "Column(heads)",
        "global_shape": [8192, 8192],
        "local_shape": [9 * 1024 // 3, 8192],  # eight groups of eight heads, a ninth one padded
        "padding": 1024,
        "bytes_per_rank": 3072 * 8192 * 2,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "0"], "--tp: 0; a positive number is needed"),
        (["--model", "lama"], "--model lama: there is no such model or path"),
        (["--model", "llama", "--layers", "3"], "--layers: given with --model llama; it is for --model gpt"),
    ],
)
def test_wrong_use_of_plan(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith(f"colrow: error: {says}"), err


def test_the_families_for_people_and_for_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["families"]) == 0
    shown = capfd.readouterr().out
    assert cli.run(["families", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert {family["name"] for family in listed["families"]} == set(FAMILIES) - {"colrow-gpt"}
    assert all(family["name"] in shown and family["note"] in shown for family in listed["families"])
    assert listed["aliases"] == {"gemma3": "gemma3_text", "smollm": "llama"}
