"""ViT: images as 196 patches and one token of their own."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, blocks, heads, norms, there
from colrow.rules import HEADS, Attention, Column, LastNorm, Mlp, Plan, Replicated, Row


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at = base(model, "layernorm")
    return there(
        model,
        {
            f"{at}embeddings": Replicated(),
            f"{at}embeddings.patch_embeddings.projection": Replicated(),
            **norms(f"{at}layers.*.layernorm_*"),
            f"{at}layers.*.attention": Attention(heads="num_attention_heads"),
            f"{at}layers.*.attention.[qkv]_proj": Column(HEADS),
            f"{at}layers.*.attention.o_proj": Row(HEADS),
            f"{at}layers.*.mlp": Mlp(),
            f"{at}layers.*.mlp.fc1": Column(),
            f"{at}layers.*.mlp.fc2": Row(),
            f"{at}layernorm": LastNorm(),
            f"{at}pooler.dense": Replicated(),
            **heads(model, at),
        },
    ) | blocks(model, f"{at}layers", last_norm=f"{at}layernorm")
