"""Train a GPT on text, split over ranks: a plain loop over the library, and an example of its use.

The split shows in three lines: `colrow.parallelize`, `colrow.seed`, `colrow.clip_grad_norm_`. The rest is as it would
be for one process; so are the losses.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import colrow
from colrow import checkpoint, comm, runs
from colrow.context import mix
from colrow.data import Corpus, Tokenizer, corpus, read, train_tokenizer
from colrow.errors import DataError, RankError
from colrow.launch import StopRequest
from colrow.models import GPT
from colrow.options import TrainOptions as TrainOptions
from colrow.parallelize import find_plan
from colrow.params import fingerprint, local_of
from colrow.sample import sample
from colrow.show import Show, StepNumbers

SMALL = 20_000_000
"""Parameters up to which one rank can hold the whole model as well, for the check of the first step."""
EQUAL = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
"""Relative gradient difference that rounding can explain: a wrong or lost term gives far more."""
VALIDATION_BATCHES = 4
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """What a run works with."""

    options: TrainOptions
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    text: Corpus
    tokenizer: Tokenizer
    folder: Path

    def micro_batch(self, step: int, number: int) -> Batch:
        """The same on all ranks of one tensor-parallel axis; each replica has rows of its own."""
        o, dp = self.options, self.mesh["dp"]
        first = (number * dp.size() + dp.get_local_rank()) * o.batch
        inputs, targets = self.text.batch(o.seed, step, range(first, first + o.batch))
        return inputs.to(comm.device(self.mesh)), targets.to(comm.device(self.mesh))


def train(options: TrainOptions) -> dict[str, Any]:
    """One rank's part in a run; the default process group must be there. Returns the run in numbers."""
    show = Show(talks=comm.is_rank_zero(), to_stderr=options.json)
    run = set_up(options, show)
    start = 0
    if options.resume:
        start = int(checkpoint.load(run.folder, run.model, run.optimizer)["step"])
        show.line(f"going on from step {start} of {run.folder}", style="bold")
    elif sum(p.numel() for p in run.model.parameters()) <= SMALL:
        compare_first_step(run, show)
    total = options.steps if options.steps > start else start + options.steps
    if comm.is_rank_zero():
        runs.forget_metrics_after(run.folder, start)
    with StopRequest() as stop:
        result = loop(run, show, stop, start, total)
    show.line(f"\ncheckpoint: {result['checkpoint']}", style="bold")
    if result["steps"] == total and options.sample:
        show.line(f"a sample of {options.sample} tokens:", style="bold")
        show.line(sample(run.model, run.tokenizer, run.mesh["tp"], options.context, options.sample, options.seed))
    show.line("\nnext:", style="bold")
    at = "" if options.out is None else f" --out {run.folder}"
    again = "" if result["steps"] < total else f" --steps {2 * total}"
    other = 2 if options.tp == 4 else 4
    show.line(f"  colrow train --resume{at}{again}\n  colrow train --resume{at} --tp {other}\n  make test")
    return result


def set_up(options: TrainOptions, show: Show) -> Run:
    """Everything up to the first step. What cannot work is an error here, on every rank."""
    options.check()
    world, tp = dist.get_world_size(), options.tp
    if world % tp:
        raise DataError("--tp", f"{tp} with {world} ranks", "replicas have tp ranks each", f"Start a multiple of {tp}")
    kind = "cpu" if dist.get_backend() == "gloo" else "cuda"
    mesh = init_device_mesh(kind, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    raw = read(options.data)
    before = (options.out or runs.latest()) if options.resume else None
    tokenizer = train_tokenizer(raw, options.vocab_size) if before is None else runs.load_tokenizer(before)
    tokens = tokenizer.encode(raw)
    for axis in (mesh["tp"], mesh["dp"]):
        if len(set(map(tuple, comm.exchange([fingerprint(tokens)], axis)))) > 1:
            fix = "Copy the same files to every machine"
            raise RankError("--data", "the ranks read different text", "all must read the same", fix)
    text = corpus(tokens, options.context)
    folder = runs.open_folder(before or options.out, options.saved(), tokenizer, resume=options.resume)
    with torch.device("meta"):
        model = GPT(options.model(tokenizer.vocab)).to(getattr(torch, options.dtype))
    show.line(f"{len(raw):,} bytes of text, {tokens.numel():,} tokens, a vocabulary of {tokenizer.vocab}\n")
    show.split(colrow.resolve(model, find_plan(model), tp, sequence_parallel=options.sequence_parallel))
    torch.manual_seed(options.seed)
    model = colrow.parallelize(model, mesh["tp"], sequence_parallel=options.sequence_parallel)
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": options.weight_decay}
    others = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, others], betas=(0.9, 0.95), fused=True)  # the rate is set at every step
    return Run(options, mesh, model, optimizer, text, tokenizer, folder)


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
    whole = GPT(config).to(loss.device, loss.dtype if o.dtype == "float64" else getattr(torch, o.dtype))
    whole.load_state_dict(weights)
    if o.dropout:
        colrow.parallelize(whole, one)
    colrow.seed(one, mix(o.seed, 0))
    want = whole(*batch)
    want.backward()
    plain = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    wanted = colrow.full_grads(whole) if o.dropout else plain
    worst = max(float((grads[n] - g).abs().max() / g.abs().max().clamp(min=1e-30)) for n, g in wanted.items())
    verdict, style = ("equals", "bold") if worst <= EQUAL[o.dtype] else ("DIFFERS from", "bold red")
    show.line(
        f"first step {verdict} one process: loss {float(loss.detach()):.6f} and {float(want.detach()):.6f}, "
        f"largest relative gradient difference {worst:.1e}\n",
        style=style,
    )


