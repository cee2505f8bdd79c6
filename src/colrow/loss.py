"""Cross entropy and log-probabilities from logits split over the vocabulary. The logits are never gathered.

With m the maximum and V the size of the whole vocabulary, per token,

    log Z = m + log sum_j exp(x_j - m),    nll = log Z - x_target,    smooth = log Z - (1/V) sum_j x_j,
    loss  = (1 - a) nll + a smooth,        dloss/dx_j = exp(x_j - log Z) - (1 - a) [j = target] - a/V

so three numbers a token are summed over the ranks, and backward needs no collective (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from colrow import comm
from colrow.embedding import check_ids
from colrow.errors import LayoutError, ShapeError
from colrow.layout import I, P, S, check_mesh, chunk_sizes
from colrow.moves import move
from colrow.params import local

Reduction = Literal["mean", "sum", "none"]


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh | None = None,
    *,
    vocab: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`F.cross_entropy` of logits that are split over the vocabulary, layout S(-1).

    Arguments:
        logits: (..., vocabulary), the vocabulary last: a DTensor in `Shard(-1)`, as a split model's head gives; or the
            local tensor (..., vocabulary on this rank), with `mesh` and `vocab`. Columns of padding do not count.
        target: (...), the same token ids on every rank; `ignore_index` where there is nothing to learn.
        mesh, vocab: the axis and the true vocabulary size. A DTensor knows both.
        ignore_index, label_smoothing, reduction: as in `F.cross_entropy`.

    Returns: the loss, the same on every rank (layout I), a scalar or (...); computed in fp32 (fp64 for fp64 logits).

    Cost: an all-reduce of the maxima and one of three numbers a token, forward. Backward none. The logits are kept for
    backward as they are, and not written to.

    Raises:
        LayoutError: logits that are whole (gathered): every rank would count the whole vocabulary.
        ShapeError: a target of another shape, or outside the vocabulary.
    """
    if reduction not in ("mean", "sum", "none"):
        fix = "Choose one of them"
        raise ShapeError("vocab_cross_entropy", f"reduction={reduction!r}", "there are 'mean', 'sum' and 'none'", fix)
    mine, mesh, vocab = _mine(logits, mesh, vocab, "vocab_cross_entropy")
    _check_target(mine, target, vocab, ignore_index, "vocab_cross_entropy")
    loss: Any = _VocabLoss.apply(mine, target, mesh, vocab, label_smoothing, ignore_index)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def vocab_log_probs(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh | None = None,
    *,
    vocab: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """log p(target) of every token, (...), fp32: what policy-gradient and preference losses are made of.

    Arguments, cost and errors as in `vocab_cross_entropy`. Where the target is `ignore_index` the result is 0.
    """
    mine, mesh, vocab = _mine(logits, mesh, vocab, "vocab_log_probs")
    _check_target(mine, target, vocab, ignore_index, "vocab_log_probs")
    return -_VocabLoss.apply(mine, target, mesh, vocab, 0.0, ignore_index)


class SplitLogits(TorchFunctionMode):
    """While it is entered, `F.cross_entropy` of logits split over the vocabulary is `vocab_cross_entropy`.

    So a model's own loss, written for whole logits (N, vocabulary), stays as it is. Class weights are refused.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        if func is not F.cross_entropy or not isinstance(logits, DTensor):
            return func(*args, **kwargs)
        given = inspect.signature(F.cross_entropy).bind(*args, **kwargs).arguments
        if given.get("weight") is not None:
            fix = "Leave out the weights, or call colrow.vocab_cross_entropy and weigh its losses"
            raise LayoutError("F.cross_entropy", "class weights", "split logits have none", fix)
        names = ("ignore_index", "label_smoothing", "reduction")
        return vocab_cross_entropy(logits, given["target"], **{name: given[name] for name in names if name in given})


class _VocabLoss(torch.autograd.Function):
    """The loss of every token, zero where the target is ignored. Saves the logits, and m and log Z - m: their sum would
    lose the digits that the softmax needs where the logits are large."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, mesh: DeviceMesh, vocab: int, smoothing: float, ignore: int
    ) -> Tensor:
        loss, top, log_z = _token_loss(logits, target, mesh, vocab, smoothing, ignore)
        ctx.save_for_backward(logits, target, top, log_z)
        ctx.terms = mesh, vocab, smoothing, ignore
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, target, top, log_z = ctx.saved_tensors
        mesh, vocab, smoothing, ignore = ctx.terms
        if torch.is_grad_enabled():  # a graph of the backward pass is wanted: differentiate the formula itself
            loss, _, _ = _token_loss(logits, target, mesh, vocab, smoothing, ignore)
            dx = torch.autograd.grad(loss, logits, grad, create_graph=True)[0]
            return dx, None, None, None, None, None
        dx = logits.to(log_z.dtype).sub(top[..., None]).sub_(log_z[..., None]).exp_()
        if smoothing:
            dx.sub_(smoothing / vocab)
        column, here = _column(target, mesh, vocab, logits.shape[-1])
        if logits.shape[-1]:
            dx.scatter_add_(-1, column[..., None], -(1 - smoothing) * here[..., None].to(dx.dtype))
        dx.mul_(grad.masked_fill(target == ignore, 0)[..., None])  # the mean over no token has an infinite gradient
        return dx.to(logits.dtype), None, None, None, None, None


