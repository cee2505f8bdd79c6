"""Llama and the models of its shape: Mistral, SmolLM, Qwen2, Qwen3, Gemma 2 and 3. Separate q, k, v, gate and up.

What differs between them needs no word here: biases, head sizes, norms around the MLP, norms on the heads (they are
inside attention, so each rank computes one term of their gradients), soft caps, sliding windows.
"""

from __future__ import annotations

from torch import nn

from colrow.families.hf import base, config_of, grouped_attention, heads, norms, there
from colrow.rules import HEADS, KV_HEADS, Block, Column, LastNorm, Mlp, Plan, Row, Vocab


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family: the bare model, with a language head, with a classifier, ..."""
    at, config = base(model, "embed_tokens"), config_of(model)
    return there(
        model,
        {
            f"{at}embed_tokens": Vocab(),
            f"{at}layers.*": Block(),
            **norms(f"{at}layers.*.*norm", f"{at}layers.*.self_attn.[qk]_norm"),
            f"{at}layers.*.self_attn": grouped_attention(config),
            f"{at}layers.*.self_attn.q_proj": Column(HEADS),
            f"{at}layers.*.self_attn.[kv]_proj": Column(KV_HEADS),
            f"{at}layers.*.self_attn.o_proj": Row(HEADS),
            f"{at}layers.*.mlp": Mlp(),
            f"{at}layers.*.mlp.gate_proj": Column(),
            f"{at}layers.*.mlp.up_proj": Column(),
            f"{at}layers.*.mlp.down_proj": Row(),
            f"{at}norm": LastNorm(),
            **heads(model, at),
        },
    )
