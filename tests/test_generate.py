"""Text from a split model: the same tokens on every rank, and as on one device."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import colrow
from colrow import LastNorm, Plan
from colrow.models import tiny as models
from colrow.models.tiny import tiny
from colrow.precision import KeepDouble
from colrow.region import FEW
from oracle import FP32, check_grads, cotangent, relative
from own import PARALLEL, ParallelModel
from pool import mesh
from test_hf import BOTH, HF64, named
from wire import Wire, counts

FAMILIES = ("llama", "gpt2", "bloom", "t5", "mixtral", "qwen3", "gemma2", "deepseek_v3")
SEED = 7
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}
SHORT, LONG = 13, 40
"""Tokens of a row; two long rows are more than `FEW`, so that sequence parallelism shards the prompt."""


def prompt(model: Any, columns: int) -> dict[str, Tensor]:
    """Two rows, the first padded on the left."""
    given = models.batch(model)
    repeated = {name: x.repeat(1, 4)[:, :columns] for name, x in given.items() if name != "labels"}
    return repeated | {"attention_mask": (torch.arange(columns) >= torch.tensor([[3], [0]])).long()}


def generate(model: Any, columns: int, way: dict[str, Any]) -> Tensor:
    return model.generate(**prompt(model, columns), **{"max_new_tokens": 7, "pad_token_id": 0} | way)


def as_on_one_device(family: str, sequence_parallel: bool) -> dict[str, Tensor]:
    """GEN-1. The ranks' generators differ before the call; the first rank's goes on as in one process, and the others'
    are not touched."""
    reference: Any = tiny(family)
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    found = {}
    for name, way in WAYS.items():
        with named(f"{family}, {name}"):
            columns = LONG if sequence_parallel else SHORT
            torch.manual_seed(SEED)
            want, after = generate(reference, columns, way), torch.get_rng_state()
            torch.manual_seed(SEED + 100 * dist.get_rank())
            before = torch.get_rng_state()
            found[name] = generate(split, columns, way)
            assert found[name].tolist() == want.tolist()
            assert torch.equal(torch.get_rng_state(), after if dist.get_rank() == 0 else before)
    return found


@BOTH
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_on_one_device(ranks: Any, size: int, family: str, sequence_parallel: bool) -> None:
    assert SHORT * 2 <= FEW < LONG * 2
    got = ranks(size).run(as_on_one_device, family, sequence_parallel)
    for name in WAYS:
        assert len({tuple(tokens[name].flatten().tolist()) for tokens in got}) == 1, name
    assert len(set(got[0]["sampling"][:, -7:].flatten().tolist())) > 3, "a model that repeats one token shows nothing"


def both(family: str, sequence_parallel: bool = True, **changes: Any) -> tuple[Any, Any]:
    reference = tiny(family, **changes)
    return reference, colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)


def decode_one_token(family: str, sequence_parallel: bool) -> dict[str, int]:
    """GEN-2. A prompt of five tokens, then one by one: each step the tokens of one device, and what it sends."""
    reference, split = both(family, sequence_parallel)
    ids, mine, theirs = torch.arange(5)[None], None, None
    sent: list[dict[str, int]] = []
    for _ in range(8):
        with torch.no_grad(), Wire() as wire:
            out = split(input_ids=ids, past_key_values=mine, use_cache=True)
            sent.append(counts(wire.take()))
            want = reference(input_ids=ids, past_key_values=theirs, use_cache=True)
        mine, theirs, ids = out.past_key_values, want.past_key_values, want.logits[:, -1:].argmax(-1)
        assert torch.equal(out.logits[:, -1:].argmax(-1), ids)
    assert sent[-1] == sent[-2]
    return sent[-1]


@BOTH
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_GEN_2_a_step_of_decoding_sends_two_all_reduces_a_layer(
    ranks: Any, family: str, sequence_parallel: bool
) -> None:
    """And one for the embedding, and a gather of the logits. Sequence parallelism costs nothing."""
    layers = 2
    want = {"all_reduce": 2 * layers + 1, "all_gather": 1}
    assert ranks(2).run(decode_one_token, family, sequence_parallel) == [want] * 2


def long_prompt() -> dict[str, int]:
    _, split = both("llama", max_position_embeddings=128)
    with torch.no_grad(), Wire() as wire:
        split(input_ids=torch.arange(FEW + 1)[None] % 61)
    return counts(wire.take())


def test_a_long_prompt_is_sharded(ranks: Any) -> None:
    """Two gathers and two scatters a layer; the embedding's scatter, the last norm's gather, the logits', and the check
    of the inputs."""
    assert ranks(2).run(long_prompt) == [{"all_reduce": 1, "all_gather": 2 * 2 + 3, "reduce_scatter": 2 * 2}] * 2


class Stops:
    """A stopping criterion of the user's: on one rank only, after some tokens."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = dist.get_rank() == self.rank and ids.shape[1] >= self.length
        return torch.full((ids.shape[0],), done, dtype=torch.bool)


