"""Hugging Face models as they are equal themselves in one process, at any degree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import colrow
from hf import MANY, ODD, KeepDouble, tiny
from oracle import check_grads, cotangent, randomize, relative
from pool import mesh

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox"]
SIZES: dict[str, dict[str, Any]] = {"small": {}, "odd": ODD, "many": MANY}
HF64 = 1e-9
"""In double throughout, rounding is near 1e-15; a lost or doubled term is of order 1."""
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def both(family: str, kind: str = "AutoModelForCausalLM", sequence_parallel: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    reference = randomize(tiny(family, kind, **changes)).double()
    return reference, colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)


def batch(vocab: int = 60) -> dict[str, Tensor]:
    """Two rows of 13 tokens, the first padded on the left."""
    ids = torch.randint(vocab, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def language_model(family: str, sizes: str, sequence_parallel: bool) -> None:
    reference, split = both(family, sequence_parallel=sequence_parallel, **SIZES[sizes])
    given = batch()
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    with KeepDouble():
        want, got = reference(**given), split(**given)
        want.loss.backward()
        got.loss.backward()
    assert isinstance(got.logits, DTensor), "beside a loss the logits are not gathered"
    assert relative(got.loss, want.loss) <= HF64
    assert relative(whole(got.logits), want.logits) <= HF64
    check_grads(split, reference, HF64)


@BOTH
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_language_model(ranks: Any, size: int, family: str, sizes: str, sequence_parallel: bool) -> None:
    ranks(size).run(language_model, family, sizes, sequence_parallel, timeout=60)


def other_heads(kind: str, sequence_parallel: bool) -> None:
    options = {"pad_token_id": 0} | ({} if kind == "AutoModel" else {"num_labels": 3})
    reference, split = both("llama", kind, sequence_parallel, **options)
    with KeepDouble():
        want, got = reference.eval()(**batch()), split.eval()(**batch())  # the classifier has dropout
        outputs = [out[0] for out in (want, got)]  # the last hidden state, or the logits of the classifier
        for y in outputs:
            y.backward(cotangent(y))
    assert relative(outputs[1], outputs[0]) <= HF64
    check_grads(split, reference, HF64)


@BOTH
@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_other_classes_of_a_family(ranks: Any, kind: str, sequence_parallel: bool) -> None:
    ranks(2).run(other_heads, kind, sequence_parallel, timeout=60)


def usual_calls(sequence_parallel: bool) -> None:
    reference, split = both("llama", sequence_parallel=sequence_parallel)
    ids, mask = batch().values()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    embeds = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask.flip(1)},
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        {"input_ids": ids, "logits_to_keep": 2},
        {"input_ids": ids[:1, :1]},
        {"inputs_embeds": embeds},
        {"input_ids": ids, "output_hidden_states": True},
    ]
    for given in calls:
        with KeepDouble():
            want, got = reference(**given), split(**given)
        assert not isinstance(got.logits, DTensor), "without a loss the logits are whole"
        assert relative(got.logits, want.logits) <= HF64, given.keys()
        for place, (mine, theirs) in enumerate(zip(got.hidden_states or (), want.hidden_states or (), strict=True)):
            assert relative(mine, theirs) <= HF64, f"hidden state {place}"


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_the_usual_call_stays_the_usual_call(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(usual_calls, sequence_parallel, timeout=60)


def gradients_of_inputs(sequence_parallel: bool) -> None:
    reference, split = both("llama", sequence_parallel=sequence_parallel)
    found = []
    for model in (reference, split):
        embeds = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        embeds.requires_grad_()
        with KeepDouble():
            out = model(inputs_embeds=embeds, output_hidden_states=True)
            y = torch.cat([out.logits, *out.hidden_states], -1)  # every hidden state is read
            y.backward(cotangent(y))
        found.append(embeds.grad)
    assert relative(found[1], found[0]) <= HF64
    check_grads(split, reference, HF64)


@BOTH
def test_inputs_embeds_and_hidden_states_have_their_gradients(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(gradients_of_inputs, sequence_parallel, timeout=60)


def checkpointed(reentrant: bool, sequence_parallel: bool) -> None:
    """The plain calls are held to the oracle above; these must give the same bits."""
    _, split = both("llama", sequence_parallel=sequence_parallel)
    found = []
    for recompute in (False, True):
        if recompute:
            split.gradient_checkpointing_enable({"use_reentrant": reentrant})
            split.enable_input_require_grads()
        split.train()
        split.zero_grad()
        split(**batch(), labels=batch()["input_ids"]).loss.backward()
        found.append(colrow.full_grads(split))
    assert split.is_gradient_checkpointing
    different = [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]
    assert not different, different


@BOTH
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_AC_1_gradient_checkpointing_enable(ranks: Any, reentrant: bool, sequence_parallel: bool) -> None:
    ranks(2).run(checkpointed, reentrant, sequence_parallel, timeout=60)


def head_norms_after_two_micro_batches(sequence_parallel: bool) -> None:
    reference, split = both("qwen3", sequence_parallel=sequence_parallel)
    for shift in (0, 1):
        ids = batch()["input_ids"].roll(shift, 1)
        for model in (reference, split):
            with KeepDouble():
                model(input_ids=ids, labels=ids).loss.backward()
    check_grads(split, reference, HF64)


@BOTH
def test_NORM_4_norms_on_heads_over_two_micro_batches(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(head_norms_after_two_micro_batches, sequence_parallel, timeout=60)


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return (input @ self.weight.t()).tanh()


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(OwnForward(8, 16), nn.Linear(16, 8))
    with pytest.raises(colrow.PlanError, match="OwnForward has a forward of its own"):
        colrow.resolve(model, colrow.Plan({"0": colrow.Column(), "1": colrow.Row()}), 2)
