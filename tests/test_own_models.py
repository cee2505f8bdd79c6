"""Models that users write, with plans of theirs, equal themselves in one process; and calls that cross one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colrow
from colrow import Column, Mlp, Plan, PlanError, Replicated, Row
from colrow.params import local_of
from oracle import FP64, check_grads, compare, cotangent, randomize, relative
from own import (
    DRAWING,
    LLAMA,
    PARALLEL,
    Conditioned,
    Cross,
    OwnBlock,
    OwnModel,
    ParallelModel,
    ThreeInputs,
    TupleModel,
    drawing,
    floats,
    gpt,
    ids,
    own_plan,
)
from pool import mesh

LIMIT = 30.0
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


def own_model(sequence_parallel: bool, shape: tuple[int, int], **options: Any) -> None:
    plan = own_plan(experts=options.get("experts", False))
    compare(lambda: OwnModel(**options), (ids(*shape, vocab=23),), plan=plan, sequence_parallel=sequence_parallel)


@BOTH
@SIZES
def test_a_users_model_with_own_norms_and_raw_parameters(ranks: Any, size: int, sequence_parallel: bool) -> None:
    """Raw parameters of a block and of the model, a hand-written norm that reads self.weight, separate q, k, v."""
    ranks(size).run(own_model, sequence_parallel, (2, 7), timeout=LIMIT)


@BOTH
@SIZES
def test_NORM_6_a_router_whose_softmax_scales_split_experts(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(own_model, sequence_parallel, (2, 7), experts=True, timeout=LIMIT)


@BOTH
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_that_is_called_twice(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(own_model, sequence_parallel, (2, 5), times=2, layers=1, timeout=LIMIT)


def tuple_model(sequence_parallel: bool, group: int) -> None:
    def build() -> nn.Module:
        model = TupleModel()
        model.group = group
        return model

    compare(build, (ids(2, 5, vocab=23),), plan=own_plan(), sequence_parallel=sequence_parallel)


@BOTH
@pytest.mark.parametrize("group", [0, 1, 2])
def test_blocks_that_return_tuples_also_checkpointed_in_groups(ranks: Any, group: int, sequence_parallel: bool) -> None:
    ranks(2).run(tuple_model, sequence_parallel, group, timeout=LIMIT)


def conditioned(sequence_parallel: bool) -> None:
    rules = {pattern: rule for pattern, rule in own_plan().layers[0] if pattern.startswith("layers")}
    plan = Plan(rules | {"scale": Replicated(), "shift": Replicated()})
    compare(Conditioned, (floats(2, 5, 16),), plan=plan, sequence_parallel=sequence_parallel)


def cross(sequence_parallel: bool) -> None:
    plan = Plan({"inner": Mlp(), "inner.up": Column(), "inner.gate": Column(), "inner.down": Row()})
    args = floats(2, 5, 8), floats(2, 5, 8, seed=9)
    compare(Cross, args, plan=plan, sequence_parallel=sequence_parallel)


@BOTH
@SIZES
def test_KV_2_what_comes_beside_the_stream_gets_its_whole_gradient(
    ranks: Any, size: int, sequence_parallel: bool
) -> None:
    """A vector that conditions the blocks, and encoder states in a cross layer: each rank holds a term of theirs."""
    ranks(size).run(conditioned, sequence_parallel, timeout=LIMIT)
    ranks(size).run(cross, sequence_parallel, timeout=LIMIT)


def three_inputs(sequence_parallel: bool) -> None:
    plan = Plan({pattern: rule for pattern, rule in own_plan().layers[0] if pattern.startswith("layers")})
    compare(ThreeInputs, (floats(2, 5, 16),), plan=plan, sequence_parallel=sequence_parallel)


@BOTH
@SIZES
def test_attention_that_is_given_the_stream_three_times(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(three_inputs, sequence_parallel, timeout=LIMIT)


def parallel_model(sequence_parallel: bool) -> None:
    compare(ParallelModel, (floats(2, 7, 16),), plan=PARALLEL, sequence_parallel=sequence_parallel)


@BOTH
@SIZES
def test_BIAS_2_attention_and_mlp_on_the_same_norm(ranks: Any, size: int, sequence_parallel: bool) -> None:
    """Each adds its own bias once; and the model ends inside the stretch, so its output is gathered."""
    ranks(size).run(parallel_model, sequence_parallel, timeout=LIMIT)


def first_drawing(ffn: int, shape: tuple[int, ...], sequence_parallel: bool) -> None:
    compare(lambda: drawing(ffn), (floats(*shape, 8),), plan=DRAWING, sequence_parallel=sequence_parallel)


@BOTH
@SIZES
@pytest.mark.parametrize("ffn", [12, 11, 1])
def test_the_first_drawing_in_two_rules(ranks: Any, size: int, ffn: int, sequence_parallel: bool) -> None:
    """No block, so `sequence_parallel=True` has nothing to shard and changes nothing."""
    ranks(size).run(first_drawing, ffn, (3, 5), sequence_parallel, timeout=LIMIT)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3)], ids=str)
def test_the_first_drawing_on_any_shape(ranks: Any, shape: tuple[int, ...]) -> None:
    ranks(3).run(first_drawing, 12, shape, True, timeout=LIMIT)


# -- replicas on local heads stay equal --------------------------------------------------------------------------------


def norms_of_heads_train(sequence_parallel: bool) -> None:
    reference: Any = randomize(OwnModel()).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), own_plan(), sequence_parallel=sequence_parallel)
    for model in (reference, split):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(20):
            y = model(ids(vocab=23, seed=step))
            y.backward(cotangent(y))
            optimizer.step()
            optimizer.zero_grad()
    assert colrow.replica_drift(split) == {}
    whole = colrow.full_state_dict(split)
    for name, value in reference.state_dict().items():
        # Adam divides by the gradient's size: rounding of 1e-16 on a gradient of 1e-5 is 1e-11 in an update, 20 times
        assert relative(whole[name], value) < 1e-8, f"{name}: {relative(whole[name], value):.3g}"


@BOTH
def test_NORM_4_q_norm_and_k_norm_copies_stay_bit_equal(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(norms_of_heads_train, sequence_parallel, timeout=LIMIT)


def norms_of_heads_are_partial(sequence_parallel: bool) -> None:
    """The control: each rank alone sees only its heads, so its own term is not the gradient."""
    split: Any = colrow.parallelize(
        randomize(OwnModel()).double(), mesh(), own_plan(), sequence_parallel=sequence_parallel
    )
    terms: dict[str, Tensor] = {}
    weight = split.layers[0].attn.q_norm.weight
    for handles in split.sums._handles.values():  # without the sums
        for handle in handles:
            handle.remove()
    weight.register_hook(lambda grad: terms.update(mine=local_of(grad)))
    y = split(ids(vocab=23))
    y.backward(cotangent(y))
    assert relative(terms["mine"], colrow.full_grads(split)["layers.0.attn.q_norm.weight"]) > 1e-2


@BOTH
def test_NORM_4_the_terms_differ_from_their_sum(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(norms_of_heads_are_partial, sequence_parallel, timeout=LIMIT)


# -- calls that cross one another --------------------------------------------------------------------------------------


def recompute_blocks(model: Any, reentrant: bool) -> None:
    """Wrap the blocks' list by one that checkpoints each."""

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)


