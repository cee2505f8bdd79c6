"""Tiny random models of Hugging Face families at the sizes that tests use, and fp64 without a detour through fp32."""

from __future__ import annotations

from typing import Any

from colrow.models import tiny as models
from colrow.models.tiny import tiny as tiny
from colrow.precision import KeepDouble as KeepDouble

SMALL: dict[str, Any] = {"vocab_size": 64}
"""Sizes that 2 and 4 divide: the usual ones, with a vocabulary to match."""
ODD: dict[str, Any] = dict(models.ODD)
MANY: dict[str, Any] = dict(models.MANY)
