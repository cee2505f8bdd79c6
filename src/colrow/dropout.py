"""Dropout that does not depend on the degree: a mask is a hash of (key, position in the whole tensor).

Rank r asks for its own positions only, so tp = 1, 2 and 4, with and without sequence parallelism, drop the same
elements, in activations that are whole, split by tokens, by heads or by features. Nothing is stored: backward and a
recomputation hash again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from colrow import comm
from colrow.context import agreed_key, current, draw, in_stream, known_tokens, require_whole
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
        return drop(input, self.p, self.mesh, self.src)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, src={self.src}, tp={self.mesh.size()}"


class FunctionalDropout(TorchFunctionMode):
    """While it is entered, the dropout that a model's own code calls (`F.dropout`, `dropout_p` of
    `F.scaled_dot_product_attention`) is ours. What a tensor is split by is seen from where it comes from.

    Arguments:
        mesh: the axis.
        stream: the layout of the stream here, `S(0)` or `I`.
        heads: how many heads every rank has, in attention: probabilities are (batch, heads, ...).
        features: whether other tensors are split by features, as between a column and a row layer.
    """

    def __init__(self, mesh: DeviceMesh, stream: Layout, heads: tuple[int, ...] | None, *, features: bool) -> None:
        super().__init__()
        self.mesh, self.stream, self.heads, self.features = mesh, stream, heads, features

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            given = inspect.signature(F.dropout).bind(*args, **kwargs).arguments
            p = given.get("p", 0.5)
            if not given.get("training", True) or p == 0:
                return given["input"]
            return drop(given["input"], p, self.mesh, self._layout(given["input"]))
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _layout(self, x: Tensor) -> Layout:
        if in_stream(x) or (self.heads is None and not self.features):
            return self.stream
        if self.features:
            return S(-1)
        if self.heads is not None and x.dim() == 4 and x.shape[1] >= self.heads[self.mesh.get_local_rank()]:
            return S(1, size=self.heads)
        given = f"F.dropout of a tensor of shape {tuple(x.shape)}"
        allowed = "in attention what is dropped is the probabilities, (batch, heads, ...), or the row layer's output"
        raise ShapeError("attention", given, allowed, "Use an nn.Dropout there, and name it in the plan: Drop(...)")

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(scale Q K^T + mask), dropped, times V: what the fused kernel computes, with our mask."""
        if enable_gqa:
            group = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        nothing = (scores == -torch.inf).all(-1, keepdim=True)  # a row that sees no key gives zero, not nan
        probabilities = scores.masked_fill(nothing, 0).softmax(-1, dtype=comm.sum_dtype(scores.dtype)).to(value.dtype)
        return drop(probabilities.masked_fill(nothing, 0), dropout_p, self.mesh, S(1, size=self.heads)) @ value


def may_drop(module: nn.Module, *, inside: bool = True) -> bool:
    """Whether a call of the module (or of one inside) may draw: it trains, and has a probability that is not zero.

    HF's modules keep those of functional dropout as numbers, or leave them in the config: `attention_dropout`,
    `hidden_dropout`, `layerdrop`, ...
    """
    seen: set[int] = set()
    for part in module.modules() if inside else (module,):
        if part.training:
            own = vars(part)
            if (isinstance(part, nn.Dropout) and part.p > 0) or _has_probability(own):
                return True
            config = own.get("config")
            if config is not None and id(config) not in seen and _has_probability(vars(config)):
                return True
            seen.add(id(config))
    return False


def _has_probability(values: dict[str, Any]) -> bool:
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values.items())


def drop(x: Tensor, p: float, mesh: DeviceMesh, src: Layout) -> Tensor:
    """Dropout of x, which is in layout `src`. In a running call the ranks' generators are equal; else they agree."""
    key = agreed_key(mesh) if current() is None else draw()
    dim, start, size = _window(x, mesh, src)
    return _Dropout.apply(x, p, key, dim, start, size)


def _window(x: Tensor, mesh: DeviceMesh, src: Layout) -> tuple[int, int, int]:
    """Which dimension x is a slice of, where the slice starts, and the size of the whole."""
    src = known_tokens(src)
    if not isinstance(src, S):
        return 0, 0, x.shape[0] if x.dim() else 1
    sizes = src.sizes(mesh.size())
    if sizes is None:
        sizes = tuple(size for (size,) in comm.exchange([x.shape[src.dim]], mesh))
    mine = sizes[rank := mesh.get_local_rank()]
    if x.shape[src.dim] < mine:
        given, allowed = f"an input of shape {tuple(x.shape)}", f"{src} leaves {mine} entries to this rank"
        raise ShapeError("Dropout", given, allowed, "Name the dimension that is sharded")
    return src.dim % x.dim(), sum(sizes[:rank]), sum(sizes)


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