def _token_loss(
    logits: Tensor, target: Tensor, mesh: DeviceMesh, vocab: int, smoothing: float, ignore: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, m and log Z - m of every token, (...) each; the loss by differentiable operations and moves."""
    x = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        top = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        top = comm.all_reduce(top, mesh, dist.ReduceOp.MAX)
    x = x - top[..., None]
    column, here = _column(target, mesh, vocab, x.shape[-1])
    at_target = x.gather(-1, column[..., None])[..., 0].masked_fill(~here, 0) if x.shape[-1] else x.sum(-1)
    terms = [x.exp().sum(-1), at_target] + ([x.sum(-1)] if smoothing else [])
    sums = move(torch.stack(terms), mesh, src=P, dst=I)
    log_z = sums[0].log()
    loss = log_z - sums[1]
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_z - sums[2] / vocab)
    return loss.masked_fill(target == ignore, 0), top, log_z.detach()


def _column(target: Tensor, mesh: DeviceMesh, vocab: int, width: int) -> tuple[Tensor, Tensor]:
    """Each target's column on this rank (0 where it is elsewhere), and whether it is here."""
    start = sum(chunk_sizes(vocab, mesh.size())[: mesh.get_local_rank()])
    here = (target >= start) & (target < start + width)
    return (target - start).masked_fill(~here, 0), here


def _mine(logits: Tensor, mesh: DeviceMesh | None, vocab: int | None, where: str) -> tuple[Tensor, DeviceMesh, int]:
    """This rank's true columns of the logits, the axis, and the size of the vocabulary."""
    fix = "Pass the head's own output, before any gather"
    if isinstance(logits, DTensor):
        vocab, placement = logits.shape[-1], logits.placements[-1]
        if not isinstance(placement, Shard) or placement.dim not in (-1, logits.dim() - 1):
            given = f"a DTensor of logits in {placement}"
            raise LayoutError(where, given, f"logits must be split over the vocabulary, Shard({logits.dim() - 1})", fix)
        return local(logits, grad=S(logits.dim() - 1)), check_mesh(logits.device_mesh, where), vocab
    if mesh is None or vocab is None:
        given = "plain logits without mesh= and vocab="
        raise LayoutError(where, given, "a local slice does not say what it is a slice of", "Pass both")
    sizes = chunk_sizes(vocab, check_mesh(mesh, where).size())
    width, mine = logits.shape[-1], sizes[mesh.get_local_rank()]
    allowed = f"each rank passes its slice of the {vocab} columns, {list(sizes)}"
    if width == vocab > sizes[0]:
        raise LayoutError(where, f"gathered logits of shape {tuple(logits.shape)}", allowed, fix)
    if width not in (mine, sizes[0]):
        given = f"logits of shape {tuple(logits.shape)}"
        raise ShapeError(where, given, allowed, "Correct vocab= or the logits")
    return logits.narrow(-1, 0, mine), mesh, vocab


def _check_target(logits: Tensor, target: Tensor, vocab: int, ignore: int, where: str) -> None:
    if target.shape != logits.shape[:-1]:
        given = f"logits of {tuple(logits.shape[:-1])} tokens with a target of shape {tuple(target.shape)}"
        raise ShapeError(where, given, f"the target must have shape {tuple(logits.shape[:-1])}", "Flatten both alike")
    check_ids(target, vocab, where, ignore)
