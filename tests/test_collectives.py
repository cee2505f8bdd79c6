"""What a split model sends: how often, and how many bytes, against the papers' formula, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import colrow
from own import DRAWING as DRAWING_PLAN
from own import LLAMA, drawing, gpt, ids
from pool import mesh
from wire import Sent, Wire, counts

LIMIT = 30.0
WIDTH = 32
FULL_LLAMA = LLAMA | {"kv_heads": 4}  # with fewer heads than ranks, k and v are whole, and their gradients are summed
STREAM = ("blocks.0.norm_1", "blocks.1.norm_2", "blocks.0.attention", "blocks.1.mlp")
SIZES = pytest.mark.parametrize("size", [2, 4])
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])

Logs = tuple[list[Sent], list[Sent]]


def one_step(layers: int, sequence_parallel: bool, tokens: tuple[int, int], options: dict[str, Any]) -> Logs:
    """The collectives of a forward and of a backward pass, once the first calls' checks are over."""
    dtype = options.get("dtype", torch.float32)
    extra = {name: value for name, value in options.items() if name != "dtype"}
    model: Any = colrow.parallelize(
        gpt(layers=layers, **extra).to(dtype), mesh(), sequence_parallel=sequence_parallel, check_inputs=1
    )
    batch = ids(*tokens, vocab=61)
    model(batch, batch).backward()
    with Wire() as wire:
        loss = model(batch, batch)
        forward = wire.take()
        loss.backward()
        return forward, wire.take()


def layer_of(ranks: Any, size: int, *args: Any, **options: Any) -> tuple[list[Sent], list[Sent]]:
    """What one layer sends: three layers less two. The same on every rank."""
    every = [ranks(size).run(one_step, layers, *args, options, timeout=LIMIT) for layers in (2, 3)]
    for logs in every:
        assert all([e.verb for e in log[way]] == [e.verb for e in logs[0][way]] for log in logs for way in (0, 1))
    (few, more) = (logs[0] for logs in every)
    return without(more[0], few[0]), without(more[1], few[1])


def without(more: list[Sent], few: list[Sent]) -> list[Sent]:
    """More less few, as bags; the all-reduce of all partial sums is compared elsewhere."""
    rest = list(more)
    for entry in few:
        if entry in rest:
            rest.remove(entry)
    return rest


@SIZES
@pytest.mark.parametrize("options", [{}, FULL_LLAMA, {"dropout": 0.1}], ids=["gpt2", "llama", "dropout"])
def test_a_tp_layer_has_two_all_reduces_each_way(ranks: Any, size: int, options: dict[str, Any]) -> None:
    forward, backward = layer_of(ranks, size, False, (2, 16), **options)
    assert counts(forward) == counts(backward) == {"all_reduce": 2}
    n = 2 * 16 * WIDTH * 4
    assert all(entry.whole == n and entry.sent == 2 * n * (size - 1) / size for entry in forward + backward)


@SIZES
@pytest.mark.parametrize("options", [{}, FULL_LLAMA, {"dropout": 0.1}], ids=["gpt2", "llama", "dropout"])
def test_SPEED_1_an_sp_layer_gathers_and_scatters(ranks: Any, size: int, options: dict[str, Any]) -> None:
    """Forward 2 + 2; backward 2 + 2 and two second gathers of what was not saved. No all-reduce but the sums' one."""
    forward, backward = layer_of(ranks, size, True, (2, 16), **options)
    assert counts(forward) == {"all_gather": 2, "reduce_scatter": 2}
    sums = [entry for entry in backward if entry.verb == "all_reduce"]
    moves = [entry for entry in backward if entry.verb != "all_reduce"]
    assert counts(moves) == {"all_gather": 4, "reduce_scatter": 2}
    assert len(sums) == 1  # the bucket of one more layer is longer, so it does not cancel
    n = 2 * 16 * WIDTH * 4
    assert all(entry.whole == n and entry.sent == n * (size - 1) / size for entry in forward + moves)


def test_sp_sends_no_more_bytes_forward_than_tp(ranks: Any) -> None:
    sp, tp = (sum(e.sent for e in layer_of(ranks, 4, mode, (2, 16))[0]) for mode in (True, False))
    assert sp == tp == 2 * 2 * (2 * 16 * WIDTH * 4) * 3 / 4


