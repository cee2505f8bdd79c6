"""`colrow verify` says yes to what holds, no to what does not, and what is wrong with a command that cannot be run."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colrow
from colrow import cli, verification
from colrow.model_options import VerifyOptions
from colrow.models.tiny import tiny
from colrow.params import local_of
from colrow.source import OwnModel, Saved, Tiny, find
from colrow.verdict import EQUAL, Settings, Verdict, relative
from colrow.verification import Errors, Exact, judge
from test_finetune import save_model

KEYS = {"ok", "tp", "sequence_parallel", "loss", "logits_rel_error", "max_grad_rel_error", "parameters"} | {
    "first_divergence", "grad_norm_rel_error", "step_rel_error", "replicas_equal", "dtype", "dropout", "tolerance",
}  # fmt: skip
WEIGHT = "blocks.1.norm_2.weight"
UP = "blocks.1.mlp.up.weight"


def test_the_contract(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "--model", "qwen3", "--tp", "3", "--no-sequence-parallel", "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found.keys() == KEYS and found["ok"] is True and found["first_divergence"] is None
    assert (found["tp"], found["sequence_parallel"], found["dtype"]) == (3, False, "float64")
    assert found["loss"]["reference"] == pytest.approx(found["loss"]["parallel"], rel=1e-9)
    assert 0 < found["max_grad_rel_error"] == max(p["rel_error"] for p in found["parameters"]) < 1e-9
    assert [p["name"] for p in found["parameters"]] == [name for name, _ in tiny("qwen3").named_parameters()]


def test_a_folder_for_people(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny("gpt2", "AutoModelForTokenClassification")
    model.save_pretrained(tmp_path)
    assert cli.run(["verify", "--model", str(tmp_path), "--tp", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("holds") and "score" not in err and "colrow verify" in out, (out, err)


def test_a_text_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, text = save_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("What is 2 plus 3? It is 5.")
    losses = []
    for more in ([], ["--text", str(text)]):
        assert cli.run(["verify", "--model", str(folder), "--tp", "2", "--json", *more]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"]["reference"])
    found: Any = Saved(folder)
    model = found.build(dropout=0.0, seed=0).double()
    ids = torch.tensor([found.tokenizer()(text.read_text())["input_ids"]])
    assert losses[1] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5) != losses[0]


@pytest.mark.parametrize(
    ("model", "content", "says"),
    [
        ("model", None, "--text text.txt: No such file or directory; a text file in UTF-8 is needed"),
        ("model", b"\xff\xfe", "--text text.txt: it is not UTF-8"),
        ("model", b"", "--text text.txt: 0 tokens; two are needed"),
        ("llama", b"some text", "--model llama: it is built in, tiny and random, without a tokenizer"),
    ],
)
def test_a_text_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, content: bytes | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"))
    if content is not None:
        Path("text.txt").write_bytes(content)
    with pytest.raises(colrow.DataError, match=re.escape(says)):
        VerifyOptions(model=model, text=Path("text.txt")).source()


def scaled(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    split = colrow.parallelize(model, mesh, **options)
    with torch.no_grad():
        local_of(split.get_parameter(WEIGHT)).mul_(1 + 1e-6)
    return split


def half_a_gradient(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    split = colrow.parallelize(model, mesh, **options)
    split.get_parameter(UP).register_hook(lambda grad: grad / 2)
    return split


def drifted(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    split = colrow.parallelize(model, mesh, **options)
    with torch.no_grad():
        local_of(split.get_parameter(WEIGHT)).add_(1e-12 * dist.get_rank())
    return split


def noisy(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    split = colrow.parallelize(model, mesh, **options)
    with torch.no_grad():
        mine = local_of(split.get_parameter(UP))
        mine.add_(1e-6 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(1), dtype=mine.dtype))
    return split


CAUSES = {
    scaled: (WEIGHT, "parameter", "It is 1.000001 times the right one"),
    half_a_gradient: (UP, "parameter gradient", "It is 1/2 of the right one"),
    drifted: (WEIGHT, "replicas", "ranks [1] hold other values"),
    noisy: (UP, "parameter", "look at how it was loaded or split"),
}
FAULTS = {
    noisy: {"loss", "logits", "gradients", "grad_norm", "step"},
    scaled: {"loss", "logits", "gradients", "grad_norm", "step"},
    half_a_gradient: {"gradients", "grad_norm", "step"},
    drifted: set(),
}


def wrong(v: Verdict) -> set[str]:
    errors = {"loss": v.loss.rel_error, "logits": v.logits_rel_error, "gradients": v.max_grad_rel_error}
    errors |= {"grad_norm": v.grad_norm_rel_error, "step": v.step_rel_error}
    return {name for name, error in errors.items() if error > v.tolerance[name]}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_every_rank_says_so(ranks: Any, fault: Any) -> None:
    found = ranks(2).run(verification.verify_source, OwnModel(), Settings(), fault)
    assert found[0] == found[1], "the first rank's verdict is everyone's"
    assert not found[0].ok and wrong(found[0]) == FAULTS[fault]
    assert found[0].replicas_equal == (fault is not drifted)
    first, (parameter, where, cause) = found[0].first_divergence, CAUSES[fault]
    assert (first.parameter, first.where) == (parameter, where) and cause in first.cause, first
    keys = {"module", "where", "rel_error", "cause", "ratio", "parameter"}
    assert found[0].as_json()["first_divergence"].keys() == keys, "scripts read them"
    if fault is half_a_gradient:
        assert first.ratio == pytest.approx(0.5)
        worst = max(found[0].parameters, key=lambda g: g.rel_error)
        assert worst.name == UP and worst.rel_error == pytest.approx(0.5)


def verify_faulty(source: Any, settings: Settings) -> Verdict:
    return verification.verify_source(source, settings, half_a_gradient)


def test_what_does_not_hold_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "verify_source", verify_faulty)
    assert cli.run(["verify", "--tp", "2"]) == 1
    out, err = capfd.readouterr()
    assert out.startswith("DOES NOT HOLD") and "colrow plan" in out and err == ""
    assert f"first divergence:\n  {UP}: its parameter gradient differs" in out and "0.5 times the right one" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shorter_dtype_is_measured_against_double(ranks: Any, dtype: Any) -> None:
    settings = Settings(dtype=dtype)
    good = ranks(2).run(verification.verify_source, Tiny("llama"), settings)[0]
    assert good.ok and good.max_grad_rel_error > torch.finfo(getattr(torch, dtype)).eps
    assert not ranks(2).run(verification.verify_source, OwnModel(), settings, half_a_gradient)[0].ok


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("source", [OwnModel(), Tiny("bert")], ids=["gpt", "bert"])
def test_dropout_is_compared_with_one_rank(ranks: Any, source: Any, sequence_parallel: bool) -> None:
    settings = Settings(sequence_parallel=sequence_parallel, dropout=0.3)
    both = (settings, replace(settings, dropout=0.0))
    dropped, kept = (ranks(2).run(verification.verify_source, source, s)[0] for s in both)
    assert dropped.ok and kept.ok
    assert abs(dropped.loss.reference - kept.loss.reference) > 1e-3, "nothing was dropped"


def exact(**grads: float) -> Exact:
    tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in grads.items()}
    return Exact(torch.ones(1), torch.ones(1), tensors, 1.0, {})


def errors(loss: float = 0.0, **gradients: float) -> Errors:
    return Errors(torch.ones(1), {"loss": loss, "logits": 0, "gradients": 0, "grad_norm": 0, "step": 0}, gradients)


def test_a_zero_gradient_is_measured_by_the_others() -> None:
    want = exact(w=1.0, k=0.0)
    small, large = (torch.tensor([value], dtype=torch.float64) for value in (1e-17, 1e-11))
    assert want.gradient_error("k", small, want.least) <= EQUAL < want.gradient_error("k", large, want.least)
    assert relative(torch.ones(1), torch.zeros(1)) > 1, "nothing to divide by is no error of python's"


def test_what_is_missing_or_no_number_does_not_hold() -> None:
    want = exact(w=1.0, k=0.5)
    assert want.gradient_error("k", None, want.least) == 1.0
    assert want.gradient_error("more", torch.ones(1), want.least) > 1
    assert judge(errors(), want, Settings()).ok
    spoilt = judge(errors(loss=math.nan, k=math.nan), want, Settings())
    assert not spoilt.ok and spoilt.as_json()["parameters"][0]["rel_error"] is None
    assert math.isnan(relative(torch.tensor(math.nan), torch.ones(()))), "or it would be lost in a maximum"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {
        "empty/readme.md": "",
        "broken/config.json": "{",
        "nameless/config.json": "{}",
        "unknown/config.json": '{"model_type": "lama"}',
        "quantised/config.json": '{"model_type": "llama", "quantization_config": {}}',
        "pickled/config.json": '{"model_type": "llama"}',
        "pickled/pytorch_model.bin": "",
        "strange/config.json": '{"model_type": "llama", "architectures": ["MyLlama"]}',
        "damaged/config.json": '{"model_type": "llama"}',
        "damaged/model.safetensors": "no tensors",
    }
    for name, text in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "0"], "--tp: 0; a positive number is needed"),
        (["--tp", "1000"], "--tp: 1000 ranks; at most 64"),
        (["--dropout", "1"], "--dropout: 1.0; a probability below 1"),
        (["--dropout", "nan"], "--dropout: nan;"),
        (["--model", "lama"], "--model lama: there is no such model or path; it may be a folder, a config.json, or a "),
        (["--model", "empty"], "--model empty: the folder has no config.json"),
        (["--model", "broken"], "--model broken: config.json is not readable JSON"),
        (["--model", "nameless/config.json"], "--model nameless/config.json: config.json names no model_type"),
        (["--model", "quantised"], "--model quantised: its weights are quantised"),
        (["--model", "pickled"], "--model pickled: its weights are pickled (*.bin)"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    folders: None, arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"colrow: error: {says}"), err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unknown", "its config cannot be used"),
        ("strange", "its class is MyLlama"),
        ("damaged", "its weights cannot be loaded"),
    ],
)
def test_a_folder_that_only_transformers_can_refuse(folders: None, name: str, says: str) -> None:
    with pytest.raises(colrow.DataError, match=f"--model {name}: {says}"):
        find(name).build(dropout=0.0, seed=0)


def test_transformers_that_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
    assert cli.run(["verify", "--model", "llama"]) == 2
    assert "pip install 'colrow[hf]'" in capfd.readouterr().err


def test_near_misses_are_named() -> None:
    with pytest.raises(colrow.DataError, match="built-in model such as 'llama'"):
        find("lama")