def plain_names(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".block.", "."): grad for name, grad in grads.items()}


def two_forwards(recompute: bool, order: str, sequence_parallel: bool) -> None:
    reference: Any = randomize(gpt(**LLAMA)).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    if recompute:
        recompute_blocks(split, reentrant=False)
    batches = [ids(2, 13), ids(1, 4, seed=2), ids(3, 1, seed=3)]
    for model in (reference, split):
        outs = [model(batch) for batch in batches]
        for place in map(int, order):
            outs[place].backward(cotangent(outs[place], seed=place))
    got = plain_names(colrow.full_grads(split))
    for name, param in reference.named_parameters():
        assert relative(got[name], param.grad) <= FP64, name


@BOTH
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("order", ["012", "210"])
def test_forwards_of_several_shapes_before_their_backwards(
    ranks: Any, order: str, recompute: bool, sequence_parallel: bool
) -> None:
    ranks(2).run(two_forwards, recompute, order, sequence_parallel, timeout=LIMIT)


def two_models() -> None:
    """Two models at once, one inside the other's hook, each with its own shape; one with, one without SP."""
    references: list[Any] = [randomize(gpt(**LLAMA), seed=1).double(), randomize(gpt(vocab=61), seed=2).double()]
    splits: list[Any] = [
        colrow.parallelize(copy.deepcopy(model), mesh(), sequence_parallel=place == 0)
        for place, model in enumerate(references)
    ]
    inner: dict[int, Tensor] = {}
    for place, (first, second) in enumerate((references, splits)):
        first.blocks[1].register_forward_pre_hook(
            lambda *_, p=place, m=second: inner.update({p: m(ids(1, 3, vocab=61))})
        )
        outs = [first(ids(2, 5)), inner[place], second(ids(3, 2, vocab=61)), first(ids(1, 1))]
        for out in outs:
            out.backward(cotangent(out), retain_graph=True)
    for reference, split in zip(references, splits, strict=True):
        check_grads(split, reference, FP64)


