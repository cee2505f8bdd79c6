"""GPT-NeoX (Pythia): a projection fused head by head, [q0 k0 v0 | q1 k1 v1 | ...], and parallel residuals."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, config_of, heads, norms, there
from colrow.rules import GROUPS, HEADS, Attention, Block, Column, LastNorm, Mlp, Plan, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at, config = base(model, "embed_in"), config_of(model)
    return there(
        model,
        {
            f"{at}embed_in": Vocab(),
            f"{at}layers.*": Block(),
            **norms(f"{at}layers.*.*norm"),
            f"{at}layers.*.attention": Attention(heads=config.num_attention_heads, head_dim="head_size"),
            f"{at}layers.*.attention.query_key_value": Column(GROUPS),
            f"{at}layers.*.attention.dense": Row(HEADS),
            f"{at}layers.*.mlp": Mlp(),
            f"{at}layers.*.mlp.dense_h_to_4h": Column(),
            f"{at}layers.*.mlp.dense_4h_to_h": Row(),
            f"{at}final_layer_norm": LastNorm(),
            **heads(model, at),
        },
    )
