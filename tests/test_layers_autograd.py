"""What autograd asks of the layers beyond one backward pass: memory, conversions, copies, second derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from by_hand import Mlp, check_step, pair, stream
from colrow import ColumnLinear, I, P, R, S, local, move
from colrow.params import local_of
from layouts import part
from oracle import FP32, FP64, check_grads, cotangent, relative
from pool import mesh as world
from test_layers import shared_pair

MODES = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def saved_by(layer: nn.Module, x: Tensor) -> tuple[set[tuple[int, ...]], int]:
    """The shapes and the bytes of what the forward pass saves, parameters apart; each storage counts once."""
    kept: dict[int, Tensor] = {}
    own = {local_of(param).untyped_storage().data_ptr() for param in layer.parameters()}

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in own:
            kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        layer(x).sum()
    return {tuple(t.shape) for t in kept.values()}, sum(t.untyped_storage().nbytes() for t in kept.values())


def memory() -> list[tuple[set[tuple[int, ...]], int]]:
    mesh = world()
    column = ColumnLinear(16, 8, mesh=mesh, src=S(0))
    shard = torch.randn(32 // mesh.size(), 16, requires_grad=True)
    by_shard = saved_by(column, shard)
    y = column(shard)
    nodes, seen = [y.grad_fn], []
    while nodes:
        node: Any = nodes.pop()
        if node is not None:
            seen.append(node)
            nodes += [parent for parent, _ in node.next_functions]
    held = [node.shard for node in seen if hasattr(node, "shard")]
    assert held == [None], "the gather itself keeps nothing once its only reader has run"
    frozen = ColumnLinear(16, 8, mesh=mesh, src=S(0))
    frozen.requires_grad_(False)
    return [by_shard, saved_by(frozen, shard)]


@pytest.mark.parametrize("size", [2, 4])
def test_the_gathered_input_is_not_kept(ranks: Any, size: int) -> None:
    for by_shard, frozen in ranks(size).run(memory, timeout=30):
        assert by_shard == ({(32 // size, 16)}, 32 // size * 16 * 4), "the shard, not the whole of 32 tokens"
        assert frozen == (set(), 0), "a frozen weight needs no input at all"


def hooked() -> None:
    """Full backward hooks put a node between the gather and the layer; the shard is found behind it."""
    mesh = world()
    column = ColumnLinear(6, 5, mesh=mesh, src=R, dtype=torch.float64)
    calls: list[int] = []
    handle = column.register_full_backward_hook(lambda *_: calls.append(1))
    shard = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    shapes, _ = saved_by(column, move(shard, mesh, src=S(0, size=4 * mesh.size()), dst=R))
    assert shapes == {(4, 6)}
    y = column(move(shard, mesh, src=S(0, size=4 * mesh.size()), dst=R))
    y.backward(c := cotangent(y))
    handle.remove()
    whole = move(shard.detach(), mesh, src=S(0, size=4 * mesh.size()), dst=R)
    wanted = c.t() @ whole
    assert calls and isinstance(column.weight.grad, DTensor)
    assert relative(local_of(column.weight.grad)[: wanted.shape[0]], wanted) <= FP64


def test_a_module_with_backward_hooks_keeps_the_shard_too(ranks: Any) -> None:
    ranks(2).run(hooked, timeout=30)


def converted(sequence_parallel: bool) -> None:
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel, dtype=torch.float32)
    check_step(split, reference, (13, 5), sequence_parallel, FP32, torch.float32)
    calls: list[str] = []
    split.down.bias.register_hook(lambda grad: calls.append("a hook of the user's"))
    for model in (split, reference):
        model.double()
        model.zero_grad()
    check_step(split, reference, (13, 5), sequence_parallel)
    for model in (split, reference):
        model.to(dtype=torch.float32).to(torch.float64)
        model.zero_grad()
    check_step(split, reference, (13, 5), sequence_parallel)
    grad = split.down.bias.grad
    assert isinstance(grad, DTensor) and grad.placements == (Replicate(),), "still summed by the backward pass"
    check_step(split, reference, (13, 5), sequence_parallel)  # accumulated: earlier sums are not summed again
    assert len(calls) == 3, "once in each backward pass since"


@MODES
@pytest.mark.parametrize("size", [2, 3])
def test_NORM_2_ACC_1_exact_after_a_change_of_dtype(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(converted, sequence_parallel, timeout=30)


def copied(sequence_parallel: bool) -> None:
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel)
    check_step(split, reference, (13, 5), sequence_parallel)
    again, reference_again = copy.deepcopy(split), copy.deepcopy(reference)
    again.zero_grad()
    reference_again.zero_grad()
    check_step(again, reference_again, (13, 5), sequence_parallel)
    check_grads(split, reference, FP64)  # the original's gradients are untouched
    assert local_of(again.up.weight).data_ptr() != local_of(split.up.weight).data_ptr()


@MODES
def test_a_deep_copy_is_exact_and_apart(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(copied, sequence_parallel, timeout=30)


def asked_for(sequence_parallel: bool) -> None:
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel)
    whole = torch.randn(13, 5, dtype=torch.float64)
    want, got = reference(whole), split(part(whole, stream(sequence_parallel), world()))
    c = cotangent(want)
    (want_grad,) = torch.autograd.grad(want, reference.down.bias, c)
    mine = part(c, stream(sequence_parallel), world())
    for _ in range(2):
        (grad,) = torch.autograd.grad(got, split.down.bias, mine, retain_graph=True)
        assert isinstance(grad, DTensor) and grad.placements == (Replicate(),)
        assert relative(local_of(grad), want_grad) <= FP64
    assert split.down.bias.grad is None, "torch.autograd.grad leaves .grad alone"


@MODES
@pytest.mark.parametrize("size", [2, 4])
def test_autograd_grad_returns_the_summed_gradient_of_a_bias(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(asked_for, sequence_parallel, timeout=30)


def lowered(sequence_parallel: bool) -> None:
    split, reference = pair((8, 16, 8), F.gelu, sequence_parallel, dtype=torch.float32)
    at, whole = stream(sequence_parallel), torch.randn(13, 8, requires_grad=True)
    x = part(whole.detach(), at, world()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = split(x)
    want = reference(whole)
    assert got.dtype == torch.bfloat16, "as nn.Linear under autocast"
    c = cotangent(want)
    want.backward(c)
    got.backward(part(c, at, world()).to(got.dtype))
    for name, param in split.named_parameters():
        assert param.grad is not None and param.grad.dtype == torch.float32, name
    assert x.grad is not None and whole.grad is not None and x.grad.dtype == torch.float32
    # bf16 has 8 bits: each of some six roundings on the way is at most 0.4 %; a lost term would be of order 1
    tolerance = 0.03
    assert relative(got, part(want.detach(), at, world())) <= tolerance
    assert relative(x.grad, part(whole.grad, at, world())) <= tolerance
    check_grads(split, reference, tolerance)


@MODES
@pytest.mark.parametrize("size", [1, 2, 3])
def test_autocast_lowers_the_activations_not_the_gradients(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(lowered, sequence_parallel, timeout=30)


def gradient_penalty(sequence_parallel: bool) -> None:
    """loss + |d loss / d x|^2. Under SP both are terms of a sum over the ranks: their layouts say so by themselves."""
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel)
    whole = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    x = part(whole.detach(), stream(sequence_parallel), world()).requires_grad_()
    c = cotangent(whole)
    for model, at, weight in ((reference, whole, c), (split, x, part(c, stream(sequence_parallel), world()))):
        loss = (model(at) * weight).sum()
        (dx,) = torch.autograd.grad(loss, at, create_graph=True)
        (loss + 0.7 * dx.square().sum()).backward()
    assert whole.grad is not None and x.grad is not None
    assert relative(x.grad, part(whole.grad, stream(sequence_parallel), world())) <= FP64
    check_grads(split, reference, FP64)


@MODES
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_DB_1_a_gradient_penalty_on_the_input(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(gradient_penalty, sequence_parallel, timeout=30)


def penalty_on_parameters(sequence_parallel: bool) -> None:
    """|d loss / d parameters|^2: squares of shards are summed over the ranks, those of the whole bias count once.

    The tanh makes the bias's gradient, which under SP is summed over the ranks, depend on every parameter.
    """
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel)
    whole, mesh = torch.randn(13, 5, dtype=torch.float64), world()
    c = cotangent(whole)
    grads = torch.autograd.grad((reference(whole).tanh() * c).sum(), list(reference.parameters()), create_graph=True)
    sum((g.square().sum() for g in grads), torch.zeros(())).backward()

    at = stream(sequence_parallel)
    loss = (split(part(whole, at, mesh)).tanh() * part(c, at, mesh)).sum()
    if sequence_parallel:
        loss = move(loss, mesh, src=P, dst=I)
    params = dict(split.named_parameters())
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), create_graph=True), strict=True))
    bias = local(grads.pop("down.bias"), grad=I)
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    mine = sum((local(g, grad=S(dims[name])).square().sum() for name, g in grads.items()), torch.zeros(()))
    (move(mine, mesh, src=P, dst=I) + bias.square().sum()).backward()
    check_grads(split, reference, FP64)


@MODES
@pytest.mark.parametrize("size", [1, 2, 3])
def test_DB_1_a_penalty_on_the_gradients_of_parameters(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(penalty_on_parameters, sequence_parallel, timeout=30)


def penalty_after_a_partial_pass() -> None:
    """A pass for one of three users leaves a second gather behind, without a graph: the next must not build on it."""
    split, reference = shared_pair()
    mesh, whole = world(), torch.randn(26, 6, dtype=torch.float64, requires_grad=True)
    x = part(whole.detach(), S(0), mesh).requires_grad_()
    c = cotangent(whole)
    for model, at, weight in ((reference, whole, c), (split, x, part(c, S(0), mesh))):
        y = model(at)
        torch.autograd.grad(y, model.k.weight, weight, retain_graph=True)
        (dk,) = torch.autograd.grad(y, model.k.weight, weight, create_graph=True)
        penalty = local(dk, grad=S(0)).square().sum()
        (penalty if model is reference else move(penalty, mesh, src=P, dst=I)).backward()
    assert x.grad is not None and whole.grad is not None
    assert relative(x.grad, part(whole.grad, S(0), mesh)) <= FP64


@pytest.mark.parametrize("size", [1, 2, 3])
def test_DB_1_a_penalty_after_a_pass_for_one_of_the_users_of_a_gather(ranks: Any, size: int) -> None:
    ranks(size).run(penalty_after_a_partial_pass, timeout=30)


class Twice(nn.Module):
    """One MLP called twice: its gradients are sums of two uses."""

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(x).tanh())


def used_twice(sequence_parallel: bool) -> None:
    split, reference = pair((5, 7, 5), F.gelu, sequence_parallel)
    check_step(Twice(split), Twice(reference), (13, 5), sequence_parallel)
    check_step(Twice(split), Twice(reference), (3, 5), sequence_parallel)


@MODES
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_used_twice_before_one_backward_pass(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(used_twice, sequence_parallel, timeout=30)


def unwatched_gradient() -> tuple[bool, bool]:
    split, reference = pair((5, 7, 5), F.gelu, True)
    again = copy.deepcopy(split)
    check_step(again, reference, (13, 5), True)
    grad = again.down.bias.grad
    assert isinstance(grad, DTensor)
    return grad.placements == (Partial(),), relative(grad.full_tensor(), reference.down.bias.grad) <= FP64  # pyright: ignore[reportArgumentType]


def test_a_gradient_that_nobody_watches_is_an_honest_partial_sum(ranks: Any) -> None:
    assert ranks(2).run(unwatched_gradient, timeout=30) == [(True, True)] * 2
