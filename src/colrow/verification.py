"""Whether a split model is the model: loss, logits, every gradient, their norm, and the weights after a step.

The first rank takes a step with the model whole, in double; then every rank takes the same step with the model split,
and the first one judges. In double both must agree to rounding. In a shorter dtype each has errors of its own, so both
are measured against the step in double: the split may be less exact than one process, but by no more than another order
of sums explains.

Memory, in copies of the model in the comparison's dtype, over all ranks of one degree t: about t + 2 (in float32 the
step in double takes 4), and some more of the largest tensor. Gradients and weights are compared one at a time. To find
where a model that does not hold differs takes some twenty times the largest tensor in double, on top.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from colrow.divergence import first_divergence
from colrow.parallelize import parallelize
from colrow.params import local_of, named_parts, unshard
from colrow.state import clip_grad_norm_, replica_drift, sync_replicas
from colrow.together import gather_objects
from colrow.trial import Meshes, Source, Trial
from colrow.verdict import PIECE, Divergence, Gradient, Loss, Settings, Verdict, exceeds, largest, relative

SMALL_GRADIENT = 1e-3
"""A gradient smaller than this part of the model's largest is measured against that part: where the true one is zero (a
bias on k that softmax does not see) there is only rounding, and nothing to divide by."""


def verify_source(source: Source, settings: Settings, split: Callable[..., nn.Module] = parallelize) -> Verdict:
    """One rank's part; the default process group must be there. Every rank returns the first one's verdict."""
    return compare(source, settings, Meshes.of(settings.tp), split)


def compare(source: Source, s: Settings, meshes: Meshes, split: Callable[..., nn.Module] = parallelize) -> Verdict:
    """`verify_source` on axes that are there. `split` splits the model that is judged, as `parallelize` does."""
    return judge_trial(Trial(source, s, meshes, split))


@dataclass(frozen=True)
class Exact:
    """The step in double. Its gradients are kept in no more digits than the comparison's dtype needs.

    Attributes:
        own: what errors one process in the comparison's dtype has.
    """

    loss: Tensor
    logits: Tensor
    grads: dict[str, Tensor]
    norm: float
    own: Mapping[str, float]

    @property
    def least(self) -> float:
        """What a gradient is at least measured against."""
        return SMALL_GRADIENT * max((float(grad.abs().max()) for grad in self.grads.values()), default=0.0)

    def gradient_error(self, name: str, got: Tensor | None, least: float) -> float:
        """Of a gradient; one that is missing is zero."""
        want = self.grads.get(name)
        if got is None:
            return 0.0 if want is None else relative(torch.zeros_like(want), want, least)
        return relative(got, torch.zeros_like(got) if want is None else want, least)

    def weight(self, value: Tensor, name: str) -> Tensor:
        """What the step makes of a weight, in double."""
        weight, grad = value.detach().double(), self.grads.get(name)
        if grad is None:
            return weight
        parts = zip(weight.flatten().split(PIECE), grad.flatten().split(PIECE), strict=True)  # AdamW goes by elements
        return torch.cat([_stepped(part, slope.double(), self.norm) for part, slope in parts]).view(weight.shape)


@dataclass(frozen=True)
class Errors:
    """Those of one step against the exact one; `gradients` in the order of the model's parameters."""

    loss: Tensor
    counted: Mapping[str, float]
    gradients: Mapping[str, float]
    replicas_equal: bool = True


def judge_trial(trial: Trial) -> Verdict:
    """Take the step in both ways, and compare. Every rank returns the first one's verdict."""
    s, exact, verdict = trial.settings, None, None
    with trial.alike():
        if trial.meshes.judges:
            exact = exact_step(trial)
            gc.collect()  # the first import of a model's code may leave a frame behind, and in it the model
    found = compare_split(trial, exact)
    if exact is not None:
        verdict = judge(found, exact, s)
    verdict = gather_objects(verdict, trial.meshes.every)[0]
    del exact
    if verdict.ok:
        return verdict
    return replace(verdict, first_divergence=explain(trial, verdict))


def explain(trial: Trial, verdict: Verdict) -> Divergence:
    """Where a verdict that does not hold comes from."""
    wrong = [g for g in verdict.parameters if exceeds(g.rel_error, verdict.tolerance["gradients"])]
    found = first_divergence(trial, wrong)
    if found is not None:
        return found
    errors = {"gradients": verdict.max_grad_rel_error, "step": verdict.step_rel_error, "loss": verdict.loss.rel_error}
    errors |= {"logits": verdict.logits_rel_error, "grad_norm": verdict.grad_norm_rel_error}
    name = next((name for name, error in errors.items() if exceeds(error, verdict.tolerance[name])), "replicas")
    if verdict.dtype == "float64" or name == "replicas":
        said = f"No module's weight, output or gradient differs by itself; {name}, seen after the step, does."
        return Divergence("", "step", errors.get(name, 0.0), said)
    said = f"No module differs by more than rounding in {verdict.dtype} explains: {name} may have gathered it."
    return Divergence("", "rounding", errors[name], said)


