"""Compare every family of models with one process, at every degree, and write docs/families.md.

The comparison is that of `colrow verify`, in float64. The ranks of a degree start once and do all cases. Exit code: 0
if all agree to 1e-9, 1 if not.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from colrow import families
from colrow.comm import is_rank_zero
from colrow.errors import ColrowError
from colrow.launch import launch
from colrow.models import tiny
from colrow.trial import Meshes
from colrow.verdict import EQUAL, Settings, Verdict
from colrow.verification import compare

DEGREES = (2, 3, 4)
DIVIDE: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 96,
    "vocab_size": 72,
}
"""Sizes that all degrees divide."""
VARIANTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "llama": ({"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},),
    "gpt2": ({"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},),
    "gpt_neox": ({"use_parallel_residual": False},),
    "opt": ({"do_layer_norm_before": False},),
    "falcon": (
        {"new_decoder_architecture": False},
        {"new_decoder_architecture": False, "multi_query": False, "num_key_value_heads": 4, "alibi": True},
    ),
    "t5": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},),
    "mixtral": ({"output_router_logits": True},),
}
"""Other members of a family, built of other parts."""
TEXT = """# Families

These Hugging Face families are split without a plan, `colrow.parallelize(model, mesh["tp"])`. Each number is the
largest relative error over loss, logits and every parameter's gradient, against one process in float64: rounding is
near 1e-15, a wrong term near 1. It is the largest of sizes that the degree divides and sizes that it does not, of fewer
key/value heads than ranks, of the family's variants, and of its classes (`colrow families` lists them).

`make families` has made this page, with torch {torch} and transformers {transformers}.

"""
PAGE = Path(__file__).parent.parent / "docs" / "families.md"


@dataclass(frozen=True)
class Case:
    """One model of a family, split in one mode: a source for `compare`."""

    family: str
    kind: str
    changes: tuple[tuple[str, Any], ...]
    sequence_parallel: bool

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        transformers.logging.set_verbosity_error()
        return tiny.tiny(self.family, self.kind, dropout=dropout, seed=seed, **dict(self.changes))

    def batch(self, model: nn.Module, *, seed: int) -> dict[str, Tensor]:
        return tiny.batch(model, seed)


@dataclass(frozen=True)
class Result:
    """The largest error of a case, or why there is none."""

    case: Case
    error: float
    refused: str = ""


def cases() -> list[Case]:
    """Every registered family: in three sizes, in its variants, and in each of its classes."""
    found = []
    for name, family in tiny.FAMILIES.items():
        if name not in families.FAMILIES:
            continue
        usual, *others = family.kinds
        models = [(usual, changes) for changes in (DIVIDE, tiny.ODD, tiny.MANY, *VARIANTS.get(name, ()))]
        models += [(kind, {}) for kind in others]
        found += [Case(name, kind, tuple(own.items()), sp) for kind, own in models for sp in (True, False)]
    return found


def run(todo: list[Case], tp: int) -> list[Result]:
    """One rank's part in all cases of a degree."""
    meshes, results = Meshes.of(tp), []
    for number, case in enumerate(todo):
        try:
            error, refused = largest(compare(case, Settings(tp, case.sequence_parallel), meshes)), ""
        except ColrowError as raised:  # the same on every rank
            error, refused = math.inf, str(raised)
        results.append(Result(case, error, refused))
        if is_rank_zero():
            print(f"\rtp {tp}: {number + 1} of {len(todo)}  {case.family:<12}", end="", file=sys.stderr, flush=True)
    return results


def largest(verdict: Verdict) -> float:
    """Of loss, logits and gradients; more than all if replicas differ, or if something else does not hold."""
    error = max(verdict.loss.rel_error, verdict.logits_rel_error, verdict.max_grad_rel_error)
    return error if verdict.ok or error > EQUAL else math.inf


def page(errors: Mapping[tuple[str, int, bool], float]) -> str:
    """The text of docs/families.md."""
    columns = [(tp, sp) for tp in DEGREES for sp in (True, False)]
    heads = ["family", "particular", *(f"tp {tp}{' + sp' if sp else ''}" for tp, sp in columns)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name in dict.fromkeys(name for name, _, _ in errors):
        numbers = [f"{errors[name, tp, sp]:.1e}" for tp, sp in columns]
        particular = tiny.FAMILIES[name].note.replace("|", "\\|")
        lines.append(f"| {' | '.join([f'`{name}`', particular, *numbers])} |")
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    return TEXT.format(**versions) + "\n".join([*lines, ""])


def main() -> int:
    todo, errors = cases(), defaultdict[tuple[str, int, bool], float](float)
    failed = []
    for tp in DEGREES:
        for result in launch(run, todo, tp, ranks=tp, timeout=600):
            key = (result.case.family, tp, result.case.sequence_parallel)
            errors[key] = max(errors[key], result.error)
            if not result.error <= EQUAL:
                failed.append(f"tp {tp}, {result.case}: {result.refused or result.error}")
    print(file=sys.stderr)
    PAGE.write_text(page(errors))
    print(f"{len(todo) * len(DEGREES)} cases, the largest error is {max(errors.values()):.1e}: see {PAGE}")
    for line in failed:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
