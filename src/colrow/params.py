"""Parameters: DTensors at rest, local tensors in flight, and one door between the two.

At rest every parameter of a split model is a DTensor on the tensor-parallel axis, norms and biases included, so that
optimizers, FSDP2, checkpoints and gradient clipping see one kind of thing. A layer reads it through `local`, which asks
what no default can know: whether the gradient that comes back is whole, a slice, or one term of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from colrow import comm
from colrow.dtensor import ToLocal
from colrow.errors import ShapeError
from colrow.layout import Layout, R, S
from colrow.split import Split


def local(param: Tensor, *, grad: Layout) -> Tensor:
    """This rank's part of a parameter at rest, as a plain tensor, for use in a region where it is in layout `grad`.

    Arguments:
        param: a DTensor on one axis. A plain tensor is returned as it is.
        grad: how the region reads it. `S(dim)`: a shard, its gradient is the shard's. `I`: whole, and every rank
            computes the same gradient. `R`: whole, and each rank computes one term of the gradient (it sees its own
            tokens, or its own heads), to be summed over the ranks. The gradient arrives in the layout `grad.dual`.
    """
    if not isinstance(param, DTensor):
        return param
    at_rest = param.placements[-1]
    split = at_rest.dim % param.dim() if isinstance(at_rest, Shard) else None
    if split != (grad.dim % param.dim() if isinstance(grad, S) else None):
        given = f"a parameter at rest as {at_rest} read as {grad}"
        raise ShapeError("colrow.local", given, "shards are read as S(dim), the others as R or I", "Correct grad=")
    placement = grad.dual.placement if split is None else Shard(split)
    if param.device_mesh.ndim > 1 or torch.compiler.is_compiling():
        return param.to_local(grad_placements=[placement])
    return ToLocal.apply(param, placement)


def read(param: Tensor, split: Split | None, mesh: DeviceMesh, grad: Layout) -> Tensor:
    """What a rank computes with: its shard; or, of a parameter that is whole at rest, all of it or what it needs.

    `grad` is how the region reads a parameter without a split; a split implies its own.
    """
    if split is None:
        return local(param, grad=grad)
    if split.sharded:
        return split.trim(local(param, grad=S(split.dim)), mesh.get_local_rank())
    return split.take(local(param, grad=R), mesh.get_local_rank())


def shard(whole: Tensor, split: Split | None, mesh: DeviceMesh) -> DTensor:
    """A tensor at rest, from the same whole one on every rank. Each shard owns exactly its storage."""
    whole = whole.detach()
    mine = split.take(whole, mesh.get_local_rank()) if split is not None and split.sharded else whole.clone()
    return at_rest(mine, split, mesh)


def at_rest(mine: Tensor, split: Split | None, mesh: DeviceMesh) -> DTensor:
    """A tensor at rest, from what this rank keeps of it: its own entries, padded, or the whole."""
    shape, placement = list(mine.shape), Replicate()
    if split is not None and split.sharded:
        placement = Shard(split.dim)
        shape[split.dim] = split.local_size * mesh.size()
    mine = (mine if mine.is_meta else mine.to(comm.device(mesh))).contiguous()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def shard_like(whole: Tensor, split: Split | None, param: Tensor) -> Tensor:
    """`shard`, placed as `param` is: also where FSDP2 has split it over further axes."""
    if not isinstance(param, DTensor):
        return whole.to(param.device)
    mesh = param.device_mesh
    if mesh.ndim == 1:
        return shard(whole, split, mesh)
    mine = shard(whole, split, mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh)
    outer = [*[Replicate()] * (mesh.ndim - 1), mine.placements[0]]
    spread = DTensor.from_local(local_of(mine), mesh, outer, run_check=False, shape=mine.shape, stride=mine.stride())
    return spread.redistribute(placements=param.placements)


def unshard(value: Tensor, split: Split | None) -> Tensor:
    """The whole tensor, true sizes and order, of a parameter at rest (or of its gradient, or of an optimizer's moment
    of it) as a new plain tensor on every rank. One all-gather; an all-reduce where the value is a partial sum."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    mesh, placement = value.device_mesh, value.placements[-1]
    if mesh.ndim > 1:  # FSDP holds a part of the shard: let it gather its own axes first
        with torch.no_grad():
            value = value.redistribute(placements=[*[Replicate()] * (mesh.ndim - 1), placement])
        mesh = mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh
    mine = local_of(value)
    if isinstance(placement, Partial):
        return comm.all_reduce(mine, mesh).clone()
    if not isinstance(placement, Shard):
        return mine.clone()
    if split is None:  # a shard that is not of our making
        with torch.no_grad():
            return value.full_tensor()
    rows = comm.all_gather(mine, mesh, split.dim, (mine.shape[split.dim],) * mesh.size())
    return split.join(rows.tensor_split(mesh.size(), split.dim))


def local_of(value: Tensor) -> Tensor:
    """The local tensor of a DTensor outside autograd (to fill, compare or save it), or the tensor itself."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local(grad_placements=value.placements)


def splits(model: nn.Module) -> dict[str, Split]:
    """The split of every parameter that has one, by its true name; the rest are whole on every rank."""
    found: dict[str, Split] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = getattr(module, "splits", None)
        if isinstance(own, dict):
            found.update({true_name(f"{prefix}.{name}" if prefix else name): split for name, split in own.items()})
    return found


def true_name(name: str) -> str:
    """The name without what wrappers put into it: activation checkpointing and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Split | None]]:
    """Every parameter once, under its first (true) name, with its split."""
    by_name = splits(model)
    for name, param in model.named_parameters():
        yield true_name(name), param, by_name.get(true_name(name))


def agree(wholes: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The same tensors on every rank: those that differ anywhere are taken from the axis's first rank.

    Cost: one all-gather of a number per tensor, and a broadcast of each tensor that differs.
    """
    every = comm.exchange([fingerprint(whole) for whole in wholes], mesh) if wholes else []
    same = [len(set(prints)) == 1 for prints in zip(*every, strict=True)]
    return [
        whole if equal else comm.broadcast(whole.detach().to(comm.device(mesh)), mesh).to(whole.device)
        for whole, equal in zip(wholes, same, strict=True)
    ]


def fingerprint(x: Tensor) -> int:
    """63 bits that depend on every element's bits and its position: equal tensors have equal fingerprints."""
    if x.numel() == 0 or x.is_meta:
        return x.numel()
    raw = x.detach().contiguous().flatten().view(torch.uint8)
    words = nn.functional.pad(raw, (0, -raw.numel() % 8)).view(torch.int64)
    total = 0  # `>>` copies the sign, hence the masks: without them x and ~x, 99 and -100, would be mixed into one
    for start in range(0, words.numel(), 1 << 22):
        block = words[start : start + (1 << 22)]
        place = torch.arange(start, start + block.numel(), device=x.device) * 2 + 1
        mixed = (block ^ ((block >> 29) & ((1 << 35) - 1))) * (place * -7046029254386353131)
        total ^= int(((mixed ^ ((mixed >> 32) & ((1 << 32) - 1))) * -7046029254386353131).sum())
    return total & (2**63 - 1)
