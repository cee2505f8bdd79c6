"""Collectives of ranks that live on one Linux host, through memory that they share. `comm` chooses.

    memory     one line of flags a rank | set 0: a slot a rank | set 1: a slot a rank

A call: write what the others need into my slot, raise my flag to the call's number, wait for everybody's flag, read
their slots. Calls use the two sets in turn. Who is in call n + 1 has read all of call n, so nobody writes into a set
that is still read, and one wait a call is enough.

A store to a flag follows the stores to the slot, and x86 lets no processor see them in another order; on other
machines torch's backend is used. The memory has no name: it is a memfd, opened through /proc, and gone with the last
process, whatever ended it. Sums are taken in the order of the ranks: the same bits on every rank, every time.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

SLOT: Final = 4 << 20
"""Bytes that a rank writes at once; what is longer goes in pieces."""
LINE: Final = 64
"""Bytes of a rank's flags, a cache line: [calls begun, what the call is (two, by set), process]."""
SMALL: Final = 1 << 16
"""Bytes up to which every rank sums all of an all-reduce; beyond, each sums its part and they are gathered."""

Exchange = Callable[[Sequence[int]], list[list[int]]]
"""Gives every rank's numbers, by torch's backend."""
Reduce = Callable[[Tensor, Tensor], Tensor]


class PeerError(RuntimeError):
    """A rank is gone, late, or in another call."""


