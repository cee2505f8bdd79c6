"""What is drawn of a trace: the first layer's regions with their shapes and collectives, as they ran on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from torch import nn

from colrow import rules
from colrow.layout import chunk_sizes
from colrow.linear import ColumnLinear, RowLinear
from colrow.observe import Observer
from colrow.resolved import Site
from colrow.traced import Kept, Kind, Linear, Message, Part, Picture, Region, Shape

ACTIVATIONS: Final = {
    "GeluBackward0": "GeLU",
    "SiluBackward0": "SiLU",
    "ReluBackward0": "ReLU",
    "TanhBackward0": "GeLU (tanh)",
    "SigmoidBackward0": "SiLU",
}
"""What autograd calls them where they are kept."""


def picture(observer: Observer, kept: Sequence[Kept], total: Part, shape: Shape) -> Picture:
    """Of the first layer, whose input on one device has this shape."""
    places, name = observer.places, observer.places.layers[0]
    inside = [site for at, site in places.sites.items() if at.startswith(f"{name}.")]
    tokens, ranks, sharded = prod(shape[:-1]), _ranks(inside), places.sites[name].sharded
    regions = [_region(observer, kept, group, shape[:-1]) for group in _groups(observer, inside)]
    norms = [
        site.name
        for site in inside
        if isinstance(site.rule, rules.Replicated) and places.of(site.name).kind == "stream" and site.grads
    ]
    return Picture(
        layer=name,
        hidden=shape[-1],
        tokens=chunk_sizes(tokens, ranks) if sharded else (tokens,) * ranks,
        total_tokens=tokens,
        norms=tuple(norms),
        regions=tuple(regions),
        saved_on_one=total.saved_on_one,
        saved=total.saved,
    )


def _ranks(sites: Sequence[Site]) -> int:
    return next((split.ranks for site in sites for split in site.splits.values()), 1)


def _groups(observer: Observer, sites: Sequence[Site]) -> list[tuple[str, Kind, list[Site]]]:
    """The regions of a layer in the order in which they ran, each with its split linear layers; column and row layers
    without a region around them are one, named after the block."""
    places, groups = observer.places, dict[tuple[str, Kind], list[Site]]()
    kinds = (rules.Attention, rules.Mlp, rules.Moe)
    for site in sites:
        at, region = places.of(site.name), places.above(site.name, *kinds)
        if region is None and isinstance(site.rule, rules.Row) and at.kind == "attention":
            region = next((name for name, kind in groups if kind == "attention"), None)  # BERT's stands beside it
        if region is not None or isinstance(site.rule, rules.Column | rules.Row):
            group = groups.setdefault((region or at.layer, at.kind), [])
            if isinstance(site.rule, rules.Column | rules.Row) and site.name in observer.shapes:
                group.append(site)
    return [(name, kind, group) for (name, kind), group in groups.items() if name in observer.shapes]


def _region(observer: Observer, kept: Sequence[Kept], group: tuple[str, Kind, list[Site]], tokens: Shape) -> Region:
    name, kind, sites = group
    linears = [_linear(observer, site) for site in sites]
    columns, rows = ([linear for linear in linears if linear.role == role] for role in ("column", "row"))
    alone = name in observer.places.layers  # no module of its own: the first column layer gathers
    takes, gives = observer.shapes[columns[0].name if alone else name]
    leaves = {linear.name for linear in rows} or {name}
    modules = {linear.name for linear in linears} | (set() if alone else {name})
    below = (at for at, _ in observer.model.get_submodule(name).named_modules() if alone)  # activations stand there
    beside = {f"{name}.{at}" for at in below if "act" in at.rpartition(".")[2]}
    roles: dict[str, list[Message]] = {"entry": [], "exit": [], "again": []}
    for message in observer.messages:
        if message.module in modules:
            roles[_role(message, leaves)].append(message)
    return Region(
        name=name,
        kind=kind,
        takes=takes,
        whole=columns[0].takes if columns and not alone else (*tokens, takes[-1]),
        gives=rows[-1].gives if rows else gives,
        linears=tuple(linears),
        activation=_activation(observer.model, kept, modules | beside),
        entry=_verbs(roles["entry"]),
        exit=_verbs(roles["exit"]),
        again=len(roles["again"]),
        sent={role: sum(message.sent for message in messages) for role, messages in roles.items()},
    )


def _role(message: Message, leaves: set[str]) -> str:
    """Whether a collective of a region is f's, g's, or the second gather."""
    forward = message.way == "forward"
    if message.verb == "all_gather":
        return "entry" if forward else "exit" if message.module in leaves else "again"
    if message.verb == "reduce_scatter":
        return "exit" if forward else "entry"
    return "exit" if forward else "entry"


def _verbs(messages: Sequence[Message]) -> tuple[str, str]:
    """What was sent forward, and backward."""
    ways = ({message.verb: None for message in messages if message.way == way} for way in ("forward", "backward"))
    forward, backward = (", ".join(verbs) for verbs in ways)
    return forward, backward


def _linear(observer: Observer, site: Site) -> Linear:
    module, split = observer.model.get_submodule(site.name), site.splits["weight"]
    role = "row" if isinstance(module, RowLinear) else "column"
    sizes = (module.in_features, module.out_features) if isinstance(module, ColumnLinear) else (0, 0)
    mine = split.valid(0) if split.trimmed and len(split.pieces) == 1 else split.local_size
    local = (mine, sizes[1]) if role == "row" else (sizes[0], mine)
    return Linear(site.name, role, sizes, local, *observer.shapes[site.name])


def _activation(model: nn.Module, kept: Sequence[Kept], modules: set[str]) -> str:
    """What stands between column and row layers: a module, or what autograd has kept of a function."""
    names = {f"{name}.{at}".rstrip(".") for name in modules for at, _ in model.get_submodule(name).named_modules()}
    found = [ACTIVATIONS[k.by] for k in kept if k.module in names and k.by in ACTIVATIONS]
    kinds = (type(model.get_submodule(name)).__name__ for name in sorted(names))
    named = (kind.removesuffix("Activation").replace("GELU", "GeLU") for kind in kinds if "activation" in kind.lower())
    return found[0] if found else next(named, "")
