"""vocab_cross_entropy and vocab_log_probs: equal to torch's on whole logits, for any vocabulary at any degree.

Tolerances. fp64 `FP64`: rounding is near 1e-15. fp32 1e-6 for the loss and 16-bit gradients one unit in the last place
(2^-7 for bf16, 2^-10 for fp16): the loss is computed in fp32, and a gradient rounded once to the dtype of the logits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import colrow
from by_hand import sent_by
from colrow import I, LayoutError, P, S, VocabHead, move, vocab_cross_entropy, vocab_log_probs
from colrow.layout import chunk_sizes
from colrow.loss import SplitLogits
from colrow.params import local_of
from layouts import part
from oracle import FP64, check_grads, cotangent, relative
from pool import mesh as world
from wire import CommDebug

TOLERANCE = {torch.float64: (FP64, FP64), torch.float32: (1e-6, 1e-5)}
TOLERANCE |= {torch.bfloat16: (1e-6, 2**-7), torch.float16: (1e-6, 2**-10)}


def sample(vocab: int, shape: tuple[int, ...], dtype: torch.dtype, ignore: int | None = -100) -> tuple[Tensor, Tensor]:
    """Whole logits and targets; a third of the targets is ignored, the whole first row among them."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((*shape, vocab), generator=generator, dtype=torch.float64).mul(2).to(dtype)
    target = torch.randint(vocab, shape, generator=generator)
    if ignore is not None and target.numel() > 3:
        target.view(-1)[::3] = ignore
        target[0] = ignore if len(shape) > 1 else target[0]
    return logits, target


