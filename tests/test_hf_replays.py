"""Public faults of tensor-parallel libraries that need a Hugging Face model, each named after its entry in the list.

Most are one statement: on this model, with these sizes, the split model equals one process. See also test_replays.py.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colrow
from colrow.models.tiny import batch
from colrow.params import local_of
from hf import KeepDouble, tiny
from oracle import check_grads, cotangent, relative
from pool import mesh
from test_hf import BOTH, HF64, both, whole
from wire import Wire, counts

SMOLLM: dict[str, Any] = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
EIGHT: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def equal(
    family: str, sequence_parallel: bool, kind: str = "AutoModelForCausalLM", extra: Any = None, **changes: Any
) -> tuple[Any, Any]:
    """Loss, logits and every gradient on a padded batch of two rows of 13 tokens; and replicas that are equal."""
    reference, split = both(family, kind, sequence_parallel, **changes)
    given = batch(reference) | (extra or {})
    with KeepDouble():
        want, got = reference(**given), split(**given)
        want.loss.backward()
        got.loss.backward()
    assert relative(got.loss, want.loss) <= HF64
    assert relative(whole(got.logits), want.logits) <= HF64
    check_grads(split, reference, HF64)
    for name, param in split.named_parameters():
        if param.placements[0].is_replicate():
            first = local_of(param.grad).clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, local_of(param.grad)), f"{name}: another gradient on another rank"
    return reference, split


def in_both_modes(family: str, changes: dict[str, Any], kind: str = "AutoModelForCausalLM", extra: Any = None) -> None:
    for sequence_parallel in (True, False):
        equal(family, sequence_parallel, kind, extra, **changes)


# -- norms and biases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_NORM_1_NORM_7_norms_and_row_biases(ranks: Any, size: int, family: str) -> None:
    """All norms, the last one too; of gpt2 also attn.c_proj.bias and mlp.c_proj.bias."""
    ranks(size).run(in_both_modes, family, {})


def after_double(sequence_parallel: bool) -> None:
    reference = tiny("gpt2")
    split = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel).double()
    given = batch(reference)
    with KeepDouble():
        reference.double()(**given).loss.backward()
        split(**given).loss.backward()
    check_grads(split, reference, HF64)


@BOTH
def test_NORM_2_double_after_parallelize(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(after_double, sequence_parallel)


def twenty_steps(sequence_parallel: bool) -> None:
    reference, split = both("qwen3", sequence_parallel=sequence_parallel)
    given = batch(reference)
    with KeepDouble():
        for model in (reference, split):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(20):
                model(**given).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert colrow.replica_drift(split) == {}
    want, got = reference.state_dict(), colrow.full_state_dict(split)
    for name, value in got.items():
        assert relative(value, want[name]) <= HF64, name


@BOTH
def test_NORM_4_copies_of_head_norms_are_bit_equal_after_twenty_steps(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(twenty_steps, sequence_parallel)


@pytest.mark.parametrize("size", [2, 3])
def test_NORM_6_a_router_and_all_that_is_below_it(ranks: Any, size: int) -> None:
    """With the loss that balances the experts, which reads the router's logits."""
    ranks(size).run(in_both_modes, "mixtral", {}, "AutoModelForCausalLM", {"output_router_logits": True})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel residual", "residuals in turn"])
def test_BIAS_2_attention_and_mlp_side_by_side(ranks: Any, size: int, parallel: bool) -> None:
    ranks(size).run(in_both_modes, "gpt_neox", {"use_parallel_residual": parallel})


def kept(family: str) -> list[str]:
    model: Any = tiny(family).bfloat16()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    colrow.parallelize(model, mesh())
    got = colrow.full_state_dict(model)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    sharded = [(name, param) for name, param in model.named_parameters() if not param.placements[0].is_replicate()]
    return [f"{name}: {local_of(param).double().sum():.17g}" for name, param in sharded]


@pytest.mark.parametrize("family", ["gpt2", "phi3", "falcon"])
def test_BIAS_4_FUSE_5_weights_come_back_bit_for_bit_and_shards_differ(ranks: Any, family: str) -> None:
    """No bias is divided by the degree, and no rank got the first rank's slice of any parameter."""
    every = ranks(3).run(kept, family)
    assert len(every[0]) > 4
    for mine in zip(*every, strict=True):
        assert len(set(mine)) == 3, mine[0]


# -- tied weights and vocabularies -------------------------------------------------------------------------------------


