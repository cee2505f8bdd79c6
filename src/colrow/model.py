"""The whole split model: its inputs are checked, and its outputs are whole."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from colrow import comm
from colrow.context import Call, agreed_draws, current, first_ranks_draws, gather, noted, noted_heads, running
from colrow.dropout import may_drop
from colrow.errors import RankError
from colrow.gradients import in_backward
from colrow.layout import I, S
from colrow.moves import move
from colrow.norm import SplitModule
from colrow.params import fingerprint, local
from colrow.recompute import forget
from colrow.region import close


class Stack(SplitModule):
    """A part of the model that holds blocks (a base model, an encoder). Called by itself it is a model: what it takes
    and gives is whole. Inside a call of the model it only passes on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_called_by_itself():
            return super().forward(*args, **kwargs)
        with ExitStack() as stack, running(Call(until_done=stack, inference=not torch.is_grad_enabled())) as call:
            if may_drop(self):
                stack.enter_context(agreed_draws(self.mesh))
            out = super().forward(*args, **kwargs)
            if call.tokens is not None:
                out = close(out, self, call.tokens)
        return _whole(out, self.mesh)

    def is_called_by_itself(self) -> bool:
        """Whether no call of the model is running, and none is repeated by activation checkpointing."""
        return current() is None and not in_backward()


class Model(Stack):
    """The split model: its inputs and outputs are those of the unsplit one.

    Attributes:
        checks_left: the next so many calls check that the ranks were given the same inputs (-1: every call).
    """

    checks_left: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.checks_left:
            self.checks_left -= 1
            check_same_inputs(self, args, kwargs)
        return super().forward(*args, **kwargs)

    def is_called_by_itself(self) -> bool:
        return True


class LanguageModel(Model):
    """A split model of Hugging Face with `generate`: the same tokens on every rank, and as on one device.

    All ranks draw from the first rank's generator, and stop when its stopping criteria say so.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        generate: Any = super().generate  # pyright: ignore[reportAttributeAccessIssue]
        with first_ranks_draws(self.mesh):
            return generate(*args, **kwargs)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """Those of transformers that read nothing but the tokens stay; the first rank decides for the others."""
        from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

        criteria: Any = super()._get_stopping_criteria(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        alike = [c for c in criteria if type(c) in (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)]
        others = [c for c in criteria if c not in alike]
        return type(criteria)([*alike, _FirstRankStops(others, self.mesh)] if others else alike)


class _FirstRankStops:
    """What the user's stopping criteria, and the clock, say on the first rank: one that stopped alone would leave the
    others waiting.

    Cost: a broadcast of a byte a row, for every token.
    """

    def __init__(self, criteria: Any, mesh: DeviceMesh) -> None:
        self.criteria, self.mesh = criteria, mesh

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        for criterion in self.criteria:
            done = done | criterion(input_ids, scores, **kwargs)
        return comm.broadcast(done.to(torch.uint8), self.mesh).bool()


def check_same_inputs(model: SplitModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An error on every rank if the ranks of the axis were given different inputs. Cost: an all-gather of 128 bytes."""
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    tensors = [(name, value.detach()) for name, value in named if isinstance(value, Tensor)][:8]
    names = [name for name, _ in tensors] + ["?"] * (8 - len(tensors))
    shapes = [zlib.crc32(repr((name, x.shape, x.dtype)).encode()) for name, x in tensors] + [0] * (8 - len(tensors))
    prints = [fingerprint(x) for _, x in tensors] + [0] * (8 - len(tensors))
    every = comm.exchange([*shapes, *prints], model.mesh)
    for place, kind in [*((i, "shape or dtype") for i in range(8)), *((8 + i, "content") for i in range(8))]:
        alike: dict[int, list[int]] = {}
        for rank, numbers in enumerate(every):
            alike.setdefault(numbers[place], []).append(rank)
        if len(alike) > 1:
            raise RankError(
                f"{type(model).__name__}, input {names[place % 8]}",
                f"the ranks were given tensors of different {kind} (alike are ranks {list(alike.values())})",
                "all ranks of one tensor-parallel axis work on the same batch",
                "Seed the sampler by the data-parallel rank, not by the global rank",
            )


def _whole(out: Any, mesh: DeviceMesh) -> Any:
    """What leaves the model made whole (S -> I): split logits, and tensors of the stream or of heads, which are marked.

    Containers keep their type. Beside a loss, logits stay a DTensor, of the true global shape: nobody may want them.
    """
    if isinstance(out, DTensor):
        placement = out.placements[-1]
        if not isinstance(placement, Shard):
            return out
        src = S(placement.dim, size=out.shape[placement.dim])
        return move(local(out, grad=S(placement.dim)), out.device_mesh, src=src, dst=I)
    if isinstance(out, Tensor):
        forget(out)
        heads = noted_heads(out)
        if heads is not None:  # probabilities, say
            mine = out.narrow(1, 0, heads[mesh.get_local_rank()])
            return move(mine, mesh, src=S(1, size=heads), dst=I)
        tokens = noted(out)
        return out if tokens in (None, tuple(out.shape[:-1])) else gather(out, mesh, tokens, I)
    if type(out) in (tuple, list):
        return type(out)(_whole(item, mesh) for item in out)
    if isinstance(out, dict):  # and the output classes of transformers, which are dicts
        beside_a_loss = out.get("loss") is not None
        for name, item in list(out.items()):
            if not (beside_a_loss and isinstance(item, DTensor)):
                out[name] = _whole(item, mesh)
    return out