@BOTH
def test_bf16_halves_what_is_moved_and_sums_in_fp32(ranks: Any, sequence_parallel: bool) -> None:
    forward, _ = layer_of(ranks, 2, sequence_parallel, (2, 16), dtype=torch.bfloat16)
    n = 2 * 16 * WIDTH * 2
    if sequence_parallel:
        assert {entry.dtype for entry in forward} == {torch.bfloat16}
        assert all(entry.whole == n for entry in forward)
    else:
        assert {entry.dtype for entry in forward} == {torch.float32}  # an all-reduce in bf16 would round every step
        assert all(entry.whole == 2 * n for entry in forward)


@BOTH
def test_awkward_tokens_send_only_their_padding_more(ranks: Any, sequence_parallel: bool) -> None:
    """13 tokens on 4 ranks: the gathers move four slices of four; the scatters the true rows, uneven."""
    forward, _ = layer_of(ranks, 4, sequence_parallel, (1, 13))
    sizes = {entry.verb: entry.whole for entry in forward}
    row = WIDTH * 4
    assert sizes == (
        {"all_gather": 16 * row, "reduce_scatter": 13 * row} if sequence_parallel else {"all_reduce": 13 * row}
    )


@SIZES
def test_everything_else_in_a_step_is_listed(ranks: Any, size: int) -> None:
    """Embedding, head and loss, by name: what is left when the layers are taken away."""
    n, tokens = 2 * 16 * WIDTH * 4, 2 * 16
    for sequence_parallel in (False, True):
        few, more = (
            ranks(size).run(one_step, layers, sequence_parallel, (2, 16), {}, timeout=LIMIT)[0] for layers in (2, 3)
        )
        forward = list(few[0])
        for entry in without(more[0], few[0]) * 2:
            forward.remove(entry)
        embedding = Sent("all_reduce", n, 2 * n * (size - 1) / size, torch.float32)
        loss = [
            Sent("all_reduce", k * 4 * tokens, 2 * k * 4 * tokens * (size - 1) / size, torch.float32) for k in (1, 2)
        ]  # the maxima; the sum of exponentials and the target's logit
        gather = [Sent("all_gather", n, n * (size - 1) / size, torch.float32)] if sequence_parallel else []
        assert forward == [embedding, *gather, *loss]
        backward = list(few[1])
        for entry in [e for e in without(more[1], few[1]) if e.verb == "all_reduce" and not sequence_parallel] * 2:
            backward.remove(entry)
        if not sequence_parallel:
            assert counts(backward) == {"all_reduce": 1}  # the head's input gradient
        else:
            # the head's input gradient: all-reduce; the first block's input: gather; the sums: all-reduce
            assert counts(backward) == {"all_gather": 4 * 2 + 1, "reduce_scatter": 2 * 2, "all_reduce": 2}


def sums_are_one_bucket() -> tuple[int, int]:
    model: Any = colrow.parallelize(gpt(layers=3), mesh(), check_inputs=0)
    loss = model(ids(), ids())
    with Wire() as wire:
        loss.backward()
    _of_the_head, bucket = [entry for entry in wire.take() if entry.verb == "all_reduce"]
    partial = [
        param.numel() * param.element_size()
        for name, param in model.named_parameters()
        if "norm" in name or name.endswith(("out.bias", "down.bias"))
    ]
    return bucket.whole, sum(partial)


def test_partial_sums_are_one_bucket_of_exactly_their_elements(ranks: Any) -> None:
    for got, want in ranks(2).run(sums_are_one_bucket, timeout=LIMIT):
        assert got == want


def without_grad(sequence_parallel: bool, rows: int) -> dict[str, int]:
    model: Any = colrow.parallelize(gpt(), mesh(), sequence_parallel=sequence_parallel, check_inputs=0)
    with torch.no_grad(), Wire() as wire:
        model(ids(rows))
    return counts(wire.take())


def test_inference_sends_the_same_and_gathers_the_logits(ranks: Any) -> None:
    tp = {"all_reduce": 5, "all_gather": 1}
    sp = {"all_reduce": 1, "all_gather": 6, "reduce_scatter": 4}
    assert ranks(2).run(without_grad, False, 2, timeout=LIMIT) == [tp] * 2
    assert ranks(2).run(without_grad, True, 5, timeout=LIMIT) == [sp] * 2


