"""One rank of the pool (see pool.py): the loop that serves requests, and the bytes in which they travel."""

import faulthandler
import importlib
import io
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Longer than any run may take: a hang is then ended by the pool, which can show where every rank stood.
GROUP_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Returned:
    """What the function returned on one rank."""

    value: Any


@dataclass(frozen=True)
class RankError:
    """What the function raised on one rank, as plain text: the exception itself may not survive pickling."""

    type_name: str
    message: str
    traceback: str
    in_step: bool = True  # False: the process group may be out of step, so the ranks must be replaced


def serve(pipe: Connection, rank: int, world_size: int, store: str, stack_file: str) -> None:
    """Join the process group, then answer requests until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it kills the ranks
    stack = Path(stack_file).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    pipe.send_bytes(_answer(_join, rank, world_size, store))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(_call, request))


def _join(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )


def _call(request: bytes) -> Any:
    (module, qualname), args, kwargs, path = loads(request)
    sys.path.extend(folder for folder in path if folder not in sys.path)
    fn: Any = importlib.import_module(module)
    for name in qualname.split("."):
        fn = getattr(fn, name)
    torch.manual_seed(0)  # what one test leaves behind must not reach the next
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    return fn(*args, **kwargs)


def _answer(fn: Any, *args: Any) -> bytes:
    """The pickled outcome of `fn(*args)`: a rank always answers, whatever the function raised or returned."""
    try:
        return dumps(Returned(fn(*args)))
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        # RuntimeError is what a collective raises when it breaks; any other error is raised before one starts.
        in_step = not isinstance(error, RuntimeError)
        return dumps(RankError(type(error).__name__, str(error), traceback.format_exc(), in_step))


class _Pickler(pickle.Pickler):
    """Plain pickle, with tensors as their bytes: no shared memory, no file descriptors, no strides, no graph."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if isinstance(obj, DTensor):
            raise TypeError("a DTensor cannot leave its rank: send its local tensor or its full_tensor()")
        flat = obj.detach().cpu().reshape(-1).contiguous()
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).view(dtype).reshape(shape)


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)
