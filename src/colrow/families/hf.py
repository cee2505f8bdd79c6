"""What all Hugging Face models share: a base model under a prefix, a language head or other heads beside it."""

from __future__ import annotations

from typing import Any

from torch import nn

from colrow.errors import PlanError
from colrow.rules import FEATURES, Attention, Block, Head, Moe, Norm, Plan, Replicated, Router, Rule, Sliced


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
            name = name.split(".base_layer")[0]  # an adapted layer: its rule is for what is inside
            rules[name] = Head() if name.split(".")[-1] == "lm_head" else Replicated()
    return rules


def root(at: str) -> str:
    """The prefix of what stands beside the base model: "" but for a model with adapters, "base_model.model."."""
    return "base_model.model." if at.startswith("base_model.model.") else ""


def there(model: nn.Module, rules: dict[str, Rule]) -> Plan:
    """A plan of those rules that match something: parts that depend on a model's options may be missing."""
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]]
    return Plan({pattern: rule for pattern, rule in rules.items() if Plan({pattern: rule}).matches(names)})


def grouped_attention(config: Any) -> Attention:
    """HF's usual attention: it knows its head size and its group, and takes its numbers of heads from the shapes."""
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        groups="num_key_value_groups",
    )


def norms(*patterns: str) -> dict[str, Rule]:
    """Rules for norms: token by token in the blocks, head by head inside attention."""
    return dict.fromkeys(patterns, Norm())


def blocks(model: nn.Module, layers: str, last_norm: str | None = None) -> Plan:
    """Rules for the blocks in the list `layers`. Where no norm follows them, the last one gives a whole output."""
    names = {name for name, _ in model.named_modules()}
    count = sum(name.rpartition(".")[0] == layers for name in names)
    if not count:
        return Plan({})
    plan = Plan({f"{layers}.*": Block()})
    return plan if last_norm in names else Plan({f"{layers}.{count - 1}": Block(last=True)}) | plan


def experts(config: Any, model: nn.Module, layers: str) -> Plan:
    """Rules for HF's mixtures of experts: a router `gate`, and `experts` with their weights stacked."""
    if getattr(config, "router_jitter_noise", 0.0):
        given = f"config.router_jitter_noise = {config.router_jitter_noise}"
        raise PlanError(config.model_type, given, "noise is drawn for whole tokens", "Set it to 0.0")
    rules: dict[str, Rule] = {}
    for name, _ in model.named_modules():
        if name.startswith(layers) and name.endswith(".experts"):
            at = name.removesuffix(".experts")
            rules |= {at: Moe(), f"{at}.gate": Router()}
            rules |= {f"{name}.gate_up_proj": Sliced(1, FEATURES, FEATURES), f"{name}.down_proj": Sliced(2)}
    return Plan(rules)
