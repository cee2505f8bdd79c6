"""Run a function on several ranks: processes of our own on this machine, or the process that `torchrun` has started.

    launch(train, options, ranks=2)        # what rank 0 returned

Own ranks compute on the CPU with one thread each and talk through gloo. They meet at a file, so no port is needed.
Whatever ends a rank ends them all within seconds, and is said once: by the rank that failed first, since what the
others say afterwards (a peer has left) follows from it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.rendezvous import rendezvous

from colrow.errors import ColrowError, RankError

TIMEOUT = 60.0
"""Seconds that a rank waits for the others in one collective."""
GRACE = 1.0
"""Seconds that the other ranks get to end by themselves once one has failed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RankFailedError(RankError):
    """A rank was killed, or raised something that is no user's mistake; `traceback` is what it raised, if it did."""

    traceback: str = ""


@dataclass(frozen=True)
class _Outcome:
    """What became of a rank, as it told before it left."""

    rank: int
    value: Any = None
    error: ColrowError | None = None
    traceback: str = ""
    when: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.traceback)

    @property
    def is_consequence(self) -> bool:
        """Whether it may only say that another rank has left."""
        return isinstance(self.error, RankError)

    def error_to_raise(self) -> ColrowError:
        if self.error is not None:
            return self.error
        last = self.traceback.strip().splitlines()[-1]
        failure = RankFailedError(
            "colrow.launch", f"rank {self.rank} raised {last}", "every rank must run to the end", "Read its traceback"
        )
        failure.traceback = self.traceback
        return failure


class StopRequest:
    """Within it, Ctrl-C and SIGTERM end nothing: they set `made`, and the loop leaves when it is ready."""

    def __init__(self) -> None:
        self.made = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def under_torchrun() -> bool:
    """Whether something else has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(fn: Callable[..., Any], *args: Any, ranks: int, timeout: float = TIMEOUT) -> Any:
    """Call `fn(*args)` on every rank, with the default process group ready; return what rank 0 returned.

    Arguments:
        fn: a function at module level; the ranks import it by name.
        ranks: how many to start. Under torchrun there are WORLD_SIZE already, this is one of them, and on the others
            the result is None.
        timeout: seconds that a rank waits for the others in one collective.

    Raises:
        ColrowError: what the first rank to fail raised.
        RankFailedError: a rank was killed, or raised anything else.
        KeyboardInterrupt: Ctrl-C, where `fn` does not handle it (see `StopRequest`).
    """
    if under_torchrun():
        return _in_this_process(fn, args, timeout)
    with tempfile.TemporaryDirectory(prefix="colrow-") as folder:
        job = _Job(fn, args, ranks, timeout, Path(folder))
        return _Ranks(job).wait()


def _in_this_process(fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    speaks: list[bool] = []
    try:
        prefixed = dist.PrefixStore("colrow", store)
        value = _call(fn, args, prefixed, rank, world_size, timeout, lambda _: speaks.append(_fails_first(store, rank)))
    except Exception as error:
        if not all(speaks):
            raise SystemExit(2 if isinstance(error, ColrowError) else 1) from None
        raise
    return value if rank == 0 else None


def _fails_first(store: dist.Store, rank: int) -> bool:
    """Whether no other rank has failed before this one: then it is this one's part to speak."""
    try:
        first = store.compare_set("colrow-first-failure", "", str(rank)).decode() == str(rank)
        # Rank 0 may hold the store that the others are about to ask; and when one leaves, torchrun ends the rest.
        time.sleep(GRACE * ((rank == 0) + 2 * (not first)))
        return first
    except RuntimeError:  # the store has left with the rank that held it, and that one has spoken
        return False


