"""Twelve faults of tensor parallelism, planted on purpose into the split model: each is found, by name and by cause.

They are planted by wrapping `parallelize`: a module gets a class over its own, or a parameter or a hook is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import colrow
from colrow import HEADS, KV_HEADS, Column, I, P, Plan, R
from colrow.context import current, gather, leave
from colrow.divergence import first_divergence
from colrow.dropout import drop
from colrow.linear import RowLinear
from colrow.models.tiny import randomize
from colrow.moves import move
from colrow.params import local, local_of, read
from colrow.source import Tiny
from colrow.trial import Meshes, Trial
from colrow.verdict import Settings, Verdict
from colrow.verification import judge_trial
from own import OwnModel, ids, own_plan
from pool import mesh


@dataclass(frozen=True)
class Gpt:
    """colrow's own model: fused [q | k | v], a gated MLP with a fused [gate | up], biases everywhere."""

    kv_heads: int = 2

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        from colrow.models import GPT, GPTConfig

        config = GPTConfig(61, 32, 2, 32, 4, self.kv_heads, 24, dropout, gated=True, tied=False)
        return randomize(GPT(config), seed)

    def batch(self, model: nn.Module, *, seed: int) -> dict[str, Tensor]:
        return {"tokens": ids(vocab=61, seed=seed), "targets": ids(vocab=61, seed=seed + 1)}


@dataclass(frozen=True)
class Own:
    """A user's own model: norms on the heads of q and k, one key/value head for each two ranks or more, experts."""

    experts: bool = False

    def build(self, *, dropout: float, seed: int) -> nn.Module:
        return randomize(OwnModel(experts=self.experts), seed)

    def batch(self, model: nn.Module, *, seed: int) -> dict[str, Tensor]:
        return {"tokens": ids(vocab=23, seed=seed)}


def over(model: nn.Module, name: str, **methods: Any) -> None:
    """Give a module a class over its own, with some methods of ours."""
    module = model.get_submodule(name)
    module.__class__ = type(type(module).__name__, (type(module),), methods)


