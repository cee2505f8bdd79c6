"""Plans: what they match, what they refuse, and that a refusal leaves the model as it was. No ranks are needed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colrow import (
    FEATURES,
    HEADS,
    KV_HEADS,
    Attention,
    Block,
    Column,
    Drop,
    Head,
    I,
    LastNorm,
    Mlp,
    Norm,
    Plan,
    PlanError,
    R,
    Replicated,
    Row,
    Vocab,
    resolve,
)
from colrow.families import gpt as gpt_family
from colrow.models import GPT, GPTConfig
from colrow.resolve import Resolved
from colrow.rules import glob
from own import DRAWING, GPT_RULES, LLAMA, SMALL, OwnModel, drawing, gpt, own_plan


def meta_gpt(**options: Any) -> GPT:
    with torch.device("meta"):
        return gpt(**options)


def state_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a refusal must leave alone: classes, parameter and buffer objects, and plain attributes."""
    return [
        (
            name,
            type(module),
            [(key, id(value)) for key, value in module._parameters.items()],
            [(key, id(value)) for key, value in module._buffers.items()],
            {key: value for key, value in vars(module).items() if isinstance(value, int | float | str)},
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def refused(model: nn.Module, rules: dict[str, Any], tp: int = 2) -> PlanError:
    """The error that the rules are refused with: four clauses, and the model untouched."""
    before = state_of(model)
    with pytest.raises(PlanError) as caught:
        resolve(model, Plan(rules), tp)
    error = caught.value
    assert state_of(model) == before
    for clause in (error.where, error.given, error.allowed, error.fix):
        assert clause.strip()
        assert clause in str(error)
    return error


def without(*patterns: str) -> dict[str, Any]:
    return {pattern: rule for pattern, rule in GPT_RULES.items() if pattern not in patterns}


def test_a_gpt_resolves_on_meta() -> None:
    model = meta_gpt()
    before = state_of(model)
    resolved = resolve(model, Plan(GPT_RULES), 2)
    assert state_of(model) == before
    assert all(p.is_meta for p in model.parameters())
    assert [row.name for row in resolved.rows] == [name for name, _ in model.named_parameters()]  # tied: once
    rows = {row.name: row for row in resolved.rows}
    assert rows["blocks.0.attention.qkv.weight"].local_shape == (48, 32)
    assert rows["blocks.1.mlp.down.weight"].local_shape == (32, 64)
    assert rows["blocks.1.mlp.down.bias"].local_shape == (32,)
    assert rows["token.weight"].local_shape == (32, 32)
    assert rows["norm.weight"].local_shape == (32,)
    assert rows["token.weight"].bytes_per_rank == 32 * 32 * 4


def test_padding_is_counted() -> None:
    rows = {row.name: row for row in resolve(meta_gpt(vocab=61, ffn=70), Plan(GPT_RULES), 4).rows}
    assert rows["token.weight"].local_shape == (16, 32)
    assert rows["token.weight"].padding == 3
    assert rows["blocks.0.mlp.up.weight"].local_shape == (18, 32)
    assert rows["blocks.0.mlp.up.bias"].padding == 2


@pytest.mark.parametrize("options", [{}, LLAMA, {"tied": False, "bias": False}, {"gated": True}], ids=str)
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 64])
def test_the_family_plan_fits_every_option_at_any_degree(options: dict[str, Any], tp: int) -> None:
    model = meta_gpt(**options)
    resolved = resolve(model, gpt_family.plan(model), tp)
    assert len(resolved.rows) == len(list(model.named_parameters()))


def test_it_prints_a_table() -> None:
    lines = str(resolve(meta_gpt(), Plan(GPT_RULES), 2)).splitlines()
    assert lines[0].split() == ["parameter", "rule", "whole", "per", "rank"]
    assert ["blocks.0.mlp.down.weight", "Row(features)", "32x128", "32x64"] in [line.split() for line in lines]
    assert ["token.weight", "Vocab", "64x32", "32x32"] in [line.split() for line in lines]
    assert ["norm.bias", "LastNorm", "32", "32"] in [line.split() for line in lines]


def test_resolved_is_a_value() -> None:
    one, other = (resolve(meta_gpt(), Plan(GPT_RULES), 2) for _ in range(2))
    assert one == other
    assert isinstance(one, Resolved)
    assert one != resolve(meta_gpt(), Plan(GPT_RULES), 3)
    with pytest.raises(AttributeError):
        one.tp = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        one.sites[1].splits["weight"] = one.sites[1].splits["weight"]  # pyright: ignore[reportIndexIssue]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("blocks.*.mlp.upp", "blocks.0.mlp.up"), ("tokens", "token"), ("blocks.*.attn", "blocks.0.attention")],
)
def test_a_pattern_that_matches_nothing_names_near_misses(pattern: str, near: str) -> None:
    error = refused(meta_gpt(), GPT_RULES | {pattern: Norm()})
    assert error.where == f"plan, pattern '{pattern}'"
    assert "matches no" in error.given
    assert near.split(".")[-1] in error.allowed


