"""Public faults of tensor-parallel libraries, each replayed on a whole model, named after its entry in the list.

The other entries stand where their subject is: layers, loss, dropout, gradients, state, meta, plans, parallelize.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colrow
from colrow import Column, LastNorm, Plan, Replicated, Row
from colrow.parallelize import find_plan
from colrow.params import local_of
from oracle import FP64, check_grads, compare, cotangent, randomize, relative
from own import LLAMA, drawing, floats, gpt, ids
from pool import mesh

LIMIT = 30.0
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
SIZES = pytest.mark.parametrize("size", [2, 4])


def equals_one_process(
    options: dict[str, Any], tokens: tuple[int, int], sequence_parallel: bool, loss: bool = False
) -> None:
    batch = ids(*tokens, vocab=options.get("vocab", 64))
    args = (batch, batch.roll(1, -1)) if loss else (batch,)
    compare(lambda: gpt(**options), args, sequence_parallel=sequence_parallel)


# -- norms and biases --------------------------------------------------------------------------------------------------


def terms_and_sums() -> None:
    """Before the sum each rank holds one term and the terms add up; after it all ranks hold the whole."""
    reference: Any = randomize(gpt(**LLAMA)).double()
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh())
    y, want = split(ids()), reference(ids())
    want.backward(cotangent(want))
    norms = [(name, param) for name, param in split.named_parameters() if "norm" in name]
    assert len(norms) == 5
    handles = [hooks for param_hooks in split.sums._handles.values() for hooks in param_hooks]
    for handle in handles:
        handle.remove()
    y.backward(cotangent(y))
    wants = {name: param.grad for name, param in reference.named_parameters()}
    for name, param in norms:
        assert param.grad.placements[0].is_partial(), name
        mine = local_of(param.grad).clone()
        assert relative(mine, wants[name]) > 1e-3, f"{name}: a term is the whole already"
        dist.all_reduce(mine)
        assert relative(mine, wants[name]) <= FP64, name
    check_grads(split, reference, FP64)


@SIZES
def test_NORM_1_terms_of_norm_gradients_are_summed(ranks: Any, size: int) -> None:
    ranks(size).run(terms_and_sums, timeout=LIMIT)


@SIZES
def test_NORM_1_NORM_7_norms_and_row_biases_of_a_whole_model(ranks: Any, size: int) -> None:
    """The last norm stands outside the blocks; attention.out.bias and mlp.down.bias see a part of the tokens."""
    ranks(size).run(equals_one_process, {}, (2, 16), True, True, timeout=LIMIT)


def all_kept() -> None:
    torch.manual_seed(0)
    model: Any = randomize(gpt(vocab=61, ffn=70, heads=5, width=40)).bfloat16()
    want = copy.deepcopy(model).state_dict()
    colrow.parallelize(model, mesh())
    got = colrow.full_state_dict(model)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    up = local_of(model.blocks[0].mlp.up.weight)
    firsts = torch.zeros(dist.get_world_size(), dtype=torch.float32)
    firsts[dist.get_rank()] = up[0, 0].float()
    dist.all_reduce(firsts)
    assert len(set(firsts.tolist())) == dist.get_world_size(), "two ranks hold the same slice"


@pytest.mark.parametrize("size", [3, 4])
def test_BIAS_4_FUSE_5_weights_come_back_bit_for_bit_and_shards_differ(ranks: Any, size: int) -> None:
    """No bias is divided by the degree, and no rank got the first rank's slice."""
    ranks(size).run(all_kept, timeout=LIMIT)


# -- tied embeddings and vocabularies ----------------------------------------------------------------------------------


def tied(vocab: int) -> None:
    split, reference = compare(lambda: gpt(vocab=vocab), (ids(vocab=vocab),))
    model: Any = split
    assert model(ids(vocab=vocab)).shape == (2, 13, vocab)
    assert model.head.weight is model.token.weight
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    alone = colrow.full_grads(model)["token.weight"]
    untied = gpt(vocab=vocab, tied=False).double()
    untied.load_state_dict(reference.state_dict())
    y = untied(ids(vocab=vocab))
    y.backward(cotangent(y))
    assert relative(alone, untied.token.weight.grad + untied.head.weight.grad) <= FP64


