"""Modules as a user might write them, and the plans that split them: material for the tests, plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from colrow import (
    FEATURES,
    HEADS,
    KV_HEADS,
    Attention,
    Block,
    Column,
    Drop,
    Head,
    LastNorm,
    Mlp,
    Norm,
    Plan,
    Replicated,
    Row,
    Vocab,
)
from colrow.models import GPT, GPTConfig
from colrow.models.gpt import MLP as GPTMLP
from colrow.models.gpt import Attention as GPTAttention

SMALL: dict[str, Any] = {"vocab": 64, "context": 32, "layers": 2, "width": 32, "heads": 4}
LLAMA: dict[str, Any] = {"gated": True, "rotary": True, "bias": False, "kv_heads": 2, "tied": False}


def gpt(**options: Any) -> Any:
    """A small `GPT`; options as in `GPTConfig`."""
    return GPT(GPTConfig(**{**SMALL, **options}))


def ids(rows: int = 2, length: int = 13, vocab: int = 64, seed: int = 1) -> Tensor:
    """Token ids, the same on every rank."""
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 3) -> Tensor:
    """Activations in fp64, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawing(ffn: int = 12) -> nn.Module:
    """The MLP of the first drawing, and `DRAWING`, its plan."""
    return nn.Sequential(nn.Linear(8, ffn), nn.GELU(), nn.Linear(ffn, 8))


DRAWING = Plan({"0": Column(), "2": Row()})


