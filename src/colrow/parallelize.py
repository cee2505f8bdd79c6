"""The one call: resolve and validate everything, then replace parameters and classes in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from colrow import comm, families, rules
from colrow.adapters import AdaptedEmbedding, Lookup, make_whole, sites_of_split
from colrow.become import become
from colrow.checks import check_alike, check_model
from colrow.dropout import Dropout
from colrow.embedding import VocabEmbedding
from colrow.errors import ColrowError, PlanError, RankError
from colrow.families.proposal import plan_for
from colrow.gradients import PartialSums, Watched
from colrow.head import VocabHead
from colrow.init import check_resettable, whole_values
from colrow.layout import check_mesh
from colrow.linear import ColumnLinear, RowLinear
from colrow.model import LanguageModel, Model, Stack
from colrow.norm import Replicated, Router, Sliced, SplitModule
from colrow.params import agree, shard
from colrow.region import Block, LastNorm, Region
from colrow.resolve import Resolved, Site, resolve
from colrow.rules import Plan
from colrow.split import Split

_MIXINS: dict[type[rules.Rule], type[nn.Module]] = {
    rules.Replicated: Replicated,
    rules.Norm: Replicated,
    rules.LastNorm: LastNorm,
    rules.Column: ColumnLinear,
    rules.Row: RowLinear,
    rules.Vocab: VocabEmbedding,
    rules.Head: VocabHead,
    rules.Attention: Region,
    rules.Mlp: Region,
    rules.Moe: Region,
    rules.Router: Router,
    rules.Sliced: Sliced,
    rules.Block: Block,
    rules.Drop: Dropout,
    Lookup: AdaptedEmbedding,
}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    sequence_parallel: bool = True,
    recompute: Recompute = "elementwise",
    check_inputs: int = 3,
) -> nn.Module:
    """Split `model` over the ranks of `mesh`, in place. It is called, trained and saved as before.

    Arguments:
        model: any module, in memory or on meta, the same on every rank; where ranks differ the first rank's values
            count. On meta, each module is initialised whole by its `reset_parameters` and split at once, so every
            degree starts from the same weights. A split model to which `peft` has added adapters: they are split, too.
        mesh: one axis of a DeviceMesh, `mesh["tp"]`. Its size need not divide anything.
        plan: what the parts mean. Without one, that of the model's family; with one, it goes before the family's.
        sequence_parallel: keep norms, dropout and residuals of the blocks on 1/t of the tokens.
        recompute: what is made again in backward, and not kept: "elementwise" (norms and activations), or "none".
        check_inputs: the first so many calls check that all ranks were given the same inputs (-1: all calls).

    Returns: `model`. Its parameters are DTensors on `mesh`, its names, hooks, dtypes, ties and `requires_grad` are what
    they were, and its outputs are whole. Build the optimizer afterwards.

    Cost: an all-gather of a few numbers a parameter. Afterwards, per layer: two all-reduces forward and two backward;
    with sequence parallelism two all-gathers and two reduce-scatters each way, and two more all-gathers in backward.

    Raises:
        PlanError: the plan does not fit, `recompute` is no such value, or the model is split already; it is as it was.
        RankError: the ranks have different models or plans.
    """
    check_mesh(mesh, "colrow.parallelize")
    check_recompute(recompute, "colrow.parallelize")
    added = sites_of_split(model)
    if added:
        _add(model, mesh, added)
        return model
    resolved = resolve_alike(model, mesh, plan, sequence_parallel, check_resettable)
    apply(model, mesh, resolved, _own_values(model, mesh), check_inputs, recompute)
    return model


def check_recompute(recompute: str, where: str) -> None:
    """Raises: PlanError: no such value."""
    if recompute not in get_args(Recompute):
        given, allowed = f"recompute={recompute!r}", " or ".join(map(repr, get_args(Recompute)))
        raise PlanError(where, given, f"it may be {allowed}", "Leave it out, or give one of them")


def find_plan(model: nn.Module, plan: Plan | None = None) -> Plan:
    """The plan that counts for `model`: the caller's, then its family's; of no known family, one that is proposed."""
    family = families.find(model)
    if family is None:
        return plan_for(model, plan, talks=comm.is_rank_zero())
    return family if plan is None else plan | family


def resolve_alike(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None, sequence_parallel: bool, check: Callable[[nn.Module], None]
) -> Resolved:
    """Resolve, check what else must hold, and make sure that every rank did, to the same end.

    An error on one is an error on all.
    """
    error = None
    resolved = None
    try:
        check_model(model)
        resolved = resolve(model, find_plan(model, plan), mesh.size(), sequence_parallel=sequence_parallel)
        check(model)
    except ColrowError as raised:
        error = raised
    digest = zlib.crc32(repr((resolved, error is None)).encode())
    every = comm.exchange([digest, int(error is not None)], mesh)
    if error is not None:
        raise error
    if len({numbers[0] for numbers in every}) > 1:
        failed = [rank for rank, (_, bad) in enumerate(every) if bad]
        given = f"ranks {failed} could not resolve it" if failed else "it resolved to different splits"
        fix = "Build the same model with the same plan on every rank"
        raise RankError("colrow.parallelize", given, "every rank splits the same model by the same plan", fix)
    if resolved is None:
        raise RankError("colrow.parallelize", "nothing was resolved", "resolve returns a value", "Report this")
    check_alike(model, mesh)
    return resolved


Recompute = Literal["none", "elementwise"]
Maker = Callable[[Split | None], DTensor]
"""From a parameter's split to the parameter at rest."""
Values = Callable[[nn.Module], tuple[dict[str, Maker], dict[str, Tensor]]]
"""Where values come from: makers of the parameters, and the buffers, that a module owns directly, by short name."""


