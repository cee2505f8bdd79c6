"""From a DTensor to a rank's tensor and back, fast: this is done for every parameter in every step.

`to_local` and `from_local` check at every call what cannot change for a parameter at rest, which takes longer than a
small layer. Nothing public does without, so private parts of torch are used, here and nowhere else for this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


class ToLocal(torch.autograd.Function):
    """A DTensor on one axis to this rank's tensor; backward, this rank's gradient to a DTensor in `placement`.

    As `DTensor.to_local`, without the checks that it makes at every call, which take longer than a small layer.
    """

    @staticmethod
    def forward(ctx: Any, param: DTensor, placement: Placement) -> Tensor:
        mine = param._local_tensor
        ctx.like, ctx.placement, ctx.contiguous = param._spec, placement, mine.is_contiguous()
        ctx.set_materialize_grads(False)
        return mine.view_as(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None
        mesh, meta = ctx.like.mesh, ctx.like.tensor_meta
        if ctx.contiguous and not torch.is_grad_enabled():
            return as_dtensor(grad.contiguous(), mesh, ctx.placement, meta.shape, meta.stride), None
        grad = grad.contiguous() if ctx.contiguous else grad
        whole = DTensor.from_local(grad, mesh, [ctx.placement], run_check=False, shape=meta.shape, stride=meta.stride)
        return whole, None


def as_dtensor(
    mine: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor of this rank's tensor, outside of any graph."""
    spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(shape, stride, mine.dtype))
    return DTensor(mine, spec, requires_grad=False)
