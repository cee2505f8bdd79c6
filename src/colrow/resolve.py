"""From a plan and a model to what each module becomes: everything decided, nothing touched, meta tensors enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

from torch import nn

from colrow import rules
from colrow.adapters import adapted, moved, of_an_adapter, sites_beside
from colrow.embedding import check_options
from colrow.errors import PlanError
from colrow.layout import I, Layout, P, R, S
from colrow.resolved import OwnConfig, Resolved, Row, Site
from colrow.rules import Plan, Rule, Unit
from colrow.split import Heads, Piece, Split, fused, split_heads
from colrow.totality import REGIONS, check_forward, check_names, check_owners, check_partners

_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def resolve(model: nn.Module, plan: Plan, tp: int, *, sequence_parallel: bool = True) -> Resolved:
    """Decide what each module becomes, and check that the plan is total and fits. Changes nothing.

    Raises:
        PlanError: says which pattern, module or parameter, and what would fit.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    params = dict(model.named_parameters(remove_duplicate=False))
    layers = adapted(modules)
    found = moved(plan.match(modules, params), layers)
    if "" in found:
        given, fix = (
            f"the model itself has the rule {found['']}",
            "Put the module into an nn.Sequential, or name its parts",
        )
        raise PlanError(type(model).__name__, given, "rules are for the parts of a model", fix)
    seen: dict[int, Site] = {}
    for name, module in modules.items():
        if of_an_adapter(name, layers):
            continue
        site = _Resolver(modules, found, tp, sequence_parallel).site(name)
        first = seen.setdefault(id(module), site)
        if (first.rule, first.splits, first.grads) != (site.rule, site.splits, site.grads):
            given = f"it is the same module as {first.name}, with the rule {site.rule} here and {first.rule} there"
            raise PlanError(name, given, "one module has one rule", "Give both names the same rule")
    sites = tuple(seen.values())
    for site in sites:
        if site.rule is not None or site.grads:
            check_names(site.name or type(model).__name__, modules[site.name])
    check_owners({name: param for name, param in params.items() if not of_an_adapter(name, layers)}, found)
    check_partners(sites)
    by_name = {site.name: site for site in sites}
    for name, layer in layers.items():
        sites += tuple(sites_beside(name, layer, by_name[f"{name}.base_layer"]))
    return Resolved(tp, sequence_parallel, sites, _rows(model, sites, found))