def tied(family: str, vocab: int) -> None:
    reference, split = equal(family, True, tie_word_embeddings=True, vocab_size=vocab)
    table, head = split.get_input_embeddings().weight, split.get_output_embeddings().weight
    assert table is head
    assert len(list(split.parameters())) == len(list(reference.parameters()))
    assert split(batch(reference)["input_ids"]).logits.shape == (2, 13, vocab)
    state = reference.state_dict()
    untied: Any = tiny(family, tie_word_embeddings=False, vocab_size=vocab).double()
    untied.load_state_dict(state)
    with KeepDouble():
        untied(**batch(reference)).loss.backward()
    both_uses = untied.get_input_embeddings().weight.grad + untied.get_output_embeddings().weight.grad
    name = next(name for name, param in split.named_parameters() if param is table)
    assert relative(colrow.full_grads(split)[name], both_uses) <= HF64


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(("size", "vocab"), [(2, 64), (4, 61)])
def test_TIE_1_a_tied_head_has_the_true_vocabulary_and_both_gradients(
    ranks: Any, family: str, size: int, vocab: int
) -> None:
    ranks(size).run(tied, family, vocab)


def from_folder(folder: str, vocab: int) -> Tensor:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    colrow.parallelize(model, mesh())
    return model(torch.arange(vocab)[None, :13]).logits.detach()


def test_TIE_4_a_checkpoint_without_the_head(ranks: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    model: Any = tiny("gpt2")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
        assert "lm_head.weight" not in saved.keys()
    want = model(torch.arange(61)[None, :13]).logits
    for got in ranks(2).run(from_folder, str(tmp_path), 61):
        assert relative(got, want) <= 1e-5


def untrained_loss() -> list[float]:
    model: Any = tiny("llama", vocab_size=61)
    nn.init.zeros_(model.lm_head.weight)
    given = batch(model)
    colrow.parallelize(model, mesh())
    with torch.no_grad():
        return [float(model(**given).loss), int(model(given["input_ids"]).logits.argmax(-1).max())]


@pytest.mark.parametrize("size", [2, 4])
def test_VOC_1_an_untrained_head_loses_ln_of_the_true_vocabulary(ranks: Any, size: int) -> None:
    for loss, largest in ranks(size).run(untrained_loss):
        assert loss == pytest.approx(math.log(61), abs=1e-6)
        assert largest < 61


def trained(family: str, steps: int, changes: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    model: Any = tiny(family, **changes)
    given = batch(model)
    colrow.parallelize(model, mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return colrow.full_state_dict(model), model(given["input_ids"]).logits.detach()


def loaded(family: str, state: dict[str, Tensor], changes: dict[str, Any], split: bool = True) -> Tensor:
    model: Any = tiny(family, seed=9, **changes)
    model.load_state_dict(state, strict=True)
    if split:
        colrow.parallelize(model, mesh())
    return model(batch(model)["input_ids"]).logits.detach()


@pytest.mark.parametrize(("size", "family", "changes"), [
    (2, "llama", {"vocab_size": 65}),
    (4, "gpt2", {"vocab_size": 61}),
    (2, "phi3", {}),
    (2, "falcon", {}),
    (4, "gpt_neox", {}),
], ids=["65 words", "61 words", "phi3", "falcon", "gpt_neox"])  # fmt: skip
def test_VOC_2_FUSE_3_trained_at_one_degree_and_loaded_at_others(
    ranks: Any, size: int, family: str, changes: dict[str, Any]
) -> None:
    """Two steps, then an export that transformers' class loads strictly; other degrees give the same logits."""
    state, want = ranks(size).run(trained, family, 2, changes)[0]
    assert relative(loaded(family, state, changes, split=False), want) <= 1e-5
    assert relative(ranks(3).run(loaded, family, state, changes)[0], want) <= 1e-5


# -- heads -------------------------------------------------------------------------------------------------------------


def test_KV_1_fewer_kv_heads_than_ranks(ranks: Any) -> None:
    ranks(4).run(in_both_modes, "llama", EIGHT)


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_KV_2_the_gradient_above_shared_kv_heads(ranks: Any, size: int, kv_heads: int) -> None:
    """Embeddings and first norms lie above attention, and get the gradient that comes through k and v."""
    ranks(size).run(in_both_modes, "llama", {"num_key_value_heads": kv_heads, "num_hidden_layers": 3})


@pytest.mark.parametrize(("size", "family", "changes"), [
    (4, "llama", {"hidden_size": 80, "num_attention_heads": 40, "num_key_value_heads": 10, "head_dim": 2}),
    (4, "llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}),
    (2, "gpt2", {"hidden_size": 50, "num_attention_heads": 25}),
    (2, "llama", SMOLLM | {"tie_word_embeddings": True}),
    (3, "falcon", {"hidden_size": 48, "num_attention_heads": 6}),
], ids=["kv 10 of 40", "6 heads", "25 heads", "smollm", "falcon"])  # fmt: skip
def test_KV_4_heads_that_the_degree_does_not_divide(
    ranks: Any, size: int, family: str, changes: dict[str, Any]
) -> None:
    ranks(size).run(in_both_modes, family, changes)


# -- fused layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_FUSE_1_combined_projections(ranks: Any, size: int) -> None:
    ranks(size).run(in_both_modes, "phi3", {})


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "bloom", "falcon"])
def test_FUSE_2_every_order_of_a_fused_projection(ranks: Any, family: str) -> None:
    ranks(2).run(in_both_modes, family, {})


@pytest.mark.parametrize("kv_heads", [1, 4], ids=["one key/value head", "each its own"])
def test_FUSE_2_falcons_older_order(ranks: Any, kv_heads: int) -> None:
    older = {"new_decoder_architecture": False, "multi_query": kv_heads == 1, "num_key_value_heads": kv_heads}
    ranks(2).run(in_both_modes, "falcon", older)


# -- tokens and positions ----------------------------------------------------------------------------------------------


def note_shape(shapes: list[torch.Size], module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
    shapes.append(out.shape)


def of_length(length: int) -> None:
    for sequence_parallel in (True, False):
        reference, split = both("llama", sequence_parallel=sequence_parallel)
        tokens = batch(reference)["input_ids"][:, :length]
        shapes: list[torch.Size] = []
        split.model.layers[0].input_layernorm.register_forward_hook(partial(note_shape, shapes))
        with KeepDouble():
            want, got = reference(tokens).logits, split(tokens).logits
            want.backward(cotangent(want))
            got.backward(cotangent(got))
        assert got.shape == (2, length, 61)
        rows = -(-2 * length // dist.get_world_size()) if sequence_parallel else 2 * length
        assert shapes[0][:-1].numel() <= rows, "a norm sees its rank's tokens only"
        assert relative(got, want) <= HF64
        for name, grad in colrow.full_grads(split).items():  # one token attends to itself: zero gradients of q and k
            torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=HF64, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [13, 3, 1])
def test_SEQ_1_SEQ_3_lengths_that_the_degree_does_not_divide(ranks: Any, size: int, length: int) -> None:
    ranks(size).run(of_length, length)


@pytest.mark.parametrize("size", [2, 4])
def test_POS_1_each_head_has_its_own_slope(ranks: Any, size: int) -> None:
    ranks(size).run(in_both_modes, "bloom", {})


def test_POS_2_a_relative_position_bias_for_each_head(ranks: Any) -> None:
    ranks(2).run(in_both_modes, "t5", {}, "AutoModelForSeq2SeqLM", {"output_hidden_states": True})


def test_POS_3_positions_given_and_padding_on_the_left(ranks: Any) -> None:
    positions = torch.arange(13).expand(2, 13) - torch.tensor([[3], [0]])
    ranks(2).run(in_both_modes, "llama", {}, "AutoModelForCausalLM", {"position_ids": positions.clamp(min=0)})


# -- losses, checkpointing, other inputs -------------------------------------------------------------------------------


def unequal_replicas(sequence_parallel: bool) -> None:
    axes = mesh((2, 2), ("dp", "tp"))
    reference: Any = tiny("llama").double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), axes["tp"], sequence_parallel=sequence_parallel)
    given = batch(reference)
    given["labels"][1, 4:] = -100  # ten tokens in one replica, four in the other
    count = (given["labels"][:, 1:] != -100).sum()
    mine = {name: value[axes["dp"].get_local_rank()][None] for name, value in given.items()}
    with KeepDouble():
        want = reference(**given).loss
        want.backward()
        got = split(**mine, num_items_in_batch=count).loss
        got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=axes["dp"].get_group())
    assert relative(total, want) <= HF64
    for name, grad in colrow.full_grads(split).items():
        dist.all_reduce(grad, group=axes["dp"].get_group())
        assert relative(grad, reference.get_parameter(name).grad) <= HF64, name