class OwnNorm(nn.Module):
    """RMSNorm written by hand, with a gain, a shift and a raw scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight + self.bias


class QKNormAttention(nn.Module):
    """Attention with separate projections and a norm on every query and key head (as in Qwen3)."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_head, self.n_kv, self.size = heads, kv_heads, width // heads
        self.q, self.k = nn.Linear(width, heads * self.size), nn.Linear(width, kv_heads * self.size)
        self.v, self.o = nn.Linear(width, kv_heads * self.size), nn.Linear(heads * self.size, width)
        self.q_norm, self.k_norm = OwnNorm(self.size), nn.RMSNorm(self.size)  # (a bias of k would have no gradient)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (n, self.size))
            for p, n in zip((self.q(x), self.k(x), self.v(x)), (self.n_head, self.n_kv, self.n_kv), strict=True)
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_head // self.n_kv, 1) for t in (k, v.transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Four MLPs, scaled by a router's softmax: the router's gradient is one term per rank."""

    def __init__(self, width: int, ffn: int, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.up = nn.ModuleList(nn.Linear(width, ffn) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(ffn, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        terms = [
            down(F.gelu(up(x)) * weights[..., i : i + 1])
            for i, (up, down) in enumerate(zip(self.up, self.down, strict=True))
        ]
        return torch.stack(terms).sum(0)


class OwnBlock(nn.Module):
    """A block with a parameter of its own (a gain), a hand-written norm, and attention with separate projections."""

    def __init__(self, width: int, heads: int = 4, kv_heads: int = 2, experts: bool = False) -> None:
        super().__init__()
        self.norm_a, self.norm_b = OwnNorm(width), nn.LayerNorm(width)
        self.attn = QKNormAttention(width, heads, kv_heads)
        self.ff = Experts(width, 12) if experts else GPTMLP(GPTConfig(width=width, ffn=20, gated=True))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.attn(self.norm_a(x))
        return x + self.ff(self.norm_b(x))


class OwnModel(nn.Module):
    """Embedding, blocks (each used `times` times), a last norm and a whole (not vocabulary-parallel) head."""

    def __init__(self, width: int = 16, layers: int = 2, times: int = 1, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.shift = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(OwnBlock(width, experts=experts) for _ in range(layers))
        self.times = times
        self.last = OwnNorm(width)
        self.classify = nn.Linear(width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return self.classify(self.last(x))


def own_plan(experts: bool = False) -> Plan:
    """For an `OwnModel`: the last norm is followed by something whole, so it gathers to I."""
    mlp: dict[str, Any] = (
        {"gate": Replicated(), "up.*": Column(), "down.*": Row()}
        if experts
        else {"gate_up": Column(FEATURES, FEATURES), "down": Row()}
    )
    return Plan(
        {
            "embed": Vocab(),
            "shift": Replicated(),
            "layers.*": Block(),
            "layers.*.norm_?": Norm(),
            "layers.*.attn": Attention(heads="n_head", kv_heads="n_kv", head_dim="size"),
            "layers.*.attn.q": Column(HEADS),
            "layers.*.attn.[kv]": Column(KV_HEADS),
            "layers.*.attn.?_norm": Norm(),
            "layers.*.attn.o": Row(HEADS),
            "layers.*.ff": Mlp(),
            **{f"layers.*.ff.{name}": rule for name, rule in mlp.items()},
            "last": LastNorm(),
            "classify": Replicated(),
        }
    )


class TupleBlock(OwnBlock):
    """A block that returns a tuple and takes its stream by a position and a mask by name, as many do."""

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        y = super().forward(x)
        return (y if scale is None else y * scale, None)


class TupleModel(OwnModel):
    """`OwnModel` with tuple blocks, checkpointed `group` at a time if asked for."""

    group = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TupleBlock(16) for _ in range(4))

    def run(self, x: Tensor, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            x = layer(x, scale=self.half)[0]
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift
        self.half = x.new_tensor(0.5)
        for first in range(0, 4, self.group or 4):
            last = first + (self.group or 4)
            if self.group:
                x = checkpoint(self.run, x, first, last, use_reentrant=False)
            else:
                x = self.run(x, first, last)
        return self.classify(self.last(x))


class Conditioned(nn.Module):
    """Blocks that take vectors beside the stream, from parameters of the model; all by name, the stream too."""

    class Block(OwnBlock):
        def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, x: Tensor, scale: Tensor, *, more: tuple[Tensor, str]
        ) -> Tensor:
            return super().forward(x) * scale + more[0]

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.layers = nn.ModuleList(self.Block(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(scale=self.scale.sin(), x=x, more=(self.shift, "shift"))
        return x


class Cross(nn.Module):
    """A region with two inputs, by name: what it reads beside the stream is used by its column layers too."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.down(self.up(x) * self.gate(memory).sigmoid())

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(memory=memory, x=x)


class ThreeInputs(nn.Module):
    """Blocks whose attention is called with the same stream three times, as `nn.MultiheadAttention` is."""

    class Attention(QKNormAttention):
        def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
                for layer, x in ((self.q, query), (self.k, key), (self.v, value))
            )
            k, v = (t.repeat_interleave(self.n_head // self.n_kv, 1) for t in (self.k_norm(k), v))
            y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
            return self.o(y.transpose(1, 2).flatten(-2))

    class Block(OwnBlock):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.attn = ThreeInputs.Attention(width, heads=4, kv_heads=2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm_a(x)
            x = x + self.gain * self.attn(y, y, value=y)
            return x + self.ff(self.norm_b(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ParallelResidual(nn.Module):
    """GPT-J's block: attention and MLP read the same norm's output, and both are added at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        config = GPTConfig(width=width, heads=4, ffn=20)
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), GPTAttention(config), GPTMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class ParallelModel(nn.Module):
    """Blocks with parallel residuals over given activations; it ends inside the sequence-parallel stretch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParallelResidual(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


PARALLEL = Plan(
    {
        "blocks.*": Block(),
        "blocks.*.norm": Norm(),
        "blocks.*.attention": Attention(heads="heads", kv_heads="kv_heads"),
        "blocks.*.attention.qkv": Column(HEADS, KV_HEADS, KV_HEADS),
        "blocks.*.attention.drop": Drop(HEADS),
        "blocks.*.attention.out": Row(HEADS),
        "blocks.*.mlp": Mlp(),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
    }
)

GPT_RULES: dict[str, Any] = {
    "token": Vocab(),
    "position": Replicated(),
    "blocks.*": Block(),
    "blocks.*.norm_*": Norm(),
    "blocks.*.attention": Attention(heads="heads", kv_heads="kv_heads"),
    "blocks.*.attention.qkv": Column(HEADS, KV_HEADS, KV_HEADS),
    "blocks.*.attention.drop": Drop(HEADS),
    "blocks.*.attention.out": Row(HEADS),
    "blocks.*.mlp": Mlp(),
    "blocks.*.mlp.up": Column(),
    "blocks.*.mlp.down": Row(),
    "norm": LastNorm(),
    "head": Head(),
}
"""The plan of a GPT with the default options, written out, to be spoiled one rule at a time."""