def exact_step(trial: Trial) -> Exact:
    """The step in double and, in a shorter dtype, how far one process is off in it."""
    model, batch = trial.whole(double=True)
    loss, logits = trial.run(model, batch)
    kept = torch.float64 if trial.settings.dtype == "float64" else torch.float32
    grads = {}
    for name, param, split in named_parts(model):
        if param.grad is not None:
            grads[name], param.grad = unshard(param.grad, split).to(kept), None
    norm = norm_of(grads)
    del model
    exact = Exact(loss, logits, grads, norm, {})
    if trial.settings.dtype == "float64":
        return exact
    return Exact(loss, logits, grads, norm, compare_whole(trial, exact).counted)


def norm_of(grads: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


def compare_whole(trial: Trial, exact: Exact) -> Errors:
    """One process, in the comparison's dtype."""
    model, batch = trial.whole(double=False)
    loss, logits = trial.run(model, batch)
    grads = [local_of(param.grad) for param in model.parameters() if param.grad is not None]
    norm, least = float(nn.utils.get_total_norm(grads)), exact.least  # torch's own, with its own rounding
    del grads
    gradients, steps = {}, []
    for name, param, split in named_parts(model):
        want = exact.weight(unshard(param, split), name)
        if param.grad is not None:
            gradients[name] = exact.gradient_error(name, unshard(param.grad, split), least)
        take_step(param, norm)
        steps.append(relative(unshard(param, split), want))
    return _errors(exact, loss, logits, norm, gradients, steps)


def compare_split(trial: Trial, exact: Exact | None) -> Errors:
    """The split model, on every rank; `exact` is there on the one that judges."""
    model, batch = trial.parted()
    loss, logits = trial.run(model, batch)
    norm = float(clip_grad_norm_(model, math.inf))
    least = 0.0 if exact is None else exact.least
    gradients: dict[str, float] = {}
    for name, param, split in named_parts(model):
        grad = None if param.grad is None else unshard(param.grad, split)
        if exact is not None and (grad is not None or name in exact.grads):
            gradients[name] = exact.gradient_error(name, grad, least)
        take_step(param, norm)
    drift = replica_drift(model)
    if drift:
        sync_replicas(model)  # or the weights could not be compared
    before: dict[str, Tensor] = {}
    with trial.alike():
        if exact is not None:
            before = dict(trial.plain().named_parameters())
    steps = []
    for name, param, split in named_parts(model):
        weight = unshard(param, split)
        if exact is not None:
            steps.append(relative(weight, exact.weight(before.pop(name), name)) if name in before else math.inf)
    steps += [math.inf] * len(before)
    if exact is None:
        return Errors(loss, {}, {})
    return _errors(exact, loss, logits, norm, gradients, steps, not drift)


def take_step(param: nn.Parameter, norm: float) -> None:
    """One step of AdamW, in place. The gradient is let go. Adam divides a gradient by its own size; where that is
    rounding, the step would be a toss of a coin, so its eps is a small part of the gradients' norm."""
    torch.optim.AdamW([param], eps=SMALL_GRADIENT * norm).step()
    param.grad = None


def _stepped(weight: Tensor, grad: Tensor, norm: float) -> Tensor:
    param = nn.Parameter(weight.clone())
    param.grad = grad
    take_step(param, norm)
    return param.detach()


def _errors(
    exact: Exact,
    loss: Tensor,
    logits: Tensor,
    norm: float,
    gradients: Mapping[str, float],
    steps: list[float],
    replicas_equal: bool = True,
) -> Errors:
    counted = {
        "loss": relative(loss, exact.loss),
        "logits": relative(logits, exact.logits),
        "gradients": largest(gradients.values()),
        "grad_norm": relative(torch.tensor(norm), torch.tensor(exact.norm)),
        "step": largest(steps),
    }
    return Errors(loss, counted, gradients, replicas_equal)


def judge(got: Errors, exact: Exact, s: Settings) -> Verdict:
    """Whether the split model's errors are what they may be."""
    tolerance = {name: s.tolerance(exact.own.get(name, 0.0)) for name in got.counted}
    return Verdict(
        ok=got.replicas_equal and not any(exceeds(error, tolerance[name]) for name, error in got.counted.items()),
        tp=s.tp,
        sequence_parallel=s.sequence_parallel,
        dtype=s.dtype,
        dropout=s.dropout,
        loss=Loss(float(exact.loss), float(got.loss), got.counted["loss"]),
        logits_rel_error=got.counted["logits"],
        max_grad_rel_error=got.counted["gradients"],
        grad_norm_rel_error=got.counted["grad_norm"],
        step_rel_error=got.counted["step"],
        replicas_equal=got.replicas_equal,
        tolerance=tolerance,
        parameters=tuple(Gradient(name, error) for name, error in got.gradients.items()),
    )