@SIZES
@pytest.mark.parametrize("vocab", [64, 61])
def test_TIE_1_a_tied_head_gives_the_true_vocabulary_and_both_gradients(ranks: Any, size: int, vocab: int) -> None:
    ranks(size).run(tied, vocab, timeout=LIMIT)


def step_and_export(options: dict[str, Any], steps: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    vocab = options.get("vocab", 64)
    split: Any = colrow.parallelize(randomize(gpt(**options)).double(), mesh())
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2)
    for step in range(steps):
        split(ids(vocab=vocab, seed=step), ids(vocab=vocab, seed=step + 9)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return colrow.full_state_dict(split) | {"logits": split(ids(vocab=vocab)).detach()}


def load_and_run(options: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
    model: Any = gpt(**options).double()
    model.load_state_dict(state, strict=True)
    return colrow.parallelize(model, mesh())(ids(vocab=options.get("vocab", 64))).detach()


@pytest.mark.parametrize(("vocab", "size"), [(65, 2), (61, 4), (61, 3), (3, 4)])
def test_VOC_2_VOC_3_any_vocabulary_trains_and_is_exported_with_its_true_rows(
    ranks: Any, vocab: int, size: int
) -> None:
    for got in ranks(size).run(step_and_export, {"vocab": vocab}, timeout=LIMIT):
        logits = got.pop("logits")
        assert got["token.weight"].shape[0] == vocab
        plain = gpt(vocab=vocab).double()
        plain.load_state_dict(got, strict=True)
        with torch.no_grad():
            assert relative(plain(ids(vocab=vocab)), logits) <= FP64


@pytest.mark.parametrize("options", [{"gated": True, "ffn": 35}, LLAMA], ids=["gated", "llama"])
def test_FUSE_3_trained_at_one_degree_and_loaded_at_others(ranks: Any, options: dict[str, Any]) -> None:
    state = ranks(2).run(step_and_export, options, 2, timeout=LIMIT)[0]
    logits = state.pop("logits")
    for size in (1, 3, 4):
        for got in ranks(size).run(load_and_run, options, state, timeout=LIMIT):
            assert relative(got, logits) <= FP64


def untrained_loss() -> tuple[float, int]:
    model: Any = gpt(vocab=61, tied=False)
    nn.init.zeros_(model.head.weight)
    split: Any = colrow.parallelize(model, mesh())
    loss = split(ids(vocab=61), ids(vocab=61))
    nn.init.constant_(local_of(split.head.weight), -1.0)  # padding too, if there is any
    return float(loss.detach()), int(split(ids(vocab=61)).argmax(-1).max())


@SIZES
def test_VOC_1_an_untrained_model_loses_ln_of_the_true_vocabulary(ranks: Any, size: int) -> None:
    for loss, largest in ranks(size).run(untrained_loss, timeout=LIMIT):
        assert abs(loss - math.log(61)) < 1e-6  # ln 64 is 0.05 away
        assert largest < 61


# -- heads -------------------------------------------------------------------------------------------------------------


@BOTH
def test_KV_1_fewer_key_value_heads_than_ranks(ranks: Any, sequence_parallel: bool) -> None:
    options = {"heads": 8, "kv_heads": 2, "width": 64}
    ranks(4).run(equals_one_process, options, (2, 5), sequence_parallel, timeout=LIMIT)


@BOTH
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_KV_2_the_gradient_above_shared_key_value_heads(
    ranks: Any, size: int, kv_heads: int, sequence_parallel: bool
) -> None:
    """Three layers: embeddings and first norms lie above attention, and get the gradient that comes through k, v."""
    options = {"kv_heads": kv_heads, "layers": 3}
    ranks(size).run(equals_one_process, options, (2, 5), sequence_parallel, timeout=LIMIT)


@BOTH
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {"heads": 40, "kv_heads": 10, "width": 80, "rotary": True}),
        (4, {"heads": 6, "width": 24}),
        (4, {"heads": 6, "kv_heads": 3, "width": 24}),
        (2, {"heads": 25, "width": 50, "layers": 1}),
        (3, {"heads": 8, "kv_heads": 4}),
        (3, {"heads": 12, "kv_heads": 2, "width": 24}),
    ],
    ids=["kv 10 of 40", "6 heads", "kv 3 of 6", "25 heads", "kv 4 of 8 on 3", "kv 2 of 12 on 3"],
)
def test_KV_4_heads_that_the_degree_does_not_divide(
    ranks: Any, size: int, options: dict[str, Any], sequence_parallel: bool
) -> None:
    ranks(size).run(equals_one_process, options, (2, 5), sequence_parallel, timeout=LIMIT)


