"""The rules for slices, experts, groups of heads, residuals and last blocks, on one model that uses them all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import colrow
from colrow import GROUPS, HEADS, Attention, Block, Column, Mlp, Moe, Norm, Plan, Router, Row, Sliced
from colrow.become import is_plain_linear
from colrow.split import split_heads
from oracle import FP64, check_grads, cotangent, relative
from own import floats
from pool import mesh

BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])


class SinkAttention(nn.Module):
    """[q q k v | ...] fused by key/value head, a learned bias and a sink for each head, a residual added inside."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.n, self.n_kv, self.size = heads, kv_heads, size
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * size)
        self.out = nn.Linear(heads * size, width)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.far = nn.Embedding(16, heads)

    def forward(self, x: Tensor, residual: Tensor, slopes: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (self.n_kv, -1, self.size))
        q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
        q, k, v = (t.expand(q.shape).flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        place = torch.arange(x.shape[1])
        bias = self.far((place[:, None] - place[None]).clamp(min=0)).permute(2, 0, 1)
        bias = bias + slopes.view(x.shape[0], self.n, 1, -1)
        scores = q @ k.transpose(-1, -2) / self.size + bias + mask
        sink = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).flatten(-2)) + residual, weights


class TopOne(nn.Module):
    """A router: (logits, weights, which)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        weights, which = logits.softmax(-1).max(-1)
        return logits, weights, which


class Stacked(nn.Module):
    """Experts whose weights are stacked, beside a shared one."""

    def __init__(self, width: int, ffn: int, count: int) -> None:
        super().__init__()
        self.gate = TopOne(width, count)
        self.up, self.down = nn.Parameter(torch.zeros(count, ffn, width)), nn.Parameter(torch.zeros(count, width, ffn))
        self.shared_up, self.shared_down = nn.Linear(width, ffn), nn.Linear(ffn, width, bias=False)
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.logits, weights, which = self.gate(x)
        hidden = F.gelu(torch.einsum("...w,...fw->...f", x, self.up[which]))
        own = torch.einsum("...f,...wf->...w", hidden, self.down[which]) * weights[..., None]
        return own.view(x.shape) + self.shared_down(F.gelu(self.shared_up(x)))


class Plainly(nn.Linear):
    """x W^T + b in its own words, as FalconLinear."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class AddingMlp(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = Plainly(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.down(F.gelu(self.up(x)))


class AllBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm_a, self.norm_b, self.norm_c = (nn.LayerNorm(width) for _ in range(3))
        self.attn, self.mlp = SinkAttention(width, heads, kv_heads, 4), AddingMlp(width, ffn)
        self.experts = Stacked(width, ffn, 3)

    def forward(self, x: Tensor, slopes: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm_a(x)
        x, weights = self.attn(y, y, slopes, mask)  # the residual is the norm's output itself
        x = self.mlp(self.norm_b(x), x)
        return x + self.experts(self.norm_c(x)), weights


class AllModel(nn.Module):
    """No norm after the last block. Its slopes take a gradient and are used by the heads of every rank."""

    def __init__(self, width: int = 16, heads: int = 6, kv_heads: int = 2, ffn: int = 13) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.zeros(heads))
        self.blocks = nn.ModuleList(AllBlock(width, heads, kv_heads, ffn) for _ in range(2))
        self.top, self.recompute = nn.Linear(width, 5), False
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        slopes = (self.slopes[:, None] * place).repeat(x.shape[0], 1)[:, None]  # (batch x heads, 1, keys)
        mask = torch.zeros(x.shape[0], len(self.slopes), x.shape[1], x.shape[1], dtype=x.dtype)
        mask[0, ::2, :, 3] = -1.0  # a mask with heads of its own
        found, experts = [], []
        block: Any
        for block in self.blocks:
            if self.recompute:
                x, weights = checkpoint(block, x, slopes, mask, use_reentrant=False)
            else:
                x, weights = block(x, slopes, mask)
            found.append(weights)
            experts.append(block.experts.logits.square().mean())
        router = torch.stack(experts).sum()
        self.weights = found
        return self.top(x) + router


PLAN = Plan(
    {
        "slopes": colrow.Replicated(),
        "blocks.0": Block(),
        "blocks.1": Block(last=True),
        "blocks.*.norm_*": Norm(),
        "blocks.*.attn": Attention(
            heads="n", kv_heads="n_kv", head_dim="size", per_head=("slopes",), residual="residual"
        ),
        "blocks.*.attn.qkv": Column(GROUPS),
        "blocks.*.attn.out": Row(HEADS),
        "blocks.*.attn.sinks": Sliced(0, HEADS, head_dim=1),
        "blocks.*.attn.far": Sliced(1, HEADS, head_dim=1),
        "blocks.*.mlp": Mlp(residual="residual"),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "blocks.*.experts": Moe(),
        "blocks.*.experts.gate": Router(),
        "blocks.*.experts.up": Sliced(1),
        "blocks.*.experts.down": Sliced(2),
        "blocks.*.experts.shared_up": Column(),
        "blocks.*.experts.shared_down": Row(),
        "top": colrow.Replicated(),
    }
)


