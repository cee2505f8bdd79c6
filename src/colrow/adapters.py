"""LoRA adapters (`peft`) beside split layers: y = W x + B A x, with the layouts that W has at its two ends.

    W is        A is                                   B is
    Column      whole, on what W takes                 split by outputs, as W
    Row         split by inputs, as W; terms summed    whole, in the stream, as W's bias
    Head        whole                                  split over the vocabulary
    whole       whole                                  whole

So an adapter adds to a collective of W's one of `r` numbers a token, or none. (LoRA: arXiv:2106.09685.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from torch import nn

from colrow import plan as rules
from colrow.embedding import VocabEmbedding
from colrow.errors import PlanError
from colrow.gradients import Watched
from colrow.head import VocabHead
from colrow.layout import I, Layout, P, R, S
from colrow.linear import ColumnLinear, RowLinear
from colrow.norm import Replicated, SplitModule
from colrow.params import local
from colrow.plan import Rule
from colrow.resolved import Site
from colrow.split import Split

TABLES: Final = ("lora_embedding_A", "lora_embedding_B")


class Lookup(Rule):
    """An embedding with adapters, which are tables of its own."""


class AdaptedEmbedding(SplitModule):
    """An embedding with adapters: its own code reads their tables, which are whole, as local tensors."""

    def _in_flight(self) -> Any:
        view = object.__new__(self.origin)
        view.__dict__.update(self.__dict__)
        own: Any = self
        for at in TABLES:
            view.__dict__[at] = {key: local(table, grad=I) for key, table in getattr(own, at).items()}
        return view


def adapted(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The layers of `peft` in a model, by name: each holds a `base_layer`, and adapters beside it.

    Raises:
        PlanError: adapters of another kind than LoRA.
    """
    found: dict[str, Any] = {}
    for name, module in modules.items():
        layer: Any = module
        if isinstance(getattr(layer, "base_layer", None), nn.Module):
            if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) or len(layer.lora_magnitude_vector):
                given, fix = f"an adapter layer of type {type(module).__name__}", "Use LoraConfig without use_dora"
                raise PlanError(name, given, "adapters beside split layers are plain LoRA", fix)
            found[name] = module
    return found


def of_an_adapter(name: str, layers: Mapping[str, Any]) -> bool:
    """Whether a module or parameter belongs to an adapter, and not to the model that is adapted."""
    parts = name.split(".")
    holders = (".".join(parts[:i]) for i in range(len(parts) + 1))
    return any(at in layers and not f"{name}.".startswith(f"{at}.base_layer.") for at in holders)


