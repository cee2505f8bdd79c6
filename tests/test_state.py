"""Clipping, replicas, optimizer steps and repeated runs of a split model: the unsplit model's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colrow
from colrow import RankError
from colrow.params import local_of
from oracle import FP64, check_grads, cotangent, randomize, relative
from own import LLAMA, gpt, ids
from pool import mesh
from wire import Wire, counts

LIMIT = 30.0
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
SIZES = pytest.mark.parametrize("size", [2, 4])
NORM_TYPES = pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")], ids=str)


def after_backward(sequence_parallel: bool, **options: Any) -> tuple[Any, Any]:
    """A model and its split copy in fp64, with gradients."""
    reference: Any = randomize(gpt(**options)).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    for model in (reference, split):
        y = model(ids(vocab=61))
        y.backward(cotangent(y))
    return reference, split


# -- clipping ----------------------------------------------------------------------------------------------------------


def clips(norm_type: float, sequence_parallel: bool, ours: bool) -> float:
    reference, split = after_backward(sequence_parallel, vocab=61, ffn=70, kv_heads=1)
    true = nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
    limit = 0.5 * float(true)
    nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type)
    if ours:
        got: Any = colrow.clip_grad_norm_(split, limit, norm_type)
    else:
        got = nn.utils.clip_grad_norm_(split.parameters(), limit, norm_type)
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
    assert relative(got, true) <= FP64, f"{float(got)} for {float(true)}"
    check_grads(split, reference, FP64)
    for model in (reference, split):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    whole = colrow.full_state_dict(split)
    for name, value in reference.state_dict().items():
        assert relative(whole[name], value) <= FP64, name
    return float(got)


@BOTH
@SIZES
@NORM_TYPES
def test_CLIP_1_the_norm_is_the_unsplit_models(
    ranks: Any, size: int, norm_type: float, sequence_parallel: bool
) -> None:
    """Replicas count once, shards all, padding not; the number has the same bits on every rank."""
    assert len(set(ranks(size).run(clips, norm_type, sequence_parallel, True, timeout=LIMIT))) == 1


@BOTH
@pytest.mark.parametrize("norm_type", [2.0, float("inf")], ids=str)
def test_CLIP_3_torchs_own_clipping_works_too(ranks: Any, norm_type: float, sequence_parallel: bool) -> None:
    assert len(set(ranks(2).run(clips, norm_type, sequence_parallel, False, timeout=LIMIT))) == 1


def steps(kind: str, sequence_parallel: bool) -> None:
    """Groups that mix split and whole parameters, with and without decay; clipping; three steps."""
    reference, split = after_backward(sequence_parallel, vocab=61, **LLAMA)
    options: dict[str, Any] = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}[
        kind
    ]
    for model in (reference, split):
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decay[::2] + rest, "weight_decay": 0.1}, {"params": decay[1::2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, **options)
        for step in range(3):
            if model is split:
                colrow.clip_grad_norm_(model, 0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            y = model(ids(vocab=61, seed=step))
            y.backward(cotangent(y))
    whole = colrow.full_state_dict(split)  # raises if replicas differ
    for name, value in reference.state_dict().items():
        # Adam divides by a gradient's size: rounding of 1e-16 on a gradient of 1e-6 is 1e-10 in an update of 1e-2
        assert relative(whole[name], value) < 1e-9, f"{name}: {relative(whole[name], value):.3g}"


@BOTH
@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
def test_CLIP_2_CLIP_3_adamw_in_every_form_with_mixed_groups(ranks: Any, kind: str, sequence_parallel: bool) -> None:
    ranks(2).run(steps, kind, sequence_parallel, timeout=LIMIT)


def clips_little() -> None:
    """No clipping below the limit, no gradients at all, and norms that are not finite."""
    _, split = after_backward(True, vocab=61)
    before = colrow.full_grads(split)
    colrow.clip_grad_norm_(split, 1e9)
    assert all(torch.equal(grad, before[name]) for name, grad in colrow.full_grads(split).items())
    row = split.blocks[0].mlp.down.weight
    if dist.get_rank() == 1:
        local_of(row.grad)[0, 0] = float("inf")
    assert not torch.isfinite(colrow.clip_grad_norm_(split, 1.0))
    try:
        colrow.clip_grad_norm_(split, 1.0, error_if_nonfinite=True)
    except colrow.ColrowError as error:
        assert "must be finite" in str(error)
    else:
        raise AssertionError("a norm that is not finite was accepted on this rank")
    split.zero_grad()
    assert float(colrow.clip_grad_norm_(split, 1.0)) == 0.0


def test_clipping_at_its_edges(ranks: Any) -> None:
    """An inf in one rank's shard is an error on all of them."""
    ranks(2).run(clips_little, timeout=LIMIT)


def clipping_costs() -> tuple[list[dict[str, int]], list[int]]:
    logs, operations = [], []
    for layers in (1, 2, 3, 9):
        split: Any = colrow.parallelize(gpt(layers=layers), mesh())
        split(ids()).sum().backward()
        with Wire() as wire:
            colrow.clip_grad_norm_(split, 1.0)
        logs.append(counts(wire.take()))
        operations.append(wire.operations)
    return logs, operations