@dataclass(frozen=True)
class _Resolver:
    modules: Mapping[str, nn.Module]
    found: Mapping[str, Rule]
    tp: int
    sequence_parallel: bool

    def site(self, name: str) -> Site:
        module, rule = self.modules[name], self.found.get(name)
        sharded = self.sequence_parallel and self._inside(name, rules.Block)
        own = {short: param for short, param in module._parameters.items() if param is not None}
        grads = {short: self._grad(name, short, sharded) for short in own}
        splits = {short: split for short in own if (split := self._slice(name, short)) is not None}
        plain = Site(name, rule, sharded, MappingProxyType(splits), MappingProxyType(grads))
        match rule:
            case rules.Column():
                src = R if self._region(name) else S(0) if sharded else I
                return self._linear(plain, module, 0, rule.units, src, I)
            case rules.Row():
                dst = P if self._inside(name, rules.Moe) else S(0) if sharded else I
                return self._linear(plain, module, 1, (rule.unit,), I, dst)
            case rules.Vocab() | rules.Head():
                return self._vocab(plain, module, rule)
            case rules.Attention():
                return replace(plain, patches=self._patches(name, module, rule), heads=self._heads(name))
            case rules.LastNorm():
                stretch = self.sequence_parallel and any(isinstance(r, rules.Block) for r in self.found.values())
                read = MappingProxyType(dict.fromkeys(own, R if stretch else I))
                return replace(plain, sharded=stretch, grads=read)
            case rules.Drop():
                return self._dropout(plain, module, rule.unit)
            case None if name and self._holds_blocks(name, module):
                return replace(plain, stack=True)
            case None if isinstance(module, nn.Dropout):
                return self._dropout(plain, module, None)
            case None if isinstance(module, _OTHER_DROPOUTS):
                given, fix = f"a {type(module).__name__}", "Use nn.Dropout, or set sequence_parallel=False and p=0"
                raise PlanError(name, given, "only nn.Dropout draws the same mask at every degree", fix)
            case _:
                return plain

    def _slice(self, name: str, short: str) -> Split | None:
        """The split of a parameter that has a rule of its own, or is in a module that works on slices."""
        full = f"{name}.{short}" if name else short
        rule = self.found.get(full, self.found.get(name))
        size = self.modules[name].get_parameter(short).shape
        if isinstance(rule, rules.Head) and full in self.found:
            return Split(0, (Piece(size[0]),), self.tp, trimmed=True)
        if not isinstance(rule, rules.Sliced):
            return None
        if not -len(size) <= rule.dim < len(size):
            given = f"{rule} for a parameter of shape {tuple(size)}"
            raise PlanError(full, given, f"it has {len(size)} dimensions", "Name one of them")
        dim = rule.dim % len(size)
        pieces = self._pieces(full, rule, rule.units, size[dim])
        if set(rule.units) == {Unit.FEATURES}:  # stacked experts: kernels for them take rows of 16 bytes
            pieces = [replace(piece, align=8 if piece.units % 8 == 0 else 1) for piece in pieces]
        return Split(dim, fused(pieces, self.tp), self.tp)

    def _patches(self, name: str, module: nn.Module, rule: rules.Attention) -> tuple[tuple[str, Any], ...]:
        """The numbers of heads that an attention module sees on one rank, by the attributes that hold them."""
        heads = self._heads(name)
        numbers = {"heads": heads.local_heads, "kv_heads": heads.local_kv_heads}
        width = heads.local_heads * heads.head_dim
        named = [(rule.heads, heads.local_heads), (rule.kv_heads, heads.local_kv_heads), (rule.width, width)]
        named.append((rule.groups, heads.local_heads // heads.local_kv_heads))
        patches: list[tuple[str, Any]] = [(at, value) for at, value in named if isinstance(at, str)]
        if rule.config:
            own = {at: numbers[which] for at, which in rule.config}
            patches.append(("config", OwnConfig(module.config, own)))
        return tuple(patches)

    def _holds_blocks(self, name: str, module: nn.Module) -> bool:
        """Whether it is a part of the model with blocks and a `forward` of its own: a base model, an encoder."""
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return False
        return any(isinstance(rule, rules.Block) and at.startswith(f"{name}.") for at, rule in self.found.items())

    def _ancestors(self, name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]

    def _inside(self, name: str, *kinds: type[Rule]) -> bool:
        """Whether the module is, or is in, one with such a rule."""
        return any(isinstance(self.found.get(above), kinds) for above in [name, *self._ancestors(name)])

    def _region(self, name: str) -> str | None:
        """The attention or MLP module that it is in."""
        return next((above for above in self._ancestors(name) if isinstance(self.found.get(above), REGIONS)), None)

    def _grad(self, name: str, short: str, sharded: bool) -> Layout:
        rule = self.found.get(f"{name}.{short}" if name else short, self.found.get(name))
        if isinstance(rule, rules.Replicated) and rule.grad is not None:
            return rule.grad
        in_region = self._region(name) is not None and not isinstance(rule, rules.Row)
        return R if sharded or in_region or isinstance(rule, REGIONS) else I

    def _attention(self, name: str) -> str:
        """The attention module that `name` is, or is in, or stands beside (BERT's output layer has its own parent)."""
        attentions = [at for at, rule in self.found.items() if isinstance(rule, rules.Attention)]
        for scope in [name, *self._ancestors(name)]:
            if isinstance(self.found.get(scope), rules.Attention):
                return scope
            near = [at for at in attentions if at.startswith(f"{scope}.")]
            if len(near) == 1:
                return near[0]
            if near:
                break
        given, fix = "its rule speaks of heads", "Give the attention module that holds it the rule Attention(...)"
        raise PlanError(name, given, "heads are counted by one Attention rule above or beside", fix)

    def _heads(self, name: str, head_dim: int | None = None) -> Heads:
        """The heads of the attention module that `name` is, is in, or stands beside; of the given size, if any."""
        at = self._attention(name)
        rule: Any = self.found[at]
        numbers = {"heads": rule.heads, "kv_heads": rule.kv_heads or rule.heads, "head_dim": head_dim or rule.head_dim}
        for role, attribute in numbers.items():
            value = getattr(self.modules[at], attribute, None) if isinstance(attribute, str) else attribute
            if not isinstance(value, int) or value < 1:
                given = (
                    f"Attention({role}={attribute!r}), and {type(self.modules[at]).__name__}.{attribute} is {value!r}"
                )
                raise PlanError(at, given, "it must name an attribute that is a positive integer", "Correct the rule")
            numbers[role] = value
        return split_heads(**numbers, ranks=self.tp, where=at)

    def _partners(self, name: str, units: tuple[Unit, ...]) -> str:
        """Where a column or row layer has its partner: in the same attention; or in the MLP, the block, the parent."""
        if set(units) != {Unit.FEATURES}:
            return self._attention(name)
        block = (above for above in self._ancestors(name) if isinstance(self.found.get(above), rules.Block))
        return self._region(name) or next(block, name.rpartition(".")[0])

    def _linear(
        self, plain: Site, module: nn.Module, dim: int, units: tuple[Unit, ...], src: Layout, dst: Layout
    ) -> Site:
        transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if not transposed:
            if not isinstance(module, nn.Linear):
                given, fix = f"{plain.rule} for a {type(module).__name__}", "Use Replicated(), or a linear layer"
                raise PlanError(plain.name, given, "Column and Row are for nn.Linear (or Conv1D)", fix)
            check_forward(plain.name, module, nn.Linear)
        along = 1 - dim if transposed else dim
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        if dst == P and bias is not None:
            given, fix = "a row layer with a bias among experts", "Give it and its column layers the rule Replicated()"
            raise PlanError(
                plain.name, given, "what experts give is summed at the exit, where a bias has no place", fix
            )
        pieces = fused(self._pieces(plain.name, plain.rule, units, weight.shape[along]), self.tp)
        trimmed = units == (Unit.FEATURES,)
        splits = {"weight": Split(along, pieces, self.tp, trimmed)}
        if dim == 0 and bias is not None:
            splits["bias"] = Split(0, pieces, self.tp, trimmed)
        found = replace(plain, splits=MappingProxyType(splits), src=src, dst=dst, transposed=transposed)
        return replace(found, partners=self._partners(plain.name, units))

    def _pieces(self, name: str, rule: Any, units: tuple[Unit, ...], size: int) -> list[Piece]:
        heads = self._heads(name, rule.head_dim) if set(units) != {Unit.FEATURES} else None
        by_unit = {} if heads is None else {Unit.HEADS: heads.q, Unit.KV_HEADS: heads.kv, Unit.GROUPS: heads.groups}
        left = size - sum(by_unit[unit].size for unit in units if unit in by_unit)
        features = units.count(Unit.FEATURES)
        if left < 0 or (left % features if features else left):
            sizes = " + ".join(str(by_unit[u].size) if u in by_unit else "features" for u in units)
            given = f"{rule} for a dimension of {size}"
            fix = "Name the pieces that the layer is made of, and check the numbers of heads"
            raise PlanError(name, given, f"by its units it is made of {sizes}", fix)
        return [by_unit[unit] if unit in by_unit else Piece(left // features) for unit in units]

    def _vocab(self, plain: Site, module: nn.Module, rule: Rule) -> Site:
        kind = nn.Embedding if isinstance(rule, rules.Vocab) else nn.Linear
        if not isinstance(module, kind):
            given = f"{rule} for a {type(module).__name__}"
            raise PlanError(plain.name, given, f"it is for an {kind.__name__}", "Use Vocab() or Head() accordingly")
        if isinstance(module, nn.Embedding):
            check_options(module, plain.name)
        check_forward(plain.name, module, kind)
        split = Split(0, (Piece(module.weight.shape[0]),), self.tp, trimmed=True)
        splits = {name: split for name, param in module._parameters.items() if param is not None}
        return Site(plain.name, rule, plain.sharded, MappingProxyType(splits), plain.grads)

    def _dropout(self, plain: Site, module: nn.Module, unit: Unit | None) -> Site:
        region = self._region(plain.name)
        if not isinstance(module, nn.Dropout):
            raise PlanError(plain.name, f"Drop for a {type(module).__name__}", "it is for nn.Dropout", "Drop the rule")
        if region is not None and plain.rule is None:
            allowed = "inside attention or MLP a plan must say what a dropout acts on"
            raise PlanError(
                plain.name, "a dropout without a rule", allowed, "Add Drop(HEADS), Drop(FEATURES) or Drop()"
            )
        if unit is None:
            src: Layout = S(0) if plain.sharded else I
        elif unit is Unit.FEATURES:
            src = S(-1)
        else:
            src = S(1, size=self._heads(plain.name).true_heads)
        return Site(plain.name, plain.rule, plain.sharded, src=src)


def _rows(model: nn.Module, sites: tuple[Site, ...], found: Mapping[str, Rule]) -> tuple[Row, ...]:
    """Every parameter once; those that share a tensor must agree on its split."""
    by_site = {site.name: site for site in sites}
    owner: dict[int, tuple[str, Split | None]] = {}
    rows = []
    for name, param in model.named_parameters(remove_duplicate=False):
        holder, _, short = name.rpartition(".")
        site = by_site.get(holder)
        if site is None:
            continue  # a module that has two names: its first one speaks for it
        split = site.splits.get(short)
        first, theirs = owner.setdefault(id(param), (name, split))
        if theirs != split:
            given = f"it is the same tensor as {first}, which is split in another way"
            raise PlanError(name, given, "a shared tensor has one split", "Give both modules rules that agree")
        if first != name:
            continue
        local, padding = list(param.shape), 0
        if split is not None and split.sharded:
            local[split.dim] = split.local_size
            padding = split.local_size * split.ranks - split.true_size
        rule = str(found.get(name, site.rule))
        rows.append(Row(name, rule, tuple(param.shape), tuple(local), padding, prod(local) * param.element_size()))
    return tuple(rows)
