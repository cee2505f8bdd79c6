"""What goes over the wire: every collective that a rank starts, with its bytes. Private parts of torch, for tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colrow import comm
from pool import mesh


@dataclass(frozen=True)
class Sent:
    """One collective: its verb, the bytes of the whole tensor, and the bytes that this rank sends."""

    verb: str
    whole: int
    sent: float
    dtype: torch.dtype


class Wire(TorchDispatchMode):
    """Records the collectives of its context, forward and backward, and counts all operations.

    It sees what torch's backend does, so all ranks use that meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Sent] = []
        self.operations = 0

    def __enter__(self) -> Self:
        comm.use_transport(mesh(), "torch")
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        comm.use_transport(mesh(), "auto")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func.namespace == "c10d":
            self.log.append(_sent(func.__name__.split(".")[0], args))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[Sent]:
        """What was recorded since the last `take`."""
        log, self.log = self.log, []
        return log


def counts(log: list[Sent]) -> dict[str, int]:
    return dict(Counter(entry.verb for entry in log))


def _sent(op: str, args: Any) -> Sent:
    tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)]
    ranks = dist.get_world_size()
    first = tensors[0]
    size = first.numel() * first.element_size()
    others = (ranks - 1) / ranks
    if op == "allreduce_":
        return Sent("all_reduce", size, 2 * size * others, first.dtype)
    if op in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        return Sent("all_gather", size, size * others, first.dtype)
    if op == "alltoall_base_":  # out, in
        mine, size = size // ranks, tensors[1].numel() * tensors[1].element_size()
        return Sent("reduce_scatter", size, size - mine, first.dtype)
    if op == "broadcast_":
        return Sent("broadcast", size, size, first.dtype)
    return Sent(op, size, float("nan"), first.dtype)


class CommDebug(CommDebugMode):
    """torch's own counter of collectives, which sees only those of its backends: all ranks use that meanwhile."""

    def __enter__(self) -> Self:
        comm.use_transport(mesh(), "torch")
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        comm.use_transport(mesh(), "auto")
