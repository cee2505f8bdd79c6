"""Every Hugging Face family, split at any degree, equals itself in one process: outputs and gradients, in double."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import colrow
from colrow.models import tiny as models
from colrow.models.tiny import ALIASES, FAMILIES, tiny
from hf import MANY, ODD, KeepDouble
from oracle import check_grads, cotangent, relative
from pool import mesh

HF64 = 1e-9
"""In double throughout, rounding is near 1e-15; a lost or doubled term is of order 1."""
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
DIVIDE: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 96,
    "vocab_size": 72,
    "moe_intermediate_size": 24,
}
"""Sizes that 2, 3 and 4 divide."""
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "falcon", "mixtral")
"""Families that may have fewer key/value heads than heads."""
FORMER: dict[str, Any] = {"new_decoder_architecture": False}
DECODER: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
VARIANTS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "llama": {"biases": ODD | {"attention_bias": True, "mlp_bias": True}, "smollm": dict(ALIASES["smollm"][1])},
    "phi3": {"a window": {"sliding_window": 8}},
    "gpt2": {"scaled by layer": ODD | {"scale_attn_by_inverse_layer_idx": True}},
    "gpt_neox": {"residuals in turn, no biases": ODD | {"use_parallel_residual": False, "attention_bias": False}},
    "opt": {"350m": ODD | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}},
    "bloom": {"residuals after norms": ODD | {"apply_residual_connection_post_layernorm": True}},
    "falcon": {
        "7b": FORMER,
        "7b, five heads": FORMER | ODD,
        "rw": FORMER | ODD | {"multi_query": False, "alibi": True, "parallel_attn": False},
        "11b": {"num_ln_in_parallel_attn": 1},
    },
    "t5": {"gated": ODD | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3}},
    "vit": {"no biases": ODD | {"qkv_bias": False}},
    "mixtral": {"auxiliary loss": ODD | {"output_router_logits": True}},
    "deepseek_v3": {"queries without a latent": ODD | {"q_lora_rank": None}},
}
"""Other members of a family, built of other parts."""


@dataclass(frozen=True)
class Case:
    """A model of a family, and what it is given: a part of the batch of 2 x 13 tokens, and other arguments.

    With `labels`, backward starts from the loss if the class has one; else from all outputs.
    """

    family: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    rows: int = 2
    columns: int = 13
    given: dict[str, Any] = field(default_factory=dict)
    labels: bool = True

    def batch(self, model: nn.Module) -> dict[str, Any]:
        found = {name: x[: self.rows] for name, x in models.batch(model).items() if self.labels or name != "labels"}
        return {name: x[:, : self.columns] if x.dim() == 2 else x for name, x in found.items()} | self.given


def cases(family: str) -> list[Case]:
    """All sizes and variants of a family. In the odd sizes weights are tied that usually are not, and the reverse."""
    tied = getattr(models.tiny_config(family), "tie_word_embeddings", True)
    found = [
        Case(family, "divide", DIVIDE, columns=12),
        Case(family, "odd, untied" if tied else "odd, tied", ODD | {"tie_word_embeddings": not tied}, rows=1),
        Case(family, "many heads", MANY),
    ]
    if family in GROUPED:
        found.append(Case(family, "one key/value head", ODD | {"num_key_value_heads": 1}))
    return found + [Case(family, name, changes) for name, changes in VARIANTS.get(family, {}).items()]


@contextmanager
def named(what: str) -> Iterator[None]:
    """Any error says in which case it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case: {what}")
        raise


def both(family: str, kind: str | None = None, sequence_parallel: bool = True, **changes: Any) -> tuple[Any, Any]:
    """A tiny model in double, whole and split."""
    reference = tiny(family, kind, **changes).double()
    return reference, colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)


def whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def flat(out: Any) -> list[Tensor]:
    """All tensors of an output, in order; what is kept for generation is no part of it."""
    if isinstance(out, Tensor):
        return [out]
    values = [v for k, v in out.items() if k != "past_key_values"] if isinstance(out, dict) else list(out)
    return [tensor for value in values if isinstance(value, Tensor | tuple) for tensor in flat(value)]


def step(model: Any, batch: Mapping[str, Any]) -> tuple[dict[Any, Any], dict[str, Tensor]]:
    """The outputs of a call and the gradients of its inputs. Backward starts from the loss, or else from all outputs,
    each with a random cotangent."""
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    with KeepDouble():
        returned = model(**given)
        out: dict[Any, Any] = dict(returned) if isinstance(returned, dict) else dict(enumerate(returned))
        ys = [out["loss"]] if "loss" in out else [y for y in flat(out) if y.requires_grad]
        torch.autograd.backward(ys, [cotangent(y) for y in ys])
    return out, {name: x.grad for name, x in leaves.items() if x.grad is not None}