def test_GEN_2_a_few_tokens_of_inference_are_not_sharded(ranks: Any) -> None:
    assert ranks(2).run(without_grad, True, 2, timeout=LIMIT) == [{"all_reduce": 5, "all_gather": 1}] * 2


def frozen(part: str, sequence_parallel: bool) -> dict[str, int]:
    """A frozen model's backward to one parameter sends only what lies on its way."""
    model: Any = colrow.parallelize(gpt(layers=3), mesh(), sequence_parallel=sequence_parallel, check_inputs=0)
    for name, param in model.named_parameters():
        param.requires_grad_(name == part)
    loss = model(ids(), ids())
    with Wire() as wire:
        loss.backward()
    return counts(wire.take())


def test_what_is_frozen_is_not_communicated(ranks: Any) -> None:
    """Only the last MLP's second layer trains: the head's input gradient, and, under SP, the way into the row layer."""
    last = "blocks.2.mlp.down.weight"
    assert ranks(2).run(frozen, last, False, timeout=LIMIT) == [{"all_reduce": 1}] * 2
    sp = ranks(2).run(frozen, last, True, timeout=LIMIT)[0]
    assert sp == {"all_reduce": 1, "all_gather": 1}


def checks_are_counted(check_inputs: int, calls: int) -> int:
    model: Any = colrow.parallelize(drawing(), mesh(), DRAWING_PLAN, check_inputs=check_inputs)
    with Wire() as wire:
        for _ in range(calls):
            model(torch.ones(2, 8))
    log = [entry for entry in wire.take() if entry.verb == "all_gather"]
    assert all(entry.whole == 2 * 128 for entry in log)  # 128 bytes a rank
    return len(log)


@pytest.mark.parametrize(("check_inputs", "checked"), [(3, 3), (0, 0), (1, 1), (-1, 5)])
def test_input_checks_happen_as_often_as_asked(ranks: Any, check_inputs: int, checked: int) -> None:
    assert ranks(2).run(checks_are_counted, check_inputs, 5, timeout=LIMIT) == [checked] * 2


def dropout_needs_one_broadcast() -> dict[str, int]:
    model: Any = colrow.parallelize(gpt(dropout=0.1), mesh(), sequence_parallel=False, check_inputs=0)
    with Wire() as wire:
        model(ids(), ids())
    return counts(wire.take())


def test_dropout_costs_eight_bytes_a_call(ranks: Any) -> None:
    assert ranks(2).run(dropout_needs_one_broadcast, timeout=LIMIT) == [{"broadcast": 1, "all_reduce": 7}] * 2


# -- who sees how many tokens ------------------------------------------------------------------------------------------


def rows_seen(tokens: tuple[int, int], sequence_parallel: bool) -> dict[str, tuple[int, ...]]:
    model: Any = colrow.parallelize(gpt(), mesh(), sequence_parallel=sequence_parallel)
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        def hook(_module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            seen[name], seen[name + " out"] = tuple(args[0].shape), tuple(out.shape)

        return hook

    for name in (*STREAM, "norm", "head", "blocks.1"):
        model.get_submodule(name).register_forward_hook(note(name))
    out = model(ids(*tokens))
    return seen | {"model out": tuple(out.shape)}


@pytest.mark.parametrize("tokens", [(2, 13), (1, 3), (1, 1)], ids=str)
@SIZES
def test_SEQ_3_SPEED_1_norms_see_a_part_of_the_tokens_and_the_model_gives_all(
    ranks: Any, size: int, tokens: tuple[int, int]
) -> None:
    total = tokens[0] * tokens[1]
    every = ranks(size).run(rows_seen, tokens, True, timeout=LIMIT)
    for rank, seen in enumerate(every):
        mine = max(0, min(-(-total // size), total - rank * -(-total // size)))
        for name in (*STREAM, "norm", *(f"{name} out" for name in STREAM), "blocks.1 out"):
            assert seen[name] == (mine, WIDTH), name
        assert seen["head"] == seen["norm out"] == (*tokens, WIDTH)
        assert seen["model out"] == (*tokens, 64)
    for seen in ranks(size).run(rows_seen, tokens, False, timeout=LIMIT):
        assert seen["blocks.0.norm_1"] == seen["blocks.1 out"] == (*tokens, WIDTH)
