"""The ways in which Hugging Face models are called: masks, positions, outputs, modes, one call after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colrow
from colrow.models.tiny import batch
from hf import KeepDouble, tiny
from oracle import check_grads, cotangent, relative
from pool import mesh
from test_hf import BOTH, HF64, both, flat, whole

LENGTH = 13


def tokens(rows: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(seed))


# -- masks and positions -----------------------------------------------------------------------------------------------


def causal(bool_mask: bool, heads: int = 1) -> Tensor:
    """A mask (batch, heads or 1, queries, keys): causal, and each row (and head) has its own window."""
    place = torch.arange(LENGTH)
    distance = place[:, None] - place[None]
    windows = torch.arange(2, 2 + 2 * heads).view(2, heads, 1, 1)
    seen = (distance >= 0) & (distance < windows)
    return seen if bool_mask else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)


def padded(left: bool) -> Tensor:
    return (tokens().new_tensor([[3], [0]]) <= torch.arange(LENGTH)).long().flip(0 if left else (0, 1)).flip(0)


PACKED = torch.cat([torch.arange(5), torch.arange(8)]).repeat(2, 1)
"""Two sequences in each row: transformers finds them where positions start again, with no mask and no cache."""
MASKS: dict[str, dict[str, Any]] = {
    "packed": {"position_ids": PACKED, "use_cache": False},
    "packed, one row": {"position_ids": torch.stack([PACKED[0], torch.arange(LENGTH)]), "use_cache": False},
    "a mask of four dimensions": {"attention_mask": causal(False)},
    "a bool mask of four dimensions": {"attention_mask": causal(True)},
    "a mask for each head": {"attention_mask": causal(False, heads=4)},
    "left padding": {"attention_mask": padded(left=True)},
    "right padding": {"attention_mask": padded(left=False)},
    "positions": {"position_ids": torch.arange(LENGTH).add(7).expand(2, LENGTH)},
    "positions of one row": {"position_ids": torch.arange(LENGTH)[None]},
}


def with_masks(family: str, attention: str) -> None:
    for sequence_parallel in (True, False):
        reference, split = both(family, sequence_parallel=sequence_parallel, attn_implementation=attention)
        plain = reference(tokens()).logits
        for name, given in MASKS.items():
            reference.zero_grad()
            split.zero_grad()
            with KeepDouble():
                want, got = (model(input_ids=tokens(), **given).logits for model in (reference, split))
                want.backward(cotangent(want))
                got.backward(cotangent(got))
            assert relative(plain, want) > 1e-3 or name.startswith("positions"), f"{name}: it does nothing"
            assert relative(got, want) <= HF64, f"{name}: {relative(got, want):.2g}"
            check_grads(split, reference, HF64)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (3, "qwen3"), (2, "gpt2")])
def test_masks_and_positions(ranks: Any, size: int, family: str, attention: str) -> None:
    ranks(size).run(with_masks, family, attention)


def packed_is_apart() -> None:
    _, split = both("llama")
    with KeepDouble():
        together = split(input_ids=tokens(), **MASKS["packed"]).logits
        apart = torch.cat([split(input_ids=tokens()[:, :5]).logits, split(input_ids=tokens()[:, 5:]).logits], 1)
    assert relative(together, apart) <= HF64


def test_packed_sequences_do_not_see_each_other(ranks: Any) -> None:
    ranks(2).run(packed_is_apart)


# -- outputs -----------------------------------------------------------------------------------------------------------

OUTPUTS: dict[str, dict[str, Any]] = {
    "a tuple": {"return_dict": False},
    "a tuple with hidden states": {"return_dict": False, "output_hidden_states": True},
    "hidden states": {"output_hidden_states": True},
    "probabilities": {"output_attentions": True, "output_hidden_states": True},
}


def outputs(family: str) -> None:
    for sequence_parallel in (True, False):
        reference, split = both(family, sequence_parallel=sequence_parallel, attn_implementation="eager")
        for name, options in OUTPUTS.items():
            reference.zero_grad()
            split.zero_grad()
            given = {"input_ids": tokens(), "use_cache": False} | options
            with KeepDouble():
                want, got = flat(reference(**given)), flat(split(**given))
                assert len(want) == len(got)
                for mine, theirs in zip(got, want, strict=True):
                    assert type(mine) is Tensor, f"{name}: {type(mine)}"
                    assert relative(mine, theirs) <= HF64, name
                for ys in (want, got):
                    torch.autograd.backward(ys, [cotangent(y) for y in ys])
            check_grads(split, reference, HF64)


@pytest.mark.parametrize(("size", "family"), [(2, "llama"), (3, "llama"), (2, "gpt2"), (3, "gpt2")])
def test_outputs_of_every_form_are_whole(ranks: Any, size: int, family: str) -> None:
    ranks(size).run(outputs, family)


# -- one call after another --------------------------------------------------------------------------------------------


def later(sequence_parallel: bool) -> None:
    """Forward passes of four sizes, then their backward passes in another order."""
    reference, split = both("gpt2", sequence_parallel=sequence_parallel)
    sizes = [(2, 13), (1, 5), (3, 1), (2, 8)]
    with KeepDouble():
        for model in (reference, split):
            losses = [model(tokens(*size)).logits for size in sizes]
            for place in (2, 0, 3, 1):
                losses[place].backward(cotangent(losses[place]))
    check_grads(split, reference, HF64)


def interleaved(sequence_parallel: bool) -> None:
    """Two split models, of two families and sizes: one's passes between the other's."""
    pairs = [both("llama", sequence_parallel=sequence_parallel), both("gpt2", sequence_parallel=sequence_parallel)]
    with KeepDouble():
        for place in (0, 1):  # the references, then the split models
            one, two = pairs[0][place], pairs[1][place]
            first, second = one(tokens()).logits, two(tokens(3, 7)).logits
            third = one(tokens(1, 4)).logits
            first.backward(cotangent(first))
            fourth = two(tokens(2, 2)).logits
            second.backward(cotangent(second))
            (third.square().sum() + fourth.square().sum()).backward()
    for reference, split in pairs:
        check_grads(split, reference, HF64)


def together(sequence_parallel: bool) -> None:
    """A model and its teacher in one forward pass and one backward pass."""
    pairs = [both(family, sequence_parallel=sequence_parallel) for family in ("qwen2", "phi3")]
    with KeepDouble():
        for place in (0, 1):
            student, teacher = (pair[place](tokens()).logits for pair in pairs)
            nn.functional.kl_div(student.log_softmax(-1), teacher.softmax(-1)).backward()
    for reference, split in pairs:
        check_grads(split, reference, HF64)


@BOTH
@pytest.mark.parametrize("how", [later, interleaved, together], ids=lambda how: how.__name__)
def test_calls_do_not_meet(ranks: Any, how: Callable[[bool], None], sequence_parallel: bool) -> None:
    ranks(2).run(how, sequence_parallel)


# -- modes -------------------------------------------------------------------------------------------------------------


def modes(sequence_parallel: bool) -> list[Tensor]:
    """eval, train, eval, train: losses, and the gradients of the two training steps."""
    torch.manual_seed(0)
    reference = tiny("gpt2", dropout=0.2).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    given, found = batch(reference), []
    with KeepDouble():
        want = reference.eval()(**given)
        for training in (False, True, False, True):
            split.train(training)
            torch.manual_seed(7)
            out = split(**given)
            found.append(out.loss.detach())
            if training:
                out.loss.backward()
            else:
                assert relative(whole(out.logits), want.logits) <= HF64
    assert found[1] == found[3]
    assert relative(found[1], want.loss) > 1e-3, "nothing was dropped"
    return [found[1], *colrow.full_grads(split).values()]


def test_train_and_eval_are_the_same_at_every_degree(ranks: Any) -> None:
    want = ranks(1).run(modes, False)[0]
    for size in (2, 4):
        for sequence_parallel in (True, False):
            got = ranks(size).run(modes, sequence_parallel)[0]
            assert max(relative(a, b) for a, b in zip(got, want, strict=True)) <= HF64


def recomputed(reentrant: bool, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = tiny("gpt2", dropout=0.2).double()
    given, found = batch(model), []
    split: Any = colrow.parallelize(model, mesh(), sequence_parallel=sequence_parallel).train()
    for recompute in (False, True):
        if recompute:
            split.gradient_checkpointing_enable({"use_reentrant": reentrant})
            split.enable_input_require_grads()
        torch.manual_seed(7)
        split.zero_grad()
        split(**given).loss.backward()
        found.append(colrow.full_grads(split) | {"generator": torch.get_rng_state()})
    different = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    assert not different, different


@BOTH
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_AC_1_recomputation_drops_the_same(ranks: Any, reentrant: bool, sequence_parallel: bool) -> None:
    """Gradients are bit-equal with and without, and so is the generator afterwards."""
    ranks(2).run(recomputed, reentrant, sequence_parallel)


# -- precisions --------------------------------------------------------------------------------------------------------


def mixed(family: str, sequence_parallel: bool) -> None:
    """bfloat16, with some modules in fp32: the same dtypes come out, and not much more is rounded."""
    truth = tiny(family)
    reference = copy.deepcopy(truth).bfloat16()
    for name, module in reference.named_modules():
        if (family == "gpt2" and isinstance(module, nn.LayerNorm)) or name.endswith("DenseReluDense.wo"):
            module.float()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    given = batch(truth)
    best, want, got = (model(**given) for model in (truth, reference, split))
    assert got.logits.dtype == want.logits.dtype
    assert relative(whole(got.logits), best.logits) <= 2 * relative(want.logits, best.logits)
    got.loss.backward()
    want.loss.backward()
    grads = colrow.full_grads(split)
    assert {name: grad.dtype for name, grad in grads.items()} == {
        name: param.grad.dtype for name, param in reference.named_parameters() if param.grad is not None
    }


@BOTH
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_some_modules_in_fp32_in_a_bfloat16_model(ranks: Any, family: str, sequence_parallel: bool) -> None:
    ranks(2).run(mixed, family, sequence_parallel)
