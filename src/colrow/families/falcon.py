"""Falcon: one key/value head for all (7B), or groups fused as [q q k v | ...] (40B), or ALiBi (RW)."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, blocks, heads, norms, there
from colrow.rules import GROUPS, HEADS, Attention, Column, Drop, LastNorm, Mlp, Plan, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family. (One key/value head for all is one group, [q .. q k v].)"""
    at = base(model, "word_embeddings")
    return there(
        model,
        {
            f"{at}word_embeddings": Vocab(),
            **norms(f"{at}h.*.ln_*", f"{at}h.*.*layernorm"),
            f"{at}h.*.self_attention": Attention(heads="num_heads", kv_heads="num_kv_heads", per_head=("alibi",)),
            f"{at}h.*.self_attention.query_key_value": Column(GROUPS),
            f"{at}h.*.self_attention.dense": Row(HEADS),
            f"{at}h.*.self_attention.attention_dropout": Drop(HEADS),
            f"{at}h.*.mlp": Mlp(),
            f"{at}h.*.mlp.dense_h_to_4h": Column(),
            f"{at}h.*.mlp.dense_4h_to_h": Row(),
            f"{at}ln_f": LastNorm(),
            **heads(model, at),
        },
    ) | blocks(model, f"{at}h", last_norm=f"{at}ln_f")