# -- tokens ------------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("length", [13, 1, 3])
def test_SEQ_1_sequences_that_the_degree_does_not_divide(ranks: Any, size: int, length: int) -> None:
    ranks(size).run(equals_one_process, LLAMA, (1, length), True, True, timeout=LIMIT)


def no_tokens(tokens: tuple[int, int], sequence_parallel: bool) -> None:
    split, reference = compare(gpt, (ids(*tokens),), sequence_parallel=sequence_parallel)
    grads = colrow.full_grads(split)
    assert grads.keys() == dict(reference.named_parameters()).keys()
    if tokens != (1, 1):
        assert all(not grad.any() for grad in grads.values())


@BOTH
@SIZES
@pytest.mark.parametrize("tokens", [(0, 5), (2, 0), (1, 1)], ids=str)
def test_ZERO_1_ranks_without_rows(ranks: Any, size: int, tokens: Any, sequence_parallel: bool) -> None:
    """The shapes are right, backward ends on every rank, and gradients are zeros, not None."""
    ranks(size).run(no_tokens, tokens, sequence_parallel, timeout=LIMIT)


class Turned(nn.Module):
    """Transposed, expanded and sliced activations around a module, so forward and backward see odd strides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.transpose(0, 1)).transpose(0, 1)
        z = self.inner(x[:, :1].expand(-1, 4, -1)[..., ::1]).transpose(0, -1)
        return y.sum() * z + z.flip(0)


def turned() -> None:
    plan = Plan({"inner.0": Column(), "inner.2": Row()})
    compare(lambda: Turned(drawing(11)), (floats(3, 5, 8),), plan=plan)


@SIZES
def test_CONT_1_strided_inputs_and_gradients(ranks: Any, size: int) -> None:
    ranks(size).run(turned, timeout=LIMIT)


# -- the end of the sequence-parallel stretch --------------------------------------------------------------------------


def ends_in(how: str, sequence_parallel: bool) -> None:
    plan = None if how == "vocabulary" else Plan({"norm": LastNorm(), "head": Replicated()})
    options = {"tied": False, "layers": 3}
    compare(lambda: gpt(**options), (ids(),), plan=plan, sequence_parallel=sequence_parallel)
    if how == "vocabulary":
        compare(lambda: gpt(**options), (ids(), ids(seed=2)), sequence_parallel=sequence_parallel)


@BOTH
@SIZES
@pytest.mark.parametrize("how", ["vocabulary", "replicated"])
def test_AG_3_what_follows_the_last_gather(ranks: Any, size: int, how: str, sequence_parallel: bool) -> None:
    """A vocabulary-parallel head gives a term of the gradient, a whole head all of it: either is the truth below."""
    ranks(size).run(ends_in, how, sequence_parallel, timeout=LIMIT)


class TwoReaders(nn.Module):
    """What the last norm gives is read by a split head and by a whole one, and leaves the model as well."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.probe = gpt(tied=False), nn.Linear(32, 3)
        self.gpt.norm.register_forward_hook(lambda _m, _a, out: self.states.append(out))
        self.states: list[Tensor] = []

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(tokens)
        hidden = self.states.pop()
        return {"logits": logits, "probe": self.probe(hidden), "hidden": hidden}  # logits may be a DTensor here


