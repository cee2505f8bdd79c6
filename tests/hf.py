"""Tiny random models of Hugging Face families, and fp64 without a detour through fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
HEAD_DIM = {"qwen3": 8, "gemma2": 8, "gemma3_text": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
EAGER = {"gemma2"}  # soft caps: no fused attention
ODD: dict[str, Any] = {
    "hidden_size": 40,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 70,
    "vocab_size": 61,
}
"""Sizes that 2, 3 and 4 do not divide."""
MANY: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
"""Fewer key/value heads than ranks, and groups that three and four ranks cut."""


def tiny(family: str, kind: str = "AutoModelForCausalLM", **changes: Any) -> nn.Module:
    """A random model of the family; `kind` is one of transformers' Auto classes."""
    sizes = SMALL | ({"head_dim": HEAD_DIM[family]} if family in HEAD_DIM else {}) | OPTIONS.get(family, {}) | changes
    if family == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
    attention = sizes.pop("attention", "eager" if family in EAGER else "sdpa")
    config = transformers.AutoConfig.for_model(family, **sizes)
    return getattr(transformers, kind).from_config(config, attn_implementation=attention)


class KeepDouble(TorchFunctionMode):
    """Casts of doubles to fp32, as norms, softmax and rotary positions make them, keep double.

    They cost 1e-8, which would hide a fault of that size; with both models in double throughout, rounding is 1e-15.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in (*args, *kwargs.values())):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