@BOTH
def test_LOSS_1_a_mean_over_all_tokens_of_unequal_replicas(ranks: Any, sequence_parallel: bool) -> None:
    ranks(4).run(unequal_replicas, sequence_parallel)


def sent(recompute: bool) -> dict[str, int]:
    model: Any = tiny("llama").train()
    given = batch(model)
    colrow.parallelize(model, mesh(), check_inputs=0)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with Wire() as wire:
        model(**given).loss.backward()
    return counts(wire.take())


def test_AC_2_recomputation_sends_the_same_on_every_rank(ranks: Any) -> None:
    """Each of two blocks sends two gathers and one scatter more: the row layer at its end is not repeated."""
    (plain,) = {tuple(got.items()) for got in ranks(2).run(sent, False)}
    (again,) = {tuple(got.items()) for got in ranks(2).run(sent, True)}
    more = {verb: number - dict(plain)[verb] for verb, number in again}
    assert more == {"all_reduce": 0, "all_gather": 4, "reduce_scatter": 2}


def own_batch() -> str:
    model: Any = colrow.parallelize(tiny("llama"), mesh())
    try:
        model(**batch(model, seed=dist.get_rank()))
    except colrow.RankError as error:
        return str(error)
    return "no error"


def test_HANG_1_each_rank_its_own_batch(ranks: Any) -> None:
    (text,) = set(ranks(3).run(own_batch))
    assert "input_ids" in text
    assert "Seed the sampler by the data-parallel rank" in text
