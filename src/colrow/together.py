"""What one rank cannot do is an error on all of them: one that raised alone would leave the others waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