class SharedMemory:
    """One rank's end of the memory. Not for use in a forked child."""

    def __init__(self, memory: mmap.mmap, ranks: int, rank: int, timeout: float) -> None:
        self.memory, self.ranks, self.rank, self.timeout = memory, ranks, rank, timeout
        self.process, self.calls = os.getpid(), 0
        self._flags = memoryview(memory).cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._flags[self._line(rank) + 3] = self.process

    @staticmethod
    def open(exchange: Exchange, ranks: int, rank: int, timeout: timedelta) -> SharedMemory | None:
        """Set up the memory of a group, on all of its ranks at once; None where they cannot share any.

        Cost: three exchanges.
        """
        fits = sorted({host for (host,) in exchange([_host()])})
        if len(fits) != 1 or fits == [0]:
            return None
        size = LINE * ranks + 2 * ranks * SLOT
        file = os.memfd_create("colrow", os.MFD_CLOEXEC) if rank == 0 else -1
        memory = None
        try:
            if rank == 0:
                os.ftruncate(file, size)
            process, number = exchange([os.getpid(), file])[0]
            try:
                own = file if rank == 0 else os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                memory = mmap.mmap(own, size)
                if rank:
                    os.close(own)
            except (OSError, ValueError):  # another user's process, or a sandbox
                memory = None
            everybody = all(opened for (opened,) in exchange([int(memory is not None)]))
        finally:
            if rank == 0:
                os.close(file)
        return SharedMemory(memory, ranks, rank, timeout.total_seconds()) if everybody and memory is not None else None

    def all_gather(self, x: Tensor) -> Tensor:
        """(ranks, *x.shape), from a contiguous tensor of the same shape on every rank."""
        out = x.new_empty((self.ranks, x.numel()))
        flat = x.view(-1)
        for start, end in _pieces(x.numel(), SLOT // x.element_size()):
            n = end - start
            self._slot(self.rank, x.dtype, n).copy_(flat[start:end])
            self._meet("all_gather", n, x.dtype)
            for rank in range(self.ranks):
                out[rank, start:end] = flat[start:end] if rank == self.rank else self._slot(rank, x.dtype, n, done=True)
        return out.view(self.ranks, *x.shape)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype, reduce: Reduce = torch.add) -> Tensor:
        """My `sizes[rank]` of the numbers of x, flat and contiguous, in order, summed over the ranks in `dtype`."""
        starts = [sum(sizes[:rank]) for rank in range(self.ranks)]
        mine = x[starts[self.rank] : starts[self.rank] + sizes[self.rank]]
        out = torch.empty(mine.shape, dtype=dtype, device=x.device)
        for start, end in _pieces(max(sizes), SLOT // x.element_size() // self.ranks):
            wide = end - start
            slot = self._slot(self.rank, x.dtype, wide * self.ranks)
            for rank in range(self.ranks):
                n = min(end, sizes[rank]) - start
                if n > 0 and rank != self.rank:
                    slot[rank * wide : rank * wide + n].copy_(x[starts[rank] + start : starts[rank] + start + n])
            self._meet("reduce_scatter", wide, x.dtype)
            n = min(end, sizes[self.rank]) - start
            if n > 0:
                first = self.rank * wide
                theirs = (self._slot(r, x.dtype, first + n, done=True)[first:] for r in range(self.ranks))
                terms = (mine[start : start + n] if r == self.rank else term for r, term in enumerate(theirs))
                _reduce_into(out[start : start + n], terms, reduce)
        return out

    def all_reduce(self, x: Tensor, reduce: Reduce = torch.add) -> Tensor:
        """A contiguous tensor summed over the ranks."""
        flat = x.view(-1)
        if self.ranks > 2 and x.nbytes > SMALL:
            per = -(-x.numel() // self.ranks)
            sizes = [max(0, min(per, x.numel() - rank * per)) for rank in range(self.ranks)]
            part = x.new_zeros(per)
            part[: sizes[self.rank]] = self.reduce_scatter(flat, sizes, x.dtype, reduce)
            return self.all_gather(part).view(-1)[: x.numel()].view(x.shape)
        out = torch.empty_like(flat)
        for start, end in _pieces(x.numel(), SLOT // x.element_size()):
            n = end - start
            self._slot(self.rank, x.dtype, n).copy_(flat[start:end])
            self._meet("all_reduce", n, x.dtype)
            slots = (self._slot(rank, x.dtype, n, done=True) for rank in range(self.ranks))
            terms = (flat[start:end] if rank == self.rank else slot for rank, slot in enumerate(slots))
            _reduce_into(out[start:end], terms, reduce)
        return out.view(x.shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's contiguous tensor."""
        out, flat = torch.empty_like(x).view(-1), x.view(-1)
        for start, end in _pieces(x.numel(), SLOT // x.element_size()):
            if self.rank == 0:
                self._slot(0, x.dtype, end - start).copy_(flat[start:end])
            self._meet("broadcast", end - start, x.dtype)
            out[start:end] = flat[start:end] if self.rank == 0 else self._slot(0, x.dtype, end - start, done=True)
        return out.view(x.shape)

    def _slot(self, rank: int, dtype: torch.dtype, n: int, *, done: bool = False) -> Tensor:
        """The first n numbers of a rank's slot, in the call that is being written; or, `done`, in the one before."""
        part = (self.calls - done) % 2
        start = LINE * self.ranks + (part * self.ranks + rank) * SLOT
        return self._bytes[start : start + n * dtype.itemsize].view(dtype)

    def _meet(self, verb: str, n: int, dtype: torch.dtype) -> None:
        """Raise my flag, and wait for those of the others.

        Raises:
            PeerError: a rank is gone or late, or called something else.
        """
        if os.getpid() != self.process:
            raise PeerError("this process is a fork of a rank: start ranks anew")
        flags, at = self._flags, 1 + self.calls % 2
        what = zlib.crc32(f"{verb} {n} {dtype}".encode()) + 1
        mine = self._line(self.rank)
        flags[mine + at] = what
        self.calls += 1
        flags[mine] = self.calls
        for rank in range(self.ranks):
            if flags[self._line(rank)] < self.calls:
                self._wait(rank)
        others = [rank for rank in range(self.ranks) if flags[self._line(rank) + at] != what]
        if others:
            raise PeerError(f"ranks {others} of the group are in another call than {verb} of {n} numbers in {dtype}")

    def _wait(self, rank: int) -> None:
        """Spin briefly, then let others have the processor, then sleep; look now and then whether the rank is alive."""
        flags, line, began = self._flags, self._line(rank), time.monotonic()
        for _ in range(100):
            if flags[line] >= self.calls:
                return
        looked = began
        while flags[line] < self.calls:
            now = time.monotonic()
            if now - began < 0.002:
                os.sched_yield()
                continue
            time.sleep(0.00005)
            if now - looked > 0.5:
                looked = now
                if not _alive(flags[line + 3]):
                    raise PeerError(f"rank {rank} of the group is gone")
                if now - began > self.timeout:
                    raise PeerError(f"rank {rank} of the group did not come within {self.timeout:.0f} s")

    @staticmethod
    def _line(rank: int) -> int:
        return rank * LINE // 8


def _reduce_into(out: Tensor, terms: Iterator[Tensor], reduce: Reduce) -> None:
    out.copy_(next(terms))
    for term in terms:
        reduce(out, term.to(out.dtype), out=out)  # pyright: ignore[reportCallIssue]


def _pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and end of pieces of `total` numbers, of at most `most` each."""
    return ((start, min(start + most, total)) for start in range(0, total, most))


def _host() -> int:
    """A number of the host, the space of processes and the user; 0 where memory cannot be shared so."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return 0
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        parts = (boot.read_text(), str(Path("/proc/self/ns/pid").readlink()), os.getuid())
    except OSError:
        return 0
    return zlib.crc32(repr(parts).encode()) + 1


def _alive(process: int) -> bool:
    """Whether a process is there, and not a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
