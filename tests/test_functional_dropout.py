"""Dropout that a model's own code calls as a function: the same elements at every degree, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import colrow
from colrow.dropout import FunctionalDropout, may_drop
from colrow.layout import I, S
from colrow.models.tiny import FAMILIES, batch, tiny
from hf import KeepDouble
from oracle import relative
from pool import mesh

EXACT = 1e-12
"""One wrong element of a mask changes a gradient by its whole size; sums in another order by 1e-15."""


def trained(
    family: str, axis: DeviceMesh, *, sequence_parallel: bool, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients of one training step with much dropout."""
    model = tiny(family, dropout=0.3, **options).double().train()
    given = batch(model)
    colrow.parallelize(model, axis, sequence_parallel=sequence_parallel)
    torch.manual_seed(7)
    with KeepDouble():
        loss = model(**given).loss
        loss.backward()
    return loss.detach(), colrow.full_grads(model)


def same_at_every_degree(family: str, options: dict[str, Any]) -> None:
    alone = mesh((dist.get_world_size(), 1), ("dp", "tp"))["tp"]
    want, wanted = trained(family, alone, sequence_parallel=False, **options)
    for sequence_parallel in (False, True):
        got, found = trained(family, mesh(), sequence_parallel=sequence_parallel, **options)
        if dist.get_rank():  # the draws of a replica follow from its first rank: rank 0 has the same alone and together
            continue
        largest = max(float(grad.abs().max()) for grad in wanted.values())
        errors = {name: float((found[name] - grad).abs().max()) / largest for name, grad in wanted.items()}
        assert relative(got, want) <= EXACT
        assert max(errors.values()) <= EXACT, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_drops_the_same_elements_at_every_degree(ranks: Any, family: str) -> None:
    ranks(3).run(same_at_every_degree, family, {}, timeout=60)


@pytest.mark.parametrize("family", ["llama", "t5", "falcon"])
def test_RNG_2_eager_attention_and_four_ranks(ranks: Any, family: str) -> None:
    options = (
        {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}
        if family == "falcon"
        else {}
    )
    ranks(4).run(same_at_every_degree, family, {"attn_implementation": "eager", **options}, timeout=60)


def draws_matter() -> None:
    losses = [trained("llama", mesh(), sequence_parallel=True)[0]]
    model = tiny("llama", dropout=0.3).double().eval()
    given = batch(model)
    assert not may_drop(model) and may_drop(model.train()), "attention_dropout is a number in HF's attention"
    colrow.parallelize(model.eval(), mesh())
    losses.append(model(**given).loss.detach())
    assert abs(losses[0] - losses[1]) > 1e-3


def test_dropout_of_probabilities_changes_the_loss_and_not_in_eval(ranks: Any) -> None:
    ranks(2).run(draws_matter)


CAUSAL = {"is_causal": True}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": CAUSAL,
    "bool": {"attn_mask": torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.4},
    "float": {"attn_mask": torch.randn(5, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)},
    "a row that sees nothing": {
        "attn_mask": torch.ones(5, 7, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    },
    "scale": {"scale": 0.3},
    "groups": {"enable_gqa": True},
}


def attention_as_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = 2 if name == "groups" else 4
    shapes = [(2, 4, 5, 6), (2, heads, 7, 6), (2, heads, 7, 3)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    want = F.scaled_dot_product_attention(q, k, v, **MASKS[name])
    with FunctionalDropout(mesh(), I, (4,), features=False):  # so rare that nothing is dropped
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-13, **MASKS[name])
    assert relative(got, want) <= 1e-11
    grads = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (want, got)]
    assert all(relative(b, a) <= 1e-11 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_dropout_is_torch_s_attention(ranks: Any, name: str) -> None:
    ranks(1).run(attention_as_torch, name)


class Odd(nn.Module):
    """Drops something in attention of which nobody can say how it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = 4, 2, 0.5
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.dropout(self.qkv(x), self.dropout, self.training).chunk(3, -1)
        return self.out(q * k * v)


def unknown_dropout() -> None:
    units = colrow.HEADS, colrow.KV_HEADS, colrow.KV_HEADS
    rules = {"0": colrow.Attention(heads="heads"), "0.qkv": colrow.Column(*units), "0.out": colrow.Row(colrow.HEADS)}
    model = colrow.parallelize(nn.Sequential(Odd()), mesh(), colrow.Plan(rules))
    with pytest.raises(colrow.ShapeError, match=r"F.dropout of a tensor of shape \(3, 12\).*name it in the plan"):
        model(torch.ones(3, 8))
    model.eval()(torch.ones(3, 8))


def test_a_dropout_of_which_nobody_knows_the_split_is_refused(ranks: Any) -> None:
    ranks(2).run(unknown_dropout)


def features_between() -> None:
    """F.dropout between a column and a row layer: by features; after the row layer: in the stream."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.hidden_dropout = nn.Linear(8, 10), nn.Linear(10, 8), 0.5

        def forward(self, x: Tensor) -> Tensor:
            h = F.dropout(self.up(x), self.hidden_dropout, self.training)
            return F.dropout(self.down(h), p=self.hidden_dropout, training=self.training)

    results = []
    for axis in (mesh((dist.get_world_size(), 1), ("dp", "tp"))["tp"], mesh()):
        torch.manual_seed(0)
        rules = {"0": colrow.Mlp(), "0.up": colrow.Column(), "0.down": colrow.Row()}
        model = colrow.parallelize(nn.Sequential(Between()).double(), axis, colrow.Plan(rules))
        torch.manual_seed(5)
        results.append(model(torch.ones(6, 8, dtype=torch.float64)))
    if dist.get_rank() == 0:
        assert (results[0] == 0).any() and torch.equal(results[0] == 0, results[1] == 0)
        assert relative(results[1], results[0]) <= EXACT


def test_dropout_of_features_and_of_the_stream(ranks: Any) -> None:
    ranks(3).run(features_between)


def test_what_a_tensor_is_split_by_is_seen_from_where_it_comes() -> None:
    """The layouts by themselves: S(-1) for features, the stream otherwise, whatever its shape."""
    assert FunctionalDropout(None, S(0), None, features=True)._layout(torch.ones(2, 3)) == S(-1)  # type: ignore[arg-type]
    assert FunctionalDropout(None, S(0), None, features=False)._layout(torch.ones(2, 3)) == S(0)  # type: ignore[arg-type]
