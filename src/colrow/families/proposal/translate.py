"""Translations: Hugging Face's own plan into what its layers are, and rules into Python that one can paste."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from torch import nn

from colrow.rules import Rule, Unit

COLUMN, ROW, HEAD, UNKNOWN = "column", "row", "head", "unknown"
_STYLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "colwise": COLUMN,
        "rowwise": ROW,
        "colwise_gather_output": "",  # gathered because something follows that its authors could not split: no help
        "rowwise_split_input": "",
        "packed_colwise": "",
        "packed_rowwise": "",
        "embedding_rowwise": "",  # seen from the sizes
        "replicated_with_grad_allreduce": "",  # so is a norm on heads
        "replicate": "",
    }
)


def styles(model: nn.Module) -> dict[str, str]:
    """What Hugging Face's plan (`tp_plan`) says of this model's modules, by name: `COLUMN`, `ROW`, or `UNKNOWN` for a
    style that has no counterpart here (experts, latent attention). Empty for a model without such a plan."""
    plans: list[tuple[str, object]] = [("", getattr(model, "_tp_plan", None))]
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if name == getattr(model, "base_model_prefix", None) or not name:
            plans.append((f"{name}." if name else "", getattr(config, "base_model_tp_plan", None)))
    found: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for at, plan in plans:
        for pattern, style in plan.items() if isinstance(plan, Mapping) else ():
            meaning = _STYLES.get(str(style), UNKNOWN)
            known = re.compile(re.escape(f"{at}{pattern}").replace(r"\*", r"\d+") + r"\Z")
            found |= {name: meaning for name in names if meaning and known.match(name)}
    return found


def written(rules: Mapping[str, Rule], comments: Iterable[str] = ()) -> str:
    """Rules, and comments among them, as Python: imports, and `plan = Plan({...})`."""
    lines = [f'        "{pattern}": {rule_source(rule)},' for pattern, rule in rules.items()]
    lines += [f"        # {comment}" for comment in comments]
    words = {"Plan"} | {word for line in lines for word in re.findall(r"\b[A-Z]\w+(?=[(),])", line.split('": ')[-1])}
    names = ", ".join(sorted(words, key=lambda word: (not word.isupper(), word)))
    return "\n".join([f"from colrow import {names}", "", "plan = Plan(", "    {", *lines, "    }", ")"])


def rule_source(rule: Rule) -> str:
    """A rule as Python: what differs from the defaults, by name where it has one."""
    args = []
    for name, at in inspect.signature(type(rule)).parameters.items():
        value = getattr(rule, name)
        if at.kind is at.VAR_POSITIONAL:
            args += [] if value == (Unit.FEATURES,) else [_source(unit) for unit in value]
        elif value != at.default:
            args.append(_source(value) if name in ("unit", "dim") else f"{name}={_source(value)}")
    return f"{type(rule).__name__}({', '.join(args)})"


def _source(value: object) -> str:
    return value.name if isinstance(value, Enum) else json.dumps(value) if isinstance(value, str) else repr(value)
