"""Mixtral: Llama's attention, and a mixture of experts whose stacked weights are split by columns and rows."""

from __future__ import annotations

from torch import nn

from colrow.families import llama
from colrow.families.hf import base, config_of, experts
from colrow.rules import Plan


def plan(model: nn.Module) -> Plan:
    """The rules for any of HF's classes of the family."""
    return experts(config_of(model), model, f"{base(model, 'embed_tokens')}layers") | llama.plan(model)