@dataclass(frozen=True)
class Fault:
    """A fault, and what is to be said of it.

    Attributes:
        plant: changes the split model; it is also given the model's whole weights.
    """

    plant: Callable[[nn.Module, dict[str, Tensor]], None]
    module: str
    where: str
    says: str
    source: Any = Gpt()
    ranks: int = 2
    sequence_parallel: bool = True
    dropout: float = 0.0
    plan: Plan | None = None

    def split(self, model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        split = colrow.parallelize(model, mesh, options.pop("plan", self.plan), **options)
        self.plant(split, whole)
        return split


def nothing(model: nn.Module, whole: Any) -> None:
    """The plan is the fault."""


def no_f(model: nn.Module, whole: Any) -> None:
    """The region moves its input to R on an axis of one rank: backward sums nothing."""
    vars(model.get_submodule("blocks.1.attention"))["mesh"] = mesh((dist.get_world_size(), 1), ("all", "one"))["one"]


def gathers_to_i(model: nn.Module, whole: Any) -> None:
    """f with sequence parallelism, whose backward takes a slice instead of the sum."""

    def forward(self: Any, x: Tensor) -> Tensor:
        call = current()
        assert call is not None and call.tokens is not None
        return self.origin.forward(self, gather(x, self.mesh, call.tokens, I))

    over(model, "blocks.1.mlp", forward=forward)


def doubled_g(model: nn.Module, whole: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return move(RowLinear.forward(self, x), self.mesh, src=P, dst=I)

    over(model, "blocks.0.mlp.down", forward=forward)


def no_g(model: nn.Module, whole: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self._local_weight(), local(self.bias, grad=I))

    over(model, "blocks.1.attention.out", forward=forward)


def bias_inside(model: nn.Module, whole: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y, call = F.linear(x, self._local_weight(), local(self.bias, grad=R)), current()
        return leave(y, self.mesh, call.tokens if call is not None else None)

    over(model, "blocks.0.attention.out", forward=forward)


def averaged(model: nn.Module, whole: Any) -> None:
    norm: Any = model.get_submodule("blocks.1.norm_2")
    norm.sums.unwatch([norm.weight])
    norm.weight.register_hook(lambda grad: grad / norm.mesh.size())
    norm.sums.watch([norm.weight])


def read_as_i(name: str) -> Callable[[nn.Module, Any], None]:
    """The parameters of a module are read as I where they are R."""

    def plant(model: nn.Module, whole: Any) -> None:
        module: Any = model.get_submodule(name)
        module.grads |= dict.fromkeys(module.grads, I)

    return plant


def kv_unsummed(name: str) -> Callable[[nn.Module, Any], None]:
    """A projection that is whole at rest, since there are fewer key/value heads than ranks, is read as I."""

    def weight(self: Any) -> Tensor:
        return self.splits["weight"].take(local(self.weight, grad=I), self.mesh.get_local_rank())

    return lambda model, whole: over(model, name, _local_weight=weight)


def shifted_mask(model: nn.Module, whole: Any) -> None:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        weight = read(self.weight, self.splits["weight"], self.mesh, R)
        here = tokens - self.mesh.get_local_rank() * (self.splits["weight"].local_size - 1)  # one too few
        elsewhere = (here < 0) | (here >= len(weight))
        return leave(F.embedding(here.masked_fill(elsewhere, 0), weight) * ~elsewhere[..., None], self.mesh, None)

    over(model, "token", forward=forward)


def swapped(model: nn.Module, whole: Any) -> None:
    mine = local_of(model.get_parameter("blocks.1.mlp.gate_up.weight"))
    mine.copy_(mine.roll(len(mine) // 2, 0))


def cut_in_a_row(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """[q | k | v] is cut into as many rows as there are ranks, instead of each of its pieces."""
    name = "blocks.0.attention.qkv.weight"
    local_of(model.get_parameter(name)).copy_(whole[name].chunk(dist.get_world_size())[dist.get_rank()])


def stale(model: nn.Module, whole: Any) -> None:
    local_of(model.get_parameter("blocks.1.norm_1.weight")).add_(0.1 * dist.get_rank())


def same_masks(name: str) -> Callable[[nn.Module, Any], None]:
    """Each rank draws the mask of its tokens, or heads, as if they were all."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return drop(x, self.p, self.mesh, I)

    return lambda model, whole: over(model, name, forward=forward)


Q_NORM, GATE, V, QKV = "layers.1.attn.q_norm", "layers.0.ff.gate", "layers.0.attn.v", "blocks.0.attention.qkv"
DROP, HEADS_DROP, GRADIENT = "blocks.1.drop", "blocks.0.attention.drop", "parameter gradient"
WRONG = Plan({"blocks.*.attention.qkv": Column(KV_HEADS, KV_HEADS, HEADS)})
FAULTS = {
    "1 no f": Fault(no_f, "blocks.1.attention", "input gradient", "not summed", sequence_parallel=False),
    "1 no f, SP": Fault(gathers_to_i, "blocks.1.mlp", "input gradient", "f, which sums"),
    "2 doubled g": Fault(doubled_g, "blocks.0.mlp.down", "output", "2 times", sequence_parallel=False),
    "2 tripled g": Fault(doubled_g, "blocks.0.mlp.down", "output", "3 times", sequence_parallel=False, ranks=3),
    "2 no g": Fault(no_g, "blocks.1.attention.out", "output", "g is missing", sequence_parallel=False),
    "3 bias inside": Fault(bias_inside, "blocks.0.attention.out", "output", "bias counts 2 times"),
    "3 bias inside, 3": Fault(bias_inside, "blocks.0.attention.out", "output", "bias counts 3 times", ranks=3),
    "4 averaged": Fault(averaged, "blocks.1.norm_2", GRADIENT, "1/2 of the right one"),
    "5 q_norm": Fault(read_as_i(Q_NORM), Q_NORM, GRADIENT, "not summed", Own()),
    "6 router": Fault(read_as_i(GATE), GATE, GRADIENT, "not summed", Own(True)),
    "7 kv": Fault(kv_unsummed(V), V, GRADIENT, "not summed", Own(), 3),
    "7 kv, fused": Fault(kv_unsummed(QKV), QKV, GRADIENT, "not summed", Gpt(1)),
    "8 shifted mask": Fault(shifted_mask, "token", "output", "shifted"),
    "9 swapped": Fault(swapped, "blocks.1.mlp.gate_up", "parameter", "halves are swapped"),
    "10 fused order": Fault(cut_in_a_row, QKV, "parameter", "wrong order"),
    "10 declared order": Fault(nothing, "blocks.0.attention.out", "input", "pieces of a fused layer", plan=WRONG),
    "11 stale": Fault(stale, "blocks.1.norm_1", "replicas", "ranks [1] hold other values"),
    "12 same masks": Fault(same_masks(DROP), DROP, "dropout mask", "masks are equal", dropout=0.3),
    "12 same masks, heads": Fault(same_masks(HEADS_DROP), HEADS_DROP, "dropout mask", "masks are equal", dropout=0.3),
}


def judged(name: str, dtype: Any) -> Verdict:
    fault = FAULTS[name]
    settings = Settings(fault.ranks, fault.sequence_parallel, dtype, fault.dropout)
    meshes = Meshes(mesh(), mesh((fault.ranks, 1), ("all", "one"))["one"], mesh())
    plan = own_plan(fault.source.experts) if isinstance(fault.source, Own) else None
    return judge_trial(Trial(fault.source, settings, meshes, fault.split, plan))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_name_and_by_cause(ranks: Any, name: str) -> None:
    fault = FAULTS[name]
    for verdict in ranks(fault.ranks).run(judged, name, "float64"):
        found = verdict.first_divergence
        assert not verdict.ok and found is not None
        assert (found.module, found.where) == (fault.module, fault.where), found
        assert fault.says in found.cause and found.rel_error > 1e-6, found


@pytest.mark.parametrize("name", ["1 no f", "3 bias inside", "9 swapped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_is_found_in_a_shorter_dtype(ranks: Any, name: str, dtype: str) -> None:
    fault, verdict = FAULTS[name], ranks(2).run(judged, name, dtype)[0]
    found = verdict.first_divergence
    assert not verdict.ok and (found.module, found.where) == (fault.module, fault.where), found


def searched(source: Any, sequence_parallel: bool, dropout: float, fault: str | None, budget: int) -> Any:
    meshes = Meshes(mesh(), mesh((dist.get_world_size(), 1), ("all", "one"))["one"], mesh())
    settings = Settings(dist.get_world_size(), sequence_parallel, dropout=dropout)
    split = colrow.parallelize if fault is None else FAULTS[fault].split
    return first_divergence(Trial(source, settings, meshes, split), [], budget)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "bert", "t5", "deepseek_v3"])
def test_control_where_nothing_is_planted_nothing_is_found(ranks: Any, name: str, sequence_parallel: bool) -> None:
    assert ranks(3).run(searched, Tiny(name), sequence_parallel, 0.2, None, 1 << 30) == [None] * 3


def test_little_memory_takes_more_steps_and_finds_the_same(ranks: Any) -> None:
    once, often = (ranks(2).run(searched, Gpt(), True, 0.0, "3 bias inside", n) for n in (1 << 30, 20_000))
    assert once == often and once[0].module == FAULTS["3 bias inside"].module
