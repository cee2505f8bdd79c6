"""What must hold of a whole plan: one owner for every parameter, and partners for the rules that need one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor, nn

from colrow import rules
from colrow.become import calls_super, is_plain_linear
from colrow.errors import PlanError
from colrow.resolved import Site
from colrow.rules import FEATURES, Rule

REGIONS: Final = (rules.Attention, rules.Mlp, rules.Moe)


def check_forward(name: str, module: nn.Module, plain: type[nn.Module]) -> None:
    """Refuse a layer whose class computes something of its own: splitting it would silently drop that."""
    own = type(module).forward
    if own is plain.forward or calls_super(type(module)) or (isinstance(module, nn.Linear) and is_plain_linear(module)):
        return
    given = f"{type(module).__name__} has a forward of its own, not that of nn.{plain.__name__}"
    fix = f"Let it call super().forward(), or use an nn.{plain.__name__}, or give it the rule Replicated()"
    raise PlanError(name, given, f"what is split is an nn.{plain.__name__}, or adds to its forward", fix)


def check_names(name: str, module: nn.Module) -> None:
    """Refuse a module whose own attributes have the names that a split one needs."""
    taken = [at for at in ("mesh", "splits", "sums", "grads", "sharded", "where") if at in vars(module)]
    if taken:
        given = f"{type(module).__name__} has an attribute named '{taken[0]}'"
        raise PlanError(name, given, "a split module has its own under that name", "Rename the module's attribute")


def check_owners(params: Mapping[str, Tensor], found: Mapping[str, Rule]) -> None:
    """Every parameter has an owner: a rule for it or for the module that holds it."""
    orphans = [name for name in params if name not in found and name.rpartition(".")[0] not in found]
    if orphans:
        listed = ", ".join(orphans[:5]) + (f" and {len(orphans) - 5} more" if len(orphans) > 5 else "")
        holder = orphans[0].rpartition(".")[0] or orphans[0]
        given = f"{listed} {'is' if len(orphans) == 1 else 'are'} named by no pattern"
        raise PlanError("plan", given, "every parameter has one owner", f"Add '{holder}': Replicated(), or a split")


def check_partners(sites: Iterable[Site]) -> None:
    """Column layers are followed by a row layer that takes what they give; `Site.partners` says where to look."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        if isinstance(site.rule, rules.Column | rules.Row):
            groups.setdefault(site.partners, []).append(site)
    for place, members in groups.items():
        columns = [site for site in members if isinstance(site.rule, rules.Column)]
        rows = [site for site in members if isinstance(site.rule, rules.Row)]
        if not columns or not rows:
            lone, other = (columns[0], "Row") if columns else (rows[0], "Column")
            given = f"a {lone.rule} layer without a {other} layer in '{place}'"
            allowed = "what column layers split, a row layer must sum"
            raise PlanError(lone.name, given, allowed, f"Give its partner the rule {other}(), or both Replicated()")
        sizes = {size for site in columns for size in _features(site)}
        for row in rows:
            size = row.splits["weight"].true_size
            if _features(row) and size not in sizes:
                given = f"it takes {size} features, and the column layers in '{place}' give {sorted(sizes)}"
                fix = "Name all pieces of a fused layer, Column(FEATURES, FEATURES) for [gate | up]"
                raise PlanError(row.name, given, "a row layer takes one piece of a column layer's output", fix)


def _features(site: Site) -> list[int]:
    """The sizes of a linear layer's pieces that are made of features."""
    rule = site.rule
    units = (rule.unit,) if isinstance(rule, rules.Row) else getattr(rule, "units", ())
    return [piece.size for unit, piece in zip(units, site.splits["weight"].pieces, strict=True) if unit is FEATURES]
