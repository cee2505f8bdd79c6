"""Dropout that does not depend on the degree: a mask is a hash of (key, position in the whole tensor).

Rank r asks for its own positions only, so tp = 1, 2 and 4, with and without sequence parallelism, drop the same
elements, in activations that are whole, split by tokens, by heads or by features. Nothing is stored: backward and a
recomputation hash again.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from colrow import comm
from colrow.context import agreed_key, current, draw, known_tokens, require_whole
from colrow.errors import ShapeError
from colrow.layout import I, Layout, S, check_layout, check_mesh

_BITS = 53


class Dropout(nn.Dropout):
    """Dropout by global position.

    Arguments:
        p: the probability that an element is dropped; the others are scaled by 1 / (1 - p).
        mesh: one axis of a DeviceMesh.
        src: the layout of input and output. `I`: whole. `S(dim)`: a slice of dimension `dim`; inside a split block
            `S(0)` are this rank's tokens. State the size, or the ranks ask each other for it at every call.

    Shapes: any; the output's is the input's. Never in place.

    Cost: nothing inside a split model, whose call has made the ranks' generators equal; used alone, a broadcast of
    eight bytes.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, mesh: DeviceMesh, src: Layout = I) -> None:
        super().__init__(p, inplace)
        self.mesh, self.src = check_mesh(mesh, "Dropout"), check_layout(src, "Dropout(src=)")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if self.src == I:
            require_whole(type(self).__name__)
        # a running call has made the ranks' generators equal
        key = agreed_key(self.mesh) if current() is None else draw()
        dim, start, size = self._window(input)
        return _Dropout.apply(input, self.p, key, dim, start, size)

    def _window(self, x: Tensor) -> tuple[int, int, int]:
        """Which dimension x is a slice of, where the slice starts, and the size of the whole."""
        src = known_tokens(self.src)
        if not isinstance(src, S):
            return 0, 0, x.shape[0] if x.dim() else 1
        sizes = src.sizes(self.mesh.size())
        if sizes is None:
            sizes = tuple(size for (size,) in comm.exchange([x.shape[src.dim]], self.mesh))
        mine = sizes[rank := self.mesh.get_local_rank()]
        if x.shape[src.dim] < mine:
            given, allowed = f"an input of shape {tuple(x.shape)}", f"{src} leaves {mine} entries to this rank"
            raise ShapeError("Dropout", given, allowed, "Name the dimension that is sharded")
        return src.dim % x.dim(), sum(sizes[:rank]), sum(sizes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, src={self.src}, tp={self.mesh.size()}"


class _Dropout(torch.autograd.Function):
    """y = x * mask / (1 - p); linear in x, so backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int, dim: int, start: int, size: int) -> Tensor:
        ctx.terms = p, key, dim, start, size
        if p >= 1:
            return torch.zeros_like(x)
        return (x / (1 - p)).masked_fill(~keep_mask(x.shape, p, key, dim, start, size, x.device), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Dropout.apply(grad, *ctx.terms), None, None, None, None, None


def keep_mask(shape: torch.Size, p: float, key: int, dim: int, start: int, size: int, device: torch.device) -> Tensor:
    """True where an element is kept; `shape` is a slice, from `start`, of dimension `dim`, of size `size` in all."""
    whole = list(shape)
    if whole:
        whole[dim] = size
    position = torch.zeros((), dtype=torch.int64, device=device)
    for axis, length in enumerate(shape):
        first = start if axis == dim else 0
        along = torch.arange(first, first + length, device=device) * prod(whole[axis + 1 :])
        position = position + along.view([-1 if i == axis else 1 for i in range(len(shape))])
    # splitmix64's finaliser; int64 arithmetic wraps, and its right shift needs the sign bits masked away
    state = position * -7046029254386353131 + key
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))).mul_(-4658895280553007687)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))).mul_(-7723592293110705685)
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return ((state >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= int(p * (1 << _BITS))
