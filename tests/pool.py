"""A pool of ranks: real processes on real gloo, started once per test session.

    def total(start):                                   # module level: the ranks import it by name
        x = torch.full((2,), start + dist.get_rank())
        dist.all_reduce(x)
        return x

    def test_total(ranks):
        assert ranks(3).run(total, 1.0)[2].tolist() == [6.0, 6.0]

Every run has a hard time limit. When it passes, every rank's stack is shown and the ranks are replaced, so no test can
hang the session or spoil the next one.
"""

import contextlib
import functools
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rank_worker
from rank_worker import RankError, Returned

LIMIT = 60.0  # seconds for one run
GRACE = 10.0  # seconds the other ranks get to answer once one has failed
START_LIMIT = 120.0  # seconds until every rank has joined the process group

# Workers are forked from a server that has imported torch and nothing else: a pool starts in a fraction of a second,
# and a fork never copies the state of the test session.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "torch.testing"])


class RankTimeout(Exception):  # noqa: N818 - a time-out is the event, not an error of the test
    """A run passed its time limit; the message shows every rank's stack."""


class RankFailure(Exception):  # noqa: N818 - the errors are inside: one per rank
    """At least one rank raised, died, or never answered; the message shows every failing rank's traceback.

    `exceptions` maps each rank that raised to (type name, message).
    """

    def __init__(self, message: str, exceptions: dict[int, tuple[str, str]]) -> None:
        super().__init__(message)
        self.exceptions = exceptions


@dataclass(frozen=True)
class _Worker:
    process: Any
    pipe: connection.Connection
    stack_file: Path

    @property
    def died(self) -> str:
        return f"the process ended with exit code {self.process.exitcode}"


class Pool:
    """`world_size` ranks and their process group; started by the first run, restarted when spoiled."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = LIMIT,
        grace: float = GRACE,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return the results by rank.

        `fn` is a module-level function. Tensors in arguments and results travel as detached CPU copies. With
        `expect_errors` a rank that raised yields a `RankError(type_name, message, traceback)` in place of a result.
        """
        request = rank_worker.dumps((_reference(fn), args, kwargs, list(sys.path)))
        try:
            self._start()
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # a dead rank: the wait below reports it
                    worker.pipe.send_bytes(request)
            answers = self._collect(timeout, grace, what=f"{fn.__module__}.{fn.__qualname__}")
        except BaseException:  # also Ctrl-C and pytest's own time-out: half-served ranks are of no use to the next run
            self.close()
            raise
        errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, RankError)}
        if errors and not (expect_errors and _still_in_step(errors, self.world_size)):
            self.close()
        if errors and not expect_errors:
            raise _failure(errors, note="")
        return [answer.value if isinstance(answer, Returned) else answer for answer in answers]

    def pids(self) -> list[int]:
        """The process ids by rank; empty while no ranks run."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the ranks. The next run starts fresh ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="colrow-ranks-"))
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            stack_file = self._folder / f"stack-{rank}"
            process = _CONTEXT.Process(
                target=rank_worker.serve,
                args=(theirs, rank, self.world_size, str(self._folder / "store"), str(stack_file)),
                name=f"rank {rank} of {self.world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))
        answers = self._collect(START_LIMIT, GRACE, what="starting the ranks")
        errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, RankError)}
        if errors:
            raise _failure(errors, note="")

    def _collect(self, limit: float, grace: float, what: str) -> list[Returned | RankError]:
        """One answer per rank, or `RankTimeout` / `RankFailure` with the stacks of the ranks that gave none."""
        answers: dict[int, Returned | RankError] = {}
        deadline = time.monotonic() + limit
        failed = False
        while len(answers) < self.world_size:
            pending = {self._workers[rank].pipe: rank for rank in range(self.world_size) if rank not in answers}
            ready = connection.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(answers, limit, grace, what)
            for pipe in ready:
                rank = pending[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
                if isinstance(answers[rank], RankError) and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace)
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> Returned | RankError:
        worker = self._workers[rank]
        try:
            return rank_worker.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5)
            return RankError("ProcessDied", worker.died, worker.died + "\n", in_step=False)

    def _give_up(self, answers: dict[int, Returned | RankError], limit: float, grace: float, what: str) -> NoReturn:
        stacks = self._stacks(answers)
        errors = {rank: answer for rank, answer in answers.items() if isinstance(answer, RankError)}
        if errors:
            note = f"the other ranks did not answer within {grace:g} s of the first failure:\n{stacks}"
            raise _failure(errors, note)
        raise RankTimeout(f"{what} on {self.world_size} ranks passed its limit of {limit:g} s\n{stacks}")

    def _stacks(self, answers: dict[int, Returned | RankError]) -> str:
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in silent:
            self._workers[rank].process.join(timeout=0)
            if self._workers[rank].process.is_alive():
                _signal(self._workers[rank].process.pid)
        lines = []
        for rank in range(self.world_size):
            if rank not in silent:
                lines.append(f"--- rank {rank}: answered ---\n")
                continue
            lines.append(f"--- rank {rank}: no answer; its stack, innermost call first ---\n")
            lines.append(_read_when_written(self._workers[rank].stack_file))
        return "".join(lines)


def mesh(shape: Sequence[int] | None = None, names: Sequence[str] = ("tp",)) -> DeviceMesh:
    """The device mesh of this rank: all ranks on one axis "tp", or as given. Made once: groups cost threads."""
    return _mesh(tuple(shape or (dist.get_world_size(),)), tuple(names))


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _reference(fn: Callable[..., Any]) -> tuple[str, str]:
    """The name by which a rank can import `fn`."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<no name>")
    if module is None or "<" in qualname:
        raise TypeError(f"pool.run: got {fn!r}; the ranks import the function by name: define it at module level")
    return module, qualname


def _still_in_step(errors: dict[int, RankError], world_size: int) -> bool:
    """Whether the process group is surely whole: every rank raised, and none inside a collective."""
    return len(errors) == world_size and all(error.in_step for error in errors.values())


def _failure(errors: dict[int, RankError], note: str) -> RankFailure:
    texts = [f"--- rank {rank} raised ---\n{error.traceback}" for rank, error in sorted(errors.items())]
    exceptions = {rank: (error.type_name, error.message) for rank, error in sorted(errors.items())}
    ranks = ", ".join(str(rank) for rank in exceptions)
    return RankFailure(f"ranks that raised: {ranks}\n" + "".join(texts) + note, exceptions)


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def _read_when_written(path: Path, patience: float = 2.0) -> str:
    """The stack dump, once it has stopped growing."""
    deadline = time.monotonic() + patience
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        new = path.read_text(errors="replace") if path.exists() else ""
        if new and new == text:
            return text
        text = new
    return text or "(the rank did not dump its stack: stopped, or stuck in the kernel)\n"
