"""The loop that every training run shares: steps, validation, metrics, checkpoints, and leaving when asked to."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import colrow
from colrow import checkpoint, comm, runs
from colrow.context import mix
from colrow.errors import DataError, RankError
from colrow.launch import StopRequest
from colrow.options import TrainOptions
from colrow.params import fingerprint, local_of
from colrow.show import Show, StepNumbers
from colrow.text import IGNORED

VALIDATION_BATCHES = 4
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, one row of tokens each."""


class Text(Protocol):
    """Tokens in rows, for training and for validation."""

    def batch(self, seed: int, step: int, rows: range) -> Batch: ...

    def validation_batches(self, size: int, count: int) -> Sequence[Batch]: ...


class Result(TypedDict):
    """A run in numbers, as `--json` prints it. `model`: the folder of the finetuned model."""

    steps: int
    loss_first: float
    loss_last: float
    tokens_per_second: float
    checkpoint: str
    model: NotRequired[str]


@dataclass(frozen=True)
class Run:
    """What a run works with. `loss` is the mean over the targets that are learnt."""

    options: TrainOptions
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    text: Text
    folder: Path
    loss: Callable[[Any, Tensor, Tensor], Tensor]

    def micro_batch(self, step: int, number: int) -> Batch:
        """The same on all ranks of one tensor-parallel axis; each replica has rows of its own."""
        o, dp = self.options, self.mesh["dp"]
        first = (number * dp.size() + dp.get_local_rank()) * o.batch
        inputs, targets = self.text.batch(o.seed, step, range(first, first + o.batch))
        return inputs.to(comm.device(self.mesh)), targets.to(comm.device(self.mesh))


def make_mesh(tp: int) -> DeviceMesh:
    """All ranks of the run: replicas of `tp` ranks each.

    Raises:
        DataError: `tp` does not divide them.
    """
    world = dist.get_world_size()
    if world % tp:
        raise DataError("--tp", f"{tp} with {world} ranks", "replicas have tp ranks each", f"Start a multiple of {tp}")
    kind = "cpu" if dist.get_backend() == "gloo" else "cuda"
    return init_device_mesh(kind, (world // tp, tp), mesh_dim_names=("dp", "tp"))


def require_same_text(tokens: Tensor, mesh: DeviceMesh) -> None:
    """Raises: RankError: the ranks have read different text."""
    for axis in (mesh["tp"], mesh["dp"]):
        if len(set(map(tuple, comm.exchange([fingerprint(tokens)], axis)))) > 1:
            fix = "Copy the same files to every machine"
            raise RankError("--data", "the ranks read different text", "all must read the same", fix)


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW for what is trained: matrices decay, biases and gains do not. The rate is set at every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay}
    others = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], betas=(0.9, 0.95), fused=True)


def resume(run: Run, show: Show) -> tuple[int, int]:
    """The step to start from, and the one to end with: a resumed run that has done its steps does as many again."""
    o, start = run.options, 0
    if o.resume:
        start = int(checkpoint.load(run.folder, run.model, run.optimizer)["step"])
        show.line(f"going on from step {start} of {run.folder}", style="bold")
    return start, o.steps if o.steps > start else start + o.steps


def loop(run: Run, show: Show, start: int, total: int) -> Result:
    """Steps `start` to `total`, or until somebody asks to stop; then a checkpoint."""
    o = run.options
    path, done, losses, seconds = Path(), start, [], 0.0
    tokens = o.tokens_per_step * run.mesh["dp"].size()
    if comm.is_rank_zero():
        runs.forget_metrics_after(run.folder, start)
    with StopRequest() as stop, show.training(start, total) as told:
        before = validate(run)
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
    show.line(f"\ncheckpoint: {path}", style="bold")
    speed = (done - start) * tokens / seconds
    return {
        "steps": done, "loss_first": losses[0], "loss_last": losses[-1], "tokens_per_second": round(speed, 1),
        "checkpoint": str(path),
    }  # fmt: skip


def train_step(run: Run, step: int, total: int) -> StepNumbers:
    """One step of the optimizer. It depends on the weights, the options and `step` alone, so a run can resume."""
    o, dp, began = run.options, run.mesh["dp"], time.perf_counter()
    colrow.seed(run.mesh["tp"], mix(o.seed, step))
    batches = [run.micro_batch(step, number) for number in range(o.accumulate)]
    losses = []
    for batch, share in zip(batches, shares(batches, dp), strict=True):
        loss = run.loss(run.model, *batch) * share
        loss.backward()
        losses.append(loss.detach())
    average_gradients(run)
    norm = colrow.clip_grad_norm_(run.model, o.clip, error_if_nonfinite=True)  # before it spoils the weights
    lr = learning_rate(o, step, total)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    mean = float(comm.all_reduce(torch.stack(losses).sum(), dp)) / dp.size()
    speed = o.tokens_per_step * dp.size() / (time.perf_counter() - began)
    return StepNumbers(step + 1, mean, lr, float(norm), speed, peak_memory(run.mesh))


def learnt(targets: Tensor) -> int:
    """How many targets count."""
    return int((targets != IGNORED).sum())


def shares(batches: Sequence[Batch], dp: DeviceMesh) -> list[float]:
    """What each micro-batch's mean loss counts in the step's: every target as much as any other.

    Averaged over the replicas, the step is that of one large batch. Cost: an all-reduce of one number.
    """
    counts = [learnt(targets) for _, targets in batches]
    every = comm.all_reduce(torch.tensor(sum(counts), device=comm.device(dp)), dp)
    return [count * dp.size() / int(every) for count in counts]


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
    losses = [float(run.loss(run.model, x.to(at), y.to(at))) * learnt(y) for x, y in batches]
    run.model.train()
    return sum(losses) / sum(learnt(y) for _, y in batches)


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
