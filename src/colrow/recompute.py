"""Tensors that are not kept for backward, since they can be made again from what is kept anyway.

    x -> norm -> y -> column layer      the norm keeps x; dW = dy^T y needs y = norm(x), made again
    u -> act  -> z -> row layer         the activation keeps u; dW = dy^T z needs z = act(u), made again
    g, u -> act(g) * u -> z             keeps g and u, of which act(g), the product and z are made again

A *recipe* says how. It is noted on the memory of the tensor that it makes, so the code in between, which somebody else
wrote, need not know of it, and a tensor without a recipe is kept as ever. What is made again has the same bits. Per
layer this leaves 20 sbh/t bytes of arXiv:2205.05198's 34 sbh/t, in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from colrow.moves import move
from colrow.precision import KeepDouble

Make = Callable[..., Tensor]
_PASSING: Final = ("ViewBackward0", "UnsafeViewBackward0", "MoveBackward", "BackwardHookFunctionBackward")
"""Nodes through which a tensor stays what it is; of moves, those that send nothing."""


class Recipe:
    """How to make a tensor again: `make(*kept)`, once for all of its users in a backward pass (q, k and v, say)."""

    def __init__(self, y: Tensor, make: Make, kept: tuple[Tensor, ...]) -> None:
        self.kept, self._make, self._version = kept, make, y._version
        self._shape, self._node, self._as_then = y.shape, y.grad_fn, _as_now(y.device.type)
        self.users = self._served = 0
        self._made: Tensor | None = None

    def fits(self, x: Tensor) -> bool:
        """Whether x is all of what the recipe makes, as it was made."""
        whole = x.is_contiguous() and x.storage_offset() == 0 and x.numel() == self._shape.numel()
        return whole and x._version == self._version

    def for_one_more(self, x: Tensor) -> tuple[Make, tuple[Tensor, ...]]:
        """Who makes x in backward, and what is to be kept for that.

        If x is made of `kept` by the graph, through moves that change nothing but the gradient's layout, second
        derivatives find the same way. A copy of x that was cut from the graph, as checkpointing makes one, has none.
        """
        self.users += 1
        moves, node = [], x.grad_fn
        while node is not None and node is not self._node and node.name() in _PASSING:
            moves += [node] if node.name() == "MoveBackward" else []
            node = node.next_functions[0][0]
        if node is None or node is not self._node:
            return self, tuple(tensor.detach() for tensor in self.kept)
        return (lambda *kept: self(*kept, moves=moves)), self.kept

    def made_by_graph(self, x: Tensor) -> bool:
        """Whether x is what the recipe made, in the graph as it was: neither cut from it nor led through anything."""
        return x.grad_fn is self._node

    def __call__(self, *kept: Tensor, moves: Sequence[Any] = ()) -> Tensor:
        """The tensor, (..., its last dimension): made for the first user, let go with the last."""
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted: each user needs its own
            made = self.once(*kept)
            for node in reversed(moves):
                made = move(made, node.mesh, src=node.src, dst=node.dst)
            return made
        if self._made is None:
            self._made = self.once(*kept)
        made, self._served = self._made, self._served + 1
        if self._served == self.users:
            self._made, self._served = None, 0
        return made

    def once(self, *kept: Tensor) -> Tensor:
        """Made anew."""
        with self._as_then():
            return self._make(*kept)


def note(y: Tensor, make: Make, *kept: Tensor) -> Tensor:
    """Say on y's memory that y is `make(*kept)`; returns y."""
    if y.is_contiguous() and y.storage_offset() == 0 and all(x is not y for x in kept):
        y.untyped_storage().colrow_recipe = Recipe(y, make, kept)  # pyright: ignore[reportAttributeAccessIssue]
    return y


def forget(x: Tensor) -> None:
    """Take the note off x's memory: x leaves the model, and whoever keeps a copy of it should not keep the graph."""
    if hasattr(x.untyped_storage(), "colrow_recipe"):
        del x.untyped_storage().colrow_recipe  # pyright: ignore[reportAttributeAccessIssue]