def test_clipping_is_linear_and_sends_one_scalar(ranks: Any) -> None:
    for logs, (one, two, three, nine) in ranks(2).run(clipping_costs, timeout=LIMIT):
        assert logs == [{"all_reduce": 1}] * 4
        assert two - one == three - two  # as many operations for each layer more
        assert nine - one == 8 * (two - one)


# -- replicas ----------------------------------------------------------------------------------------------------------


def drifts() -> tuple[str, str]:
    torch.manual_seed(0)
    split: Any = colrow.parallelize(gpt(dropout=0.1).bfloat16(), mesh())
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-3)
    for step in range(50):
        split(ids(seed=step), ids(seed=step).roll(1, -1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert colrow.replica_drift(split) == {}, "replicas differ after training"
    before = colrow.full_state_dict(split)
    name, moved = "blocks.1.norm_2.weight", split.blocks[1].norm_2.weight
    if dist.get_rank() == 1:
        local_of(moved)[3] += 1e-1
    drift = colrow.replica_drift(split)
    assert list(drift) == [name], drift
    assert abs(drift[name] - 0.1) < 0.01  # one bf16 step at 1 is 0.008
    try:
        colrow.full_state_dict(split)
    except RankError as error:
        text = str(error)
    else:
        raise AssertionError("unequal replicas were exported")
    colrow.sync_replicas(split)
    after = colrow.full_state_dict(split)
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    return name, text


def test_NORM_8_unequal_replicas_are_never_exported(ranks: Any) -> None:
    """50 steps in bf16 leave replicas bit-equal; a nudge to one rank's norm is an error that names it, on all."""
    (first, second) = ranks(2).run(drifts, timeout=LIMIT)
    assert first == second
    name, text = first
    assert f"{name} most" in text
    assert "colrow.sync_replicas(model)" in text


def buffers_drift() -> None:
    split: Any = colrow.parallelize(gpt(**LLAMA), mesh())
    inverse = split.blocks[0].attention.rotary.inverse
    want = inverse.clone()
    if dist.get_rank() == 1:
        inverse.add_(1.0)
    assert list(colrow.replica_drift(split)) == ["blocks.0.attention.rotary.inverse"]
    colrow.sync_replicas(split)
    assert colrow.replica_drift(split) == {}
    assert torch.equal(inverse, want)


def test_buffers_are_replicas_too(ranks: Any) -> None:
    ranks(2).run(buffers_drift, timeout=LIMIT)


# -- training ----------------------------------------------------------------------------------------------------------


def trains(steps: int, sequence_parallel: bool, options: dict[str, Any]) -> list[float]:
    """fp32 with dropout; the model and the seed are the same at every degree."""
    torch.manual_seed(0)
    split: Any = colrow.parallelize(gpt(dropout=0.1, **options), mesh(), sequence_parallel=sequence_parallel)
    colrow.seed(mesh(), 1)
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        batch = ids(seed=step, vocab=61)
        loss: Tensor = split(batch, batch.roll(1, -1))
        loss.backward()
        colrow.clip_grad_norm_(split, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert colrow.replica_drift(split) == {}
    return losses


FIFTY: dict[str, tuple[dict[str, Any], list[tuple[int, bool]]]] = {
    "gpt2": ({}, [(2, True), (2, False), (4, True)]),
    "llama": (LLAMA | {"vocab": 61, "ffn": 70, "layers": 1}, [(2, True), (3, False)]),
}


@pytest.mark.parametrize("case", FIFTY)
def test_fifty_steps_with_dropout_are_the_same_at_every_degree(ranks: Any, case: str) -> None:
    options, runs = FIFTY[case]
    want = ranks(1).run(trains, 50, False, options, timeout=LIMIT)[0]
    assert len(set(want)) == 50
    for size, sequence_parallel in runs:
        every = ranks(size).run(trains, 50, sequence_parallel, options, timeout=LIMIT)
        assert all(losses == every[0] for losses in every), "the ranks print different losses"
        for step, (got, expected) in enumerate(zip(every[0], want, strict=True)):
            # fp32 against one process: sums in another order, some hundred units of 6e-8
            assert abs(got / expected - 1) < 1e-5, f"step {step} at tp {size}: {got} for {expected}"


@BOTH
def test_DET_1_the_same_run_twice_is_bitwise_the_same(ranks: Any, sequence_parallel: bool) -> None:
    first = ranks(2).run(trains, 10, sequence_parallel, {}, timeout=LIMIT)
    assert ranks(2).run(trains, 10, sequence_parallel, {}, timeout=LIMIT) == first


def micro_batches() -> None:
    """The same rows in other batches: a tolerance only, but no more than rounding."""
    split: Any = colrow.parallelize(randomize(gpt(**LLAMA)), mesh())
    split.eval()
    batch = ids(4, 9)
    together = split(batch)
    apart = torch.cat([split(batch[row : row + 1]) for row in range(4)])
    assert relative(apart, together) < 1e-5  # fp32: matrix products of other shapes take sums in another order


def test_DET_1_rows_do_not_depend_on_their_batch(ranks: Any) -> None:
    ranks(2).run(micro_batches, timeout=LIMIT)
