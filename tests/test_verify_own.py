"""`colrow.verify` on a user's ranks, with their model, batch and plan; and what it costs in memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colrow
from colrow.models.tiny import randomize
from colrow.verdict import Verdict
from own import OwnModel, gpt, ids, own_plan
from pool import mesh
from test_pretrained import Peak


def build() -> nn.Module:
    return randomize(OwnModel())


def cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids(vocab=7).flatten())


def own(by_name: bool, loss: Any, **options: Any) -> Verdict:
    batch: Any = {"tokens": ids(vocab=23)} if by_name else (ids(vocab=23),)
    return colrow.verify(build, batch, mesh(), own_plan(), loss_fn=loss, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by place"])
def test_a_users_model_holds(ranks: Any, by_name: bool, dtype: torch.dtype) -> None:
    loss = cross_entropy if by_name else None
    verdicts = ranks(3).run(own, by_name, loss, dtype=dtype, sequence_parallel=by_name)
    assert verdicts == verdicts[:1] * 3 and verdicts[0].ok and verdicts[0].first_divergence is None
    assert (verdicts[0].tp, verdicts[0].sequence_parallel) == (3, by_name)
    if by_name:
        torch.manual_seed(0)
        assert verdicts[0].loss.reference == pytest.approx(cross_entropy(build().to(dtype)(ids(vocab=23))).item(), 1e-5)


def replicas() -> Verdict:
    """Two replicas of two ranks, each with its own batch."""
    axis = mesh((2, 2), ("dp", "tp"))["tp"]
    return colrow.verify(build, (ids(vocab=23, seed=dist.get_rank() // 2),), axis, own_plan())


def test_each_axis_of_a_larger_mesh_has_its_own_verdict(ranks: Any) -> None:
    a, b, c, d = ranks(4).run(replicas)
    assert a == b and c == d and a.ok and c.ok and a.loss != c.loss


def drops(p: float) -> Verdict:
    return colrow.verify(lambda: randomize(gpt(dropout=0.5)), {"tokens": ids()}, mesh(), dropout=p)


def test_dropout_is_as_asked_for_and_not_as_built(ranks: Any) -> None:
    with_it, without = (ranks(2).run(drops, p)[0] for p in (0.3, 0.0))
    assert with_it.ok and without.ok and with_it.loss.reference != without.loss.reference


def broken(kind: str) -> Any:
    class Model(OwnModel):
        def forward(self, tokens: Tensor) -> Tensor:
            if kind == "the whole model" and type(self) is Model:  # the split one has another class
                raise KeyError("no such cache")
            return super().forward(tokens)

    def make() -> nn.Module:
        if kind == "the build" and dist.get_rank() == 1:
            raise OSError("no space left")
        if kind == "another one":
            return randomize(Model(), int(torch.randint(1 << 30, (), generator=generator)))
        return randomize(Model())

    generator = torch.Generator().manual_seed(0)
    return colrow.verify(make, (ids(vocab=23),), mesh(), own_plan(), dtype=DTYPES.get(kind, torch.float64))


DTYPES = {"a dtype": torch.float16}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("the whole model", "rank 0 raised KeyError ('no such cache'); every rank must come through"),
        ("the build", "rank 1 raised OSError (no space left)"),
        ("another one", "it has built two different models; every call must build the same one"),
        ("a dtype", "dtype=torch.float16; it may be torch.float64, torch.float32, torch.bfloat16"),
    ],
)
def test_what_one_rank_raises_all_do(ranks: Any, kind: str, says: str) -> None:
    errors = ranks(2).run(broken, kind, expect_errors=True, timeout=30)
    assert len({(error.type_name, error.message) for error in errors}) == 1 and says in errors[0].message, errors


WIDTH, LAYERS = 768, 6


def large() -> nn.Module:
    return randomize(gpt(width=WIDTH, layers=LAYERS, heads=8, vocab=64))


def most_memory() -> float:
    """The most that this rank held, in copies of the model in fp32."""
    with Peak() as peak:
        verdict = colrow.verify(large, {"tokens": ids(1, 16)}, mesh(), dtype=torch.float32)
    assert verdict.ok, verdict
    return peak.bytes / (4 * 12 * WIDTH**2 * LAYERS)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_it_never_holds_two_models_at_once(ranks: Any) -> None:
    """One process in double, weights and gradients, are 4 copies; what builds a shard holds the whole beside it."""
    ranks(2).close()  # fresh processes: what earlier tests have freed, malloc keeps
    first, second = ranks(2).run(most_memory, timeout=120)
    assert 3.5 < first < 5.2 and 1 < second < 2.2, (first, second)
