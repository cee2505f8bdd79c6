"""Plans of known models, one small file a family, found by `model.config.model_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from colrow.families import bert, bloom, deepseek_v3, falcon, gpt, gpt2, gpt_neox, llama, mixtral, opt, phi3, t5, vit
from colrow.rules import Plan

FAMILIES: Final[dict[str, Callable[[nn.Module], Plan]]] = {
    "colrow-gpt": gpt.plan,
    "llama": llama.plan,
    "mistral": llama.plan,
    "qwen2": llama.plan,
    "qwen3": llama.plan,
    "gemma2": llama.plan,
    "gemma3_text": llama.plan,
    "phi3": phi3.plan,
    "gpt2": gpt2.plan,
    "gpt_neox": gpt_neox.plan,
    "opt": opt.plan,
    "bloom": bloom.plan,
    "falcon": falcon.plan,
    "bert": bert.plan,
    "t5": t5.plan,
    "vit": vit.plan,
    "mixtral": mixtral.plan,
    "deepseek_v3": deepseek_v3.plan,
}


def find(model: nn.Module) -> Plan | None:
    """The plan of the model's family, if it is of a known one."""
    family = FAMILIES.get(str(getattr(getattr(model, "config", None), "model_type", None)))
    return None if family is None else family(model)
