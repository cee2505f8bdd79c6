"""The two linear layers of tensor parallelism, Y = g(act(f(X) A) B): A split by columns, B by rows.

    rank 0   X -> X A0 -> act -> (.) B0 = Y0 \
                                              g: sum -> Y
    rank 1   X -> X A1 -> act -> (.) B1 = Y1 /

(arXiv:1909.08053, section 3; with sequence parallelism arXiv:2205.05198, section 4.2.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from colrow.context import current, known_tokens, leave, mark
from colrow.errors import LayoutError, ShapeError
from colrow.gradients import Watched
from colrow.layout import I, Layout, P, R, S, check_layout, check_mesh, chunk_sizes
from colrow.moves import forget_shard, move, shard_of
from colrow.params import read
from colrow.recompute import recipe_of
from colrow.split import Piece, Split


class ColumnLinear(Watched, nn.Linear):
    """A linear layer whose outputs are split: rank r computes X A_r, the r-th slice of the output features.

    Arguments:
        in_features, out_features: the true sizes; the ranks need not divide them.
        mesh: one axis of a DeviceMesh.
        src: the input's layout. `I`: whole activations (the layer applies f). `S(0)`: this rank's tokens, (n, in), of
            all of them; the layer gathers. `R`: already gathered, by a `move` that several column layers share.

    Shapes: input (..., in), `src`; output (..., out on this rank), `S(-1)`. Weight at rest (out, in), `Shard(0)`,
    padded with zeros to a multiple of the ranks; drawn as `nn.Linear` draws it, so its whole is the same at any degree.

    Cost: `I` an all-reduce of (..., in) in backward. `S(0)` an all-gather, and in backward a reduce-scatter and one
    more all-gather: what is saved is the shard, not the gathered input. `R` nothing, but for that second all-gather.

    Raises:
        LayoutError: a mesh of several axes, or another `src`.
        ShapeError: an input whose last dimension is not `in_features`.
    """

    src: Layout
    transposed: bool = False
    """Whether the weight is kept as (in, out), as `Conv1D` of transformers does."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        src: Layout = I,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_mesh(mesh, type(self).__name__)
        self._check_end("src", src, (I, R))
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        split = Split(0, (Piece(out_features),), mesh.size(), trimmed=True)
        self.src = src
        self.adopt(mesh, {"weight": split} | ({"bias": split} if bias else {}))

    def forward(self, input: Tensor) -> Tensor:
        self._check_width(input, self.in_features)
        x = input if self.src == R else move(input, self.mesh, src=known_tokens(self.src), dst=R)
        y = regathering_linear(x, *self._terms())
        if x is not input:
            forget_shard(x)
        return y

    def _terms(self) -> tuple[Tensor, Tensor | None]:
        """This rank's weight (out on this rank, in) and bias."""
        bias = None if self.bias is None else read(self.bias, self.splits.get("bias"), self.mesh, R)
        return self._local_weight(), bias

    def _local_weight(self) -> Tensor:
        weight = read(self.weight, self.splits.get("weight"), self.mesh, R)
        return weight.t() if self.transposed else weight

    def _check_width(self, x: Tensor, *allowed: int, wanted: str | None = None) -> None:
        if x.shape[-1] not in allowed:
            given = f"an input of shape {tuple(x.shape)}"
            wanted = wanted or str(allowed[0])  # the same words on every rank
            fix = "Feed it what the unsplit layer would get, in the layout that it was built for"
            raise ShapeError(self.where, given, f"its last dimension must be {wanted}", fix)

    @classmethod
    def _check_end(cls, name: str, layout: Layout, allowed: tuple[Layout, ...]) -> None:
        if check_layout(layout, f"{cls.__name__}({name}=)") in allowed:
            return
        if not isinstance(layout, S) or layout.dim != 0:
            given = f"{name}={layout}"
            legal = ", ".join([*(str(a) for a in allowed), "S(0)"])
            fix = "Bring the tensor into one of these with colrow.move"
            raise LayoutError(cls.__name__, given, f"{name} may be {legal}", fix)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, src={self.src}, tp={self.mesh.size()}"