def length_until(rank: int, positional: bool) -> int:
    _, split = both("llama")
    ids, criteria = torch.arange(5)[None], StoppingCriteriaList([Stops(rank, 9)])
    config = GenerationConfig(max_new_tokens=12, pad_token_id=0)
    if positional:
        return split.generate(ids, config, None, criteria).shape[1]
    return split.generate(ids, generation_config=config, stopping_criteria=criteria).shape[1]


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize(("rank", "length"), [(0, 9), (1, 17)])
def test_GEN_4_the_first_rank_stops_all(ranks: Any, rank: int, length: int, positional: bool) -> None:
    """What is true on another rank only stops nobody."""
    assert ranks(2).run(length_until, rank, positional, timeout=30) == [length] * 2


class Slow:
    """A processor of logits that takes its time, on the first rank only."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            time.sleep(0.02)
        return scores


def length_in(seconds: float) -> int:
    _, split = both("llama")
    given = {"max_new_tokens": 50, "max_time": seconds, "pad_token_id": 0}
    return split.generate(torch.arange(5)[None], logits_processor=LogitsProcessorList([Slow()]), **given).shape[1]


def test_GEN_4_the_first_ranks_clock_stops_all(ranks: Any) -> None:
    lengths = ranks(2).run(length_in, 0.2, timeout=30)
    assert lengths[0] == lengths[1] < 55


def end_of_text() -> list[Tensor]:
    """Rows end at different tokens: the rest is padding, as on one device."""
    found = []
    for model in both("llama"):
        torch.manual_seed(SEED)
        found.append(
            generate(model, SHORT, {"do_sample": True, "eos_token_id": list(range(1, 9)), "max_new_tokens": 30})
        )
    return found


def test_rows_that_end_early(ranks: Any) -> None:
    for want, got in ranks(2).run(end_of_text):
        assert got.tolist() == want.tolist() and 0 in got[:, SHORT:], "no row ended early"


def parts_alone(family: str) -> None:
    """What a base model or an encoder gives when it is called by itself is whole, with the right gradients."""
    reference, split = both(family)
    reference, split = reference.double(), split.double()
    given = {name: x for name, x in models.batch(reference).items() if name != "labels"}
    outs = []
    for model in (reference, split):
        part = model.get_encoder() if family == "t5" else model.base_model
        with KeepDouble():
            out = part(**given, output_hidden_states=True)
            ys = [out[0], *out["hidden_states"]]
            torch.autograd.backward(ys, [cotangent(y) for y in ys])
        outs.append(ys)
    for want, got in zip(*outs, strict=True):
        assert relative(got, want) <= HF64
    check_grads(split, reference, HF64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mixtral"])
def test_a_part_that_holds_the_blocks_may_be_called_by_itself(ranks: Any, size: int, family: str) -> None:
    ranks(size).run(parts_alone, family)


class Trunk(ParallelModel):
    """What it gives is not what its last block gives."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def trunk_alone() -> None:
    reference = nn.Sequential(Trunk(), nn.LayerNorm(16))
    plan = Plan({f"0.{name}": rule for name, rule in PARALLEL.layers[0]} | {"1": LastNorm()})
    split = colrow.parallelize(copy.deepcopy(reference), mesh(), plan)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    for want, got in ((reference[0](x), split.get_submodule("0")(x)), (reference(x), split(x))):
        assert relative(got, want) <= FP32


def test_a_part_that_ends_where_tokens_are_sharded_may_be_called_by_itself(ranks: Any) -> None:
    ranks(3).run(trunk_alone)


def as_the_author_wrote_it() -> None:
    reference, split = both("llama")
    assert inspect.signature(split.forward) == inspect.signature(reference.forward)
    assert type(split).__name__ == "LlamaForCausalLM" and isinstance(split, type(reference))
    assert type(split.model).__name__ == "LlamaModel"
    shown = str(split)
    for role in ("LanguageModel[LlamaForCausalLM]", "Region[LlamaAttention]", "ColumnLinear", "RowLinear", "Block["):
        assert role in shown, f"{role} is not in:\n{shown}"


def test_classes_keep_names_and_signatures_and_print_shows_the_roles(ranks: Any) -> None:
    ranks(2).run(as_the_author_wrote_it)
