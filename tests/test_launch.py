"""Ranks that are started, that fail, and that are killed: one voice, the right exit code, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colrow.errors import ColrowError, DataError
from colrow.launch import RankFailedError, launch

SECONDS = 30.0  # to start two ranks (importing torch, on a busy machine) and to end them: far below the group's 60


def add_up(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def mistake() -> None:
    raise DataError("--data", f"seen by rank {dist.get_rank()}", "none", "Mend it")


def one_rank_fails(how: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise (
            DataError("--data", "on rank 1", "none", "Mend it") if how == "mistake" else ZeroDivisionError("on rank 1")
        )
    dist.barrier()  # the other rank has left: this raises, or waits until it is ended


def wait_for_ever() -> None:
    os.write(1, b"waiting\n")  # in one piece: two ranks write to the same pipe
    time.sleep(600)


@pytest.fixture
def quick():
    """The test must take seconds, not the group's time-out."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


def test_the_result_of_rank_0_comes_back() -> None:
    assert launch(add_up, 1, ranks=2) == 3


def test_what_every_rank_raises_is_raised_once(quick: None) -> None:
    with pytest.raises(DataError, match=r"^--data: seen by rank [01]; none\. Mend it\.$"):
        launch(mistake, ranks=2)


def test_the_mistake_of_one_rank_ends_all_and_is_the_one_told(quick: None) -> None:
    with pytest.raises(DataError, match="on rank 1"):
        launch(one_rank_fails, "mistake", ranks=2)


def test_a_bug_on_one_rank_ends_all_with_its_traceback(quick: None) -> None:
    with pytest.raises(RankFailedError, match="rank 1 raised ZeroDivisionError: on rank 1") as caught:
        launch(one_rank_fails, "bug", ranks=2)
    assert "one_rank_fails" in caught.value.traceback


def test_a_killed_rank_is_named_and_ends_all(quick: None) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        launch(one_rank_fails, "killed", ranks=2)


def test_ctrl_c_ends_a_function_that_does_not_handle_it(quick: None) -> None:
    code = "import test_launch as t; t.launch(t.wait_for_ever, ranks=2)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert errors.strip().endswith("KeyboardInterrupt") and errors.count("Traceback") == 1


TORCHRUN = """
import sys, test_launch as t
try:
    print(t.launch(getattr(t, sys.argv[1]), *map(eval, sys.argv[2:]), ranks=1))
except t.ColrowError as error:
    print("said:", error)
    sys.exit(2)
"""


def under_torchrun(*arguments: str) -> list[tuple[int, str]]:
    """Two processes with the environment that torchrun gives; their exit codes and what they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TORCHRUN, *arguments],
            cwd=Path(__file__).parent,
            env=os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=SECONDS)[0].strip() for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def test_under_torchrun_the_function_runs_in_this_process(quick: None) -> None:
    assert under_torchrun("add_up", "1") == [(0, "3"), (0, "None")]


def test_under_torchrun_one_rank_speaks_and_all_leave(quick: None) -> None:
    answers = under_torchrun("mistake")
    assert [code for code, _ in answers] == [2, 2]
    assert sorted(text[:5] for _, text in answers) == ["", "said:"]


def test_the_errors_are_one_family() -> None:
    assert issubclass(RankFailedError, ColrowError)
