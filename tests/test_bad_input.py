"""What cannot be split, or is not split yet, is one error with four clauses on every rank, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colrow
from colrow import HEADS, ColrowError, Column, Plan, Replicated, checkpoint
from hf import tiny
from pool import mesh


class Packed(torch.Tensor):
    """A stand-in for the tensor subclasses of quantisation libraries."""


class Int8Params(nn.Parameter):
    """A stand-in for a library's class of parameters."""


def with_weight(make: Callable[[torch.Tensor], nn.Parameter]) -> nn.Module:
    model: Any = tiny("llama")
    down = model.model.layers[1].mlp.down_proj
    down.weight = make(down.weight.detach())
    return model


def quantised() -> nn.Module:
    model: Any = tiny("llama")
    model.hf_quantizer = SimpleNamespace()
    return model


def offloaded(part: str, hook: bool) -> nn.Module:
    model: Any = tiny("llama")
    at = model.get_submodule(part).to("meta")
    if hook:
        at._hf_hook = SimpleNamespace()
    return model


def two_dtypes() -> nn.Module:
    model: Any = tiny("gpt2")
    model.transformer.h[1].mlp.c_fc.bias.data = model.transformer.h[1].mlp.c_fc.bias.data.double()
    return model


def twice() -> nn.Module:
    return colrow.parallelize(tiny("llama"), mesh())


def tied_llama() -> nn.Module:
    return tiny("llama", tie_word_embeddings=True)


DOWN = "model.layers.1.mlp.down_proj.weight"
CASES: dict[str, tuple[Callable[[], nn.Module], Plan | None, list[str]]] = {
    "twice": (twice, None, ["the model is split already"]),
    "an unknown fused layout": (
        lambda: tiny("gpt2"),
        Plan({"transformer.h.*.attn.c_attn": Column(HEADS)}),
        ["transformer.h.0.attn.c_attn", "for a dimension of 96", "made of 32"],
    ),
    "pieces that do not fit": (
        lambda: tiny("phi3"),
        Plan({"model.layers.*.self_attn.qkv_proj": Column(HEADS, HEADS, HEADS)}),
        ["model.layers.0.self_attn.qkv_proj", "for a dimension of 64", "made of 32 + 32 + 32"],
    ),
    "a tied head left whole": (
        lambda: tiny("gpt2"),
        Plan({"lm_head": Replicated()}),
        ["lm_head.weight", "transformer.wte.weight"],
    ),
    "a tied embedding left whole": (
        tied_llama,
        Plan({"model.embed_tokens": Replicated()}),
        ["lm_head.weight", "model.embed_tokens.weight"],
    ),
    "int8": (lambda: with_weight(lambda w: nn.Parameter(w.to(torch.int8), False)), None, [DOWN, "int8", "equantise"]),
    "uint8": (lambda: with_weight(lambda w: nn.Parameter(w.to(torch.uint8), False)), None, [DOWN, "uint8"]),
    "fp8": (lambda: with_weight(lambda w: nn.Parameter(w.to(torch.float8_e4m3fn))), None, [DOWN, "float8_e4m3fn"]),
    "a tensor subclass": (lambda: with_weight(lambda w: nn.Parameter(w.as_subclass(Packed))), None, [DOWN, "Packed"]),
    "a class of parameters": (lambda: with_weight(Int8Params), None, [DOWN, "Int8Params", "float32"]),
    "a quantised model": (quantised, None, ["LlamaForCausalLM", "quantised", "dequantize()"]),
    "partly on meta": (
        lambda: offloaded("model.layers.1", hook=False),
        None,
        ["model.layers.1.input_layernorm.weight", "on meta", "model.embed_tokens.weight", "on cpu"],
    ),
    "offloaded": (lambda: offloaded("model.layers.1.mlp.up_proj", hook=True), None, ["up_proj.weight", "on meta"]),
    "two dtypes": (two_dtypes, None, ["transformer.h.1.mlp.c_fc", "float32", "float64"]),
}