def test_a_rule_for_modules_does_not_match_a_parameter() -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.*.mlp.up.weight": Column()})
    assert "matches no module" in error.given


def test_two_rules_for_one_module() -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.1.mlp.*": Replicated()})
    assert error.where.startswith("blocks.1.mlp.")
    assert "'blocks.*.mlp.up' says Column(features) and 'blocks.1.mlp.*' says Replicated" in error.given


def test_two_patterns_that_agree_are_one_rule() -> None:
    assert resolve(meta_gpt(), Plan(GPT_RULES | {"blocks.1.mlp.up": Column()}), 2)


def test_plans_are_copied_and_sent() -> None:
    both = Plan({"a": Column(HEADS, KV_HEADS)}) | Plan({"**": Replicated()})
    assert copy.deepcopy(both) == pickle.loads(pickle.dumps(both)) == both


def test_an_unowned_parameter() -> None:
    error = refused(meta_gpt(), without("position"))
    assert "position.weight is named by no pattern" in error.given
    assert "'position': Replicated()" in error.fix


def test_many_unowned_parameters_are_counted() -> None:
    error = refused(meta_gpt(layers=4), without("blocks.*.norm_*"))
    assert "blocks.0.norm_1.weight" in error.given
    assert "and 11 more are named" in error.given


def test_FUSE_7_a_column_layer_without_a_row_layer() -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.*.mlp.down": Replicated()})
    assert error.where == "blocks.0.mlp.up"
    assert "a Column(features) layer without a Row layer in 'blocks.0.mlp'" in error.given


def test_FUSE_7_a_row_layer_without_a_column_layer() -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.*.mlp.up": Replicated()})
    assert error.where == "blocks.0.mlp.down"
    assert "without a Column layer" in error.given


def test_FUSE_7_names_do_not_matter_and_partners_do() -> None:
    class Foo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.foo, self.bar, self.baz = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)

    assert resolve(Foo(), Plan({"foo": Column(), "bar": Row(), "baz": Replicated()}), 2)
    error = refused(Foo(), {"foo": Column(), "bar": Row()})
    assert "baz.weight, baz.bias are named by no pattern" in error.given


def test_a_row_layer_of_another_size_than_its_column_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(16, 8))
    error = refused(model, {"0": Column(), "2": Row()})
    assert error.where == "2"
    assert "16 features" in error.given
    assert "[12]" in error.given


def test_FUSE_2_a_fused_layer_named_as_one_piece_is_refused() -> None:
    rules = without("blocks.*.mlp.up") | {"blocks.*.mlp.gate_up": Column()}
    error = refused(meta_gpt(gated=True), rules)
    assert error.where == "blocks.0.mlp.down"
    assert "it takes 128 features" in error.given
    assert "[256]" in error.given
    assert "Column(FEATURES, FEATURES)" in error.fix


@pytest.mark.parametrize("units", [(HEADS,), (HEADS, KV_HEADS), (HEADS, HEADS, HEADS, HEADS)], ids=str)
def test_FUSE_2_a_projection_that_is_not_made_of_these_heads(units: Any) -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.*.attention.qkv": Column(*units)})
    assert error.where == "blocks.0.attention.qkv"
    assert "for a dimension of 96" in error.given
    assert "32" in error.allowed


def test_fused_features_that_do_not_divide() -> None:
    model = nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 8))
    error = refused(model, {"0": Column(FEATURES, FEATURES), "2": Row()})
    assert "for a dimension of 13" in error.given


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (Attention(heads="n_head"), "heads='n_head'"),
        (Attention(heads="heads", kv_heads="groups"), "kv_heads='groups'"),
        (Attention(heads="heads", head_dim="size"), "head_dim='size'"),
        (Attention(heads="qkv"), "heads='qkv'"),
        (Attention(heads="heads", head_dim=0), "head_dim=0"),
    ],
    ids=str,
)
def test_attention_that_names_a_wrong_attribute(rule: Attention, wrong: str) -> None:
    error = refused(meta_gpt(), GPT_RULES | {"blocks.*.attention": rule})
    assert error.where == "blocks.0.attention"
    assert wrong in error.given
    assert "positive integer" in error.allowed


