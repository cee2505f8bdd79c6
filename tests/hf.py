"""Tiny random models of Hugging Face families at the sizes that tests use, and fp64 without a detour through fp32."""

from __future__ import annotations

from typing import Any

from colrow.models.tiny import tiny as tiny
from colrow.precision import KeepDouble as KeepDouble

SMALL: dict[str, Any] = {"vocab_size": 64}
"""Sizes that 2 and 4 divide: the usual ones, with a vocabulary to match."""
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
