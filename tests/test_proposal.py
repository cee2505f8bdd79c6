"""Models of no known family: what is accepted is exact, and what is not certain is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import colrow
from colrow.families.proposal import propose
from colrow.parallelize import find_plan
from hf import KeepDouble
from oracle import check_grads, compare, randomize, relative
from pool import mesh

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "granite": {},
    "starcoder2": {},
    "stablelm": {},  # no plan of Hugging Face's: from its structure
    "cohere": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"head_dim": 8},  # a fused [gate | up], as its code says
    "ernie4_5": {},
    "nemotron": {},
    "exaone4": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "phi": {},
}
EXACT = 1e-9
"""In double throughout, rounding is near 1e-15; a lost or doubled term is of order 1."""
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


def tiny(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes}))


def equals_one_process(kind: str, changes: dict[str, Any], sequence_parallel: bool) -> None:
    reference = randomize(tiny(kind, **changes)).double()
    split = colrow.parallelize(copy.deepcopy(reference), mesh(), sequence_parallel=sequence_parallel)
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with KeepDouble():
        outs = [model(input_ids=ids, attention_mask=mask, labels=ids) for model in (reference, split)]
        for out in outs:
            out.loss.backward()
    assert relative(outs[1].loss, outs[0].loss) <= EXACT
    assert relative(outs[1].logits.full_tensor(), outs[0].logits) <= EXACT
    check_grads(split, reference, EXACT)


@BOTH
@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_accepted_is_exact(ranks: Any, size: int, kind: str, sequence_parallel: bool) -> None:
    ranks(size).run(equals_one_process, kind, ACCEPTED[kind], sequence_parallel, timeout=60)


@pytest.mark.parametrize(
    "kind", ["olmo2", "gpt_bigcode", "codegen", "mamba", "nanochat", "qwen3_moe", "granitemoe", "bart"]
)
def test_what_is_not_certain_is_refused(kind: str) -> None:
    with pytest.raises(colrow.PlanError, match="of no known family") as error:
        find_plan(tiny(kind))
    first = propose(tiny(kind)).doubts[0]
    assert f"{first.name}: {first.why}" in str(error.value) and f"# {first.name}: {first.why}" in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_translation_equals_the_familys_own_rules(kind: str) -> None:
    model = tiny(kind)
    proposal = propose(model)
    assert not proposal.doubts and proposal.source == "Hugging Face's own plan"
    for degree in (2, 3):
        own, translated = (colrow.resolve(model, plan, degree) for plan in (find_plan(model), proposal.plan))
        assert own.rows == translated.rows
        for one, other in zip(own.sites, translated.sites, strict=True):
            assert (one.splits, one.grads, one.src, one.dst) == (other.splits, other.grads, other.src, other.dst)
            assert (one.patches, one.heads) == (other.patches, other.heads)


def test_what_is_printed_is_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("stablelm")
    plan = find_plan(model)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "colrow"]
    assert "from its structure" in message
    pasted: dict[str, Any] = {}
    exec(message[message.index("from colrow import") :], pasted)
    assert pasted["plan"] == plan


def test_a_users_plan_settles_doubts() -> None:
    model = tiny("gpt_bigcode", multi_query=True)
    rules = {
        "transformer.h.*": colrow.Block(),
        "transformer.h.*.attn": colrow.Attention(heads="num_heads", kv_heads="num_key_value_heads", config=()),
        "transformer.h.*.attn.c_attn": colrow.Column(colrow.HEADS, colrow.KV_HEADS, colrow.KV_HEADS),
        "transformer.ln_f": colrow.LastNorm(),
    }
    for settled in range(1, len(rules)):
        some = colrow.Plan(dict(list(rules.items())[:settled]))
        with pytest.raises(colrow.PlanError, match="a plan for parts of it"):
            find_plan(model, some)
    plan = find_plan(model, colrow.Plan(rules))
    assert plan.layers[0] == tuple(rules.items())
    assert "transformer.h.*.mlp.c_fc" in dict(plan.layers[1])


def test_a_total_plan_is_not_doubted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model.config = object()  # pyright: ignore[reportArgumentType]
    plan = colrow.Plan({"0": colrow.Column(), "1": colrow.Row()})
    assert find_plan(model, plan) is plan


class Config:
    hidden_size, n_heads, head_dim, vocab_size = 24, 3, 8, 31


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = Config.n_heads, Config.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(24, 24) for _ in range(3))
        self.wo = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        scores = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.head_dim), dim=-1)
        y = (scores @ v).transpose(1, 2).reshape(b, s, self.n_heads * self.head_dim)
        return self.drop(self.wo(y))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act, self.drop = nn.Linear(24, 40), nn.Linear(40, 24), nn.GELU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


class Layer(nn.Module):
    def __init__(self, attend: type[Attend] = Attend, feed: type[Feed] = Feed) -> None:
        super().__init__()
        self.one, self.two, self.attn, self.mlp = nn.LayerNorm(24), nn.LayerNorm(24), attend(), feed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.one(x))
        return x + self.mlp(self.two(x))


class Own(nn.Module):
    def __init__(self, attend: type[Attend] = Attend, feed: type[Feed] = Feed, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.config = Config()
        self.embed, self.places = nn.Embedding(31, 24), nn.Embedding(16, 24)
        self.layers = nn.ModuleList(layer(attend, feed) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def own_equals_one_process(sequence_parallel: bool) -> None:
    ids = torch.randint(31, (2, 5), generator=torch.Generator().manual_seed(1))
    compare(Own, (ids,), sequence_parallel=sequence_parallel)


@BOTH
@pytest.mark.parametrize("size", [2, 3])
def test_a_module_of_ones_own(ranks: Any, size: int, sequence_parallel: bool) -> None:
    rules = dict(propose(Own()).plan.layers[0])
    assert rules["layers.*.attn"] == colrow.Attention(heads="n_heads")
    assert rules["layers.*.attn.drop"] == colrow.Drop() and rules["layers.*.mlp.drop"] == colrow.Drop(colrow.FEATURES)
    ranks(size).run(own_equals_one_process, sequence_parallel)


class DividesByHeads(Attend):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        return self.wo((q * k + v) / self.n_heads)


class NormOverAllHeads(Attend):
    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.normalize(self.wq(x), dim=-1) * self.wk(x) + self.wv(x))


class ScoresBetweenHeads(Attend):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim)
        return self.wo((F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v).reshape(b, s, -1))


class SoftmaxOverHeads(Attend):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        return self.wo((F.softmax(q @ k.transpose(-1, -2), dim=1) @ v).transpose(1, 2).reshape(b, s, -1))


class NotTurnedBack(Attend):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        return self.wo(F.scaled_dot_product_attention(q, k, v).reshape(b, s, -1))


class OwnWidth(Attend):
    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q = self.wq(x).view(b, s, self.n_heads, c // self.n_heads).transpose(1, 2)
        return self.wo((q * q).transpose(1, 2).reshape(b, s, -1) + self.wk(x) + self.wv(x))


class AddsItsInput(Attend):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.wo(self.wq(x) * self.wk(x) + self.wv(x))


class CountsUnderAnotherName(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = 3

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return self.wo(self.wq(x).view(b, s, self.pieces, -1).reshape(b, s, -1) + self.wk(x) + self.wv(x))


class Normalises(Feed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        return self.down(h / h.sum(-1, keepdim=True))


class SoftmaxOfFeatures(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.softmax(self.up(x), dim=-1))


class AddsAfter(Feed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(x)))
        return y + x


class NormalisesAfter(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.act(self.up(x))))


class Interleaved(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 80)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h[..., ::2] * self.act(h[..., 1::2]))


class LooksBack(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.one(x))
        return x + self.mlp(self.two(torch.cat([x[:, :1], x[:, :-1]], dim=1)))


class NormOfTokens(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(-2, keepdim=True))


class NormalisesTokens(Layer):
    def __init__(self, attend: type[Attend] = Attend, feed: type[Feed] = Feed) -> None:
        super().__init__(attend, feed)
        self.two = NormOfTokens(24)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1, 1)  # in turn: [0 1 0 1]


class RepeatsInTurn(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.n_rep = 1

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, repeat_kv(k, self.n_rep), repeat_kv(v, self.n_rep))
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class Pools(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.one(x))
        return x + self.mlp(self.two(x)) + x.mean(1, keepdim=True)


class AddsPlaces(Own):
    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.embed(ids), self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x + places)
        return self.head(self.norm(x))


class ReadsTheStream(Own):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, -1]))


class NoLastNorm(Own):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TRAPS: dict[str, nn.Module] = {
    **{kind.__name__: Own(attend=kind) for kind in Attend.__subclasses__()},
    **{kind.__name__: Own(feed=kind) for kind in Feed.__subclasses__()},
    **{kind.__name__: Own(layer=kind) for kind in Layer.__subclasses__()},
    **{kind.__name__: kind() for kind in Own.__subclasses__()},
}


@pytest.mark.parametrize("trap", TRAPS)
def test_code_that_a_split_would_change_is_refused(trap: str) -> None:
    doubts = propose(TRAPS[trap]).doubts
    assert doubts, propose(TRAPS[trap])
    assert any(trap in doubt.why or "fused" in doubt.why or "not known" in doubt.why for doubt in doubts), doubts
