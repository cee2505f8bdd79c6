"""`colrow generate`: the same text at every degree, as it comes; drawn, searched for, from stdin; and wrong use."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colrow import cli
from colrow import generate as generating
from colrow.model_options import GenerateOptions
from pool import Pool
from test_cli import COMMAND
from test_finetune import VOCAB, save_model

Ranks = Callable[[int], Pool]
PROMPT = "What is 7 plus"


@pytest.fixture
def options(tmp_path: Path) -> GenerateOptions:
    model = save_model(tmp_path / "model", hidden_size=40, num_attention_heads=5, num_key_value_heads=5)
    return GenerateOptions(str(model), PROMPT, max_new_tokens=12)


def generated(options: GenerateOptions) -> tuple[Any, str]:
    """The result on this rank, and what was shown on stdout."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        result = generating.generate(options)
    return result, shown.getvalue()


def plain(options: GenerateOptions, **settings: Any) -> str:
    """What transformers writes by itself, on one device."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model)
    ids = tokenizer(options.prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(options.seed)
    made = model.generate(ids, max_new_tokens=options.max_new_tokens, pad_token_id=0, **settings)[0]
    return tokenizer.decode(made[ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {"do_sample": False}),
        (
            {"temperature": 2.0, "top_p": 0.9, "seed": 3},
            {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "top_k": 0},
        ),
        ({"beams": 3}, {"do_sample": False, "num_beams": 3}),
    ],
    ids=["greedy", "drawn", "beams"],
)
def test_the_text_is_that_of_one_device_at_every_degree(
    ranks: Ranks, options: GenerateOptions, asked: dict[str, Any], settings: dict[str, Any]
) -> None:
    options = replace(options, **asked)
    want = plain(options, **settings)
    for tp in (2, 3):
        (result, shown), *others = ranks(tp).run(generated, replace(options, tp=tp))
        assert result["text"] == want and result["tokens"] > 0
        assert shown.strip("\n") == PROMPT + want, "the first rank writes the whole text"
        assert all(other == "" and rest["text"] == want for rest, other in others)


def test_another_seed_draws_another_text(ranks: Ranks, options: GenerateOptions) -> None:
    options = replace(options, temperature=3.0)
    texts = {ranks(1).run(generated, replace(options, seed=seed))[0][0]["text"] for seed in range(3)}
    assert len(texts) == 3


def test_one_object_on_stdout_from_a_prompt_on_stdin(options: GenerateOptions) -> None:
    arguments = ["generate", "--model", options.model, "--tp", "2", "--prompt", "-", "--max-new-tokens", "3", "--json"]
    done = subprocess.run([*COMMAND, *arguments], input=PROMPT + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"prompt", "text", "tokens", "tokens_per_second"}
    assert (result["prompt"], result["tokens"]) == (PROMPT, 3)


def wrong(kind: str, options: GenerateOptions) -> GenerateOptions:
    folder = Path(options.model)
    match kind:
        case "long":
            return replace(options, max_new_tokens=64)
        case "vocabulary":
            save_model(folder, vocab_size=VOCAB - 270)
        case "no tokenizer":
            for file in folder.glob("tokenizer*"):
                file.unlink()
        case _:
            (folder / "tokenizer.json").write_text("{")
    return options


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("long", "--max-new-tokens: 64 after a prompt of"),
        ("vocabulary", "the model has 30; tokenizer and model share one vocabulary"),
        ("no tokenizer", "there is no tokenizer in it"),
        ("tokenizer", "its tokenizer cannot be used"),
    ],
)
def test_wrong_use_is_the_same_error_on_every_rank(
    ranks: Ranks, options: GenerateOptions, kind: str, says: str
) -> None:
    raised = ranks(2).run(generated, wrong(kind, replace(options, tp=2)), expect_errors=True)
    assert len({(e.type_name, e.message) for e in raised}) == 1 and says in raised[0].message, raised[0].message
    assert raised[0].type_name == "DataError"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", ""], "--prompt: ''; a model goes on with something"),
        (["--prompt", "a", "--tp", "0"], "--tp: 0"),
        (["--prompt", "a", "--beams", "0"], "--beams: 0"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: -1"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p: 1.5"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: 0"),
        (["--prompt", "a"], "--model nowhere: there is no such model or path"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "--model", "nowhere", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"colrow: error: {says}") and len(err.splitlines()) == 1, err
