"""`colrow.plan`: what `parallelize` would make of a model, on meta tensors, without ranks."""

from __future__ import annotations

from math import prod

from torch import nn

from colrow.checks import check_model
from colrow.errors import PlanError
from colrow.figures import share
from colrow.parallelize import find_plan
from colrow.plan_advice import Places, advise, why_whole
from colrow.plan_report import PlanReport, Totals
from colrow.plan_tree import Part
from colrow.resolve import resolve
from colrow.rules import Plan


def plan(model: nn.Module, tp: int, plan: Plan | None = None, *, sequence_parallel: bool = True) -> PlanReport:
    """What `parallelize` would make of a model, and its cost in memory. Changes nothing and starts no ranks.

    Arguments:
        model: plain PyTorch, not split yet; on meta it costs no memory, whatever its size.
        tp: the number of ranks; it need not divide anything.
        plan: as for `parallelize`; by default that of the model's family, or one proposed from its structure.
        sequence_parallel: as for `parallelize`.

    Returns: a report to print or to read: every parameter, sums, what stays whole and why, padding, warnings.

    Raises:
        PlanError: what `parallelize` would say of the model and the plan.
    """
    if tp < 1:
        raise PlanError("colrow.plan", f"tp={tp}", "a positive number of ranks is needed", "Give tp=2, say")
    check_model(model)
    resolved = resolve(model, find_plan(model, plan), tp, sequence_parallel=sequence_parallel)
    places = Places(resolved)
    parts = []
    for row in resolved.rows:
        module = model.get_submodule(row.name.rpartition(".")[0])
        why = "" if places.is_split(row.name) else why_whole(row.name, module, places)
        waste = 1 - share(prod(row.global_shape), prod(row.local_shape) * tp) if row.padding else 0.0
        parts.append(Part(row, why, waste))
    totals = _totals(model, parts, tp)
    dtypes = {str(param.dtype).removeprefix("torch.") for param in model.parameters()}
    return PlanReport(
        tp,
        sequence_parallel,
        dtypes.pop() if len(dtypes) == 1 else "mixed",
        resolved.rows,
        totals,
        {part.row.name: part.why for part in parts if part.why},
        {part.row.name: part.waste for part in parts if part.waste},
        advise(resolved, parts, totals.bytes_per_rank),
    )


def _totals(model: nn.Module, parts: list[Part], tp: int) -> Totals:
    params = dict(model.named_parameters(remove_duplicate=False))
    found = dict.fromkeys(Totals.__dataclass_fields__, 0)
    padding = 0.0
    for part in parts:
        row, param = part.row, params[part.row.name]
        here, copies = prod(row.local_shape), 4 if param.requires_grad else 1  # weight, gradient, two moments
        found["parameters"] += param.numel()
        found["trainable"] += param.numel() * param.requires_grad
        found["whole_bytes"] += param.numel() * param.element_size()
        found["bytes_per_rank"] += row.bytes_per_rank
        found["replicated_bytes" if part.why else "sharded_bytes_per_rank"] += row.bytes_per_rank
        found["adamw_bytes_per_rank"] += row.bytes_per_rank * copies
        found["adamw_float32_bytes_per_rank"] += here * 4 * copies
        padding += row.bytes_per_rank * part.waste
    return Totals(**found | {"padding_bytes_per_rank": round(padding)})