def loop(run: Run, show: Show, stop: StopRequest, start: int, total: int) -> dict[str, Any]:
    """Steps `start` to `total`, or until somebody asks to stop; then a checkpoint."""
    o = run.options
    path, done, losses, seconds = Path(), start, [], 0.0
    tokens = o.tokens_per_step * run.mesh["dp"].size()
    before = validate(run)
    with show.training(start, total) as told:
        told.validation(start, before, None)
        for step in range(start, total):
            numbers = train_step(run, step, total)
            done, seconds = step + 1, seconds + tokens / numbers.tokens_per_second
            losses.append(numbers.loss)
            told.step(numbers)
            if comm.is_rank_zero():
                runs.note(run.folder, asdict(numbers))
            if done % o.eval_every == 0 or done == total:
                before, last = validate(run), before
                told.validation(done, before, last)
            leave = somebody(run.mesh, stop.made)
            if done % o.save_every == 0 or done == total or leave:
                path = checkpoint.save(run.folder, run.model, run.optimizer, {"step": done, "seed": o.seed})
            if leave:
                show.line(f"asked to stop: saved after step {done}", style="bold")
                break
    speed = (done - start) * tokens / seconds
    return {
        "steps": done, "loss_first": losses[0], "loss_last": losses[-1], "tokens_per_second": round(speed, 1),
        "checkpoint": str(path),
    }  # fmt: skip


def train_step(run: Run, step: int, total: int) -> StepNumbers:
    """One step of the optimizer. It depends on the weights, the options and `step` alone, so a run can resume."""
    o, began = run.options, time.perf_counter()
    colrow.seed(run.mesh["tp"], mix(o.seed, step))
    losses = []
    for number in range(o.accumulate):
        loss = run.model(*run.micro_batch(step, number)) / o.accumulate  # micro-batches have equal numbers of tokens
        loss.backward()
        losses.append(loss.detach())
    average_gradients(run)
    norm = colrow.clip_grad_norm_(run.model, o.clip, error_if_nonfinite=True)  # before it spoils the weights
    lr = learning_rate(o, step, total)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    dp = run.mesh["dp"]
    mean = float(comm.all_reduce(torch.stack(losses).sum(), dp)) / dp.size()
    speed = o.tokens_per_step * dp.size() / (time.perf_counter() - began)
    return StepNumbers(step + 1, mean, lr, float(norm), speed, peak_memory(run.mesh))


def average_gradients(run: Run) -> None:
    """Over the data-parallel replicas: one all-reduce of all gradients."""
    dp = run.mesh["dp"]
    grads = [local_of(p.grad) for p in run.model.parameters() if p.grad is not None]
    if dp.size() > 1:
        mean = comm.all_reduce(torch.cat([grad.flatten() for grad in grads]), dp) / dp.size()
        for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def learning_rate(o: TrainOptions, step: int, total: int) -> float:
    """A straight warm-up, then a cosine down to a tenth."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    done = (step - o.warmup) / max(1, total - o.warmup)
    return o.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def validate(run: Run) -> float:
    """The mean loss over some fixed rows of the validation text."""
    run.model.eval()
    batches = run.text.validation_batches(run.options.batch, VALIDATION_BATCHES)
    at = comm.device(run.mesh)
    losses = [float(run.model(x.to(at), y.to(at))) * len(x) for x, y in batches]
    run.model.train()
    return sum(losses) / sum(len(x) for x, _ in batches)


def somebody(mesh: DeviceMesh, here: bool) -> bool:
    """Whether it is so on any rank: all ranks leave the loop at the same step."""
    flag = torch.tensor(float(here), device=comm.device(mesh))
    for axis in (mesh["tp"], mesh["dp"]):
        flag = comm.all_reduce(flag, axis, dist.ReduceOp.MAX)
    return bool(flag)


def peak_memory(mesh: DeviceMesh) -> int:
    """Bytes that this rank has held at most: of the accelerator, or of the whole process on the CPU."""
    if mesh.device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
