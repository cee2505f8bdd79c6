"""A split model seen whole: true names and sizes on every rank; the norm of its gradients; equal replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from colrow import comm
from colrow.checks import require_split
from colrow.context import mix
from colrow.errors import ColrowError, RankError
from colrow.layout import check_mesh
from colrow.params import agree, fingerprint, local_of, named_parts, splits, true_name, unshard


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What `state_dict()` of the unsplit model would be: true names, sizes and order, plain tensors, on every rank.

    Cost: an all-gather of every shard; the memory of the whole model.

    Raises:
        PlanError: the model is not split.
        RankError: replicas that have drifted apart, by name. Nothing is silently taken from one rank.
    """
    require_split(model, "colrow.full_state_dict")
    require_equal_replicas(model)
    by_name = splits(model)
    named = {true_name(name): value for name, value in model.state_dict().items()}
    return {name: unshard(value, by_name.get(name)) for name, value in named.items()}


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, as the unsplit model would have them: true sizes, plain tensors, on every rank.

    Raises:
        PlanError: the model is not split.
    """
    require_split(model, "colrow.full_grads")
    return {name: unshard(param.grad, split) for name, param, split in named_parts(model) if param.grad is not None}


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`, and return what it was.

    Each element counts once, however many ranks hold it, so the norm is the unsplit model's, and it is the same number
    on every rank. Works beside FSDP2, whose gradients are split over a second axis.

    Arguments:
        model: after `backward()`, and before the optimizer's step.
        norm_type: 1, 2, ... or `inf`.

    Returns: a scalar tensor, fp32 (fp64 for fp64 gradients).

    Cost: one all-reduce of a scalar per axis. Linear in the number of parameters.

    Raises:
        PlanError: the model is not split: torch's own function is for that.
        ColrowError: a norm that is not finite, with `error_if_nonfinite`.
    """
    require_split(model, "colrow.clip_grad_norm_")
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = _total_norm([_settled(grad) for grad in grads], float(norm_type))
    if error_if_nonfinite and not bool(total.isfinite()):
        given, fix = f"the norm of the gradients is {float(total)}", "Look for the first loss that is not finite"
        raise ColrowError("colrow.clip_grad_norm_", given, "it must be finite", fix)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        mine = local_of(grad)
        mine.mul_(scale.to(mine.device, mine.dtype))
    return total


def _settled(grad: Tensor) -> Tensor:
    """The gradient without pending sums (a parameter whose hooks were lost keeps a Partial one: right, but slower)."""
    if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
        return grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements])
    return grad


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Norms of the local parts, joined over just the axes on which each gradient is split."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        axes = (
            tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate()) if isinstance(grad, DTensor) else ()
        )
        groups.setdefault((mesh, axes), []).append(local_of(grad))
    parts = []
    for (mesh, axes), tensors in groups.items():
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        norm = nn.utils.get_total_norm([t.to(dtype) for t in tensors], norm_type)
        largest = norm_type == float("inf")
        power = norm if largest else norm**norm_type
        if mesh is not None:
            for axis in axes:
                power = comm.all_reduce(power, _axis(mesh, axis), dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        parts.append(power)
    if not parts:
        return torch.zeros(())
    stacked = torch.stack([part.to(parts[0].device, parts[0].dtype) for part in parts])
    return stacked.max() if norm_type == float("inf") else stacked.sum() ** (1 / norm_type)


def _axis(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    return mesh[mesh.mesh_dim_names[axis]] if mesh.ndim > 1 and mesh.mesh_dim_names else mesh


def seed(mesh: DeviceMesh, value: int) -> None:
    """Seed torch's generators so that the ranks of one axis agree and data-parallel replicas differ.

    The first rank's `value` counts. Call it after the model is built: replicas start from the same weights, and then
    drop different elements. A split model's dropout at a given `value` is the same at every degree.
    """
    check_mesh(mesh, "colrow.seed")
    agreed = int(comm.broadcast(torch.tensor([value], device=comm.device(mesh)), mesh))
    torch.manual_seed(mix(agreed, comm.first_rank(mesh)))


def replica_drift(model: nn.Module) -> dict[str, float]:
    """Parameters and buffers that should be equal on all ranks and are not: name -> largest absolute difference.

    Cost: an all-gather of a number per tensor, and two all-reduces of each that differs.
    """
    require_split(model, "colrow.replica_drift")
    mesh = _axis_of(model)
    if mesh is None:
        return {}
    copies = {
        name: local_of(value)
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if not (isinstance(value, DTensor) and isinstance(value.placements[-1], Shard))
    }
    every = comm.exchange([fingerprint(value) for value in copies.values()], mesh) if copies else []
    drift = {}
    for (name, value), prints in zip(copies.items(), zip(*every, strict=True), strict=True):
        if len(set(prints)) > 1:
            wide = value.detach().double()
            high, low = comm.all_reduce(wide, mesh, dist.ReduceOp.MAX), comm.all_reduce(wide, mesh, dist.ReduceOp.MIN)
            drift[name] = float((high - low).max())
    return drift


def require_equal_replicas(model: nn.Module) -> None:
    """Raise a RankError that names the replicas that have drifted apart, on every rank."""
    drift = replica_drift(model)
    if drift:
        worst = max(drift, key=lambda name: drift[name])
        given = f"{len(drift)} replicated tensors differ between ranks, {worst} most, by {drift[worst]:.3g}"
        fix = "Look for an update outside the optimizer, or make them equal with colrow.sync_replicas(model)"
        raise RankError("colrow.full_state_dict", given, "replicas must be equal, bit for bit", fix)


def sync_replicas(model: nn.Module) -> None:
    """Make replicated parameters and buffers equal again: the first rank's values, in place."""
    require_split(model, "colrow.sync_replicas")
    mesh, drift = _axis_of(model), replica_drift(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if mesh is not None and name in drift:
            mine = local_of(value).detach()
            mine.copy_(agree([mine], mesh)[0])


def _axis_of(model: nn.Module) -> DeviceMesh | None:
    """The tensor-parallel axis of a split model."""
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    return _axis(meshes[0], meshes[0].ndim - 1) if meshes else None
