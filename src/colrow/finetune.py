"""Finetune a language model from a Hugging Face folder, split over ranks: all its weights, or adapters beside them.

The result is a plain folder again, `OUT/model`. Steps, checkpoints and metrics are those of `loop`.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import colrow
from colrow import comm, runs
from colrow.errors import DataError
from colrow.loop import Result, Run, loop, make_mesh, make_optimizer, require_same_text, resume
from colrow.options import TrainOptions
from colrow.pretrained import load_pretrained, save_pretrained
from colrow.show import Show
from colrow.source import find_language_model
from colrow.text import pack, read_documents, tokenize

CONTEXT = 512
"""Tokens in a row, unless the model takes fewer."""


def defaults_for(options: TrainOptions) -> TrainOptions:
    """What a run starts from that finetunes the model of `options`. Reads its config.

    Raises:
        DataError: the folder cannot be used.
    """
    context = min(CONTEXT, find_language_model(options.model).positions or CONTEXT)
    lr = 2e-4 if options.lora_rank else 2e-5
    return replace(TrainOptions(), steps=100, batch=2, context=context, lr=lr, warmup=10, save_every=50, eval_every=50)


def finetune(options: TrainOptions) -> Result:
    """One rank's part in a run; the default process group must be there. Returns the run in numbers."""
    show = Show(talks=comm.is_rank_zero(), to_stderr=options.json)
    run = set_up(options, show)
    start, total = resume(run, show)
    result = loop(run, show, start, total)
    result["model"] = str(run.folder / "model")
    save_pretrained(run.model, run.folder / "model")
    show.line(f"model: {result['model']}", style="bold")
    show.line("\nnext:", style="bold")
    for line in next_steps(run, result, total):
        show.line(f"  {line}")
    return result


def set_up(options: TrainOptions, show: Show) -> Run:
    """Everything up to the first step. What cannot work is an error here, on every rank, before a file is written."""
    options.check()
    mesh, saved = make_mesh(options.tp), find_language_model(options.model)
    if saved.positions is not None and options.context > saved.positions:
        allowed, fix = f"the model takes at most {saved.positions} tokens in a row", "Give a smaller --context"
        raise DataError("--context", f"{options.context}", allowed, fix)
    documents, tokenizer = read_documents(options.data), saved.tokenizer()
    ids, labels = tokenize(documents, tokenizer)
    saved.require_known(ids, tokenizer)
    require_same_text(torch.cat([ids, labels]), mesh)
    text = pack(ids, labels, options.context, options.accumulate * options.batch * mesh["dp"].size())
    whole = saved.on_meta()
    show.line(f"{len(documents):,} documents, {ids.numel():,} tokens, {len(text.train[0]):,} rows to learn from\n")
    show.split(colrow.plan(whole, options.tp, sequence_parallel=options.sequence_parallel))
    model = load_pretrained(
        saved.path, mesh["tp"], dtype=options.torch_dtype, sequence_parallel=options.sequence_parallel
    )
    if options.lora_rank:
        model = add_adapters(model, mesh["tp"], options)
    model.train()
    before = (options.out or runs.latest()) if options.resume else options.out
    name = saved.path.resolve().name
    folder = runs.open_folder(before, options.saved(), None, resume=options.resume, name=name)
    return Run(options, mesh, model, make_optimizer(model, options.weight_decay), text, folder, _loss)


def _loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def add_adapters(model: Any, mesh: DeviceMesh, options: TrainOptions) -> Any:
    """The split model with LoRA adapters, split as well; they alone are trained.

    Raises:
        DataError: `peft` is missing, or no layer has such a name.
    """
    if importlib.util.find_spec("peft") is None:
        raise DataError("--lora-rank", "peft is not installed", "it makes the adapters", "pip install peft")
    from peft import LoraConfig, get_peft_model

    targets = options.lora_targets if options.lora_targets == "all-linear" else options.lora_targets.split(",")
    config = LoraConfig(
        r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers calls otherwise now
            adapted = get_peft_model(model, config)
    except ValueError as error:
        given, fix = (
            f"'{options.lora_targets}' ({' '.join(str(error).split())[:200]})",
            "Give names such as q_proj,v_proj",
        )
        raise DataError("--lora-targets", given, "the ends of names of linear layers", fix) from error
    torch.manual_seed(options.seed)  # rules the adapters' first values
    return colrow.parallelize(adapted, mesh, sequence_parallel=options.sequence_parallel)


def next_steps(run: Run, result: Result, total: int) -> list[str]:
    """What to type after a run."""
    folder, at = result.get("model", ""), f" --out {run.folder}"
    steps = [f"colrow train --resume{at}" + ("" if result["steps"] < total else f" --steps {2 * total}")]
    if run.options.lora_rank:
        base = Path(run.options.model)
        return [*steps, f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{folder}")']
    tp = run.options.tp
    return [
        f'colrow generate --model {folder} --tp {tp} --prompt "..."',
        f'AutoModelForCausalLM.from_pretrained("{folder}")    in plain transformers, on one device',
        f'colrow.load_pretrained("{folder}", mesh["tp"])      split, in your own code',
        *steps,
    ]
