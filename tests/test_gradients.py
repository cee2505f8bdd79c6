"""Gradients in every way that they are asked for: accumulated, by autograd.grad, twice, recomputed, beside FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import colrow
from colrow.params import named_parts, unshard
from oracle import FP64, check_grads, cotangent, randomize, relative
from own import LLAMA, PARALLEL, OwnModel, ParallelModel, floats, gpt, ids, own_plan
from pool import mesh
from wire import Wire, counts

LIMIT = 30.0
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def pair(build: Callable[[], nn.Module], sequence_parallel: bool, plan: Any = None) -> tuple[Any, Any]:
    """A model with random biases and gains in fp64, and a split copy."""
    torch.manual_seed(0)
    reference = randomize(build()).double()
    split = colrow.parallelize(copy.deepcopy(reference), mesh(), plan, sequence_parallel=sequence_parallel)
    return reference, split


def experts() -> nn.Module:
    return OwnModel(experts=True)


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulates(set_to_none: bool, sequence_parallel: bool) -> None:
    reference, split = pair(experts, sequence_parallel, own_plan(experts=True))
    shapes = [(2, 7), (1, 13), (3, 1), (2, 2)]
    for step in range(2):
        for model in (reference, split):
            model.zero_grad(set_to_none=set_to_none)
            for place, shape in enumerate(shapes):
                y = model(ids(*shape, vocab=23, seed=10 * step + place))
                (y * cotangent(y, seed=place)).sum().mul(place + 1).backward()
        check_grads(split, reference, FP64)


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_ACC_1_four_unequal_micro_batches(ranks: Any, size: int, set_to_none: bool, sequence_parallel: bool) -> None:
    """Earlier micro-batches are not summed over the ranks again, whether .grad starts as None or as zeros."""
    ranks(size).run(accumulates, set_to_none, sequence_parallel, timeout=LIMIT)


def sums_per_backward(freeze: bool) -> list[int]:
    """All-reduces of each backward pass, under sequence parallelism, but for the head's input gradient."""
    _, split = pair(gpt, True)
    if freeze:
        for name, param in split.named_parameters():
            param.requires_grad_(not ("norm" in name or name.endswith(("out.bias", "down.bias"))))
    found = []
    for _ in range(3):
        y = split(ids())
        with Wire() as wire:
            y.backward(cotangent(y))
        found.append(counts(wire.take())["all_reduce"] - 1)
    return found


def test_ACC_1_NORM_2_partial_sums_take_one_all_reduce_per_backward(ranks: Any) -> None:
    assert ranks(2).run(sums_per_backward, False, timeout=LIMIT) == [[1, 1, 1]] * 2


def test_frozen_parameters_cost_nothing(ranks: Any) -> None:
    assert ranks(2).run(sums_per_backward, True, timeout=LIMIT) == [[0, 0, 0]] * 2


# -- other ways to ask -------------------------------------------------------------------------------------------------


def by_autograd_grad(sequence_parallel: bool) -> None:
    reference, split = pair(experts, sequence_parallel, own_plan(experts=True))
    wants, gots = [
        torch.autograd.grad(y, list(model.parameters()), cotangent(y))
        for model in (reference, split)
        if (y := model(ids(vocab=23))) is not None
    ]
    parts = named_parts(split)
    for (name, param, how), got, want in zip(parts, gots, wants, strict=True):
        assert param.grad is None, name
        assert relative(unshard(got, how), want) <= FP64, name


