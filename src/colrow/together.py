"""What one rank cannot do is an error on all of them: one that raised alone would leave the others waiting."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.errors import ColrowError, RankError


@contextmanager
def together(mesh: DeviceMesh, verb: str) -> Iterator[None]:
    """An error on one rank of the axis, while it reads files, is an error on all of them.

    Cost: one small all-gather.
    """
    error = None
    try:
        yield
    except ColrowError as raised:
        error = raised
    failed = [rank for rank, (bad,) in enumerate(comm.exchange([int(error is not None)], mesh)) if bad]
    if error is not None:
        raise error
    if failed:
        given, fix = f"ranks {failed} could not read it", "Read their errors: every rank needs the whole folder"
        raise RankError(verb, given, "every rank reads the same files", fix)


class Alike:
    """Within it any error of one rank is the same error on all of them: a ColrowError as it is, another one in words.

    For work without collectives, such as what one rank does while the others wait.

    Cost: one small all-gather.
    """

    def __init__(self, mesh: DeviceMesh, verb: str) -> None:
        self.mesh, self.verb = mesh, verb

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C, say: this rank leaves, which the others notice
        mine = None
        if isinstance(error, ColrowError):
            mine = error
        elif error is not None:
            said = f"rank {self.mesh.get_local_rank()} raised {type(error).__name__} ({' '.join(str(error).split())})"
            fix = "Read its traceback on that rank"
            mine = RankError(self.verb, said[:1000], "every rank must come through", fix)
        first = next((found for found in gather_objects(mine, self.mesh) if found is not None), None)
        if first is not None:
            raise first from error


def gather_objects(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Every rank's value, on all ranks of the axis. Cost: two all-gathers."""
    raw = pickle.dumps(value)
    sizes = [size for (size,) in comm.exchange([len(raw)], mesh)]
    letters = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(comm.device(mesh))
    whole = comm.all_gather(letters, mesh, 0, sizes).cpu()
    return [pickle.loads(bytes(part.tolist())) for part in whole.split(sizes)]
