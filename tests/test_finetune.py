"""Finetuning from a folder: the same losses at every degree, a plain folder at the end, and clear words before it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from colrow import cli
from colrow import finetune as finetuning
from colrow.errors import DataError
from colrow.models.tiny import tiny
from colrow.options import TrainOptions
from colrow.text import IGNORED, Document, pack, read_documents, tokenize
from oracle import relative
from pool import Pool
from test_cli import finish, start
from test_train import close

Ranks = Callable[[int], Pool]
VOCAB = 300
PAIRS = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}" + "!" * (i % 7)} for i in range(60)]


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of `VOCAB` entries with an eos token."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    bpe.train_from_iterator([pair["prompt"] + pair["completion"] for pair in PAIRS], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>").save_pretrained(folder)


def save_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A tiny random language model with its tokenizer."""
    model: Any = tiny(family, **{"vocab_size": VOCAB, "eos_token_id": 0, **changes})
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    """A tiny run on prompts and completions; a micro-batch has more or fewer tokens to learn than another."""
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    return TrainOptions(
        model=str(save_model(tmp_path / "start")), data=(tmp_path / "data.jsonl",), out=tmp_path / "run", steps=4,
        batch=4, warmup=1, lr=1e-3, context=16, eval_every=100,
    )  # fmt: skip