@BOTH
def test_autograd_grad_returns_the_sums(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(by_autograd_grad, sequence_parallel, timeout=LIMIT)


def only_some_inputs(sequence_parallel: bool) -> None:
    """`backward(inputs=...)`: a norm, a shard and a row bias; the rest get nothing."""
    reference, split = pair(gpt, sequence_parallel)
    names = {"blocks.0.norm_1.weight", "blocks.1.mlp.up.weight", "blocks.0.attention.out.bias"}
    for model in (reference, split):
        y = model(ids())
        y.backward(cotangent(y), inputs=[p for name, p in model.named_parameters() if name in names])
    assert set(colrow.full_grads(split)) == names
    check_grads(split, reference, FP64)


@BOTH
def test_backward_for_some_parameters_only(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(only_some_inputs, sequence_parallel, timeout=LIMIT)


def twice(sequence_parallel: bool) -> None:
    reference, split = pair(gpt, sequence_parallel)
    for model in (reference, split):
        y = model(ids())
        y.backward(cotangent(y), retain_graph=True)
        y.backward(cotangent(y, seed=6), retain_graph=True)
        y.backward(cotangent(y, seed=7))
    check_grads(split, reference, FP64)


@BOTH
def test_a_retained_graph_runs_backward_three_times(ranks: Any, sequence_parallel: bool) -> None:
    ranks(3).run(twice, sequence_parallel, timeout=LIMIT)


def penalty_of_blocks(sequence_parallel: bool) -> None:
    reference, split = pair(ParallelModel, sequence_parallel, PARALLEL)
    for model in (reference, split):
        x = floats(2, 5, 16).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention is differentiable once
            y = model(x)
            loss = (y * cotangent(y)).sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
    check_grads(split, reference, FP64)


@BOTH
def test_DB_1_gradient_penalty_on_the_input_of_blocks(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(penalty_of_blocks, sequence_parallel, timeout=LIMIT)


def penalty_of_a_gpt(sequence_parallel: bool) -> None:
    reference, split = pair(gpt, sequence_parallel)
    for model in (reference, split):
        kept: list[Tensor] = []
        model.drop.register_forward_hook(lambda _module, _args, out, kept=kept: kept.append(out))
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(ids(), ids(seed=2))
            (slope,) = torch.autograd.grad(loss, kept[0], create_graph=True)
            (loss + 10 * slope.square().sum()).backward()
    check_grads(split, reference, FP64)


@BOTH
def test_DB_1_gradient_penalty_on_the_embedding_of_a_gpt_with_its_loss(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(penalty_of_a_gpt, sequence_parallel, timeout=LIMIT)


def penalty_on_parameters(sequence_parallel: bool) -> None:
    """The penalty is on the gradient of whole and split parameters themselves, so the sums are differentiated too."""
    reference, split = pair(ParallelModel, sequence_parallel, PARALLEL)
    names = ("blocks.0.norm.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.out.bias")
    for model in (reference, split):
        with sdpa_kernel(SDPBackend.MATH):
            y = model(floats(2, 5, 16))
            loss = (y * cotangent(y)).sum()
            chosen = [dict(model.named_parameters())[name] for name in names]
            slopes = torch.autograd.grad(loss, chosen, create_graph=True)
            penalty: Any = loss
            for slope in slopes:
                square: Any = slope.square().sum()
                penalty = penalty + (square.full_tensor() if hasattr(square, "full_tensor") else square)
            penalty.backward()
    check_grads(split, reference, FP64)


@BOTH
def test_DB_1_gradient_penalty_on_parameters(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(penalty_on_parameters, sequence_parallel, timeout=LIMIT)


def changes_dtype(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    reference: Any = randomize(gpt(**LLAMA))
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    reference, split = reference.double(), split.double()
    for model in (reference, split):
        y = model(ids())
        y.backward(cotangent(y))
    check_grads(split, reference, FP64)
    if sequence_parallel:
        with Wire() as wire:
            split(ids()).sum().backward()
        log = wire.take()
        assert counts(log)["all_reduce"] == 3, f"{log}"  # the embedding, the head's input gradient, the sums


@BOTH
def test_NORM_2_double_after_parallelize(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(changes_dtype, sequence_parallel, timeout=LIMIT)


# -- activation checkpointing ------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, ...]] = {
    "blocks": ("Block",),
    "attention": ("Attention",),
    "attention and mlp": ("Attention", "MLP"),
    "all, nested": ("Block", "Attention", "MLP"),
}


def recomputes(parts: tuple[str, ...], reentrant: bool, sequence_parallel: bool) -> None:
    """Bit-equal, with dropout: recomputation draws the same masks, and leaves the generators where they were."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        split: Any = colrow.parallelize(randomize(gpt(dropout=0.1)), mesh(), sequence_parallel=sequence_parallel)
        if wrap:
            impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
            apply_activation_checkpointing(
                split,
                checkpoint_wrapper_fn=lambda module, impl=impl: checkpoint_wrapper(module, checkpoint_impl=impl),
                check_fn=lambda module: getattr(module, "origin", nn.Module).__name__ in parts,
            )
        torch.manual_seed(11 + dist.get_rank())  # the ranks' generators need not agree
        loss = split(ids(), ids(seed=2))
        loss.backward()
        results.append((loss.detach(), colrow.full_grads(split), torch.get_rng_state()))
    (loss, grads, state), (again, regrads, restate) = results
    assert torch.equal(loss, again), "the forward pass draws other masks"
    assert grads.keys() == regrads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, regrads[name]), f"{name}: {relative(regrads[name], grad):.3g}"
    assert torch.equal(state, restate), "the generator ran ahead"


@BOTH
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("parts", PARTS)
def test_AC_1_recomputation_is_bit_equal(ranks: Any, parts: str, reentrant: bool, sequence_parallel: bool) -> None:
    ranks(2).run(recomputes, PARTS[parts], reentrant, sequence_parallel, timeout=LIMIT)


def recomputes_whole_model(sequence_parallel: bool) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        split: Any = colrow.parallelize(randomize(gpt(dropout=0.1)), mesh(), sequence_parallel=sequence_parallel)
        torch.manual_seed(11 + dist.get_rank())
        args = (ids(), ids(seed=2))
        loss: Any = checkpoint(split, *args, use_reentrant=False) if wrap else split(*args)
        loss.backward()
        results.append((loss.detach(), colrow.full_grads(split), torch.get_rng_state()))
    (loss, grads, state), (again, regrads, restate) = results
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, regrads[name]) for name, grad in grads.items())
    assert torch.equal(state, restate)


@BOTH
def test_AC_1_the_whole_model_may_be_recomputed(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(recomputes_whole_model, sequence_parallel, timeout=LIMIT)


def masks_differ_between_calls() -> None:
    """The control of the two tests above: dropout does draw, and a second call draws something else."""
    torch.manual_seed(0)
    split: Any = colrow.parallelize(randomize(gpt(dropout=0.1)), mesh())
    assert not torch.equal(split(ids(), ids(seed=2)), split(ids(), ids(seed=2)))
    split.eval()
    assert torch.equal(split(ids(), ids(seed=2)), split(ids(), ids(seed=2)))


def test_AC_1_control_another_call_draws_other_masks(ranks: Any) -> None:
    ranks(2).run(masks_differ_between_calls, timeout=LIMIT)


def names_and_values_when_wrapped(impl: str) -> None:
    reference, split = pair(gpt, True)
    apply_activation_checkpointing(
        split,
        checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl[impl]),
        check_fn=lambda module: getattr(module, "origin", nn.Module).__name__ in ("Block", "MLP"),
    )
    y, want = split(ids()), reference(ids())
    y.backward(cotangent(y))
    want.backward(cotangent(want))
    check_grads(split, reference, FP64)
    whole = colrow.full_state_dict(split)
    for name, value in reference.state_dict().items():
        assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("impl", ["REENTRANT", "NO_REENTRANT"])
def test_CKPT_7_names_and_whole_values_do_not_depend_on_wrappers(ranks: Any, impl: str) -> None:
    ranks(2).run(names_and_values_when_wrapped, impl, timeout=LIMIT)


# -- beside data parallelism -------------------------------------------------------------------------------------------


def under_fsdp(options: dict[str, Any], sequence_parallel: bool) -> None:
    whole = mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    reference: Any = randomize(gpt(**options)).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), whole["tp"], sequence_parallel=sequence_parallel)
    for block in split.blocks:
        fully_shard(block, mesh=whole["dp"])
    fully_shard(split, mesh=whole["dp"])
    batches = [ids(vocab=61, seed=1), ids(vocab=61, seed=2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, split)]
    for _ in range(3):
        for batch in batches:
            (reference(batch, batch.roll(1, -1)) / 2).backward()
        mine = batches[whole["dp"].get_local_rank()]
        split(mine, mine.roll(1, -1)).backward()
        check_grads(split, reference, FP64)
        want = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        got = colrow.clip_grad_norm_(split, 0.5)
        assert relative(got, want) <= FP64
        check_grads(split, reference, FP64)
        for model, optimizer in zip((reference, split), optimizers, strict=True):
            optimizer.step()
            model.zero_grad()
        assert colrow.replica_drift(split) == {}
    state = colrow.full_state_dict(split)
    for name, value in reference.state_dict().items():
        # Adam divides by a gradient's size, so its rounding of 1e-16 may show as 1e-11 in small elements
        assert relative(state[name], value) < 1e-8, name


@BOTH
@pytest.mark.parametrize("options", [{}, LLAMA, {"vocab": 61, "ffn": 70, "heads": 5, "width": 40}], ids=str)
def test_fsdp2_over_the_data_parallel_axis(ranks: Any, options: dict[str, Any], sequence_parallel: bool) -> None:
    """Gradients, clipping and three AdamW steps on dp2 x tp2 equal one process on the union of the batches."""
    ranks(4).run(under_fsdp, options, sequence_parallel, timeout=LIMIT)


def under_ddp() -> str:
    whole = mesh((2, 2), ("dp", "tp"))
    split = colrow.parallelize(gpt(), whole["tp"])
    try:
        DistributedDataParallel(split, process_group=whole["dp"].get_group())
    except NotImplementedError as error:
        return str(error)
    return "wrapped"


def test_NORM_2_ddp_does_not_take_dtensors_and_says_so_at_once(ranks: Any) -> None:
    """torch's DDP refuses DTensor parameters at construction: data parallelism is FSDP2's `fully_shard`, as above."""
    for message in ranks(4).run(under_ddp, timeout=LIMIT):
        assert "broadcast" in message