def test_two_models_interleaved_one_inside_the_other(ranks: Any) -> None:
    ranks(2).run(two_models, timeout=LIMIT)


def block_alone(sequence_parallel: bool, shape: tuple[int, int]) -> None:
    reference: Any = randomize(OwnModel()).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), own_plan(), sequence_parallel=sequence_parallel)
    x, twin = (floats(*shape, 16).requires_grad_() for _ in range(2))
    want, got = reference.layers[1](x), split.layers[1](twin)
    assert relative(got, want) <= FP64
    want.backward(cotangent(want))
    got.backward(cotangent(got))
    assert x.grad is not None
    assert twin.grad is not None
    assert relative(twin.grad, x.grad) <= FP64
    check_grads(split, reference, FP64)


@BOTH
@pytest.mark.parametrize("shape", [(2, 7), (1, 2)], ids=str)
def test_a_block_called_by_itself_takes_and_gives_whole_activations(
    ranks: Any, shape: tuple[int, int], sequence_parallel: bool
) -> None:
    ranks(3).run(block_alone, sequence_parallel, shape, timeout=LIMIT)


def attention_alone() -> None:
    split: Any = colrow.parallelize(OwnModel(), mesh(), own_plan())
    split.layers[0].attn(torch.zeros(2, 7, 16))


def test_attention_called_by_itself_says_what_to_call(ranks: Any) -> None:
    errors = ranks(2).run(attention_alone, expect_errors=True, timeout=LIMIT)
    assert {error.type_name for error in errors} == {"ShapeError"}
    assert "outside the sequence-parallel stretch" in errors[0].message
    assert "Call the whole model, or the block" in errors[0].message


def a_block_as_the_model(sequence_parallel: bool) -> None:
    """The block is the whole model: then there is no Block rule, and its parts are named."""
    rules = {
        pattern.removeprefix("layers.*."): rule
        for pattern, rule in own_plan().layers[0]
        if pattern.startswith("layers.*.")
    }
    plan = Plan(rules | {"gain": Replicated()})
    compare(lambda: OwnBlock(16), (floats(2, 5, 16),), plan=plan, sequence_parallel=sequence_parallel)


@BOTH
def test_a_block_may_be_the_whole_model(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(a_block_as_the_model, sequence_parallel, timeout=LIMIT)


def single_parameter_rules() -> None:
    """A module whose parameters are named one by one."""
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.LayerNorm(8))
    plan = Plan({"0": Column(), "2": Row(), "3.weight": Replicated(), "3.bias": Replicated()})
    compare(lambda: copy.deepcopy(model), (floats(2, 5, 8),), plan=plan)
    try:
        colrow.parallelize(copy.deepcopy(model), mesh(), Plan({"0": Column(), "2": Row(), "3.weight": Replicated()}))
    except PlanError as error:
        assert "3.bias is named by no pattern" in str(error)
    else:
        raise AssertionError("an unowned parameter was accepted")


def test_single_parameters_may_have_rules(ranks: Any) -> None:
    ranks(2).run(single_parameter_rules, timeout=LIMIT)