def error_of(action: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        action(*args, **kwargs)
    except ColrowError as error:
        assert all((error.where, error.given, error.allowed, error.fix)), f"a clause is missing: {error}"
        return type(error).__name__, str(error)
    return "no error", ""


def refused(case: str) -> tuple[str, str]:
    build, plan, _ = CASES[case]
    torch.manual_seed(0)
    model = build()
    kinds = [type(module) for module in model.modules()]
    params = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = error_of(colrow.parallelize, model, mesh(), plan)
    assert [type(module) for module in model.modules()] == kinds
    assert all(params[name] is param for name, param in model.named_parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.is_meta or torch.equal(torch.Tensor(value), torch.Tensor(before[name])), name
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_split(ranks: Any, case: str) -> None:
    ((kind, text),) = set(ranks(2).run(refused, case))
    assert kind == "PlanError"
    for word in CASES[case][2]:
        assert word in text


def of_another_kind(what: str) -> tuple[str, str]:
    model: Any = tiny("llama", num_hidden_layers=1)
    norm = model.model.layers[0].input_layernorm
    if dist.get_rank() == 1:
        norm.requires_grad_(False) if what == "frozen" else norm.to(torch.float16 if what == "half" else "meta")
    if what == "half" and dist.get_rank() == 0:
        norm.bfloat16()  # as many bytes, another meaning
    found = error_of(colrow.parallelize, model, mesh())
    assert not any(hasattr(module, "splits") for module in model.modules())
    return found


@pytest.mark.parametrize("what", ["frozen", "half"])
def test_parameters_of_other_kinds_on_the_ranks(ranks: Any, what: str) -> None:
    ((kind, text),) = set(ranks(2).run(of_another_kind, what))
    assert kind == "RankError"
    assert "model.layers.0.input_layernorm.weight: it is of another kind on ranks " in text


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "colrow.full_state_dict": colrow.full_state_dict,
    "colrow.full_grads": colrow.full_grads,
    "colrow.clip_grad_norm_": lambda model: colrow.clip_grad_norm_(model, 1.0),
    "colrow.replica_drift": colrow.replica_drift,
    "colrow.sync_replicas": colrow.sync_replicas,
    "colrow.checkpoint.save": lambda model: checkpoint.save("nowhere", model, None, {"step": 1}),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_that_is_not_split_yet(verb: str) -> None:
    kind, text = error_of(VERBS[verb], tiny("gpt2"))
    assert kind == "PlanError"
    assert text.startswith(f"{verb}: GPT2LMHeadModel is not split yet")


TYPES = {"token_type_ids": torch.zeros(1, 2, dtype=torch.long)}
CALLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gpt2": (
        "gpt2",
        {"input_ids": torch.zeros(1, 70, dtype=torch.long)},
        ["transformer.wpe: indices 0 to 69", "0 to 63"],
    ),
    "gpt2, given": (
        "gpt2",
        {"input_ids": torch.zeros(1, 2, dtype=torch.long), "position_ids": torch.tensor([[-1, 5]])},
        ["transformer.wpe: indices -1 to 5", "0 to 63"],
    ),
    "opt": (
        "opt",
        {"input_ids": torch.ones(1, 70, dtype=torch.long)},
        ["embed_positions: indices 0 to 69", "-2 to 63"],
    ),
    "bert": (
        "bert",
        {name: torch.tensor([[0, 64 * i]]) for i, name in enumerate(("input_ids", "position_ids"))} | TYPES,
        ["bert.embeddings.position_embeddings: indices 0 to 64", "0 to 63"],
    ),
    "a token": (
        "llama",
        {"input_ids": torch.tensor([[1, 61]])},
        ["model.embed_tokens: token id 61 at (0, 1)", "0 to 60"],
    ),
}


def called(case: str) -> tuple[str, str]:
    family, given, _ = CALLS[case]
    model = colrow.parallelize(tiny(family), mesh())
    return error_of(model, **given)


@pytest.mark.parametrize("case", CALLS)
def test_an_index_past_a_table_names_the_module(ranks: Any, case: str) -> None:
    ((kind, text),) = set(ranks(2).run(called, case))
    assert kind == "ShapeError"
    for word in CALLS[case][2]:
        assert word in text
