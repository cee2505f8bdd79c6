"""What is made again in backward has the same bits, and what is kept is what the formula allows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import colrow
from colrow import source
from colrow.models.tiny import batch, tiny
from colrow.observe import Observer, Places
from colrow.parallelize import find_plan
from colrow.recompute import Lean, note, recipe_of
from oracle import FP32, FP64, relative
from own import gpt, ids
from pool import mesh

BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def grads(model: nn.Module, given: dict[str, Tensor], sequence_parallel: bool, recompute: Any) -> dict[str, Tensor]:
    split: Any = colrow.parallelize(
        copy.deepcopy(model), mesh(), sequence_parallel=sequence_parallel, recompute=recompute, check_inputs=0
    )
    for _ in range(2):  # twice, with the same graph and a new one
        out = split(**given)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward(retain_graph=True)
        loss.backward()
    return colrow.full_grads(split)


def both_ways(name: str, sequence_parallel: bool) -> None:
    model = source.find("gpt").build(dropout=0.1, seed=0) if name == "gpt" else tiny(name, dropout=0.1)
    given = source.find("gpt").batch(model, seed=1) if name == "gpt" else batch(model)
    found = []
    for recompute in ("elementwise", "none"):
        torch.manual_seed(5)
        found.append(grads(model.train(), given, sequence_parallel, recompute))
    again, kept = found
    assert again.keys() == kept.keys()
    if name in ("gpt", "bert", "bloom"):  # norms of torch
        different = [name for name, value in kept.items() if not torch.equal(again[name], value)]
        assert not different, different
    else:  # a norm written out: the terms of its gradient are added in another order
        assert max(relative(again[name], value) for name, value in kept.items()) <= FP32


@BOTH
@pytest.mark.parametrize("name", ["gpt", "llama", "gemma2", "phi3", "gpt2", "bert", "bloom", "t5", "deepseek_v3"])
def test_gradients_are_the_same(ranks: Any, name: str, sequence_parallel: bool) -> None:
    ranks(2).run(both_ways, name, sequence_parallel)


WIDE, TOKENS = 64, 2 * 32


def kept_in_a_layer(gated: bool, sequence_parallel: bool) -> int:
    model: Any = gpt(layers=2, width=WIDE, heads=4, ffn=4 * WIDE, gated=gated, context=32)
    given = {"tokens": ids(2, 32, vocab=61), "targets": ids(2, 32, vocab=61)}
    places = Places(colrow.resolve(model, find_plan(model), 2, sequence_parallel=sequence_parallel))
    split: Any = colrow.parallelize(model, mesh(), sequence_parallel=sequence_parallel, check_inputs=0)
    with Observer(split, places) as observer:
        kept = observer.kept(split(**given), given.values())
    return sum(row.bytes for row in kept if row.layer == "blocks.1")


@pytest.mark.parametrize(
    ("gated", "sequence_parallel", "units"), [(False, True, 10 / 2), (True, True, 14 / 2), (False, False, 2 + 8 / 2)]
)
def test_a_layer_keeps_twenty_bytes_a_number(ranks: Any, gated: bool, sequence_parallel: bool, units: float) -> None:
    """20 sbh/t in 16 bits are ten tensors of s b h numbers: two norms' inputs, q, k, v and attention's output, and 4 h
    before the activation (a gate has 4 h more). Without sequence parallelism the norms' inputs are whole."""
    for kept in ranks(2).run(kept_in_a_layer, gated, sequence_parallel):
        assert kept == pytest.approx(units * TOKENS * WIDE * 4, rel=0.04)  # and some numbers a token


def differentiated_twice() -> None:
    torch.manual_seed(0)
    reference = gpt(layers=1, gated=True).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), check_inputs=0)
    norms = []
    for model in (reference, split):
        loss = model(ids(2, 13, vocab=61), ids(2, 13, vocab=61))
        inner = [param for name, param in model.named_parameters() if "norm_2" in name or "mlp" in name]
        first = torch.autograd.grad(loss, inner, create_graph=True)
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in first]
        total = torch.stack([g.square().sum() for g in whole]).sum()
        norms.append(float(total.detach()))
        total.backward()
    assert abs(norms[0] / norms[1] - 1) < 1e-10