def test_heads_that_are_no_multiple_of_kv_heads() -> None:
    model = meta_gpt()
    for block in model.blocks:
        vars(block.attention)["kv_heads"] = 3
    error = refused(model, GPT_RULES)
    assert "4 heads with 3 key/value heads" in error.given


def test_heads_without_an_attention_rule_above() -> None:
    error = refused(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"0": Column(HEADS), "1": Row(HEADS)})
    assert "Attention(...)" in error.fix


def test_a_dropout_in_a_region_needs_a_rule() -> None:
    error = refused(meta_gpt(), without("blocks.*.attention.drop"))
    assert error.where == "blocks.0.attention.drop"
    assert "a dropout without a rule" in error.given


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout])
def test_other_kinds_of_dropout(kind: Callable[[float], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 12), kind(0.1), nn.Linear(12, 8))
    assert "nn.Dropout" in refused(model, {"0": Column(), "2": Row()}).fix


@pytest.mark.parametrize(
    ("pattern", "rule", "kind"),
    [
        ("blocks.*.mlp.up", Vocab(), "Linear"),
        ("token", Column(), "Embedding"),
        ("token", Head(), "Embedding"),
        ("head", Vocab(), "Linear"),
        ("blocks.*.norm_*", Row(), "LayerNorm"),
        ("blocks.*.attention.qkv", Drop(HEADS), "Linear"),
    ],
)
def test_a_rule_for_another_kind_of_module(pattern: str, rule: Any, kind: str) -> None:
    assert kind in refused(meta_gpt(), GPT_RULES | {pattern: rule}).given


def test_options_of_an_embedding_that_need_the_whole_table() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    assert "max_norm" in refused(model, {"0": Vocab()}).given


def test_one_module_under_two_names_has_one_rule() -> None:
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(8, 8)})
    error = refused(model, {"a": Column(), "b": Row(), "c": Row()})
    assert "the same module as a" in error.given
    same = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(8, 8)})
    assert resolve(same, Plan({"a": Column(), "b": Column(), "c": Row()}), 2)
    error = refused(same, {"a": Column(), "c": Row()})
    assert "with the rule None here" in error.given


def test_a_shared_tensor_has_one_split() -> None:
    model = meta_gpt()
    error = refused(model, GPT_RULES | {"head": Replicated(), "norm": LastNorm()})
    assert error.where == "head.weight"
    assert "the same tensor as token.weight" in error.given


def test_the_model_itself_is_no_part() -> None:
    assert "the model itself" in refused(nn.Linear(4, 4), {"": Replicated()}).given


@pytest.mark.parametrize("wrong", ["Column", Column, None, 3, R], ids=repr)
def test_a_rule_that_is_no_rule(wrong: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Plan({"up": wrong})
    assert caught.value.where == "plan, pattern 'up'"
    assert "is not a rule" in caught.value.given
    for name in ("Column", "Row", "Replicated", "Attention", "Block"):
        assert name in caught.value.allowed


# -- globs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("up", ["up"], ["mlp.up", "upp", "up.weight"]),
        ("*", ["up", "down"], ["mlp.up", ""]),
        ("blocks.*", ["blocks.0", "blocks.17"], ["blocks", "blocks.0.mlp"]),
        ("blocks.*.mlp", ["blocks.0.mlp"], ["blocks.mlp", "blocks.0.1.mlp"]),
        ("**.up", ["mlp.up", "blocks.0.mlp.up"], ["up", "mlp.upper"]),
        ("blocks.**", ["blocks.0", "blocks.0.mlp.up"], ["blocks"]),
        ("**", ["a", "a.b.c"], [""]),
        ("norm_*", ["norm_1", "norm_"], ["norm", "norm_1.weight"]),
        ("*_proj", ["q_proj", "_proj"], ["q_proj_2", "a.q_proj"]),
        ("[qkv]_proj", ["q_proj", "v_proj"], ["o_proj"]),
        ("?", ["a"], ["ab", "."]),
        ("a.b", ["a.b"], ["axb"]),
        ("a+", ["a+"], ["aa"]),
        ("", [""], ["a"]),
    ],
)
def test_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    assert all(glob(pattern).match(name) for name in yes), yes
    assert not any(glob(pattern).match(name) for name in no), no


# -- layers ------------------------------------------------------------------------------------------------------------


