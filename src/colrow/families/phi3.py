"""Phi-3: Llama's shape with a fused [q | k | v] and a fused [gate | up]."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from colrow.families.hf import base, config_of, grouped_attention, heads, norms, there
from colrow.rules import FEATURES, HEADS, KV_HEADS, Block, Column, LastNorm, Mlp, Plan, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at, config = base(model, "embed_tokens"), config_of(model)
    attention = replace(
        grouped_attention(config), kv_heads="num_key_value_heads", config=(("num_attention_heads", "heads"),)
    )
    return there(
        model,
        {
            f"{at}embed_tokens": Vocab(),
            f"{at}layers.*": Block(),
            **norms(f"{at}layers.*.*norm"),
            f"{at}layers.*.self_attn": attention,
            f"{at}layers.*.self_attn.qkv_proj": Column(HEADS, KV_HEADS, KV_HEADS),
            f"{at}layers.*.self_attn.o_proj": Row(HEADS),
            f"{at}layers.*.mlp": Mlp(),
            f"{at}layers.*.mlp.gate_up_proj": Column(FEATURES, FEATURES),
            f"{at}layers.*.mlp.down_proj": Row(),
            f"{at}norm": LastNorm(),
            **heads(model, at),
        },
    )