def autocast_like_before() -> None:
    model = gpt(layers=1)
    found = []
    for recompute in ("elementwise", "none"):
        split: Any = colrow.parallelize(copy.deepcopy(model), mesh(), recompute=recompute, check_inputs=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = split(ids(2, 13, vocab=61), ids(2, 13, vocab=61))
        loss.backward()  # outside, as torch advises
        found.append(colrow.full_grads(split))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("case", [differentiated_twice, autocast_like_before])
def test_second_derivatives_and_autocast(ranks: Any, case: Any) -> None:
    ranks(2).run(case)


def unknown() -> None:
    colrow.parallelize(gpt(layers=1), mesh(), recompute="all")  # pyright: ignore[reportArgumentType]


def test_another_value_is_refused(ranks: Any) -> None:
    (error,) = ranks(1).run(unknown, expect_errors=True)
    assert "recompute='all'; it may be 'none' or 'elementwise'" in error.message


def test_a_recipe_is_for_what_it_has_made_and_nothing_else() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = note(x * 2, lambda x: x * 2, x)
    assert recipe_of(y) is recipe_of(y.view(12)) is not None, "all of it, in another shape"
    assert recipe_of(y[1:]) is None and recipe_of(y.t()) is None, "a part, and another order"
    assert recipe_of(y.clone()) is None
    with torch.no_grad():
        assert recipe_of(y) is None, "nothing is kept"
        y.add_(1)
    assert recipe_of(y) is None, "it has changed"


@pytest.mark.parametrize("act", [F.gelu, F.silu, lambda x: F.gelu(x, approximate="tanh")])
def test_gates_in_either_order(act: Any) -> None:
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for product in (lambda a, b: a * b, lambda a, b: b * a, torch.mul, lambda a, b: b.mul(a)):
        wanted = torch.autograd.grad((product(act(gate), up) ** 2).sum(), (gate, up))
        with Lean():
            y = product(act(gate), up)
        assert type(y.grad_fn).__name__ == "GatedBackward" and recipe_of(y) is not None
        got = torch.autograd.grad((y**2).sum(), (gate, up))
        assert all(relative(a, b) <= FP64 for a, b in zip(got, wanted, strict=True))


def test_a_gate_that_is_cut_from_the_graph_stays_cut() -> None:
    gate, up = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    with Lean():
        y = F.silu(gate).detach() * up
        z = F.silu(gate).view(35).view(5, 7).detach().requires_grad_() * up
    assert torch.autograd.grad(y.sum(), gate, allow_unused=True) == (None,)
    assert torch.autograd.grad(z.sum(), gate, allow_unused=True) == (None,)


def kept_outputs() -> list[bool]:
    model = tiny("bert", "AutoModel")
    split: Any = colrow.parallelize(model, mesh(), sequence_parallel=False)
    outs = split(**batch(model), output_hidden_states=True)
    return [recipe_of(x) is not None for x in (outs.last_hidden_state, *outs.hidden_states)]


def test_what_leaves_the_model_does_not_hold_the_graph(ranks: Any) -> None:
    assert not any(flag for flags in ranks(2).run(kept_outputs) for flag in flags)


def test_products_of_other_shapes_and_frozen_gates_are_right() -> None:
    gate, up = torch.randn(5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    with Lean():
        y = F.silu(gate) * up  # broadcast: left as it is
        z = F.silu(gate.detach()) * gate
    assert type(y.grad_fn).__name__ == "MulBackward0"
    (got,) = torch.autograd.grad(z.sum(), gate)
    torch.testing.assert_close(got, F.silu(gate.detach()))