def built(**sizes: int) -> nn.Module:
    model = AllModel(**sizes).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def all_rules(sizes: dict[str, int], sequence_parallel: bool, recompute: bool) -> None:
    reference: Any = built(**sizes)
    split: Any = colrow.parallelize(copy.deepcopy(reference), mesh(), PLAN, sequence_parallel=sequence_parallel)
    split.recompute = recompute
    x = floats(2, 7, 16)
    want, got = reference(x), split(x)
    assert relative(got, want) <= FP64
    want.backward(cotangent(want))
    got.backward(cotangent(got))
    check_grads(split, reference, FP64)


@BOTH
@pytest.mark.parametrize("sizes", [{}, {"heads": 5, "kv_heads": 5}, {"heads": 3, "kv_heads": 1}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_model_with_all_of_them(ranks: Any, size: int, sizes: dict[str, int], sequence_parallel: bool) -> None:
    ranks(size).run(all_rules, sizes, sequence_parallel, False)


@BOTH
def test_NORM_6_all_of_them_recomputed(ranks: Any, sequence_parallel: bool) -> None:
    ranks(2).run(all_rules, {}, sequence_parallel, True)


def test_groups_are_read_by_head_where_a_group_is_cut() -> None:
    """Six heads in two groups, [0 1 2 k v | 3 4 5 k v], that is places 0-2, 3, 4 and 5-7, 8, 9."""
    assert split_heads(6, 2, 4, 2, "").groups.reads is None  # a group for each rank
    assert split_heads(6, 2, 4, 3, "").groups.reads == ((0, 3, 4, 1, 3, 4), (2, 3, 4, 5, 8, 9), (6, 8, 9, 7, 8, 9))
    assert split_heads(4, 2, 4, 4, "").groups.reads == ((0, 2, 3), (1, 2, 3), (4, 6, 7), (5, 6, 7))
    assert split_heads(5, 1, 4, 2, "").groups.reads == ((0, 1, 2, 5, 6), (3, 4, -1, 5, 6))
    assert split_heads(5, 1, 4, 2, "").true_heads == (3, 2)


class Scaled(nn.Linear):
    scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) * self.scale


class Quantised(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.scales, self.bias)  # pyright: ignore[reportOperatorIssue]


def test_a_linear_layer_in_other_words_is_one_and_others_are_not() -> None:
    assert is_plain_linear(Plainly(4, 6)) and is_plain_linear(nn.Linear(4, 6, bias=False))
    assert not is_plain_linear(Scaled(4, 6)) and not is_plain_linear(Quantised(4, 6))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such dimension": (
        {"blocks.*.experts.up": Sliced(3)},
        r"blocks.0.experts.up: Sliced\(3: features\) for a parameter of shape \(3, 13, 16\); it has 3 dimensions",
    ),
    "a bias among experts": (
        {"blocks.*.experts.shared_up": Column(), "blocks.*.experts": Moe(), "blocks.*.mlp": Moe()},
        "blocks.0.mlp.down: a row layer with a bias among experts; what experts give is summed at the exit",
    ),
    "a wrong head size": (
        {"blocks.*.attn.sinks": Sliced(0, HEADS)},
        r"blocks.0.attn.sinks: Sliced\(0: heads\) for a dimension of 6; by its units it is made of 24",
    ),
    "a row of features in attention": (
        {"blocks.*.attn.out": Row()},
        "blocks.0.attn.out: it takes 24 features, and the column layers in 'blocks.0.attn' give",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rule_that_does_not_fit_is_refused(case: str) -> None:
    rules, message = REFUSED[case]
    with pytest.raises(colrow.PlanError, match=message):
        colrow.resolve(AllModel(), Plan(rules) | PLAN, 2)


def test_a_name_that_a_split_module_needs_is_refused() -> None:
    model: Any = AllModel()
    model.blocks[1].mlp.grads = []
    with pytest.raises(colrow.PlanError, match=r"blocks.1.mlp: AddingMlp has an attribute named 'grads'"):
        colrow.resolve(model, PLAN, 2)


class NoRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 3), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * self.gate(x)[..., :1]


def not_a_router() -> None:
    rules = {"0": Moe(), "0.gate": Router(), "0.up": Column(), "0.down": Row()}
    model = colrow.parallelize(nn.Sequential(NoRouter()), mesh(), Plan(rules))
    with pytest.raises(colrow.ShapeError, match=r"0.gate: an output of type Tensor; a router returns \(logits, ...\)"):
        model(torch.ones(2, 4))


def test_what_is_no_router_says_so(ranks: Any) -> None:
    ranks(2).run(not_a_router)


def probabilities_are_whole(sequence_parallel: bool) -> None:
    class Returns(AllModel):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weights

    reference = Returns().double()
    reference.load_state_dict(built().state_dict())
    split = colrow.parallelize(copy.deepcopy(reference), mesh(), PLAN, sequence_parallel=sequence_parallel)
    x = floats(2, 7, 16)
    (_, want), (_, got) = reference(x), split(x)
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) <= FP64
    for weights in (want, got):
        y = torch.stack(list(weights))
        y.backward(cotangent(y))
    check_grads(split, reference, FP64)


@BOTH
@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_probabilities_leave_the_model_whole(ranks: Any, size: int, sequence_parallel: bool) -> None:
    ranks(size).run(probabilities_are_whole, sequence_parallel)