def finetuned(options: TrainOptions) -> tuple[Any, str]:
    """The result on this rank, and what was shown."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        result = finetuning.finetune(options)
    return result, shown.getvalue()


def losses(ranks: Ranks, size: int, options: TrainOptions, name: str) -> list[float]:
    """The losses of all steps of a run on `size` ranks, in a folder of its own."""
    out = options.data[0].parent / name
    ranks(size).run(finetuned, replace(options, out=out))
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


BOTH = pytest.mark.parametrize("changes", [{}, {"lora_rank": 3, "lr": 1e-2}], ids=["all weights", "adapters"])


@BOTH
def test_losses_are_equal_at_every_degree_and_however_a_batch_is_dealt_out(
    ranks: Ranks, options: TrainOptions, changes: dict[str, Any]
) -> None:
    options = replace(options, **changes)
    want = losses(ranks, 1, options, "one")
    assert want[-1] < want[0]
    assert close(losses(ranks, 3, replace(options, tp=3), "tp3"), want)
    assert close(losses(ranks, 2, replace(options, tp=2, batch=1, accumulate=4), "parts"), want)
    assert close(losses(ranks, 4, replace(options, tp=2, batch=2), "replicas"), want)


@BOTH
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    ranks: Ranks, options: TrainOptions, changes: dict[str, Any]
) -> None:
    options = replace(options, tp=2, save_every=2, **changes)
    want = losses(ranks, 2, options, "run")
    shutil.rmtree(options.data[0].parent / "run" / "step-000004")
    assert close(losses(ranks, 3, replace(options, resume=True, tp=3), "run"), want)


def test_the_result_is_a_plain_folder(ranks: Ranks, options: TrainOptions) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, text = ranks(2).run(finetuned, replace(options, tp=2))[0]
    assert set(result) == {"steps", "loss_first", "loss_last", "tokens_per_second", "checkpoint", "model"}
    assert f"colrow generate --model {result['model']}" in text and "Column(kv_heads)" in text
    before = AutoModelForCausalLM.from_pretrained(options.model)
    after = AutoModelForCausalLM.from_pretrained(result["model"])
    moved = relative(after.lm_head.weight, before.lm_head.weight)
    assert 0 < moved < 0.1
    words = PAIRS[3]["prompt"] + PAIRS[3]["completion"]
    mine, theirs = (
        AutoTokenizer.from_pretrained(path)(words)["input_ids"] for path in (result["model"], options.model)
    )
    assert mine == theirs


def test_adapters_are_a_plain_folder(ranks: Ranks, options: TrainOptions) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = replace(options, tp=2, lora_rank=3, lr=1e-2)
    result, shown = ranks(2).run(finetuned, options)[0]
    assert "PeftModel.from_pretrained" in shown
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(options.model), result["model"])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = pack(*tokenize(read_documents(options.data), tokenizer), options.context, options.batch)
    ids, labels = rows.batch(options.seed, 4, range(options.batch))
    with torch.no_grad():
        want = float(model(input_ids=ids, labels=labels).loss)
    resumed, _ = ranks(2).run(finetuned, replace(options, resume=True, steps=5))[0]
    assert close([resumed["loss_first"]], [want]), "the next step of the run starts from what plain peft has loaded"


def test_the_command_and_its_resumption(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(options.data[0].parent)
    started = start("train", "--model", "start", "--data", "data.jsonl", "--tp", "2", "--steps", "2", "--json")
    code, out, err = finish(started)
    assert code == 0, err
    first = json.loads(out)
    assert (first["steps"], first["model"], first["checkpoint"]) == (2, "runs/start/model", "runs/start/step-000002")
    saved = json.loads(Path("runs/start/options.json").read_text())
    assert (saved["context"], saved["lr"], saved["batch"]) == (64, 2e-5, 2), "the defaults of finetuning"
    monkeypatch.chdir("runs")  # the folder keeps whole paths
    code, out, err = finish(start("train", "--resume", "--out", "start", "--tp", "1", "--json"))
    assert code == 0, err
    assert json.loads(out)["steps"] == 4 and "going on from step 2" in err


def test_the_model_has_its_own_dtype_or_the_one_that_is_asked_for(ranks: Ranks, options: TrainOptions) -> None:
    tiny("llama", vocab_size=VOCAB).bfloat16().save_pretrained(options.model)  # type: ignore[operator]
    for dtype, kept in (("auto", "bfloat16"), ("float32", "float32")):
        out = options.data[0].parent / dtype
        result, _ = ranks(2).run(finetuned, replace(options, tp=2, steps=1, dtype=dtype, out=out))[0]
        assert json.loads((Path(result["model"]) / "config.json").read_text())["dtype"] == kept


def wrong(kind: str, options: TrainOptions) -> TrainOptions:
    data, model = options.data[0], Path(options.model)
    match kind:
        case "empty":
            data.write_text("\n")
        case "binary":
            binary = data.with_suffix(".txt")
            binary.write_bytes(b"\x89PNG\0\0\1")
            return replace(options, data=(binary,))
        case "line":
            data.write_text('{"text": "one"}\n\n{"text": "tw')
        case "keys":
            data.write_text('{"text": "one"}\n{"content": "two"}')
        case "short":
            data.write_text('{"text": "one"}')
        case "prompts":
            data.write_text(json.dumps({"prompt": "p" * 900, "completion": "c"}))
        case "no data":
            return replace(options, data=())
        case "vocabulary":
            save_model(model, vocab_size=VOCAB - 20)
        case "no tokenizer":
            for file in model.glob("tokenizer*"):
                file.unlink()
        case "context":
            return replace(options, context=65)
        case "out":
            (data.parent / "run").mkdir()
            (data.parent / "run" / "thesis.txt").touch()
        case "layers":
            return replace(options, layers=2)
        case "targets":
            return replace(options, lora_rank=2, lora_targets="nothing")
        case _:
            (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    return options


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("empty", "data.jsonl: the file is empty"),
        ("binary", "data.txt: it is binary; text in UTF-8"),
        ("line", "data.jsonl, line 3: it is no JSON"),
        ("keys", "data.jsonl, line 2: it has the keys ['content']; a line has"),
        ("short", "tokens make 0 rows of 16"),
        ("prompts", "rows of 16 in which something is learnt"),
        ("no data", "--data: none is given"),
        ("vocabulary", "the model has 280; tokenizer and model share one vocabulary"),
        ("no tokenizer", "there is no tokenizer in it"),
        ("context", "--context: 65; the model takes at most 64"),
        ("out", "run: it exists and is no run's"),
        ("layers", "--layers: given with --model"),
        ("targets", "--lora-targets: 'nothing'"),
        ("weights", "model.safetensors cannot be read"),
    ],
)
def test_wrong_use_is_the_same_error_on_every_rank_before_anything_is_written(
    ranks: Ranks, options: TrainOptions, kind: str, says: str
) -> None:
    options = wrong(kind, replace(options, tp=2))
    there = sorted(options.out.glob("**/*")) if options.out else []
    raised = ranks(2).run(finetuned, options, expect_errors=True)
    assert len({(e.type_name, e.message) for e in raised}) == 1 and says in raised[0].message, raised[0].message
    assert raised[0].type_name in ("DataError", "CheckpointError")
    assert options.out is not None and sorted(options.out.glob("**/*")) == there


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "missing"], "--model missing: there is no such model or path"),
        (["--model", "llama"], "--model llama: it is built in, tiny and random"),
        (["--model", "no weights"], "--model no weights: there are no *.safetensors in it"),
        (["--model", "encoder"], "--model encoder: it is a BertForMaskedLM; a causal language model"),
        (["--lora-rank", "4"], "--lora-rank: given with --model gpt"),
    ],
)
def test_a_wrong_model_is_one_line_before_ranks_are_started(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved: Any = tiny("bert")
    saved.save_pretrained("encoder")
    saved.config.save_pretrained("no weights")
    capfd.readouterr()  # transformers' progress bars
    assert cli.run(["train", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"colrow: error: {says}") and len(err.splitlines()) == 1, err


def test_defaults_suit_the_model(options: TrainOptions) -> None:
    got = finetuning.defaults_for(options)
    assert (got.context, got.batch, got.steps, got.lr) == (64, 2, 100, 2e-5), "the model takes 64 tokens"
    assert finetuning.defaults_for(replace(options, lora_rank=4)).lr == 2e-4


def test_prompts_are_not_learnt_and_every_row_is_seen_once(options: TrainOptions) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids, labels = tokenize([Document("It is 2", "What? "), Document("all of it")], tokenizer)
    assert tokenizer.decode(ids) == "What? It is 2<end>all of it<end>"
    assert tokenizer.decode(labels[labels != IGNORED]) == "It is 2<end>all of it<end>"
    rows = pack(torch.arange(100), torch.arange(100), context=5, per_step=4)
    assert len(rows.train[0]) == 19 and len(rows.validation[0]) == 1
    seen = [int(row[0]) for step in range(5) for row in rows.batch(0, step, range(4))[0]]
    assert (
        len(set(seen[:19])) == 19 and rows.batch(1, 0, range(4))[0].tolist() != rows.batch(0, 0, range(4))[0].tolist()
    )
    assert rows.batch(0, 0, range(4))[1][:, 0].eq(IGNORED).all()


def test_parquet_wants_datasets(tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is not None:
        pytest.skip("datasets is installed")
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pip install datasets"):
        read_documents([tmp_path / "data.parquet"])
