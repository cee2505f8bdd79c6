"""Hugging Face's other classes of each family, what they give beside logits, checkpointing, and fused experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import colrow
from colrow.models.tiny import FAMILIES, batch, tiny
from hf import MANY, ODD
from oracle import FP32, check_grads, relative
from pool import mesh
from test_hf import DECODER, Case, exact, named, whole

AUTO = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""transformers' Auto classes, and the tables that say which families have them."""
TWO: dict[str, Any] = {"next_sentence_label": torch.tensor([0, 1])}
ASKED: dict[str, Any] = {"start_positions": torch.tensor([3, 5]), "end_positions": torch.tensor([7, 5])}


def labels(*shape: int, below: int = 61) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(4))


MORE: dict[str, list[Case]] = {
    "llama": [Case("llama", "with a loss", ODD, "AutoModelForQuestionAnswering", given=ASKED)],
    "gpt2": [
        Case("gpt2", "two heads", {}, "GPT2DoubleHeadsModel", given={"mc_token_ids": torch.tensor([12, 9])}),
    ],
    "bert": [
        Case("bert", "two losses", {}, "BertForPreTraining", given=TWO | {"labels": labels(2, 13)}),
        Case("bert", "untied", ODD | {"tie_word_embeddings": False}, "BertForPreTraining"),
        Case("bert", "a decoder", DECODER, "BertLMHeadModel"),
        Case("bert", "pairs", {}, "BertForNextSentencePrediction", given={"labels": labels(2, below=2)}),
        Case("bert", "with a loss", {}, "AutoModelForQuestionAnswering", given=ASKED),
    ],
    "t5": [
        Case("t5", "an encoder", ODD, "T5EncoderModel"),
        Case("t5", "with a loss", {}, "AutoModelForQuestionAnswering", given=ASKED),
    ],
    "vit": [
        Case(
            "vit", "masked", {}, "ViTForMaskedImageModeling", given={"bool_masked_pos": labels(2, 196, below=2).bool()}
        ),
    ],
}
"""Classes that no Auto class names, and losses that need labels of their own."""


def test_no_class_of_a_family_is_left_out() -> None:
    from transformers.models.auto import modeling_auto

    for family, known in FAMILIES.items():
        there = {auto for auto, table in AUTO.items() if family in getattr(modeling_auto, table)}
        assert set(known.kinds) == there, family


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_classes_of_a_family(ranks: Any, size: int, family: str) -> None:
    todo = [Case(family, "small", {}, kind) for kind in FAMILIES[family].kinds]
    ranks(size).run(exact, todo + MORE.get(family, []), timeout=200)


# -- what stands beside the logits -------------------------------------------------------------------------------------

EAGER: dict[str, Any] = {"attn_implementation": "eager"}
BESIDE: dict[str, Any] = {"output_attentions": True, "output_hidden_states": True}


def gives(family: str) -> int:
    """How many attention probabilities and hidden states the whole model gives."""
    model = tiny(family, **EAGER)
    out = model(**batch(model), **BESIDE)
    return sum(len(value) for name, value in out.items() if name.endswith(("attentions", "hidden_states")))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_probabilities_and_hidden_states_are_whole_and_take_gradients(ranks: Any, size: int, family: str) -> None:
    """Of all heads, also where ranks share key/value heads or have heads that are padding; all are read."""
    assert gives(family) == (12 if family == "t5" else 5), "of two layers: two and three; T5's decoder looks across"
    kind = "AutoModel" if family == "t5" else None  # without labels it asks for the decoder's tokens, as they are there
    todo = [Case(family, "outputs", sizes | EAGER, kind, given=BESIDE, labels=False) for sizes in ({}, ODD, MANY)]
    todo.append(Case(family, "a tuple", EAGER, given=BESIDE | {"return_dict": False}))
    ranks(size).run(exact, todo, timeout=200)


# -- checkpointing -----------------------------------------------------------------------------------------------------


def recomputed(family: str, tolerance: float) -> None:
    """The plain calls are held to the oracle elsewhere; these must give the same gradients as they."""
    model = tiny(family).double()
    given: dict[str, Any] = batch(model)
    given.pop("attention_mask", None)  # its lowest double is -inf in fp32, and a padded row would be no number
    for sequence_parallel in (True, False):
        split: Any = colrow.parallelize(copy.deepcopy(model), mesh(), sequence_parallel=sequence_parallel).train()
        found = []
        for kind in (None, False, True):
            with named(f"{family}, use_reentrant={kind}, {sequence_parallel=}"):
                if kind is not None:
                    split.gradient_checkpointing_enable({"use_reentrant": kind})
                    assert split.is_gradient_checkpointing
                split.zero_grad()
                split(**given).loss.backward()
                found.append(colrow.full_grads(split))
                errors = {name: relative(found[-1][name], grad) for name, grad in found[0].items()}
                different = {name: error for name, error in errors.items() if not error <= tolerance}
                assert found[0].keys() == found[-1].keys() and not different, different


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "tolerance"), [(2, 0.0), (3, 1e-12)])
def test_AC_1_recomputing_gives_the_same_gradients(ranks: Any, size: int, tolerance: float, family: str) -> None:
    """Two ranks: the same bits. On three, the terms of norms' gradients are summed in another order: reentrant
    recomputation ends a backward pass for each block, which sums that block's alone, and the order of a sum depends on
    the size of the bucket. T5 lets its zero bias take a gradient where it recomputes, and attention then takes another
    path: the whole model has other bits too.
    """
    ranks(size).run(recomputed, family, 1e-12 if family == "t5" else tolerance, timeout=200)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(family: str, implementation: str) -> None:
    sizes = {"intermediate_size": 24, "moe_intermediate_size": 24, "experts_implementation": implementation}
    for sequence_parallel in (True, False):
        with named(f"{sequence_parallel=}"):
            reference: Any = tiny(family, **sizes)
            split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
            given = batch(reference)
            want, got = reference(**given), split(**given)
            want.loss.backward()
            got.loss.backward()
            assert relative(whole(got.logits), want.logits) <= FP32
            check_grads(split, reference, FP32)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_experts_in_fp32_by_either_implementation(ranks: Any, size: int, family: str, implementation: str) -> None:
    """24 features fall to 2, 3 and 4 ranks in slices of 16, 8 and 8: the fused kernel wants rows of 16 bytes."""
    ranks(size).run(experts, family, implementation)