def recipe_of(x: Tensor) -> Recipe | None:
    """How to make x again, if that is known and x is to be kept for a backward pass."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    recipe: Recipe | None = getattr(x.untyped_storage(), "colrow_recipe", None)
    return recipe if recipe is not None and recipe.fits(x) else None


class Recomputed(torch.autograd.Function):
    """`make(*kept)`, of which backward keeps nothing else than `kept`: it runs again there."""

    @staticmethod
    def forward(ctx: Any, make: Make, *kept: Tensor) -> Tensor:
        ctx.make, ctx.as_then = make, _as_now(kept[0].device.type)
        ctx.save_for_backward(*kept)
        return make(*kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[1:]
        again, kept = _leaves(ctx.saved_tensors, needed)
        with torch.enable_grad(), ctx.as_then():
            y = ctx.make(*kept)
        return None, *_grads(y, kept, needed, dy, again)


class Lean(TorchFunctionMode):
    """While it is entered, activations and their products, act(g) * u, are noted, and keep only what they must."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ACTIVATIONS and args and not kwargs.get("inplace") and torch.is_grad_enabled():
            x, rest = args[0], args[1:]
            return note(func(x, *rest, **kwargs), lambda again: func(again, *rest, **kwargs), x)
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            for gated, other in (args, args[::-1]):
                recipe = recipe_of(gated) if isinstance(gated, Tensor) and isinstance(other, Tensor) else None
                alike = recipe is not None and gated.shape == other.shape and gated.dtype == other.dtype
                if recipe is not None and alike and recipe.made_by_graph(gated):
                    return _gate(recipe, gated, other)
        return func(*args, **kwargs)


def _gate(recipe: Recipe, gated: Tensor, other: Tensor) -> Tensor:
    """act(g) * u."""

    def product(u: Tensor, *kept: Tensor) -> Tensor:
        return recipe.once(*kept).view(u.shape) * u

    return note(Gated.apply(gated.detach(), other, recipe, *recipe.kept), product, other, *recipe.kept)


class Gated(torch.autograd.Function):
    """act(g) * u, which keeps g and u. Backward: du = dy act(g), dg = act'(g) (dy u), with act(g) made again."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, other: Tensor, recipe: Recipe, *kept: Tensor) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(other, *kept)
        return gated * other

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        other, *kept = ctx.saved_tensors
        _, needs_other, _, *needed = ctx.needs_input_grad
        again, kept = _leaves(kept, needed)
        with torch.enable_grad():
            gated = ctx.recipe.once(*kept).view(other.shape)
        d_other = (dy * (gated if again else gated.detach())) if needs_other else None
        return None, d_other, None, *_grads(gated, kept, needed, dy * other, again)


def _leaves(kept: Sequence[Tensor], needed: Sequence[bool]) -> tuple[bool, list[Tensor]]:
    """Whether a graph of the backward pass is wanted; and what to differentiate by: the tensors, or fresh leaves."""
    again = torch.is_grad_enabled()
    pairs = zip(kept, needed, strict=True)
    return again, [x if again else x.detach().requires_grad_(need) for x, need in pairs]


def _grads(
    y: Tensor, kept: Sequence[Tensor], needed: Sequence[bool], dy: Tensor, again: bool
) -> Iterator[Tensor | None]:
    """The gradients of y by those of `kept` that need one, and None for the others."""
    wanted = [x for x, need in zip(kept, needed, strict=True) if need]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again, allow_unused=True) if wanted else ())
    return (next(found) if need else None for need in needed)


_ACTIVATIONS: Final = frozenset({F.gelu, F.silu})
_PRODUCTS: Final = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__})


def _as_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """How tensors are computed now (autocast, double throughout), to be entered later."""
    on, dtype, double = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), KeepDouble.active()

    @contextmanager
    def then() -> Iterator[None]:
        with torch.autocast(device, dtype=dtype, enabled=on), KeepDouble() if double else nullcontext():
            yield

    return then
