"""The GPT in all its options equals itself in one process, at any degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colrow.models import GPT, GPTConfig
from oracle import compare

SMALL: dict[str, Any] = {"vocab": 64, "context": 32, "layers": 2, "width": 32, "heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "untied": {"tied": False},
    "no bias": {"bias": False},
    "gqa": {"kv_heads": 2},
    "llama": {"gated": True, "rotary": True, "bias": False, "kv_heads": 2, "tied": False},
    "gated with bias": {"gated": True},
    "5 heads": {"heads": 5, "width": 40},
    "ffn 70": {"ffn": 70},
    "gated ffn 70": {"ffn": 70, "gated": True},
    "vocab 61": {"vocab": 61},
    "vocab 61 untied": {"vocab": 61, "tied": False},
    "1 kv head": {"kv_heads": 1},
    "6 heads, 2 kv": {"heads": 6, "kv_heads": 2, "width": 48},
    "6 heads, 3 kv": {"heads": 6, "kv_heads": 3, "width": 48},
    "8 heads, 2 kv": {"heads": 8, "kv_heads": 2},
    "everything odd": {"heads": 5, "width": 40, "ffn": 71, "vocab": 61, "rotary": True, "gated": True},
    "fewer heads than ranks": {"heads": 1, "width": 8, "ffn": 3, "vocab": 5},
}


def gpt_equals_one_process(case: str, sequence_parallel: bool, shape: tuple[int, int], with_loss: bool) -> None:
    config = GPTConfig(**{**SMALL, **CASES[case]})
    ids = torch.randint(config.vocab, shape, generator=torch.Generator().manual_seed(1))
    targets = ids.roll(1, -1)
    args = (ids, targets) if with_loss else (ids,)
    compare(lambda: GPT(config), args, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_option_at_every_degree(ranks: Any, size: int, case: str, sequence_parallel: bool) -> None:
    ranks(size).run(gpt_equals_one_process, case, sequence_parallel, (2, 13), case != "untied")


@pytest.mark.parametrize("shape", [(1, 1), (2, 13), (1, 3), (3, 7), (0, 5)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_tokens(ranks: Any, size: int, shape: tuple[int, int]) -> None:
    ranks(size).run(gpt_equals_one_process, "gpt2", True, shape, False)