def _call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float,
    failed: Callable[[Exception], None],
) -> Any:
    """`fn(*args)` in a process group. The group's end is ours: gloo's threads would else outlive the interpreter."""
    backend = "nccl" if torch.cuda.is_available() and under_torchrun() else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        dist.barrier()  # a rank that fails at once would leave another one that is still connecting
        return fn(*args)
    except Exception as error:
        failed(error)  # while the others still wait: what they will say comes later
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class _Job:
    """What every own rank is told."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    timeout: float
    folder: Path

    def outcome(self, rank: int) -> Path:
        return self.folder / f"outcome-{rank}"


def _rank(rank: int, job: _Job) -> None:
    """The life of one of our own ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked until here: see _Ranks
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve

    def failed(error: Exception) -> None:
        mine = error if isinstance(error, ColrowError) else None
        _tell(job, _Outcome(rank, error=mine, traceback=traceback.format_exc(), when=time.time_ns()))

    store = dist.FileStore(str(job.folder / "store"), job.ranks)
    value = _call(job.fn, job.args, store, rank, job.ranks, job.timeout, failed)
    _tell(job, _Outcome(rank, value=value if rank == 0 else None))
    leave(0)


def leave(code: int) -> NoReturn:
    """End this process, a rank, at once: an orderly end may abort in what torch still holds of gloo's groups."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _tell(job: _Job, outcome: _Outcome) -> None:
    path = job.outcome(outcome.rank)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(path)


class _Ranks:
    """Processes of our own, and the parent's part: it waits, passes Ctrl-C on, and ends all when one has failed."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.interrupts = 0
        self.handled = threading.current_thread() is threading.main_thread()
        # A rank that is still importing would die of Ctrl-C with a traceback. A blocked signal waits, and children
        # inherit the block; so the tracker, whose start lifts it, comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.context: Any = mp.start_processes(_rank, (job,), nprocs=job.ranks, join=False, daemon=True)
            self.before = {number: signal.signal(number, self._interrupt) for number in _SIGNALS if self.handled}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def wait(self) -> Any:
        """Until all ranks have left: what rank 0 returned, or the error that counts."""
        processes = self.context.processes
        told = 0
        try:
            while alive := [process for process in processes if process.is_alive()]:
                connection.wait([process.sentinel for process in alive], timeout=0.2)
                if any(process.exitcode for process in processes):
                    break
                if self.interrupts > 1:
                    raise KeyboardInterrupt
                if self.interrupts > told:
                    told = self.interrupts
                    for process in alive:
                        os.kill(process.pid, signal.SIGINT)
            codes = self._leave(GRACE)
        finally:
            self._leave(0)
            for number, handler in self.before.items():
                signal.signal(number, handler)
            for name in self.context.error_files:
                Path(name).unlink(missing_ok=True)  # torch's copy of the tracebacks
        return self._result(codes)

    def _leave(self, grace: float) -> list[int]:
        """Give the ranks `grace` seconds, kill those that remain, and return the others' exit codes (theirs is 0)."""
        deadline = time.monotonic() + grace
        for process in self.context.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode or 0 for process in self.context.processes]
        for process in self.context.processes:
            if process.is_alive():
                process.kill()
                process.join()
        return codes

    def _result(self, codes: list[int]) -> Any:
        files = [path for path in map(self.job.outcome, range(self.job.ranks)) if path.exists()]
        outcomes: list[_Outcome] = [pickle.loads(path.read_bytes()) for path in files]
        failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.when)
        roots = [outcome for outcome in failures if not outcome.is_consequence]
        killed = {rank: -code for rank, code in enumerate(codes) if code < 0}
        shot = {rank: number for rank, number in killed.items() if number == signal.SIGKILL}
        if shot or (killed and not roots):
            raise _killed(*next(iter((shot or killed).items())))
        if failures:
            raise (roots or failures)[0].error_to_raise()
        if any(codes):
            given = f"the ranks ended with exit codes {codes}"
            raise RankFailedError("colrow.launch", given, "every rank must run to the end", "Look above for the reason")
        if len(outcomes) < self.job.ranks:  # a rank that Ctrl-C has ended tells nothing and leaves with 0
            raise KeyboardInterrupt
        return outcomes[0].value


def _killed(rank: int, number: int) -> RankFailedError:
    given = f"rank {rank} was killed by signal {number} ({signal.Signals(number).name}) and the others were ended"
    memory = "; the system does so when memory is short" if number == signal.SIGKILL else ""
    return RankFailedError(
        "colrow.launch", given, f"every rank must run to the end{memory}", "Continue from the last checkpoint, --resume"
    )
