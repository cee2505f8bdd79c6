"""LoRA adapters (`peft`) beside split layers: y = W x + B A x, with the layouts that W has at its two ends.

    W is        A is                                   B is
    Column      whole, on what W takes                 split by outputs, as W
    Row         split by inputs, as W; terms summed    whole, in the stream, as W's bias
    Head        whole                                  split over the vocabulary
    whole       whole                                  whole

So an adapter adds to a collective of W's one of `r` numbers a token, or none. (LoRA: arXiv:2106.09685.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colrow import rules
from colrow.context import mix
from colrow.embedding import VocabEmbedding
from colrow.errors import PlanError
from colrow.gradients import Watched
from colrow.head import VocabHead
from colrow.layout import I, Layout, P, R, S
from colrow.linear import ColumnLinear, RowLinear
from colrow.norm import Replicated, SplitModule
from colrow.params import local, local_of, shard_like
from colrow.resolved import Site
from colrow.rules import Rule
from colrow.split import Split

TABLES: Final = ("lora_embedding_A", "lora_embedding_B")


class Lookup(Rule):
    """An embedding with adapters, which are tables of its own."""


class AdaptedEmbedding(SplitModule):
    """An embedding with adapters: its own code reads their tables, which are whole, as local tensors."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What merging an adapter adds to the embedding's table, split and padded as the table is."""
        origin, base = cast(Any, self.origin), cast(Any, self.base_layer)
        return shard_like(local_of(origin.get_delta_weight(self, adapter)), base.splits.get("weight"), base.weight)

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
        PlanError: adapters of another kind than plain LoRA, or beside something else than a layer with a weight.
    """
    learning: Any = getattr(modules.get(""), "active_peft_config", None)
    if getattr(learning, "is_prompt_learning", False):
        given, fix = f"prompts that are learned ({type(learning).__name__})", "Use LoraConfig"
        raise PlanError("colrow.parallelize", given, "adapters beside split layers are plain LoRA", fix)
    found: dict[str, Any] = {}
    for name, module in modules.items():
        layer: Any = module
        if not isinstance(module._modules.get("base_layer"), nn.Module) or not hasattr(layer, "adapter_layer_names"):
            continue
        variants = sorted({type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()})
        plain = isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and not hasattr(layer, "parameter_name")
        if variants or not plain or "weight" not in layer.base_layer._parameters:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            given = f"an adapter of type {kind}" + (f" ({', '.join(variants)})" if variants else "")
            fix = "Use LoraConfig without use_dora, target_parameters or another variant"
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


def sites_beside(name: str, layer: Any, base: Site, keys: Iterable[str] | None = None) -> Iterator[Site]:
    """What the adapters of one layer become (all, or those named), from what the layer inside has become."""
    split, rule = base.splits.get("weight"), base.rule
    enters, leaves = _ends(base)
    if len(layer.lora_embedding_A):
        yield Site(name, Lookup(), base.sharded)
        yield from (
            Site(f"{name}.{at}", rules.Replicated(), grads=dict.fromkeys(getattr(layer, at), I)) for at in TABLES
        )
    for key in layer.lora_A if keys is None else keys:
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
    """What adapters become that were added to a model after it was split.

    Raises:
        PlanError: adapters that cannot be split; the model is as it was.
    """
    sites: list[Site] = []
    for name, layer in adapted(dict(model.named_modules())).items():
        keys = _new_adapters(name, layer) if isinstance(layer.base_layer, Watched) else []
        if keys:
            base = _site_of(f"{name}.base_layer", layer.base_layer)
            sites += sites_beside(name, layer, base, [key for key in keys if key in layer.lora_A])
    for name, _, key, fits in _beside_linear(model):
        start = _configs(model).get(key)
        if not fits and start is not None and start.init_lora_weights not in (True, "gaussian"):
            given, fix = (
                f"adapter '{key}' with init_lora_weights={start.init_lora_weights!r}",
                "Add it before the split",
            )
            allowed = "added after the split, adapters start as with init_lora_weights=True or 'gaussian'"
            raise PlanError(name, given, allowed, fix)
    return sites


def make_whole(model: nn.Module) -> None:
    """Give adapters that were added to a split model their true sizes, and fresh values.

    `peft` makes them as large as a rank's part of the layer, and draws their values for that size. Here they are drawn
    for the whole, from the seed of `torch.manual_seed` and the layer's name, so they are the same at every degree.
    Those that have the true sizes and hold something already (`peft` starts B at zero) keep their values.
    """
    configs = _configs(model)
    for _, layer, key, fits in _beside_linear(model):
        base, down, up = layer.base_layer, layer.lora_A[key], layer.lora_B[key]
        layer.fan_in_fan_out = base.transposed
        layer.in_features, layer.out_features = base.in_features, base.out_features  # for adapters that are added later
        for part, size in zip((down, up), _true_sizes(layer, key), strict=True) if not fits else ():
            part.out_features, part.in_features = size
            part.weight = nn.Parameter(part.weight.new_zeros(size), part.weight.requires_grad)
            if part.bias is not None:
                part.bias = nn.Parameter(part.bias.new_zeros(size[0]), part.bias.requires_grad)
    for name, layer in adapted(dict(model.named_modules())).items():
        for key in _new_adapters(name, layer) if isinstance(layer.base_layer, Watched) else ():
            kind = configs[key].init_lora_weights if key in configs else True
            starts = layer.lora_B[key].weight if key in layer.lora_B else layer.lora_embedding_A[key]
            if kind in (True, "gaussian") and not starts.any():
                _draw(layer, key, kind, mix(torch.initial_seed(), zlib.crc32(f"{name}.{key}".encode())))


def _draw(layer: Any, key: str, kind: Any, seed: int) -> None:
    """Values to start from; torch's generators are afterwards as they were."""
    devices = sorted({param.device.index for param in layer.parameters() if param.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        layer.reset_lora_parameters(key, kind)


def _beside_linear(model: nn.Module) -> Iterator[tuple[str, Any, str, bool]]:
    """The new adapters beside split linear layers: the layer's name, the layer, the key, whether they have its true
    sizes or those of a rank's part."""
    for name, layer in adapted(dict(model.named_modules())).items():
        for key in _new_adapters(name, layer) if isinstance(layer.base_layer, ColumnLinear) else ():
            parts = layer.lora_A[key], layer.lora_B[key]
            yield name, layer, key, tuple(tuple(part.weight.shape) for part in parts) == _true_sizes(layer, key)


def _true_sizes(layer: Any, key: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of A and B beside the whole layer."""
    return (layer.r[key], layer.base_layer.in_features), (layer.base_layer.out_features, layer.r[key])


def _configs(model: nn.Module) -> dict[str, Any]:
    """What `peft` was asked for, by adapter."""
    found: Iterator[Any] = (getattr(module, "peft_config", None) for module in model.modules())
    return next((configs for configs in found if isinstance(configs, dict)), {})


def _new_adapters(name: str, layer: Any) -> list[str]:
    """The adapters of a layer that nobody has split yet."""
    tables, split = layer.lora_embedding_A, isinstance(layer, Watched)
    if split and not all(isinstance(table, DTensor) for table in tables.values()):
        given, fix = "a further adapter for an embedding", "Add all of them, and then call colrow.parallelize"
        raise PlanError(name, given, "an embedding's adapters are split together", fix)
    linear = [key for key in layer.lora_A if not isinstance(layer.lora_A[key], Watched)]
    return linear if split else [*tables, *linear]


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