def test_the_first_plan_goes_before_the_second() -> None:
    model = meta_gpt(tied=False)
    user = Plan({"token": Replicated(), "blocks.0.mlp": Replicated(), "blocks.0.mlp.*": Replicated()})
    rows = {row.name: row for row in resolve(model, user | Plan(GPT_RULES), 2).rows}
    assert rows["token.weight"].local_shape == (64, 32)
    assert rows["blocks.0.mlp.up.weight"].local_shape == (128, 32)
    assert rows["blocks.1.mlp.up.weight"].local_shape == (64, 32)
    assert rows["head.weight"].local_shape == (32, 32)


def test_a_pattern_of_the_first_layer_must_match_too() -> None:
    with pytest.raises(PlanError, match="matches no"):
        resolve(meta_gpt(), Plan({"embedding": Replicated()}) | Plan(GPT_RULES), 2)


def test_plans_are_immutable_values() -> None:
    a, b = Plan({"x": Column()}), Plan({"x": Column()})
    assert a == b
    assert hash(a) == hash(b)
    assert a != Plan({"x": Column(FEATURES, FEATURES)})
    assert a != Plan({"x": Row()})
    assert a | b != a
    assert len({a, b, a | b}) == 2
    for attempt in ("layers", "rules"):
        with pytest.raises(AttributeError):
            setattr(a, attempt, ())
    with pytest.raises(AttributeError):
        Column().units = ()  # pyright: ignore[reportAttributeAccessIssue]
    rules: dict[str, Any] = {"x": Column()}
    frozen = Plan(rules)
    rules["y"] = Row()
    assert frozen == a
    before = repr(a)
    _ = a | Plan({"z": Row()})
    assert repr(a) == before == "Plan({'x': Column(features)})"
    assert repr(a | Plan({"z": Row()})) == "Plan({'x': Column(features)}) | Plan({'z': Row(features)})"


# -- the layouts that follow from the place ----------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_how_whole_parameters_are_read_follows_from_the_place(sequence_parallel: bool) -> None:
    with torch.device("meta"):
        model = OwnModel(experts=True)
    sites = {s.name: s for s in resolve(model, own_plan(experts=True), 2, sequence_parallel=sequence_parallel).sites}
    inside = R if sequence_parallel else I
    assert sites["layers.0"].grads == {"gain": inside}
    assert sites["layers.0.norm_a"].grads == dict.fromkeys(("weight", "bias", "scale"), inside)
    assert sites["layers.0.attn.o"].grads["bias"] == inside
    assert sites["layers.0.attn.k_norm"].grads == {"weight": R}  # local heads, in both modes
    assert sites["layers.1.ff.gate"].grads == {"weight": R, "bias": R}
    assert sites["last"].grads["weight"] == inside
    assert sites["classify"].grads == {"weight": I, "bias": I}
    assert sites[""].grads == {"shift": I}


def test_replicated_grad_overrides() -> None:
    rules = GPT_RULES | {"position": Replicated(grad=R)}
    sites = {site.name: site for site in resolve(meta_gpt(), Plan(rules), 2).sites}
    assert sites["position"].grads == {"weight": R}


def test_heads_on_each_rank_are_patched() -> None:
    def patches(heads: int, kv_heads: int, tp: int) -> dict[str, int]:
        model = meta_gpt(heads=heads, kv_heads=kv_heads, width=8 * heads)
        sites = {site.name: site for site in resolve(model, Plan(GPT_RULES), tp).sites}
        return dict(sites["blocks.0.attention"].patches)

    assert patches(4, 4, 2) == {"heads": 2, "kv_heads": 2}
    assert patches(8, 2, 4) == {"heads": 2, "kv_heads": 1}
    assert patches(5, 5, 2) == {"heads": 3, "kv_heads": 3}
    assert patches(6, 2, 4) == {"heads": 2, "kv_heads": 2}  # groups of 3, two heads a rank: one kv head each


def test_a_plan_without_blocks_knows_no_sequence_parallel_stretch() -> None:
    sites = {site.name: site for site in resolve(drawing(), DRAWING, 2).sites}
    assert not any(site.sharded for site in sites.values())


def test_small_is_the_config_that_the_tests_mean() -> None:
    assert GPTConfig(**SMALL).width % GPTConfig(**SMALL).heads == 0


def test_a_block_that_is_a_region_too_is_not_needed() -> None:
    """Attention and MLP rules may stand without a Block: then there is no sequence parallelism around them."""
    rules = without("blocks.*")
    sites = {site.name: site for site in resolve(meta_gpt(), Plan(rules), 2).sites}
    assert not sites["blocks.0.norm_1"].sharded
    assert isinstance(sites["blocks.0"].rule, Block | type(None))
    assert isinstance(sites["blocks.0.mlp"].rule, Mlp)