def apply(
    model: nn.Module, mesh: DeviceMesh, resolved: Resolved, values: Values, checks: int, recompute: Recompute
) -> None:
    """Replace every module's parameters by shards, then its class. The plan is agreed; `checks` calls check inputs."""
    sums = PartialSums(mesh)
    by_name = {site.name: site for site in resolved.sites}
    done: dict[int, nn.Parameter] = {}
    for name, module in dict(model.named_modules()).items():
        if name not in by_name:
            continue  # a container in an adapter
        _fill(module, by_name[name], comm.device(mesh), values, done)
        _convert(module, by_name[name], mesh, sums, root=module is model)
        if recompute != "none" and isinstance(by_name[name].rule, rules.Norm | rules.Mlp):
            vars(module)["tp_again"] = True
    sums.watch(done.values())
    become(model, LanguageModel if callable(getattr(model, "generate", None)) else Model, keeps_signature=True)
    vars(model)["checks_left"] = checks


def _add(model: nn.Module, mesh: DeviceMesh, added: Sequence[Site]) -> None:
    """Split adapters that were added to a model after it was split."""
    make_whole(model)
    modules, sums = dict(model.named_modules()), PartialSums(mesh)
    done: dict[int, nn.Parameter] = {}
    values = _own_values(nn.ModuleList(modules[site.name] for site in added if modules[site.name]._parameters), mesh)
    for site in added:
        if modules[site.name]._parameters:
            _fill(modules[site.name], site, comm.device(mesh), values, done)
        _convert(modules[site.name], site, mesh, sums, root=False)
    sums.watch(done.values())


def _fill(module: nn.Module, site: Site, device: torch.device, values: Values, done: dict[int, nn.Parameter]) -> None:
    """Put a module's own parameters at rest; its whole values are let go with the end of this call."""
    makers, buffers = values(module)
    for short, make in makers.items():
        old = module._parameters[short]
        if old is not None and id(old) not in done:  # a tied one keeps its first value, as in building the model
            done[id(old)] = nn.Parameter(make(site.splits.get(short)), old.requires_grad)
        module._parameters[short] = done[id(old)]
    for short, buffer in buffers.items():
        module._buffers[short] = buffer.to(device)


def _own_values(model: nn.Module, mesh: DeviceMesh) -> Values:
    """The values that the model has, made equal on every rank; or, on meta, those that its modules start from."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in tensors):
        agreed = None
    else:
        with torch.no_grad():
            agreed = dict(zip(map(id, tensors), agree(tensors, mesh), strict=True))

    def values(module: nn.Module) -> tuple[dict[str, Maker], dict[str, Tensor]]:
        params, buffers = whole_values(module, comm.device(mesh))
        if agreed is None:
            params = dict(zip(params, agree(list(params.values()), mesh), strict=True))
        else:
            params = {short: agreed[id(module._parameters[short])] for short in params}
            buffers = {short: agreed[id(buffer)] for short, buffer in buffers.items()}
        return {short: partial(shard, value, mesh=mesh) for short, value in params.items()}, buffers

    return values


def _convert(module: nn.Module, site: Site, mesh: DeviceMesh, sums: PartialSums, *, root: bool) -> None:
    """Give a module the class that its rule asks for. One without rule or parameters keeps its own."""
    mixin = None if site.rule is None else _MIXINS[type(site.rule)]
    if isinstance(module, nn.Dropout):
        mixin = Dropout
    elif site.stack:
        mixin = Stack
    elif mixin is None and site.grads and not root:
        mixin = Sliced if site.splits else Replicated
    if mixin is not None:
        become(module, mixin)
    if not (root or isinstance(module, Watched | Dropout)):
        return
    attributes: dict[str, object] = {"mesh": mesh, "where": site.name or type(module).__name__}
    if root or isinstance(module, Watched):
        attributes |= {"splits": dict(site.splits), "sums": sums}
    if root or isinstance(module, SplitModule):
        attributes |= {"grads": dict(site.grads)}
    if isinstance(module, Region | Block | LastNorm | Replicated):
        attributes |= {"sharded": site.sharded}
    if isinstance(module, Region):
        attributes |= {"tp_heads": site.heads, "tp_sums": isinstance(site.rule, rules.Moe)}
        attributes |= {f"tp_{at}": getattr(site.rule, at) for at in ("per_head", "residual") if hasattr(site.rule, at)}
    if isinstance(site.rule, rules.Block):
        attributes |= {"tp_last": site.rule.last}
    if isinstance(module, Dropout | ColumnLinear):
        attributes |= {"src": site.src}
    if site.transposed:
        sizes, split = list(module.get_parameter("weight").shape), site.splits["weight"]
        sizes[split.dim] = split.true_size
        attributes |= {"transposed": True, "in_features": sizes[0], "out_features": sizes[1]}
    if isinstance(module, RowLinear | VocabEmbedding):
        attributes |= {"dst": site.dst}
    vars(module).update(attributes | dict(site.patches))
