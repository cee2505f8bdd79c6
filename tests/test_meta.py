"""A model built on meta starts from the weights that it would have had in memory, at any degree, shard by shard."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import colrow
from colrow import PlanError
from colrow.params import local_of
from own import LLAMA, OwnModel, gpt, ids, own_plan
from pool import mesh

LIMIT = 30.0
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "untied": {"tied": False},
    "odd": {"heads": 5, "width": 40, "kv_heads": 1, "ffn": 71, "vocab": 61, "gated": True},
}


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return gpt(**options)


def whole_from_meta(case: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed + 1000 * dist.get_rank())  # the first rank's draws count
    model = on_meta(**OPTIONS[case])
    colrow.parallelize(model, mesh())
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert not value.is_meta, f"{name} is still on meta"
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert (model.head.weight is model.token.weight) == OPTIONS[case].get("tied", True)
    assert colrow.replica_drift(model) == {}
    logits = model(ids(vocab=61)).detach()
    return colrow.full_state_dict(model) | dict(model.named_buffers()) | {"logits": logits}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_INIT_2_TIE_4_weights_from_meta_are_those_of_memory(ranks: Any, size: int, case: str) -> None:
    torch.manual_seed(7)
    reference = gpt(**OPTIONS[case])
    want = reference.state_dict() | dict(reference.named_buffers())
    with torch.no_grad():
        logits = reference(ids(vocab=61))
    for got in ranks(size).run(whole_from_meta, case, 7, timeout=LIMIT):
        assert torch.allclose(got.pop("logits"), logits, rtol=0, atol=1e-6)  # fp32, logits of size 1: order of sums
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(got[name], value), name


def test_INIT_2_another_seed_gives_other_weights(ranks: Any) -> None:
    one, other = (ranks(2).run(whole_from_meta, "gpt2", seed, timeout=LIMIT)[0] for seed in (7, 8))
    assert not torch.equal(one["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


def buffers_from_meta(how: str) -> dict[str, Any]:
    options = LLAMA | {"layers": 1}
    if how == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
    model = on_meta(**options)
    if how == "parameters":
        for param in model.parameters():
            param.data = param.data.to(torch.bfloat16)
    torch.set_default_dtype(torch.float32)
    model.blocks[0].attention.rotary.inverse.requires_grad_(False)
    colrow.parallelize(model, mesh())
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    y = model(ids())
    assert torch.isfinite(y).all()
    return {"inverse": model.blocks[0].attention.rotary.inverse, "y": y.dtype}


@pytest.mark.parametrize(("how", "dtype"), [("parameters", torch.float32), ("default dtype", torch.bfloat16)])
def test_MEM_3_buffers_are_right_and_keep_their_own_dtype(ranks: Any, how: str, dtype: torch.dtype) -> None:
    """A bf16 model whose rotary frequencies were left in fp32 keeps them so; nothing is left uninitialised."""
    want = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    for got in ranks(2).run(buffers_from_meta, how, timeout=LIMIT):
        assert got["inverse"].dtype == dtype
        assert got["inverse"][0] == 1.0
        assert torch.equal(got["inverse"], want.to(dtype))
        assert got["y"] == torch.bfloat16


class Live(TorchDispatchMode):
    """Follows the bytes of the tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t._local_tensor if isinstance(t, DTensor) else t for t in tree_iter(out) if isinstance(t, Tensor)]
        self.made = [ref for ref in self.made if ref() is not None] + [weakref.ref(t) for t in made if not t.is_meta]
        alive = [t for ref in self.made if (t := ref()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        self.peak = max(self.peak, sum(storages.values()))
        return out


@contextmanager
def live() -> Iterator[Live]:
    with Live() as mode:
        yield mode


def peak_of(meta: bool) -> tuple[int, int, int, int]:
    options = {"layers": 10, "vocab": 96, "ffn": 128}
    colrow.use_transport(mesh(), "torch")  # shared memory is no tensor of the model
    with live() as mode:
        model = on_meta(**options) if meta else gpt(**options)
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        colrow.parallelize(model, mesh())
    colrow.use_transport(mesh(), "auto")
    shards = sum(local_of(p).numel() * 4 for p in model.parameters())
    return mode.peak, shards, max(sizes), sum(sizes)


def test_only_one_module_is_whole_at_a_time(ranks: Any) -> None:
    peak, shards, largest, whole = ranks(4).run(peak_of, True, timeout=LIMIT)[1]
    # beside the shards: one whole weight, and what its fingerprint needs, five times as much (32 MiB each at most)
    assert shards < peak <= shards + 6.1 * largest
    assert peak < 0.5 * whole
    control = ranks(4).run(peak_of, False, timeout=LIMIT)[1][0]
    assert control > whole  # in memory the whole model is there, and this count sees it


def flags_on_meta() -> set[str]:
    model = on_meta(**LLAMA)
    model.requires_grad_(False)
    model.blocks[0].norm_1.weight.requires_grad_(True)
    colrow.parallelize(model, mesh())
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_frozen_parameters_stay_frozen(ranks: Any) -> None:
    assert ranks(2).run(flags_on_meta, timeout=LIMIT) == [{"blocks.0.norm_1.weight"}] * 2


def without_reset() -> str:
    with torch.device("meta"):
        model = OwnModel()
    kinds = [type(module) for module in model.modules()]
    params = [id(param) for param in model.parameters()]
    try:
        colrow.parallelize(model, mesh(), own_plan())
    except PlanError as error:
        assert [type(module) for module in model.modules()] == kinds
        assert [id(param) for param in model.parameters()] == params
        assert all((error.where, error.given, error.allowed, error.fix))
        return str(error)
    return "no error"


def test_a_module_without_reset_parameters_is_named(ranks: Any) -> None:
    (message,) = set(ranks(2).run(without_reset, timeout=LIMIT))
    assert "OwnModel has values on meta and no reset_parameters()" in message


def partly_on_meta() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Blocks on meta, the rest in memory: what is there is kept, what is not is drawn."""
    torch.manual_seed(3)
    model = on_meta(tied=False)
    memory = gpt(tied=False)
    model.token, model.head = copy.deepcopy(memory.token), copy.deepcopy(memory.head)
    colrow.parallelize(model, mesh())
    whole = colrow.full_state_dict(model)
    assert all(torch.isfinite(value).all() for value in whole.values())
    return whole, memory.state_dict()


def test_a_model_that_is_partly_on_meta(ranks: Any) -> None:
    every = ranks(2).run(partly_on_meta, timeout=LIMIT)
    for whole, memory in every:
        assert torch.equal(whole["token.weight"], memory["token.weight"])
        assert torch.equal(whole["head.weight"], memory["head.weight"])
        up = whole["blocks.0.mlp.up.weight"]
        assert 0.5 < float(up.std()) * 32**0.5 * 3**0.5 < 2  # nn.Linear draws uniformly from +-1/sqrt(in)
        assert torch.equal(up, every[0][0]["blocks.0.mlp.up.weight"])


def own_module_on_meta() -> None:
    """A user's module with `reset_parameters` under a plan, and a tensor shared with an earlier module."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8))
            self.register_buffer("offset", torch.empty(8))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight)
            nn.init.constant_(self.get_buffer("offset"), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.get_buffer("offset")

    def build() -> nn.Sequential:
        return nn.Sequential(Scale(), nn.Linear(8, 11), nn.GELU(), nn.Linear(11, 8), Scale())

    plan = colrow.Plan({"[04]": colrow.Replicated(), "1": colrow.Column(), "3": colrow.Row()})
    torch.manual_seed(5)
    want = build()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = build()
    colrow.parallelize(model, mesh(), plan)
    got = colrow.full_state_dict(model)
    for name, value in want.state_dict().items():
        assert torch.equal(got[name], value), name
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), want(x), rtol=1e-5, atol=1e-6)  # fp32: another order of eleven terms


def test_a_users_modules_on_meta(ranks: Any) -> None:
    ranks(3).run(own_module_on_meta, timeout=LIMIT)
