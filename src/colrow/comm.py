"""Raw collectives on local tensors. No autograd here, and no raw collective anywhere else.

Every function accepts any strides and any dtype, never writes to its input, and turns a lost peer into a `RankError` on
the ranks that remain. On an axis of one rank nothing is sent or copied: the result is the input. Sums of 16-bit floats
are taken in fp32.

Bytes that a rank sends, for x of n bytes on t ranks: all_reduce 2 n (t-1)/t, all_gather (of the whole, n) and
reduce_scatter n (t-1)/t each.

Ranks of a gloo group that live on one host talk through memory that they share (`shared`); all others, and where that
cannot be, through the group's own backend. `use_transport` chooses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, MutableSet, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from colrow.errors import RankError
from colrow.shared import SharedMemory

Transport = Literal["auto", "shared", "torch"]
_MEMORIES: Final[MutableMapping[dist.ProcessGroup, SharedMemory | None]] = WeakKeyDictionary()
"""What a group's ranks share, for as long as there is the group; None: they cannot."""
_ON_BACKEND: Final[MutableSet[dist.ProcessGroup]] = WeakSet()
"""Groups that use torch's backend although they may share memory."""


class Watch(TorchDispatchMode):
    """While it is entered, `sent` is told of every collective of this rank.

    It is a dispatch mode because torch carries these into the threads of the backward pass. The numbers in which
    autograd creates its nodes tell which part of the forward pass a collective in backward belongs to; nothing public
    knows them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def sent(self, verb: str, size: float, seconds: float) -> None:
        """A collective is done: the bytes that this rank sent, and how long it was in it."""
        raise NotImplementedError

    @staticmethod
    def next_node() -> int:
        """The number of the node that autograd will create next, on this thread."""
        return torch.autograd._get_sequence_nr()

    @staticmethod
    def number(node: Any) -> int:
        """That of a node of autograd's graph."""
        return node._sequence_nr()

    @staticmethod
    def running_node() -> int | None:
        """The number of the node whose backward is running, if one is."""
        node = torch._C._current_autograd_node()
        return None if node is None else Watch.number(node)


def all_reduce(x: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """x summed (or reduced by `op`) over the ranks: the same bits on each of them."""
    if mesh.size() == 1 or x.numel() == 0:
        return x
    memory = _shared(mesh)
    total = x.to(sum_dtype(x.dtype), copy=memory is None, memory_format=torch.contiguous_format)
    with _peers("all_reduce", mesh, 2 * total.nbytes * (mesh.size() - 1) / mesh.size()):
        if memory is not None:
            total = memory.all_reduce(total.contiguous(), _REDUCE[op])
        else:
            dist.all_reduce(total, op, group=mesh.get_group())
    return total.to(x.dtype)


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int]) -> Tensor:
    """The ranks' slices of dimension `dim` joined; `sizes[r]` is the size of rank r's. A copy less on dim 0."""
    whole = _with_size(x, dim, sum(sizes))
    if mesh.size() == 1 or whole.numel() == 0:
        return x if mesh.size() == 1 else x.new_zeros(whole)
    per = max(sizes)
    rows = _pad(x.movedim(dim, 0), per)
    memory = _shared(mesh)
    with _peers("all_gather", mesh, rows.nbytes * (mesh.size() - 1)):
        if memory is not None:
            out = memory.all_gather(rows).flatten(0, 1)
        else:
            out = rows.new_empty((mesh.size() * per, *rows.shape[1:]))
            dist.all_gather_single(out, rows, group=mesh.get_group())
    if all(size == per or sum(sizes[rank:]) == size for rank, size in enumerate(sizes)):
        out = out.narrow(0, 0, sum(sizes))  # only the tail is padding
    else:
        out = torch.cat([out.narrow(0, rank * per, size) for rank, size in enumerate(sizes)])
    return out.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int]) -> Tensor:
    """x summed over the ranks, of which each keeps its slice of dimension `dim`.

    An all-to-all and a local sum: gloo's own reduce-scatter is an all-reduce of everything, and a local sum can be
    taken in fp32, in an order that does not depend on the ring, for the same bytes.
    """
    mine = sizes[mesh.get_local_rank()]
    if mesh.size() == 1 or x.numel() == 0:
        return x if mesh.size() == 1 else x.new_zeros(_with_size(x, dim, mine))
    rows, memory, dtype = x.movedim(dim, 0).contiguous(), _shared(mesh), sum_dtype(x.dtype)
    row = rows.numel() // rows.shape[0]
    with _peers("reduce_scatter", mesh, row * rows.element_size() * (rows.shape[0] - mine)):
        if memory is not None:
            total = memory.reduce_scatter(rows.view(-1), [size * row for size in sizes], dtype)
        else:
            terms = rows.new_empty((mesh.size(), mine * row))
            dist.all_to_all_single(
                terms.view(-1, *rows.shape[1:]), rows, [mine] * mesh.size(), list(sizes), group=mesh.get_group()
            )
            total = terms.sum(0, dtype=dtype)
    return total.to(x.dtype).view(mine, *rows.shape[1:]).movedim(0, dim).contiguous()


