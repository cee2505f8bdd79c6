"""GPT-2: `Conv1D` layers (weights kept as (in, out)), a fused [q | k | v], learned positions, a tied head."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, heads, norms, there
from colrow.rules import HEADS, KV_HEADS, Attention, Block, Column, Drop, LastNorm, Mlp, Plan, Replicated, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at = base(model, "wte")
    return there(
        model,
        {
            f"{at}wte": Vocab(),
            f"{at}wpe": Replicated(),
            f"{at}h.*": Block(),
            **norms(f"{at}h.*.ln_*"),
            f"{at}h.*.attn": Attention(heads="num_heads", head_dim="head_dim", width="split_size"),
            f"{at}h.*.attn.c_attn": Column(HEADS, KV_HEADS, KV_HEADS),
            f"{at}h.*.attn.c_proj": Row(HEADS),
            f"{at}h.*.attn.attn_dropout": Drop(HEADS),
            f"{at}h.*.attn.resid_dropout": Drop(),
            f"{at}h.*.mlp": Mlp(),
            f"{at}h.*.mlp.c_fc": Column(),
            f"{at}h.*.mlp.c_proj": Row(),
            f"{at}h.*.mlp.dropout": Drop(),
            f"{at}ln_f": LastNorm(),
            **heads(model, at),
        },
    )