def exact(todo: list[Case]) -> None:
    """All outputs and the gradients of all inputs and parameters, in both modes."""
    for case in todo:
        reference = tiny(case.family, case.kind, **case.changes).double()
        batch = case.batch(reference)
        want, wanted = step(reference, batch)
        for sequence_parallel in (True, False):
            with named(f"{case.family}, {case.kind}, {case.name}, {sequence_parallel=}, {case.changes}"):
                split = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
                got, found = step(split, batch)
                compare(got, want, "output")
                compare(found, wanted, "gradient of the input")
                check_grads(split, reference, HF64)


def compare(got: Mapping[Any, Any], want: Mapping[Any, Any], what: str) -> None:
    """Two sets of tensors, by name."""
    assert got.keys() == want.keys(), f"{what}: {list(got)}, wanted {list(want)}"
    for name in want:
        for mine, theirs in zip(flat((got[name],)), flat((want[name],)), strict=True):
            error = relative(whole(mine), theirs)
            assert error <= HF64, f"{what} {name}: relative error {error:.3g} > {HF64}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_family_in_all_sizes_and_variants(ranks: Any, size: int, family: str) -> None:
    ranks(size).run(exact, cases(family), timeout=200)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_decoder_with_cross_attention(ranks: Any, size: int) -> None:
    """What the encoder gives takes a gradient, to which every rank's heads add a term."""
    todo = []
    for sizes in (DIVIDE, ODD, MANY):
        states = torch.randn(
            2, 7, sizes["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        )
        given = {"encoder_hidden_states": states, "encoder_attention_mask": torch.arange(7).expand(2, 7).ge(2).long()}
        todo += [Case("bert", "cross", sizes | DECODER, kind, given=given) for kind in ("BertLMHeadModel", "AutoModel")]
    ranks(size).run(exact, todo, timeout=200)


def logits_stay_split(family: str) -> None:
    for sequence_parallel in (True, False):
        reference, split = both(family, sequence_parallel=sequence_parallel)
        given: dict[str, Any] = models.batch(reference)
        assert isinstance(split(**given).logits, DTensor), "beside a loss the logits are not gathered"
        given |= {"labels": None} | ({"decoder_input_ids": given["input_ids"]} if family == "t5" else {})
        assert type(split(**given).logits) is Tensor, "without a loss they are whole"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "vit"])
def test_logits_are_gathered_where_there_is_no_loss(ranks: Any, family: str) -> None:
    ranks(2).run(logits_stay_split, family)


def usual_calls(sequence_parallel: bool) -> None:
    reference, split = both("llama", sequence_parallel=sequence_parallel)
    given = models.batch(reference)
    ids, mask = given["input_ids"], given["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    embeds = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask.flip(1)},
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        {"input_ids": ids, "logits_to_keep": 2},
        {"input_ids": ids[:1, :1]},
        {"inputs_embeds": embeds},
    ]
    for given in calls:
        with named(f"{list(given)}"):
            compare(step(split, given)[0], step(reference, given)[0], "output")


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_the_usual_call_stays_the_usual_call(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(usual_calls, sequence_parallel)


def gradients_of_inputs(family: str) -> None:
    for sequence_parallel in (True, False):
        reference, split = both(family, sequence_parallel=sequence_parallel)
        embeds = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        given = {"inputs_embeds": embeds, "output_hidden_states": True}
        (want, wanted), (got, found) = step(reference, given), step(split, given)
        assert list(wanted) == ["inputs_embeds"]
        compare(got, want, "output")
        compare(found, wanted, "gradient of the input")
        check_grads(split, reference, HF64)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("vit", "t5")])
def test_inputs_embeds_have_their_gradients(ranks: Any, family: str) -> None:
    """And every hidden state is read."""
    ranks(2).run(gradients_of_inputs, family)


def head_norms_after_two_micro_batches(sequence_parallel: bool) -> None:
    reference, split = both("qwen3", sequence_parallel=sequence_parallel)
    for shift in (0, 1):
        ids = models.batch(reference)["input_ids"].roll(shift, 1)
        for model in (reference, split):
            with KeepDouble():
                model(input_ids=ids, labels=ids).loss.backward()
    check_grads(split, reference, HF64)


@BOTH
def test_NORM_4_norms_on_heads_over_two_micro_batches(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(head_norms_after_two_micro_batches, sequence_parallel)


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return (input @ self.weight.t()).tanh()


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(OwnForward(8, 16), nn.Linear(16, 8))
    with pytest.raises(colrow.PlanError, match="OwnForward has a forward of its own"):
        colrow.resolve(model, colrow.Plan({"0": colrow.Column(), "1": colrow.Row()}), 2)