def wanted(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """torch's cross entropy with the vocabulary last, of what the 16-bit numbers stand for."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(x.movedim(-1, 1) if x.dim() > 2 else x, target, **options)


def as_logits(whole: Tensor, form: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(a leaf with this rank's columns, the logits made of it, what else the loss needs to know)."""
    mesh, vocab = world(), whole.shape[-1]
    mine = part(whole, S(-1), mesh).requires_grad_()
    plain: dict[str, Any] = {"mesh": mesh, "vocab": vocab}
    if form == "plain":
        return mine, mine, plain
    if form == "padded":  # columns that a head computed for padding; whatever they hold must not count
        missing = chunk_sizes(vocab, mesh.size())[0] - mine.shape[-1]
        return mine, F.pad(mine, (0, missing), value=1e4), plain
    at = [Shard(whole.dim() - 1)]
    return mine, DTensor.from_local(mine, mesh, at, run_check=False, shape=whole.shape, stride=whole.stride()), {}


def check_loss(whole: Tensor, target: Tensor, form: str, **options: Any) -> None:
    reference = whole.clone().requires_grad_()
    want = wanted(reference, target, **options)
    mine, logits, more = as_logits(whole, form)
    before = mine.detach().clone()
    got = vocab_cross_entropy(logits, target, **more, **options)
    where = f"{tuple(whole.shape)} {whole.dtype} {form} {options}"
    assert got.dtype == want.dtype and got.shape == want.shape, where
    of_loss, of_grad = TOLERANCE[whole.dtype]
    assert torch.equal(got.isnan(), want.isnan()), where
    assert relative(got.nan_to_num(), want.nan_to_num()) <= of_loss, where
    c = cotangent(want)
    want.backward(c)
    got.backward(c)
    assert mine.grad is not None and reference.grad is not None
    assert relative(mine.grad, part(reference.grad, S(-1), world())) <= of_grad, f"{where}: gradient"
    assert torch.equal(mine, before), f"{where}: the logits were written to"


def every_option(vocab: int, dtype: torch.dtype) -> None:
    exact = dtype == torch.float64  # the algebra in all its options; of the other types just the rounding
    for reduction in ("mean", "sum", "none") if exact else ("mean",):
        for smoothing in (0.0, 0.1, 1.0) if exact else (0.0, 0.1):
            for ignore in (-100, 0, None) if exact else (-100,):
                whole, target = sample(vocab, (3, 5), dtype, ignore)
                options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
                options |= {} if ignore is None else {"ignore_index": ignore}
                for form in ("plain", "padded", "DTensor"):
                    check_loss(whole, target, form, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [61, 65, 8, 3, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_VOC_5_VOC_8_every_option_of_cross_entropy(ranks: Any, size: int, vocab: int, dtype: torch.dtype) -> None:
    ranks(size).run(every_option, vocab, dtype, timeout=30)


def edges() -> None:
    for form in ("plain", "DTensor"):
        whole, _ = sample(8, (4,), torch.float64)
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
                check_loss(whole, torch.full((4,), -100), form, **options)  # nothing to learn: nan, and zero gradients
                check_loss(whole[:0], torch.zeros(0, dtype=torch.long), form, **options)  # no tokens
                check_loss(whole[0], torch.tensor(5), form, **options)  # one token without a batch
                for scale in (1e4, -1e4):
                    check_loss(whole * scale, torch.tensor([0, 3, 7, -100]), form, **options)
                    check_loss((whole + scale).float(), torch.tensor([0, 3, 7, -100]), form, **options)
        masked = whole.clone()
        masked[:, ::2] = -torch.inf  # as a constraint on the output leaves them; column 0 of every rank among them
        check_loss(masked, torch.tensor([1, 3, 7, 5]), form)
        check_loss(masked, torch.tensor([1, 3, 7, -100]), form, reduction="sum")
        check_loss(whole.t().contiguous().t(), torch.tensor([1, 3, 7, 5]), form)
        check_loss(whole[:1].expand(4, 8), torch.tensor([1, 3, 7, 5]), form)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_VOC_8_extreme_logits_and_nothing_to_learn(ranks: Any, size: int) -> None:
    ranks(size).run(edges, timeout=30)


def untrained() -> float:
    torch.manual_seed(0)
    head = VocabHead(6, 61, mesh=world())
    with torch.no_grad():
        for param in head.parameters():
            local_of(param).zero_()
    loss = vocab_cross_entropy(head(torch.randn(2, 13, 6)), torch.randint(61, (2, 13)))
    loss.backward()
    for param in head.parameters():
        assert isinstance(param.grad, DTensor)
        mine = chunk_sizes(61, world().size())[world().get_local_rank()]
        assert not bool(local_of(param.grad)[mine:].any()), "rows of padding learn nothing"
    return float(loss.detach())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_VOC_1_columns_of_padding_never_count(ranks: Any, size: int) -> None:
    for loss in ranks(size).run(untrained, timeout=30):
        assert abs(loss - math.log(61)) < 1e-6, "ln 61 = 4.1109; with three columns of padding ln 64 = 4.1589"


def through_a_head(sequence_parallel: bool) -> None:
    """AG-3: a head behind the loss passes the right gradient to what is below it, in both modes."""
    mesh, at = world(), S(0) if sequence_parallel else I
    torch.manual_seed(1)
    reference = torch.nn.Linear(6, 61, dtype=torch.float64)
    torch.manual_seed(1)
    head = VocabHead(6, 61, mesh=mesh, src=at, dtype=torch.float64)
    _, target = sample(61, (13,), torch.float64)
    whole = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    mine = part(whole.detach(), at, mesh).requires_grad_()
    want, logits = F.cross_entropy(reference(whole), target), head(mine)
    with SplitLogits():
        got = torch.nn.CrossEntropyLoss()(logits, target)
    assert relative(got, want) <= FP64
    want.backward()
    got.backward()
    assert mine.grad is not None and whole.grad is not None
    assert relative(mine.grad, part(whole.grad, at, mesh)) <= FP64
    check_grads(head, reference, FP64)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_AG_3_a_loss_behind_a_vocabulary_parallel_head(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(through_a_head, sequence_parallel, timeout=30)


def log_probs(vocab: int) -> None:
    for form in ("plain", "padded", "DTensor"):
        for dtype in (torch.float64, torch.bfloat16):
            whole, target = sample(vocab, (3, 5), dtype)
            reference = whole.clone().requires_grad_()
            want = -wanted(reference, target, reduction="none")
            mine, logits, more = as_logits(whole, form)
            got = vocab_log_probs(logits, target, **more)
            assert got.dtype == want.dtype and relative(got, want) <= TOLERANCE[dtype][0]
            assert not bool(got[target == -100].any()), "zero where the target is ignored"
            weights = cotangent(want)  # as advantages weigh them
            (want.exp() * weights).sum().backward()
            (got.exp() * weights).sum().backward()
            assert mine.grad is not None and reference.grad is not None
            assert relative(mine.grad, part(reference.grad, S(-1), world())) <= TOLERANCE[dtype][1]


@pytest.mark.parametrize("vocab", [61, 8, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_log_probs(ranks: Any, size: int, vocab: int) -> None:
    ranks(size).run(log_probs, vocab, timeout=30)


def second_derivative(vocab: int) -> None:
    """loss + |d loss / d logits|^2: the squares of this rank's columns are a term of the sum over all."""
    mesh = world()
    whole, target = sample(vocab, (4,), torch.float64)
    reference = whole.clone().requires_grad_()
    mine = part(whole, S(-1), mesh).requires_grad_()
    for smoothing in (0.0, 0.1):
        losses = (
            F.cross_entropy(reference, target, label_smoothing=smoothing),
            vocab_cross_entropy(mine, target, mesh, vocab=vocab, label_smoothing=smoothing),
        )
        for loss, x in zip(losses, (reference, mine), strict=True):
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = dx.square().sum()
            x.grad = None
            (loss + (penalty if x is reference else move(penalty, mesh, src=P, dst=I))).backward()
        assert mine.grad is not None and reference.grad is not None
        assert relative(mine.grad, part(reference.grad, S(-1), mesh)) <= FP64


@pytest.mark.parametrize("vocab", [61, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_DB_1_a_penalty_on_the_gradient_of_the_logits(ranks: Any, size: int, vocab: int) -> None:
    ranks(size).run(second_derivative, vocab, timeout=30)


def sent() -> tuple[dict[str, int], dict[str, int]]:
    whole, target = sample(61, (13,), torch.float32)
    _, logits, more = as_logits(whole, "plain")
    with CommDebug() as forward:
        loss = vocab_cross_entropy(logits, target, **more, label_smoothing=0.1)
    with CommDebug() as backward:
        loss.backward()
    return sent_by(forward), sent_by(backward)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_all_reduces_forward_and_none_backward(ranks: Any, size: int) -> None:
    assert ranks(size).run(sent, timeout=30) == [({"allreduce_": 2} if size > 1 else {}, {})] * size


def torchs_own_loss() -> None:
    whole, target = sample(8, (4,), torch.float32)
    _, logits, _ = as_logits(whole, "DTensor")
    options: dict[str, Any] = {"ignore_index": int(target[1]), "reduction": "sum", "label_smoothing": 0.2}
    target[target == -100] = 1
    with SplitLogits():
        plain, split = F.cross_entropy(whole, target, **options), F.cross_entropy(logits, target, **options)
        assert torch.equal(plain, wanted(whole, target, **options))
        assert relative(split, plain) <= 1e-6  # fp32: another order of summing
        try:
            F.cross_entropy(logits, target, torch.ones(8))
        except LayoutError as error:
            assert "class weights" in str(error), error
        else:
            raise AssertionError("class weights were ignored")


def test_torchs_own_loss_takes_both_kinds_of_logits(ranks: Any) -> None:
    ranks(2).run(torchs_own_loss, timeout=30)


SLICES = "each rank passes its slice of the 61 columns, [16, 16, 16, 13]. "
WRONG = {
    "gathered": ("LayoutError", f": gathered logits of shape (4, 61); {SLICES}Pass the head's own output, before any"),
    "whole DTensor": (
        "LayoutError",
        ": a DTensor of logits in R; logits must be split over the vocabulary, Shard(1). ",
    ),
    "split by tokens": ("LayoutError", ": a DTensor of logits in S(0); logits must be split over the vocabulary, "),
    "no mesh": (
        "LayoutError",
        ": plain logits without mesh= and vocab=; a local slice does not say what it is a slice",
    ),
    "two axes": ("LayoutError", ": a mesh of 2 axes ('dp', 'tp'); one axis is split at a time. Pass mesh[\"tp\"]."),
    "other width": ("ShapeError", f": logits of shape (4, 9); {SLICES}Correct vocab= or the logits."),
    "reduction": ("ShapeError", ": reduction='max'; there are 'mean', 'sum' and 'none'. Choose one of them."),
    "bad target": (
        "ShapeError",
        ": token id 61 at (2,); the vocabulary has ids 0 to 60. Use the tokenizer of this model",
    ),
    "negative target": ("ShapeError", ": token id -1 at (2,); the vocabulary has ids 0 to 60. Use the tokenizer of th"),
    "target shape": (
        "ShapeError",
        ": logits of (4,) tokens with a target of shape (3,); the target must have shape (4,)",
    ),
    "log probs": ("LayoutError", f": gathered logits of shape (4, 61); {SLICES}Pass the head's own output, before any"),
}


def wrong(case: str) -> None:
    mesh, whole = world(), torch.zeros(4, 61)
    target = torch.zeros(4, dtype=torch.long)
    mine = torch.zeros(4, 16)  # as wide as the first rank's on all of them: padding in the last
    plain: dict[str, Any] = {"mesh": mesh, "vocab": 61}
    if case == "bad target" or case == "negative target":
        target[2] = 61 if case == "bad target" else -1
    loss = vocab_log_probs if case == "log probs" else vocab_cross_entropy
    given: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "gathered": (whole, plain),
        "log probs": (whole, plain),
        "whole DTensor": (DTensor.from_local(whole, mesh, [Replicate()]), {}),
        "split by tokens": (DTensor.from_local(whole, mesh, [Shard(0)]), {}),
        "no mesh": (mine, {}),
        "two axes": (mine, {"mesh": world((2, 2), ("dp", "tp")), "vocab": 61}),
        "other width": (mine[:, :9], plain),
        "reduction": (mine, plain | {"reduction": "max"}),
    }
    logits, more = given.get(case, (mine, plain))
    loss(logits, target[:3] if case == "target shape" else target, **more)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_error_on_every_rank(ranks: Any, case: str) -> None:
    kind, text = WRONG[case]
    where = "vocab_log_probs" if case == "log probs" else "vocab_cross_entropy"
    errors = ranks(4).run(wrong, case, expect_errors=True, timeout=30)
    assert len({(error.type_name, error.message) for error in errors}) == 1, errors
    assert errors[0].type_name == kind and errors[0].message.startswith(where + text), errors[0].message


def test_the_public_names() -> None:
    assert colrow.vocab_cross_entropy is vocab_cross_entropy and colrow.vocab_log_probs is vocab_log_probs
