"""The memory that ranks on one host share: exact sums, under delays, in pieces, beside other groups; and its faults."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import colrow
from colrow import comm, shared
from colrow.models import GPT, GPTConfig
from colrow.shared import SharedMemory
from oracle import FP64, relative
from pool import mesh

REPEATS = 500
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


def numbers(rng: random.Random, ranks: int, rows: int, columns: int) -> list[Tensor]:
    """What each rank has: whole numbers, whose sums are exact in every dtype."""
    dtype, seed = rng.choice(DTYPES), rng.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 8, (rows, columns), generator=generator).to(dtype) for _ in range(ranks)]


def many_times(repeats: int, most: int) -> None:
    axis, rank = mesh(), mesh().get_local_rank()
    comm.use_transport(axis, "shared")
    rng, own = random.Random(1), random.Random(rank)
    for _ in range(repeats):
        rows, columns = rng.choice((0, 1, 2, 7, rng.randrange(most))), rng.randrange(1, 9)
        every = numbers(rng, axis.size(), rows, columns)
        sizes = [rng.randrange(rows + 1) for _ in range(axis.size() - 1)]
        sizes = [b - a for a, b in zip([0, *sorted(sizes)], [*sorted(sizes), rows], strict=True)]
        if own.random() < 0.1:
            time.sleep(own.random() * 0.003)
        total = torch.stack(every).sum(0)
        mine = every[rank].t().contiguous().t() if rng.random() < 0.5 else every[rank]  # any strides
        start = sum(sizes[:rank])
        assert torch.equal(comm.all_reduce(mine, axis), total.to(mine.dtype))
        part = total[start : start + sizes[rank]].to(mine.dtype)
        assert torch.equal(comm.reduce_scatter(mine, axis, 0, sizes), part)
        assert torch.equal(comm.all_gather(part, axis, 0, sizes), total.to(mine.dtype))
        assert torch.equal(comm.broadcast(mine, axis), every[0])
        top = torch.stack(every).amax(0) if rows else every[0]
        assert torch.equal(comm.all_reduce(mine, axis, torch.distributed.ReduceOp.MAX), top)
        assert torch.equal(mine, every[rank]), "the input is not written to"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_many_random_collectives_are_exact(ranks: Any, size: int) -> None:
    """Five ranks on fewer processors, too; each is late now and then."""
    ranks(size).run(many_times, REPEATS if size == 2 else REPEATS // 4, 400, timeout=120)


def longer_than_a_slot() -> None:
    axis, rank = mesh(), mesh().get_local_rank()
    comm.use_transport(axis, "shared")
    every = [torch.arange(5 * shared.SLOT // 8 + 3, dtype=torch.float32) % 1000 + r for r in range(axis.size())]
    total, n = sum(every, torch.zeros(())), len(every[0])
    assert torch.equal(comm.all_reduce(every[rank], axis), total)
    sizes = [n - 5 * (axis.size() - 1), *[5] * (axis.size() - 1)]
    start = sum(sizes[:rank])
    assert torch.equal(comm.reduce_scatter(every[rank], axis, 0, sizes), total[start : start + sizes[rank]])
    assert torch.equal(comm.all_gather(every[rank], axis, 0, [n] * axis.size()), torch.cat(every))
    assert torch.equal(comm.broadcast(every[rank], axis), every[0])


@SIZES
def test_what_is_longer_than_a_slot_goes_in_pieces(ranks: Any, size: int) -> None:
    ranks(size).run(longer_than_a_slot)


def two_axes() -> tuple[float, float, float]:
    grid = mesh((2, 2), ("dp", "tp"))
    for axis in ("dp", "tp"):
        comm.use_transport(grid[axis], "shared")
    mine = torch.full((3,), 10.0 ** mesh().get_local_rank())
    found = [comm.all_reduce(mine, grid[axis]) for axis in ("tp", "dp")] + [comm.all_reduce(mine, mesh())]
    return float(found[0][0]), float(found[1][0]), float(found[2][0])


def test_several_groups_do_not_meet(ranks: Any) -> None:
    assert ranks(4).run(two_axes) == [(11, 101, 1111), (11, 1010, 1111), (1100, 101, 1111), (1100, 1010, 1111)]


def of_both(sequence_parallel: bool) -> list[dict[str, Tensor]]:
    found = []
    for transport in ("shared", "torch"):
        comm.use_transport(mesh(), transport)
        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(vocab=61, context=16, layers=2, width=40, heads=5, ffn=70, gated=True)).double()
        split: Any = colrow.parallelize(model, mesh(), sequence_parallel=sequence_parallel)
        ids = torch.arange(26).view(2, 13)
        split(ids, ids).backward()
        found.append(colrow.full_grads(split))
    comm.use_transport(mesh(), "auto")
    return found


@SIZES
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
def test_both_transports_give_the_same_gradients(ranks: Any, size: int, sequence_parallel: bool) -> None:
    for one, other in ranks(size).run(of_both, sequence_parallel):
        assert all(relative(one[name], other[name]) <= FP64 for name in one)


def sums(seed: int) -> tuple[Tensor, Tensor]:
    comm.use_transport(mesh(), "shared")
    generator = torch.Generator().manual_seed(seed + mesh().get_local_rank())
    x = torch.randn(1 << 16, generator=generator)
    return comm.all_reduce(x, mesh()), comm.all_reduce(x[:99], mesh())


def test_sums_have_the_same_bits_on_every_rank_every_time(ranks: Any) -> None:
    first, *rest = [found for _ in range(3) for found in ranks(4).run(sums, 0)]
    assert all(torch.equal(a, b) for found in rest for a, b in zip(found, first, strict=True))


def another_shape() -> tuple[str, float]:
    comm.use_transport(mesh(), "shared")
    try:
        comm.all_reduce(torch.ones(2 + mesh().get_local_rank()), mesh())
        said = ""
    except colrow.RankError as error:
        said = str(error)
    return said, float(comm.all_reduce(torch.ones(1), mesh()))  # and it works again


def test_ranks_with_different_shapes_are_told(ranks: Any) -> None:
    for said, total in ranks(3).run(another_shape):
        assert "are in another call than all_reduce of" in said and total == 3.0


def of_groups_that_go() -> tuple[int, list[str]]:
    counts = []
    for _ in range(5):
        group: Any = dist.new_group()
        comm.all_reduce(torch.ones(9), DeviceMesh.from_group(group, "cpu"))
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(sum("memfd:colrow" in _target(link) for link in Path("/proc/self/fd").iterdir()))
    return counts[-1] - counts[0], [file.name for file in Path("/dev/shm").glob("*colrow*")]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # the one that lists the folder
        return ""


def test_the_memory_has_no_name_and_goes_with_its_group(ranks: Any) -> None:
    """So nothing is left when a rank is killed, and two runs cannot meet."""
    assert ranks(2).run(of_groups_that_go) == [(0, [])] * 2


def in_a_fork() -> str:
    comm.use_transport(mesh(), "shared")
    comm.all_reduce(torch.ones(1), mesh())
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            comm.all_reduce(torch.ones(1), mesh())
        except colrow.RankError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read()


def test_a_forked_child_is_no_rank(ranks: Any) -> None:
    assert all("this process is a fork of a rank" in said for said in ranks(2).run(in_a_fork))


def told(*answers: list[list[int]]) -> Any:
    """An exchange with ranks that say what they are told to."""
    waiting = iter(answers)
    return lambda mine: next(waiting)


def test_ranks_that_cannot_share_use_torchs_backend() -> None:
    limit = timedelta(seconds=1)
    assert SharedMemory.open(told([[1], [2]]), 2, 0, limit) is None, "two hosts"
    assert SharedMemory.open(told([[0], [0]]), 2, 0, limit) is None, "another processor or system"
    assert SharedMemory.open(told([[1], [1]], [[1 << 22, 3]], [[1], [0]]), 2, 1, limit) is None, "no such process"


def cannot_share() -> str:
    found, shared._host = shared._host, lambda: 0
    group: Any = dist.new_group()
    axis = DeviceMesh.from_group(group, "cpu")
    try:
        total = comm.all_reduce(torch.ones(1), axis)
        assert float(total) == 2.0, "gloo"
        comm.use_transport(axis, "shared")
    except colrow.RankError as error:
        return str(error)
    finally:
        shared._host = found
    return ""


def test_asking_for_what_cannot_be_is_an_error(ranks: Any) -> None:
    assert all("its ranks cannot share memory" in said for said in ranks(2).run(cannot_share))


FAULT = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import colrow
from colrow import comm

rank, file, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3, timeout=timedelta(seconds=4))
mesh = init_device_mesh("cpu", (3,))
comm.use_transport(mesh, "shared")
for step in range(10**6):
    if step == 50 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        comm.all_reduce(torch.ones(1000), mesh)
    except colrow.RankError as error:
        print(error, flush=True)
        os._exit(3)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "rank 1 of the group is gone"), ("stopped", "did not come within")]
)
def test_a_rank_that_is_gone_or_late_is_named(tmp_path: Path, how: str, said: str) -> None:
    script = tmp_path / "fault.py"
    script.write_text(FAULT)
    began = time.monotonic()
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store", how], stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            out, _ = started[rank].communicate(timeout=60)
            assert started[rank].returncode == 3 and "all_reduce" in out and said in out, out
        assert time.monotonic() - began < 45
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
