"""BLOOM: ALiBi (one slope for each head), a projection fused head by head, residuals added inside attention and MLP."""

from __future__ import annotations

from torch import nn

from colrow.errors import PlanError
from colrow.families.hf import base, blocks, config_of, heads, norms, there
from colrow.rules import GROUPS, HEADS, Attention, Column, Drop, LastNorm, Mlp, Plan, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    at, config = base(model, "word_embeddings"), config_of(model)
    if config.pretraining_tp > 1 and config.slow_but_exact:
        given = f"config.slow_but_exact with pretraining_tp = {config.pretraining_tp}"
        raise PlanError("bloom", given, "it would slice weights that are split already", "Set slow_but_exact=False")
    attention = Attention(heads="num_heads", per_head=("alibi",), residual="residual")
    return there(
        model,
        {
            f"{at}word_embeddings": Vocab(),
            **norms(f"{at}word_embeddings_layernorm", f"{at}h.*.*layernorm"),
            f"{at}h.*.self_attention": attention,
            f"{at}h.*.self_attention.query_key_value": Column(GROUPS),
            f"{at}h.*.self_attention.dense": Row(HEADS),
            f"{at}h.*.self_attention.attention_dropout": Drop(HEADS),
            f"{at}h.*.mlp": Mlp(residual="residual"),
            f"{at}h.*.mlp.dense_h_to_4h": Column(),
            f"{at}h.*.mlp.dense_4h_to_h": Row(),
            f"{at}ln_f": LastNorm(),
            **heads(model, at),
        },
    ) | blocks(model, f"{at}h", last_norm=f"{at}ln_f")
