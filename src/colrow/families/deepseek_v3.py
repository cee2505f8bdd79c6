"""DeepSeek-V3: attention through low-rank latents (MLA), first dense layers, then experts beside shared ones."""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, blocks, config_of, experts, heads, norms, there
from colrow.rules import HEADS, Attention, Column, LastNorm, Mlp, Plan, Replicated, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family. The latents are whole on every rank; heads are split."""
    at, config = base(model, "embed_tokens"), config_of(model)
    attention, values = f"{at}layers.*.self_attn", config.v_head_dim
    return (
        experts(config, model, f"{at}layers")
        | there(
            model,
            {
                f"{at}embed_tokens": Vocab(),
                **norms(f"{at}layers.*.*norm", f"{attention}.*norm"),
                attention: Attention(heads="num_heads", head_dim="qk_head_dim"),
                f"{attention}.q_proj": Column(HEADS),
                f"{attention}.q_a_proj": Replicated(),
                f"{attention}.q_b_proj": Column(HEADS),
                f"{attention}.kv_a_proj_with_mqa": Replicated(),
                f"{attention}.kv_b_proj": Column(HEADS, head_dim=config.qk_nope_head_dim + values),
                f"{attention}.o_proj": Row(HEADS, head_dim=values),
                f"{at}layers.*.mlp": Mlp(),
                f"{at}layers.*.mlp.**.[gu]*_proj": Column(),
                f"{at}layers.*.mlp.[gu]*_proj": Column(),
                f"{at}layers.*.mlp.**.down_proj": Row(),
                f"{at}layers.*.mlp.down_proj": Row(),
                f"{at}norm": LastNorm(),
                **heads(model, at),
            },
        )
        | blocks(model, f"{at}layers", last_norm=f"{at}norm")
    )