def moved(found: Mapping[str, Rule], layers: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules of a plan with those of adapted layers given to the layers inside."""
    kept = {name: rule for name, rule in found.items() if not of_an_adapter(name, layers)}
    return kept | {f"{name}.base_layer": found[name] for name in layers if name in found}


def sites_beside(name: str, layer: Any, base: Site) -> Iterator[Site]:
    """What the adapters of one layer become, from what the layer inside has become."""
    split, rule = base.splits.get("weight"), base.rule
    enters, leaves = _ends(base)
    if len(layer.lora_embedding_A):
        yield Site(name, Lookup(), base.sharded)
        yield from (
            Site(f"{name}.{at}", rules.Replicated(), grads=dict.fromkeys(getattr(layer, at), I)) for at in TABLES
        )
    else:
        yield Site(name, None)
    for key in layer.lora_A:
        down, up, drop = (f"{name}.{part}.{key}" for part in ("lora_A", "lora_B", "lora_dropout"))
        biased = layer.lora_B[key].bias is not None
        if isinstance(rule, rules.Row) and split is not None:
            rows = {"weight": replace(split, dim=1)}
            dropped = S(-1, size=tuple(split.valid(rank) for rank in range(split.ranks)))
            yield Site(down, rules.Row(rule.unit), base.sharded, rows, dst=base.dst)
            yield _whole(up, base, leaves, biased)
            yield Site(drop, None, base.sharded, src=dropped)
            continue
        yield _whole(down, base, enters, False)
        yield Site(drop, None, base.sharded, src=enters)
        if isinstance(rule, rules.Column | rules.Head) and split is not None:
            columns = {"weight": replace(split, dim=0)} | ({"bias": replace(split, dim=0)} if biased else {})
            yield Site(up, rule, base.sharded, columns, src=base.src)
        else:
            yield _whole(up, base, enters, biased)


def _ends(base: Site) -> tuple[Layout, Layout]:
    """The layouts of what the layer takes and of what it gives, as far as whole adapters read them."""
    if isinstance(base.rule, rules.Row):
        return base.dst, R if base.dst == P or isinstance(base.dst, S) else I
    if isinstance(base.rule, rules.Column | rules.Head):
        return base.src, base.src
    read = base.grads.get("weight", I)
    return read, read


def _whole(name: str, base: Site, taken: Layout, biased: bool) -> Site:
    """A linear layer whose weight is whole on every rank. On gathered tokens it is a column layer without a split: it
    keeps the shard that they were gathered from, and gathers again together with the others."""
    if taken == R and isinstance(base.rule, rules.Column):
        return Site(name, rules.Column(), base.sharded, src=R)
    read = I if taken == I else R
    return Site(name, rules.Replicated(), base.sharded, grads={"weight": read} | ({"bias": read} if biased else {}))


def sites_of_split(model: nn.Module) -> list[Site]:
    """What adapters become that were added to a model after it was split."""
    modules = dict(model.named_modules())
    return [
        site
        for name, layer in adapted(modules).items()
        if isinstance(layer.base_layer, Watched)
        for site in sites_beside(name, layer, _site_of(f"{name}.base_layer", layer.base_layer))
        if site.name in modules and is_new(modules[site.name])
    ]


def make_whole(model: nn.Module) -> None:
    """Give adapters that were added to a split model their true sizes, and fresh values.

    `peft` makes them as large as a rank's part of the layer, and draws their values for that size; here they are drawn
    for the whole, as `peft` draws them by default (arXiv:2106.09685, section 4.1: A at random, B zero).

    Raises:
        PlanError: adapters that start from other values, which belong to a rank's part.
    """
    for name, layer in adapted(dict(model.named_modules())).items():
        base: Any = layer.base_layer
        if not isinstance(base, ColumnLinear) or not all(is_new(layer.lora_A[key]) for key in layer.lora_A):
            continue
        layer.fan_in_fan_out = base.transposed
        for key in layer.lora_A:
            down, up = layer.lora_A[key], layer.lora_B[key]
            if bool(up.weight.detach().any()):
                given, fix = "adapters with initial values of their own", "Add them before colrow.parallelize"
                raise PlanError(name, given, "after the split they start at zero (init_lora_weights=True)", fix)
            sizes = (layer.r[key], base.in_features), (base.out_features, layer.r[key])
            for part, size in zip((down, up), sizes, strict=True):
                part.out_features, part.in_features = size
                part.weight = nn.Parameter(part.weight.new_zeros(size), part.weight.requires_grad)
                if part.bias is not None:
                    part.bias = nn.Parameter(part.bias.new_zeros(size[0]), part.bias.requires_grad)
            nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))


def is_new(module: nn.Module) -> bool:
    """Whether nobody has split it yet."""
    return not isinstance(module, Watched)


def _site_of(name: str, module: Watched) -> Site:
    """What a split layer has become, read off the layer."""
    kinds: dict[type[Watched], Rule] = {VocabHead: rules.Head(), RowLinear: rules.Row(), ColumnLinear: rules.Column()}
    kinds |= {VocabEmbedding: rules.Vocab(), Replicated: rules.Replicated()}
    rule = next((rule for kind, rule in kinds.items() if isinstance(module, kind)), None)
    if rule is None:
        given, fix = f"an adapter beside a {type(module).__name__}", "Leave this layer out of target_modules"
        raise PlanError(name, given, "adapters stand beside linear layers and embeddings", fix)
    own: Any = module
    sharded = bool(getattr(module, "sharded", False))
    ends = {at: getattr(own, at) for at in ("src", "dst") if hasattr(own, at)}
    splits: dict[str, Split] = dict(module.splits)
    return Site(name, rule, sharded, splits, dict(getattr(own, "grads", {})), **ends)