def both_readers(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    reference = randomize(TwoReaders()).double()
    (inner,) = find_plan(gpt(tied=False)).layers
    plan = Plan({f"gpt.{pattern}": rule for pattern, rule in inner} | {"probe": Replicated()})
    torch.manual_seed(0)
    split = colrow.parallelize(randomize(TwoReaders()).double(), mesh(), plan, sequence_parallel=sequence_parallel)
    for model in (reference, split):
        out = model(ids())
        torch.stack([(y * cotangent(y)).sum() for y in out.values()]).sum().backward()
    check_grads(split, reference, FP64)


@BOTH
@SIZES
def test_AG_3_the_last_norm_may_have_readers_of_both_kinds(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(both_readers, sequence_parallel, timeout=LIMIT)


class NormByName(nn.Module):
    """Hands the last norm its input by the input's name."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: Any = gpt(tied=False, rotary=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gpt.token(tokens)
        for block in self.gpt.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(input=x))


def last_norm_by_name(sequence_parallel: bool) -> None:
    (inner,) = find_plan(gpt(tied=False, rotary=True)).layers
    plan = Plan({f"gpt.{pattern}": rule for pattern, rule in inner})
    compare(NormByName, (ids(),), plan=plan, sequence_parallel=sequence_parallel)


@BOTH
def test_the_last_norm_may_be_called_with_its_input_by_name(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(last_norm_by_name, sequence_parallel, timeout=LIMIT)


# -- randomness in a whole model ---------------------------------------------------------------------------------------


def hidden_states(sequence_parallel: bool, dp: int) -> list[Tensor]:
    """What each block gives, whole, with dropout on; the trainer has seeded by the global rank."""
    torch.manual_seed(0)
    whole = mesh((dp, dist.get_world_size() // dp), ("dp", "tp"))
    model: Any = randomize(gpt(dropout=0.1)).double()
    split: Any = colrow.parallelize(model, whole["tp"], sequence_parallel=sequence_parallel)
    if dp == 1:
        torch.manual_seed(100 + dist.get_rank())
    else:
        colrow.seed(whole["tp"], 100)
    states: list[Tensor] = []
    for block in split.blocks:
        block.register_forward_hook(lambda _m, _a, out: states.append(out.detach()))
    states.append(split(ids()).detach())
    if sequence_parallel:
        states = states[-1:]
    return states


def test_RNG_2_the_same_elements_are_dropped_at_every_degree(ranks: Any) -> None:
    want = ranks(1).run(hidden_states, False, 1, timeout=LIMIT)[0]
    for size in (2, 4):
        for rank_states in ranks(size).run(hidden_states, False, 1, timeout=LIMIT):
            assert [relative(a, b) <= FP64 for a, b in zip(rank_states, want, strict=True)] == [True] * 3
        for rank_states in ranks(size).run(hidden_states, True, 1, timeout=LIMIT):
            assert relative(rank_states[0], want[-1]) <= FP64


def test_RNG_2_data_parallel_replicas_drop_others(ranks: Any) -> None:
    first, second, third, fourth = ranks(4).run(hidden_states, False, 2, timeout=LIMIT)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(third, fourth, strict=True))
    assert relative(first[0], third[0]) > 1e-3


def layers_draw_apart() -> None:
    """Layers of equal weights and inputs drop different elements, and so do two steps."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Dropout(0.5), nn.Dropout(0.5)
            self.up, self.down = nn.Linear(64, 4), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.a(x), self.b(x), self.down(self.up(x))

    split: Any = colrow.parallelize(Twice(), mesh(), Plan({"up": Column(), "down": Row()}))
    ones = torch.ones(64, 64)
    masks = [mask for _ in range(2) for mask in split(ones)[:2]]
    for place, mask in enumerate(masks):
        assert 0.45 < float((mask > 0).float().mean()) < 0.55
        for other in masks[place + 1 :]:
            assert 0.45 < float(((mask > 0) == (other > 0)).float().mean()) < 0.55


def test_RNG_1_layers_and_steps_drop_different_elements(ranks: Any) -> None:
    ranks(2).run(layers_draw_apart, timeout=LIMIT)