class RowLinear(ColumnLinear):
    """A linear layer whose inputs are split: rank r computes X_r B_r, a term of the output; the terms are summed.

    Arguments:
        in_features, out_features: the true sizes; the ranks need not divide them.
        mesh: one axis of a DeviceMesh.
        dst: the output's layout. `I`: whole (the layer applies g). `S(0)`: this rank's tokens of all of them, (n, out).
            `P`: the terms, not summed and without the bias: for a sum that a `move` takes later.

    Shapes: input (..., in on this rank), `S(-1)`; output (..., out) or (n, out), `dst`. Weight at rest (out, in),
    `Shard(1)`, zero-padded; the bias is whole on every rank, and added once, after the sum. Padding in the input, as
    `ColumnLinear` may leave it, is not read: whatever stands there does not count.

    Cost: `I` an all-reduce of (..., out) forward, nothing backward. `S(0)` a reduce-scatter and an all-gather; the bias
    then sees this rank's tokens only, and its gradient is summed over the ranks at the end of the backward pass.
    """

    dst: Layout

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        dst: Layout = I,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_mesh(mesh, type(self).__name__)
        self._check_end("dst", dst, (I, P))
        nn.Linear.__init__(self, in_features, out_features, bias, device=device, dtype=dtype)
        self.dst = dst
        self.adopt(mesh, {"weight": Split(1, (Piece(in_features),), mesh.size(), trimmed=True)})

    def forward(self, input: Tensor) -> Tensor:
        split, rank = self.splits["weight"], self.mesh.get_local_rank()
        valid = split.valid(rank)
        slices = f"this rank's slice of {self.in_features}, {list(chunk_sizes(self.in_features, self.mesh.size()))}"
        self._check_width(input, valid, split.local_size, wanted=slices)
        weight = self._local_weight().narrow(1, 0, valid)
        y = lean_linear(input if input.shape[-1] == valid else input.narrow(-1, 0, valid), weight, None)
        if self.dst == P:
            return y
        sharded = isinstance(known_tokens(self.dst), S)
        y = leave(y, self.mesh, tokens=tuple(y.shape[:-1]) if sharded else None)
        if self.bias is not None:  # autocast may have lowered y's dtype
            y = y + read(self.bias, None, self.mesh, R if sharded else I).to(y.dtype)
        call = current()
        if call is not None or not sharded:
            mark(y, call.tokens if call is not None and sharded else None)  # a dropout may ask what it drops
        return y

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, dst={self.dst}, tp={self.mesh.size()}"


def regathering_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, which keeps the shard that x was gathered from, if it was, and not x; or what x can be made of."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    source = shard_of(x)
    if source is None:
        return lean_linear(x, weight, bias)
    node, shard = source
    node.again = again = getattr(node, "again", None) or Regather(node.mesh, node.src, node.sizes, shard)
    again.users += 1
    return _LeanLinear.apply(x, weight, bias, again, *again.kept)


def lean_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, which keeps what x can be made of, if that is known, and not x."""
    recipe = recipe_of(x) if weight.requires_grad else None
    if recipe is None:
        return F.linear(x, weight, bias)
    again, kept = recipe.for_one_more(x)
    return _LeanLinear.apply(x, weight, bias, again, *kept)


class Regather:
    """One second gather in backward for all column layers that share the first (q, k and v, say)."""

    def __init__(self, mesh: DeviceMesh, src: S, sizes: tuple[int, ...], shard: Tensor) -> None:
        self.mesh, self.src, self.sizes, recipe = mesh, S(src.dim, size=sizes), sizes, recipe_of(shard)
        self.make, self.kept = ((lambda kept: kept), (shard,)) if recipe is None else recipe.for_one_more(shard)
        self.users = self.served = 0
        self.whole: Tensor | None = None

    def __call__(self, *kept: Tensor) -> Tensor:
        """The whole input as (tokens, in), from the shard or what that is made of. Gathered for the first user, let go
        with the last."""
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted: each user needs its own
            return self._gather(*kept)
        if self.whole is None:
            self.whole = self._gather(*kept)
        whole, self.served = self.whole, self.served + 1
        if self.served == self.users:
            self.whole, self.served = None, 0
        return whole

    def _gather(self, *kept: Tensor) -> Tensor:
        return move(self.make(*kept), self.mesh, src=self.src, dst=R).flatten(0, -2)


class _LeanLinear(torch.autograd.Function):
    """y = x W^T + b. Backward: dx = dy W, dW = dy^T x with x = again(*kept), db = sum dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, again: Any, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *kept)
        ctx.again, ctx.x_dtype, ctx.bias_dtype = again, x.dtype, None if bias is None else bias.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)  # autocast may have computed y in a lower precision than x and W are kept in
        dx = (dy @ weight.to(dy.dtype)).to(ctx.x_dtype) if needs_x else None
        dw = None
        if needs_weight:
            x = ctx.again(*kept).to(dy.dtype)
            dw = (rows.t() @ x.flatten(0, -2)).to(weight.dtype)
        db = rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return dx, dw, db, None, *(None for _ in kept)
