"""OPT: an MLP without a module of its own in the block, learned positions, projections around the blocks."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, blocks, heads, norms, there
from colrow.rules import HEADS, Attention, Column, LastNorm, Plan, Replicated, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family. (The 350M model has no norm after its last block.)"""
    at = base(model, "embed_tokens")
    return there(
        model,
        {
            f"{at}embed_tokens": Vocab(),
            f"{at}embed_positions": Replicated(),
            f"{at}project_*": Replicated(),
            **norms(f"{at}layers.*.*layer_norm"),
            f"{at}layers.*.self_attn": Attention(heads="num_heads"),
            f"{at}layers.*.self_attn.[qkv]_proj": Column(HEADS),
            f"{at}layers.*.self_attn.out_proj": Row(HEADS),
            f"{at}layers.*.fc1": Column(),
            f"{at}layers.*.fc2": Row(),
            f"{at}final_layer_norm": LastNorm(),
            **heads(model, at),
        },
    ) | blocks(model, f"{at}layers", last_norm=f"{at}final_layer_norm")
