"""Train a GPT on text, split over ranks: an example of the library's use. `loop` has the steps.

The split shows in three lines: `colrow.parallelize`, `colrow.seed`, `colrow.clip_grad_norm_`. The rest is as it would
be for one process; so are the losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import colrow
from colrow import comm, runs
from colrow.context import mix
from colrow.data import Tokenizer, corpus, read, train_tokenizer
from colrow.loop import Result, Run, loop, make_mesh, make_optimizer, require_same_text, resume
from colrow.models import GPT
from colrow.options import TrainOptions as TrainOptions
from colrow.sample import sample
from colrow.show import Show

SMALL = 20_000_000
"""Parameters up to which one rank can hold the whole model as well, for the check of the first step."""
EQUAL = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Relative gradient difference that rounding can explain: a wrong or lost term gives far more."""


def train(options: TrainOptions) -> Result:
    """One rank's part in a run; the default process group must be there. Returns the run in numbers."""
    show = Show(talks=comm.is_rank_zero(), to_stderr=options.json)
    run, tokenizer = set_up(options, show)
    start, total = resume(run, show)
    if not options.resume and sum(p.numel() for p in run.model.parameters()) <= SMALL:
        compare_first_step(run, show)
    result = loop(run, show, start, total)
    if result["steps"] == total and options.sample:
        show.line(f"a sample of {options.sample} tokens:", style="bold")
        show.line(sample(run.model, tokenizer, run.mesh["tp"], options.context, options.sample, options.seed))
    show.line("\nnext:", style="bold")
    at = "" if options.out is None else f" --out {run.folder}"
    again = "" if result["steps"] < total else f" --steps {2 * total}"
    other = 2 if options.tp == 4 else 4
    show.line(f"  colrow train --resume{at}{again}\n  colrow train --resume{at} --tp {other}\n  make test")
    return result


def set_up(options: TrainOptions, show: Show) -> tuple[Run, Tokenizer]:
    """Everything up to the first step. What cannot work is an error here, on every rank."""
    options.check()
    mesh = make_mesh(options.tp)
    raw = read(options.data)
    before: Path | None = (options.out or runs.latest()) if options.resume else None
    tokenizer = train_tokenizer(raw, options.vocab_size) if before is None else runs.load_tokenizer(before)
    tokens = tokenizer.encode(raw)
    require_same_text(tokens, mesh)
    text = corpus(tokens, options.context)
    folder = runs.open_folder(before or options.out, options.saved(), tokenizer, resume=options.resume)
    with torch.device("meta"):
        model = GPT(options.gpt(tokenizer.vocab)).to(options.torch_dtype or torch.float32)
    show.line(f"{len(raw):,} bytes of text, {tokens.numel():,} tokens, a vocabulary of {tokenizer.vocab}\n")
    show.split(colrow.plan(model, options.tp, sequence_parallel=options.sequence_parallel))
    torch.manual_seed(options.seed)
    model = colrow.parallelize(model, mesh["tp"], sequence_parallel=options.sequence_parallel)
    optimizer = make_optimizer(model, options.weight_decay)
    return Run(options, mesh, model, optimizer, text, folder, _loss), tokenizer


def _loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens, targets)


def compare_first_step(run: Run, show: Show) -> None:
    """Whether the loss and every gradient of the first micro-batch are those of the whole model on one rank.

    With dropout the model of one rank is split over that rank alone, for the same masks; without, it is plain PyTorch.
    """
    o, weights = run.options, colrow.full_state_dict(run.model)
    one = init_device_mesh(run.mesh.device_type, (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    batch = run.micro_batch(0, 0)
    colrow.seed(run.mesh["tp"], mix(o.seed, 0))
    loss = run.model(*batch)
    loss.backward()
    grads = colrow.full_grads(run.model)
    run.optimizer.zero_grad()
    if not comm.is_rank_zero():
        return
    config: Any = run.model.config
    dtype = next(iter(weights.values())).dtype
    whole = GPT(config).to(loss.device, dtype)
    whole.load_state_dict(weights)
    if o.dropout:
        colrow.parallelize(whole, one)
    colrow.seed(one, mix(o.seed, 0))
    want = whole(*batch)
    want.backward()
    plain = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    wanted = colrow.full_grads(whole) if o.dropout else plain
    worst = max(float((grads[n] - g).abs().max() / g.abs().max().clamp(min=1e-30)) for n, g in wanted.items())
    verdict, style = ("equals", "bold") if worst <= EQUAL[dtype] else ("DIFFERS from", "bold red")
    show.line(
        f"first step {verdict} one process: loss {float(loss.detach()):.6f} and {float(want.detach()):.6f}, "
        f"largest relative gradient difference {worst:.1e}\n",
        style=style,
    )
