"""The model of the benchmark, plain PyTorch, and how each library splits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import colrow
from colrow import HEADS, Column, LastNorm, Norm, Plan, Row
from colrow.rules import Attention as AttentionRule
from colrow.rules import Block as BlockRule
from colrow.rules import Mlp as MlpRule


@dataclass(frozen=True)
class Case:
    """Layers of a GPT: hidden size, tokens in a row, rows, layers, heads; `gated` and `kv_heads` as Llama has them."""

    name: str
    hidden: int
    sequence: int
    batch: int
    layers: int
    heads: int
    kv_heads: int | None = None
    gated: bool = False


CASES = (
    Case("h512", 512, 512, 4, 4, 8),
    Case("h256", 256, 128, 2, 8, 8),
    Case("llama", 384, 256, 2, 6, 6, kv_heads=2, gated=True),
)


class Attention(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.heads, self.kv_heads = case.heads, case.kv_heads or case.heads
        self.head_dim = case.hidden // case.heads
        self.q = nn.Linear(case.hidden, case.hidden)
        self.k = nn.Linear(case.hidden, self.kv_heads * self.head_dim)
        self.v = nn.Linear(case.hidden, self.kv_heads * self.head_dim)
        self.o = nn.Linear(case.hidden, case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=self.kv_heads < self.heads)
        return self.o(y.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        width = 4 * case.hidden
        self.gate = nn.Linear(case.hidden, width) if case.gated else None
        self.up = nn.Linear(case.hidden, width)
        self.down = nn.Linear(width, case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(case.hidden), nn.LayerNorm(case.hidden)
        self.attention, self.mlp = Attention(case), Mlp(case)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Layers(nn.Module):
    """(batch, sequence, hidden) to the same."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def plan(case: Case) -> Plan:
    gate = {"blocks.*.mlp.gate": Column()} if case.gated else {}
    return Plan(
        {
            "blocks.*": BlockRule(),
            "blocks.*.norm_?": Norm(),
            "blocks.*.attention": AttentionRule(heads="heads", kv_heads="kv_heads"),
            "blocks.*.attention.q": Column(HEADS),
            "blocks.*.attention.[kv]": Column(colrow.KV_HEADS),
            "blocks.*.attention.o": Row(HEADS),
            "blocks.*.mlp": MlpRule(),
            **gate,
            "blocks.*.mlp.up": Column(),
            "blocks.*.mlp.down": Row(),
            "norm": LastNorm(),
        }
    )


def with_dtensor(model: Layers, mesh: DeviceMesh, *, sequence_parallel: bool) -> Layers:
    """torch's own parallel styles, as torchtitan applies them to a transformer."""
    for block in model.blocks:
        gather: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        scatter: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequence_parallel else {}
        styles: dict[str, ParallelStyle] = {}
        for name in ("attention.q", "attention.k", "attention.v", "mlp.up"):
            styles[name] = ColwiseParallel()
        for name in ("attention.o", "mlp.down"):
            styles[name] = RowwiseParallel(**scatter)
        if isinstance(block, Block) and block.mlp.gate is not None:
            styles["mlp.gate"] = ColwiseParallel()
        if sequence_parallel:
            styles |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
            styles |= {"attention": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
        parallelize_module(block, mesh, styles)
    if sequence_parallel:
        parallelize_module(model, mesh, {"norm": SequenceParallel()})
    return model


def same(x: Tensor) -> Tensor:
    return x


def contenders(
    case: Case, mesh: DeviceMesh, alone: DeviceMesh
) -> dict[str, tuple[Callable[[Layers], Any], Callable[[Tensor], Tensor], str]]:
    """By name: how the model is made of the plain one, how its input, and the transport that it uses."""

    def ours(axis: DeviceMesh, **options: Any) -> Callable[[Layers], Any]:
        return lambda model: colrow.parallelize(model, axis, plan(case), check_inputs=0, **options)

    def scattered(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(1)])

    return {
        "one process": (lambda model: model, same, "auto"),
        "one process, one core": (lambda model: model, same, "auto"),
        "colrow, tp 1": (ours(alone), same, "auto"),
        "colrow TP": (ours(mesh, sequence_parallel=False), same, "shared"),
        "colrow TP + SP": (ours(mesh), same, "shared"),
        "colrow TP + SP, recompute none": (ours(mesh, recompute="none"), same, "shared"),
        "colrow TP + SP, gloo": (ours(mesh), same, "torch"),
        "DTensor TP": (lambda model: with_dtensor(model, mesh, sequence_parallel=False), same, "auto"),
        "DTensor TP + SP": (lambda model: with_dtensor(model, mesh, sequence_parallel=True), scattered, "auto"),
    }


def step(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a forward pass."""
    y = model(x)
    whole = y.full_tensor() if hasattr(y, "full_tensor") else y
    return torch.as_tensor(whole).square().mean()
