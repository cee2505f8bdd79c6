"""`colrow.models.gpt.GPT`: our own decoder, in all its options."""

from __future__ import annotations

from torch import nn

from colrow.rules import (
    FEATURES,
    HEADS,
    KV_HEADS,
    Attention,
    Block,
    Column,
    Drop,
    Head,
    LastNorm,
    Mlp,
    Norm,
    Plan,
    Replicated,
    Row,
    Rule,
    Vocab,
)


def plan(model: nn.Module) -> Plan:
    """The rules for a GPT; which parts there are depends on its options."""
    names = {name for name, _ in model.named_modules()}
    gated = any(name.endswith("mlp.gate_up") for name in names)
    up: dict[str, Rule] = {"gate_up": Column(FEATURES, FEATURES)} if gated else {"up": Column()}
    positions: dict[str, Rule] = {"position": Replicated()} if "position" in names else {}
    return Plan(
        {
            "token": Vocab(),
            **positions,
            "blocks.*": Block(),
            "blocks.*.norm_*": Norm(),
            "blocks.*.attention": Attention(heads="heads", kv_heads="kv_heads"),
            "blocks.*.attention.qkv": Column(HEADS, KV_HEADS, KV_HEADS),
            "blocks.*.attention.drop": Drop(HEADS),
            "blocks.*.attention.out": Row(HEADS),
            "blocks.*.mlp": Mlp(),
            **{f"blocks.*.mlp.{name}": rule for name, rule in up.items()},
            "blocks.*.mlp.down": Row(),
            "norm": LastNorm(),
            "head": Head(),
        }
    )
