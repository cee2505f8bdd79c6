"""`parallelize` keeps the model that it was given: names, flags, dtypes, ties, hooks; or refuses it on every rank."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import colrow
from colrow import Column, LastNorm, LayoutError, Plan, PlanError, RankError, Replicated
from colrow.params import local_of
from oracle import FP64, check_grads, cotangent, randomize, relative
from own import DRAWING, GPT_RULES, LLAMA, OwnModel, drawing, gpt, ids, own_plan
from pool import mesh

LIMIT = 30.0


def failures(errors: list[Any], kind: str) -> set[str]:
    """The messages of errors that every rank must have raised, of this type."""
    assert {error.type_name for error in errors} == {kind}, [(e.type_name, e.message) for e in errors]
    return {error.message for error in errors}


# -- what stays --------------------------------------------------------------------------------------------------------


def everything_stays(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = gpt(**options).to(dtype)
    before = copy.deepcopy(model)
    calls: list[str] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before block"))
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after block"))
    model.blocks[0].attention.qkv.register_forward_hook(lambda *_: calls.append("after qkv"))
    model.norm.register_full_backward_hook(lambda *_: calls.append("backward of norm"))
    modules = {name: (id(module), type(module)) for name, module in model.named_modules()}
    assert colrow.parallelize(model, mesh()) is model
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert list(model.state_dict()) == list(before.state_dict())
    for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert isinstance(new, nn.Parameter), name
        assert isinstance(new, DTensor), name
        assert new.dtype == old.dtype == dtype, name
        assert new.requires_grad == old.requires_grad, name
    for name, module in model.named_modules():
        identity, kind = modules[name]
        assert id(module) == identity, name
        assert isinstance(module, kind), name
    tied = options.get("tied", True)
    assert (model.head.weight is model.token.weight) == tied
    model(ids(vocab=61)).sum().backward()
    assert calls == ["before block", "after qkv", "after block", "backward of norm"], calls
    whole = colrow.full_state_dict(model)
    for name, value in before.state_dict().items():
        assert torch.equal(whole[name], value), f"{name} changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, LLAMA, {"vocab": 61, "ffn": 70}], ids=["gpt2", "llama", "odd"])
def test_names_objects_dtypes_ties_and_hooks_stay(ranks: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    ranks(2).run(everything_stays, options, dtype, timeout=LIMIT)


def flags_stay(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    model = gpt()
    trainable = {"blocks.0.mlp.up.weight", "blocks.1.norm_1.weight", "blocks.1.mlp.down.bias"}
    for name, param in model.named_parameters():
        param.requires_grad_(name in trainable)
    whole = mesh(shape, names)
    colrow.parallelize(model, whole["tp"] if len(shape) > 1 else whole)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    model(ids()).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trainable


@pytest.mark.parametrize(
    ("size", "shape", "names"), [(2, (2,), ("tp",)), (4, (2, 2), ("dp", "tp"))], ids=["tp2", "dp2xtp2"]
)
def test_LORA_4_frozen_parameters_stay_frozen(ranks: Any, size: int, shape: Any, names: Any) -> None:
    ranks(size).run(flags_stay, shape, names, timeout=LIMIT)


def storage_is_exact() -> None:
    model = gpt(ffn=70, vocab=61, heads=5, width=40, kv_heads=5)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    colrow.parallelize(model, mesh())
    total = 0
    for name, param in model.named_parameters():
        mine = local_of(param)
        stored, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
        assert stored == needed, f"{name} keeps {stored} bytes for {needed}"
        total += needed
    file = io.BytesIO()
    torch.save({name: local_of(param) for name, param in model.named_parameters()}, file)
    # torch.save adds about 400 bytes of names and alignment to each of some thirty tensors of this small model
    assert len(file.getvalue()) <= total + 600 * len(list(model.parameters()))
    assert total < 0.45 * whole  # a quarter, and the replicas and the padding


def test_MEM_2_each_shard_owns_exactly_its_storage(ranks: Any) -> None:
    ranks(4).run(storage_is_exact, timeout=LIMIT)


def first_rank_counts(shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    model: Any = randomize(gpt(**LLAMA | {"bias": True}), seed=dist.get_rank())
    model.blocks[0].attention.rotary.inverse.add_(dist.get_rank())
    whole = mesh(shape, names)
    axis = whole["tp"] if len(shape) > 1 else whole
    mine = {k: v.clone() for k, v in [*model.state_dict().items(), *model.named_buffers()]}
    colrow.parallelize(model, axis)
    assert colrow.replica_drift(model) == {}
    full = colrow.full_state_dict(model) | dict(model.named_buffers())
    if axis.get_local_rank() == 0:
        for name, value in full.items():
            assert torch.equal(value, mine[name]), f"{name} is not the first rank's"
    return full


def test_ranks_with_other_weights_get_the_first_ranks(ranks: Any) -> None:
    every = ranks(3).run(first_rank_counts, (3,), ("tp",), timeout=LIMIT)
    for full in every[1:]:
        assert all(torch.equal(full[name], value) for name, value in every[0].items())


@pytest.mark.parametrize(("names", "groups"), [(("dp", "tp"), [[0, 1], [2, 3]]), (("tp", "dp"), [[0, 2], [1, 3]])])
def test_MESH_3_each_group_is_made_equal_to_its_own_first_rank(ranks: Any, names: Any, groups: Any) -> None:
    every = ranks(4).run(first_rank_counts, (2, 2), names, timeout=LIMIT)
    for first, second in groups:
        assert all(torch.equal(every[second][name], value) for name, value in every[first].items())
    other = groups[1][0]
    assert not torch.equal(every[0]["norm.weight"], every[other]["norm.weight"])


def grads_over_both_batches(names: tuple[str, ...], sequence_parallel: bool) -> None:
    whole = mesh((2, 2), names)
    assert (
        whole["tp"].mesh.tolist()
        == ([0, 1], [2, 3], [0, 2], [1, 3])[(0 if names[0] == "dp" else 2) + whole["dp"].get_local_rank()]
    )
    reference = randomize(gpt()).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), whole["tp"], sequence_parallel=sequence_parallel)
    batches = [ids(seed=1), ids(seed=2)]
    for batch in batches:
        y = reference(batch)
        y.backward(cotangent(y))
    y = split(batches[whole["dp"].get_local_rank()])
    y.backward(cotangent(y))
    for param in split.parameters():  # what a data-parallel wrapper does: sum over the replicas
        grad = param.grad
        assert grad is not None
        dist.all_reduce(local_of(grad), group=whole["dp"].get_group())
    check_grads(split, reference, FP64)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids=["dp-tp", "tp-dp"])
def test_MESH_2_one_axis_of_a_two_axis_mesh(ranks: Any, names: Any, sequence_parallel: bool) -> None:
    ranks(4).run(grads_over_both_batches, names, sequence_parallel, timeout=LIMIT)


def printed() -> str:
    return str(colrow.parallelize(gpt(), mesh()))


def test_print_shows_the_split(ranks: Any) -> None:
    text = ranks(2).run(printed, timeout=LIMIT)[1]
    for part in ("Model[GPT]", "Block[Block]", "Region[Attention]", "Region[MLP]", "LastNorm[LayerNorm]"):
        assert part in text
    assert "(up): ColumnLinear(in_features=32, out_features=128, bias=True, src=R, tp=2)" in text
    assert "dst=S(0), tp=2)" in text


# -- what is refused, on every rank, and the model as it was -----------------------------------------------------------


def split_twice(model: nn.Module | None = None) -> None:
    split: Any = colrow.parallelize(gpt(), mesh())
    colrow.parallelize(split, mesh())


def split_a_part_twice() -> None:
    split: Any = colrow.parallelize(gpt(), mesh())
    colrow.parallelize(nn.Sequential(split, nn.Linear(4, 4)), mesh(), Plan({"**": Replicated()}))


def test_a_second_call_is_an_error(ranks: Any) -> None:
    (message,) = failures(ranks(2).run(split_twice, expect_errors=True, timeout=LIMIT), "PlanError")
    assert "split already" in message
    (message,) = failures(ranks(2).run(split_a_part_twice, expect_errors=True, timeout=LIMIT), "PlanError")
    assert "split already" in message


def split_over_two_axes(names: tuple[str, ...] | None) -> None:
    whole = mesh((2, 2), names) if names else DeviceMesh("cpu", torch.arange(4).view(2, 2))
    colrow.parallelize(gpt(), whole)


def split_off_the_mesh() -> str:
    part = DeviceMesh("cpu", [0, 1])
    try:
        colrow.parallelize(gpt(), part)
    except LayoutError as error:
        return str(error)
    return "split"


def split_over(not_a_mesh: Any) -> None:
    colrow.parallelize(gpt(), not_a_mesh)


def test_a_mesh_of_two_axes_is_an_error_that_names_the_axis(ranks: Any) -> None:
    (message,) = failures(
        ranks(4).run(split_over_two_axes, ("dp", "tp"), expect_errors=True, timeout=LIMIT), "LayoutError"
    )
    assert 'Pass mesh["tp"]' in message
    (message,) = failures(ranks(4).run(split_over_two_axes, None, expect_errors=True, timeout=LIMIT), "LayoutError")
    assert "mesh_dim_names" in message


def test_MESH_2_a_rank_that_is_not_on_the_mesh_is_told_so(ranks: Any) -> None:
    first, second, third = ranks(3).run(split_off_the_mesh, timeout=LIMIT)
    assert first == second == "split"
    assert "not on the mesh" in third
    assert "[0, 1]" in third


def test_what_is_no_mesh(ranks: Any) -> None:
    (message,) = failures(ranks(2).run(split_over, 2, expect_errors=True, timeout=LIMIT), "LayoutError")
    assert "a int where the mesh should be" in message


def wrong_plan_leaves_the_model(rules: dict[str, Any]) -> str:
    model = gpt()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    try:
        colrow.parallelize(model, mesh(), Plan(rules))
    except PlanError as error:
        assert {name: type(module) for name, module in model.named_modules()} == kinds
        for name, param in model.named_parameters():
            assert id(param) == before[name][0], name
            assert torch.equal(param, before[name][1]), name
        colrow.parallelize(model, mesh())  # the model can still be split
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"blocks.*.mlp.upp": Column()}, "matches no module"),
        ({"blocks.*.mlp.down": Replicated()}, "without a Row layer"),
        ({"head": Replicated(), "norm": LastNorm()}, "the same tensor as token.weight"),
    ],
    ids=["no match", "no partner", "tied"],
)
def test_a_wrong_plan_is_the_same_error_everywhere_and_touches_nothing(ranks: Any, rules: Any, says: str) -> None:
    (message,) = set(ranks(3).run(wrong_plan_leaves_the_model, rules, timeout=LIMIT))
    assert says in message


def no_plan_for_an_unknown_family() -> None:
    colrow.parallelize(drawing(), mesh())


def test_an_unknown_family_without_a_plan(ranks: Any) -> None:
    errors = ranks(2).run(no_plan_for_an_unknown_family, expect_errors=True, timeout=LIMIT)
    (message,) = failures(errors, "PlanError")
    assert "Sequential is of no known family" in message
    assert "Plan({" in message


def other_models(what: str) -> None:
    odd = dist.get_rank() == 1
    plan: Any = None
    model = gpt()
    if what == "sizes":
        model = gpt(ffn=64 if odd else 128)
    elif what == "plans":
        rules = {"token": Replicated()} if odd else {}
        model = gpt(tied=False)
        plan = Plan(rules | {k: v for k, v in GPT_RULES.items() if k not in rules})
    elif what == "one plan is wrong" and odd:
        plan = Plan({"nothing.like.it": Column()})
    elif what == "layers":
        model = gpt(layers=3 if odd else 2)
    colrow.parallelize(model, mesh(), plan, sequence_parallel=not (what == "modes" and odd))


@pytest.mark.parametrize("what", ["sizes", "plans", "layers", "modes"])
def test_ranks_with_other_models_or_plans(ranks: Any, what: str) -> None:
    errors = ranks(3).run(other_models, what, expect_errors=True, timeout=LIMIT)
    (message,) = failures(errors, "RankError")
    assert "it resolved to different splits" in message


def test_a_plan_that_is_wrong_on_one_rank(ranks: Any) -> None:
    first, second, third = ranks(3).run(other_models, "one plan is wrong", expect_errors=True, timeout=LIMIT)
    assert (first.type_name, second.type_name, third.type_name) == ("RankError", "PlanError", "RankError")
    assert "ranks [1] could not resolve it" in first.message


# -- what the ranks are fed --------------------------------------------------------------------------------------------


def other_inputs(what: str, at_call: int = 0) -> None:
    split: Any = colrow.parallelize(gpt(), mesh())
    odd = dist.get_rank() == 1
    for call in range(at_call + 1):
        now = odd and call == at_call
        batch, targets = ids(), ids(seed=2)
        if what == "content":
            batch = ids(seed=9) if now else batch
        elif what == "shape":
            batch, targets = (t[:, :7] if now else t for t in (batch, targets))
        elif what == "dtype":
            batch = batch.int() if now else batch
        elif what == "targets":
            targets = ids(seed=9) if now else targets
        split(batch, targets=targets)


@pytest.mark.parametrize(
    ("what", "name", "kind"),
    [
        ("content", "input 0", "content"),
        ("shape", "input 0", "shape or dtype"),
        ("dtype", "input 0", "shape or dtype"),
        ("targets", "input targets", "content"),
    ],
)
def test_HANG_1_other_inputs_are_an_error_on_all_ranks(ranks: Any, what: str, name: str, kind: str) -> None:
    (message,) = failures(ranks(3).run(other_inputs, what, expect_errors=True, timeout=LIMIT), "RankError")
    assert name in message
    assert f"of different {kind}" in message
    assert "[[0, 2], [1]]" in message


def test_HANG_1_the_third_call_is_still_checked(ranks: Any) -> None:
    failures(ranks(2).run(other_inputs, "content", 2, expect_errors=True, timeout=LIMIT), "RankError")


def one_leaves(how: str) -> None:
    split: Any = colrow.parallelize(gpt(), mesh())

    def leave(*_: Any) -> None:
        if dist.get_rank() == 1:
            os._exit(3)

    if how == "forward":
        split.blocks[1].register_forward_pre_hook(leave)
    else:
        split.blocks[1].mlp.register_full_backward_pre_hook(leave)
    split(ids(), ids()).backward()


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_HANG_3_the_others_fail_when_one_rank_leaves(ranks: Any, how: str) -> None:
    first, second = ranks(2).run(one_leaves, how, expect_errors=True, timeout=LIMIT)
    assert second.type_name == "ProcessDied"
    assert first.type_name == "RankError"
    assert "it did not complete" in first.message


def bad_token() -> None:
    colrow.parallelize(gpt(vocab=61), mesh())(torch.tensor([[3, 61]]))


def test_a_bad_token_is_the_same_error_on_every_rank(ranks: Any) -> None:
    (message,) = failures(ranks(2).run(bad_token, expect_errors=True, timeout=LIMIT), "ShapeError")
    assert "token id 61 at (0, 1)" in message
    assert "0 to 60" in message


# -- copies ------------------------------------------------------------------------------------------------------------


def copies_train_alike(sequence_parallel: bool) -> None:
    reference = randomize(OwnModel()).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), own_plan(), sequence_parallel=sequence_parallel)
    twin = copy.deepcopy(split)
    assert not set(map(id, twin.parameters())) & set(map(id, split.parameters()))
    for model in (reference, twin):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            y = model(ids(vocab=23, seed=step))
            y.backward(cotangent(y))
            optimizer.step()
            optimizer.zero_grad()
    whole = colrow.full_state_dict(twin)
    for name, value in reference.state_dict().items():
        # Adam divides by a gradient's size, so rounding of 1e-16 on a gradient of 1e-5 shows as 1e-11 in the update
        assert relative(whole[name], value) < 1e-8, name
    y = split(ids(vocab=23))
    assert torch.isfinite(y).all()
    assert all(p.grad is None for p in split.parameters()), "the original shares gradients with its copy"


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
def test_a_deep_copy_of_a_split_model_trains_alike(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(copies_train_alike, sequence_parallel, timeout=LIMIT)


def errors_are_value_errors() -> None:
    for kind in (PlanError, RankError, LayoutError):
        assert issubclass(kind, colrow.ColrowError)
    try:
        colrow.parallelize(drawing(), mesh(), DRAWING | Plan({"9": Replicated()}))
    except ValueError as error:
        assert "'9'" in str(error)


def test_errors_are_value_errors(ranks: Any) -> None:
    ranks(2).run(errors_are_value_errors, timeout=LIMIT)
