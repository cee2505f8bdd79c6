"""What all Hugging Face models share: a base model under a prefix, a language head or other heads beside it."""

from __future__ import annotations

from typing import Any

from torch import nn

from colrow.errors import PlanError
from colrow.plan import Attention, Head, Norm, Plan, Replicated, Rule


def config_of(model: nn.Module) -> Any:
    """The model's config, which its numbers of heads are read from."""
    return model.config


def base(model: nn.Module, marker: str) -> str:
    """The prefix of the base model's parts, "model." or "": where the module called `marker` is."""
    name = next((name for name, _ in model.named_modules() if name.split(".")[-1] == marker), marker)
    return name.removesuffix(marker)


def heads(model: nn.Module, at: str) -> dict[str, Rule]:
    """Rules for what stands beside the base model: the language head is split over the vocabulary, others are whole."""
    rules: dict[str, Rule] = {}
    for name, module in model.named_modules():
        if at and name and not name.startswith(at) and any(True for _ in module.parameters(recurse=False)):
            rules[name] = Head() if name == "lm_head" else Replicated()
    return rules


def there(model: nn.Module, rules: dict[str, Rule]) -> Plan:
    """A plan of those rules that match something: parts that depend on a model's options may be missing."""
    names = [name for name, _ in model.named_modules()]
    return Plan({pattern: rule for pattern, rule in rules.items() if Plan({pattern: rule}).matches(names)})


def grouped_attention(config: Any) -> Attention:
    """HF's usual attention: it knows its head size and its group, and takes its numbers of heads from the shapes."""
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        groups="num_key_value_groups",
    )


def no_attention_dropout(config: Any, name: str) -> None:
    """Refuse dropout of attention probabilities: HF draws it in functions, where masks would depend on the degree."""
    if getattr(config, name, 0.0):
        given, fix = f"config.{name} = {getattr(config, name)}", f"Build the model with {name}=0.0"
        raise PlanError(config.model_type, given, "dropout of attention probabilities is not split yet", fix)


def norms(*patterns: str) -> dict[str, Rule]:
    """Rules for norms: token by token in the blocks, head by head inside attention."""
    return dict.fromkeys(patterns, Norm())
