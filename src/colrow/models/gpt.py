"""A small GPT in plain PyTorch. Nothing here knows of ranks: `colrow.parallelize` splits it as it stands.

Shapes: B batch, T tokens, C width, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and options. The defaults are GPT-2's design; `gated` and `rotary` with `bias=False` are Llama's."""

    vocab: int = 256
    context: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many
    ffn: int | None = None  # hidden features of the MLP; None: four times the width
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True  # the head shares its weight with the token embedding
    gated: bool = False  # SwiGLU instead of GeLU, and RMSNorm instead of LayerNorm
    rotary: bool = False  # rotary positions instead of learned ones
    model_type: str = "colrow-gpt"


class Embedding(nn.Embedding):
    """A table with small values: with a tied head, the default's standard deviation of 1 would drown the logits."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864): turns pairs of features by an angle that grows with the position."""

    inverse: Tensor

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base
        self.register_buffer("inverse", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        exponent = torch.arange(0, self.head_dim, 2, device=self.inverse.device) / self.head_dim
        self.inverse.copy_(self.base**-exponent)

    def forward(self, x: Tensor) -> Tensor:  # (B, heads, T, D)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * self.inverse.to(x.dtype)  # (T, D/2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Attention(nn.Module):
    """Causal self-attention with a fused [q | k | v] projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.width // config.heads
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, config.bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.width, config.bias)
        self.drop = nn.Dropout(config.dropout)
        self.rotary = Rotary(self.head_dim) if config.rotary else None

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        pieces = self.qkv(x).split([n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in pieces)  # (B, heads, T, D)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        k, v = (t.repeat_interleave(n, 1) if (n := self.heads // self.kv_heads) > 1 else t for t in (k, v))
        if self.training and self.drop.p > 0:
            scores = q @ k.transpose(-1, -2) / self.head_dim**0.5  # (B, H, T, T)
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            y = self.drop(scores.masked_fill(later, -torch.inf).softmax(-1)) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Y = GeLU(X A) B, or SwiGLU with a fused [gate | up] projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        ffn = config.ffn or 4 * config.width
        self.gated = config.gated
        if config.gated:
            self.gate_up = nn.Linear(config.width, 2 * ffn, config.bias)
        else:
            self.up = nn.Linear(config.width, ffn, config.bias)
        self.down = nn.Linear(ffn, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(config), Attention(config)
        self.norm_2, self.mlp = norm(config), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V); with targets (B, T), to their mean cross entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = Embedding(config.vocab, config.width)
        self.position = None if config.rotary else Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens)  # (B, T, C)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[-1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.width) if config.gated else nn.LayerNorm(config.width, bias=config.bias)