def broadcast(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x of the axis's first rank, on all of them. (`src` is a *global* rank: the axis {2, 3} has no rank 0.)"""
    if mesh.size() == 1 or x.numel() == 0:
        return x
    memory, value = _shared(mesh), x.clone(memory_format=torch.contiguous_format)
    with _peers("broadcast", mesh, value.nbytes):
        if memory is not None:
            value = memory.broadcast(value)
        else:
            dist.broadcast(value, src=first_rank(mesh), group=mesh.get_group())
    return value


def exchange(numbers: Sequence[int], mesh: DeviceMesh) -> list[list[int]]:
    """Every rank's list of integers (all of one length): how ranks agree on something before they act on it."""
    mine = torch.tensor([list(numbers)], dtype=torch.int64, device=device(mesh))
    return all_gather(mine, mesh, 0, (1,) * mesh.size()).tolist()


def use_transport(mesh: DeviceMesh, transport: Transport) -> None:
    """Choose how the ranks of an axis talk; every rank of it makes the same call.

    Arguments:
        mesh: one axis of a DeviceMesh.
        transport: "shared": memory that ranks on one host share. "torch": the group's own backend. "auto", which is how
            an axis starts: shared where it can be (gloo, Linux on x86, one host, one user), else the backend.

    Raises:
        RankError: "shared", and these ranks cannot share memory.
    """
    group = mesh.get_group()
    _ON_BACKEND.discard(group)
    if transport == "torch":
        _ON_BACKEND.add(group)
    elif transport == "shared" and _shared(mesh) is None:
        given, fix = "its ranks cannot share memory", "Leave it at 'auto', or give 'torch'"
        allowed = "ranks of one user on one Linux host with an x86 processor, joined by gloo"
        raise RankError(f"use_transport on ranks {mesh.mesh.tolist()}", given, allowed, fix)


def _shared(mesh: DeviceMesh) -> SharedMemory | None:
    """The memory that the ranks of the axis share, if they do. The first call sets it up, on all of them.

    What torch compiles has torch's collectives in it, which the compiler knows.
    """
    if torch.compiler.is_compiling():
        return None
    group = mesh.get_group()
    if group in _ON_BACKEND:
        return None
    if group not in _MEMORIES:
        _MEMORIES[group] = None  # for the exchanges of the set-up
        if mesh.device_type == "cpu" and dist.get_backend(group) == "gloo":
            timeout = group._get_backend(torch.device("cpu")).options._timeout  # nothing public tells it
            memory = SharedMemory.open(lambda n: exchange(n, mesh), mesh.size(), mesh.get_local_rank(), timeout)
            _MEMORIES[group] = memory
    return _MEMORIES[group]


_REDUCE: Final = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}


def is_rank_zero() -> bool:
    """Whether this is the run's first rank: the one that talks and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_zero(text: str) -> str:
    """A text (4096 bytes at most) of the run's first rank, on every rank of the run: how one that writes reports."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    on = torch.device("cpu") if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    raw = text.encode()[:4096].ljust(4096, b"\0")
    letters = torch.tensor(list(raw), dtype=torch.uint8, device=on)
    dist.broadcast(letters, src=0)
    return bytes(letters.tolist()).rstrip(b"\0").decode(errors="ignore")


def all_here(verb: str, seconds: float = 20.0) -> None:
    """Wait until every rank of the run has come to the same call of `verb`: on one rank alone a collective would hang.

    Raises:
        RankError: some did not come in time. The call does not count then: a later one is met by a later one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # no public function tells who has come
    mine = store.add(f"colrow/{verb}/{dist.get_rank()}", 1)
    others, deadline = [r for r in range(dist.get_world_size()) if r != dist.get_rank()], time.monotonic() + seconds
    while others := [rank for rank in others if store.add(f"colrow/{verb}/{rank}", 0) < mine]:
        if time.monotonic() > deadline:
            store.add(f"colrow/{verb}/{dist.get_rank()}", -1)
            given, fix = (
                f"ranks {others} did not call it within {seconds:.0f} s",
                "Call it on every rank, not under `if`",
            )
            raise RankError(verb, given, "every rank has a part of each tensor; the first one writes", fix)
        time.sleep(0.02)


def device(mesh: DeviceMesh) -> torch.device:
    """Where this rank's collectives on `mesh` run: the CPU, or the accelerator that is current."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def first_rank(mesh: DeviceMesh) -> int:
    """The global rank of the axis's first member: it names the data-parallel replica that the axis belongs to."""
    return int(mesh.mesh.flatten()[0])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _pad(rows: Tensor, size: int) -> Tensor:
    if rows.shape[0] == size:
        return rows.contiguous()
    padded = rows.new_zeros((size, *rows.shape[1:]))
    padded.narrow(0, 0, rows.shape[0]).copy_(rows)
    return padded


def _with_size(x: Tensor, dim: int, size: int) -> torch.Size:
    shape = list(x.shape)
    shape[dim] = size
    return torch.Size(shape)


@contextmanager
def _peers(verb: str, mesh: DeviceMesh, size: float) -> Iterator[None]:
    """A peer that died or never came is said in our words; what the backend said follows as the cause. Who watches is
    told of the `size` bytes that were sent."""
    modes = [] if torch.compiler.is_compiling() else _get_current_dispatch_mode_stack()
    watches = [mode for mode in modes if isinstance(mode, Watch)]
    began = time.perf_counter() if watches else 0.0
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().splitlines()[0]
        raise RankError(
            f"{verb} on ranks {mesh.mesh.tolist()}",
            f"it did not complete ({first_line})",
            "every rank must reach the same collectives with the same shapes",
            "Read the first traceback of the other ranks: one of them left, or was given other shapes",
        ) from error
    for watch in watches:
        watch.sent(verb, size, time.perf_counter() - began)
