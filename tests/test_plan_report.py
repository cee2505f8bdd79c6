"""`colrow.plan`: its bytes are those that ranks store; it says what stays whole and why, and warns of odd choices."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import colrow
from colrow import Column, Norm, Plan, PlanError, Replicated, Row, Vocab, cli
from colrow.figures import folded, runs
from colrow.models.tiny import from_config, tiny_config
from colrow.params import local_of
from colrow.plan_advice import ADAPTER, LATENT, NORM, ROUTER, ROW_BIAS, TABLE
from hf import MANY, ODD, tiny
from pool import mesh

SECONDS, BYTES = 10, 2 * 1024**3
"""What the plan of a model of any size may take."""
LARGE: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "deepseek_v3": {},  # its defaults are those of the model with 671e9 parameters
}


def on_meta(family: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return from_config(tiny_config(family, **changes), "AutoModelForCausalLM")


def kinds(report: colrow.PlanReport) -> dict[str, colrow.Advice]:
    return {warning.kind: warning for warning in report.warnings}


def stored_bytes(family: str, sizes: dict[str, Any]) -> int:
    model = colrow.parallelize(tiny(family, **sizes), mesh())
    return sum(local_of(param).untyped_storage().nbytes() for param in model.parameters())


@pytest.mark.parametrize(("family", "sizes"), [("llama", MANY), ("gpt2", {}), ("mixtral", ODD), ("deepseek_v3", {})])
def test_the_bytes_are_those_that_ranks_store(ranks: Any, family: str, sizes: dict[str, Any]) -> None:
    report = colrow.plan(tiny(family, **sizes), 3)
    assert ranks(3).run(stored_bytes, family, sizes) == [report.totals.bytes_per_rank] * 3
    totals = report.totals
    assert totals.sharded_bytes_per_rank + totals.replicated_bytes == totals.bytes_per_rank
    assert totals.whole_bytes == sum(p.numel() * p.element_size() for p in tiny(family, **sizes).parameters())
    in_common = 3 * (totals.sharded_bytes_per_rank - totals.padding_bytes_per_rank) + totals.replicated_bytes
    assert in_common == pytest.approx(totals.whole_bytes, abs=3), "shards without padding are the whole"
    assert report.padding_share == totals.padding_bytes_per_rank / totals.bytes_per_rank


def test_the_estimate_for_adamw_counts_what_learns_four_times() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)).to(torch.bfloat16)
    model[1].weight.requires_grad_(False)
    totals = colrow.plan(model, 2, Plan({"0": Column(), "1": Row()})).totals
    assert (totals.parameters, totals.trainable) == (64, 32)
    assert totals.adamw_bytes_per_rank == 2 * (4 * 16 + 16)
    assert totals.adamw_float32_bytes_per_rank == 4 * (4 * 16 + 16)


def test_it_says_why_a_parameter_is_whole() -> None:
    whole = colrow.plan(on_meta("deepseek_v3"), 2).replicated
    assert whole["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == LATENT
    assert whole["model.layers.1.mlp.gate.weight"] == ROUTER and whole["model.norm.weight"] == NORM
    whole = colrow.plan(on_meta("gpt2"), 2).replicated
    assert whole["transformer.wpe.weight"] == TABLE and whole["transformer.h.0.mlp.c_proj.bias"] == ROW_BIAS
    assert "transformer.wte.weight" not in whole and "transformer.h.0.attn.c_attn.bias" not in whole
    adapted = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["up_proj"]))
    whole = colrow.plan(adapted, 2).replicated
    assert whole["base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"] == ADAPTER
    whole = colrow.plan(on_meta("llama", **MANY), 3).replicated
    assert whole["model.layers.0.self_attn.k_proj.weight"].startswith("2 key/value heads for 3 ranks: a rank reads")
    assert "model.layers.0.self_attn.q_proj.weight" not in whole


def test_it_warns_of_key_value_heads_fewer_than_ranks() -> None:
    warning = kinds(colrow.plan(on_meta("llama", **MANY), 3))["kv_heads"]
    assert warning.where == "model.layers.0-1.self_attn" and "2 key/value heads for 3 ranks" in warning.given
    assert warning.fix == "At tp=2 or less they are split"
    assert "kv_heads" not in kinds(colrow.plan(on_meta("llama", **MANY), 2))
    fused = kinds(colrow.plan(on_meta("falcon", new_decoder_architecture=False, multi_query=True), 2))["kv_heads"]
    assert "fused with the query heads: whole on every rank" in fused.given and "%" in fused.given
    assert fused.fix == "No tp splits one head; count its bytes"


def test_it_warns_of_padding() -> None:
    five = on_meta("llama", **ODD)
    warned = kinds(colrow.plan(five, 2))
    assert warned["heads"].given == "5 heads on 2 ranks: each computes 3, 1 of 6 (16.7%) zero padding"
    assert warned["vocabulary"].given == "61 entries on 2 ranks: 1 (1.6%) are padding"
    warned = kinds(colrow.plan(five, 4))
    assert "5 heads on 4 ranks: 1 without a head" in warned["idle_ranks"].given
    assert warned["idle_ranks"].fix == "No head is padded at tp=5"
    mlp = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 8))
    report = colrow.plan(mlp, 4, Plan({"0": Column(), "1": Row()}))
    assert "5 features on 4 ranks: 37.5%" in kinds(report)["padding"].given
    assert report.waste == dict.fromkeys(("0.weight", "0.bias", "1.weight"), 3 / 8)
    assert colrow.plan(on_meta("llama", vocab_size=64), 2).warnings == ()


def test_it_warns_of_a_large_layer_that_is_whole() -> None:
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64), nn.LayerNorm(64))
    rules = {"0": Vocab(), "2": Norm()}
    plan = Plan(rules | {"1": Replicated()})
    assert colrow.plan(model, 1, plan).warnings == (), "on one rank everything is whole"
    (weight, *_) = colrow.plan(model, 2, plan).warnings
    assert (weight.kind, weight.where) == ("large_whole", "1.weight") and "no rule splits it" in weight.given


def test_layers_that_are_alike_are_one_line() -> None:
    report = colrow.plan(on_meta("deepseek_v3", num_hidden_layers=5, first_k_dense_replace=2), 2)
    assert sum(node.bytes_per_rank for node in report.tree()) == report.totals.bytes_per_rank
    layers = {node.label: node for top in report.tree() for _, node in top.walk()}["2-4"]
    one = sum(row.bytes_per_rank for row in report.rows if row.name.startswith("model.layers.3."))
    assert layers.bytes_per_rank == sum(node.bytes_per_rank for node in layers.below) == 3 * one
    text = str(report)
    labels = [line.strip("│├└─ ").split()[0] for line in text.splitlines() if line]
    assert labels.count("0-1") == labels.count("2-4") == 1
    assert labels.count("q_b_proj.weight") == 2 and labels.count("experts") == 1
    assert "\nmodel.layers" not in text and "  model.layers.0-4.input_layernorm.weight" in text
    assert runs([7, 0, 1, 2, 4]) == "0-2,4,7" and runs(range(0, 20, 2)) == "0,2,4,..,18"
    assert folded(["h.0.a", "h.1.a", "h.1.b"]) == {"h.0-1.a": ["h.0.a", "h.1.a"], "h.1.b": ["h.1.b"]}


def test_chains_of_different_names_are_not_one_line() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Identity(), nn.Linear(4, 4)))
    text = str(colrow.plan(model, 2, Plan({"**": Replicated()})))
    assert "0.0" in text and "1.1" in text


@pytest.mark.parametrize("tp", [0, -1])
def test_a_degree_is_positive(tp: int) -> None:
    with pytest.raises(PlanError, match=r"colrow\.plan: tp=.*Give tp=2, say\."):
        colrow.plan(nn.Linear(2, 2), tp)


def test_a_model_without_parameters_has_a_plan() -> None:
    assert "holds 0 B" in str(colrow.plan(nn.Sequential(nn.ReLU()), 2, Plan({})))


def test_the_command_counts_in_another_dtype(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        assert cli.run(["plan", "--tp", "2", "--dtype", dtype, "--no-sequence-parallel", "--json"]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["totals"]["bytes_per_rank"] == 2 * found[1]["totals"]["bytes_per_rank"]
    assert found[1]["dtype"] == "bfloat16" and not found[1]["sequence_parallel"]
    assert cli.run(["plan", "--tp", "2", "--no-sequence-parallel"]) == 0
    out = capfd.readouterr().out
    assert "\ntensor parallel, tp 2, float32: each rank holds" in out and "next:" in out


@pytest.mark.parametrize("family", LARGE)
def test_the_plan_of_a_large_model_takes_seconds_and_little_memory(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **LARGE[family], dtype="bfloat16")
    (tmp_path / "config.json").write_text(config.to_json_string())
    before = cpu_seconds()  # of a clock that other work on the machine does not move
    command = [sys.executable, "-m", "colrow", "plan", "--model", str(tmp_path / "config.json"), "--tp", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=_limit)
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)["totals"]
    assert totals["whole_bytes"] > 140e9 and totals["bytes_per_rank"] < totals["whole_bytes"] / 7
    assert cpu_seconds() - before < SECONDS


def cpu_seconds() -> float:
    """What all children that have ended have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
