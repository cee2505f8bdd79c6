"""The first place at which a split model leaves the whole one, looked for in the order in which errors spread.

First the weights; then outputs, in the order in which they are computed; then gradients, in theirs; at last the
gradients of parameters. The step is taken again for it, as often as its tensors fill `BUDGET`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from colrow import causes, places
from colrow.causes import Cause, Evidence, Traces
from colrow.params import local_of, named_parts, unshard
from colrow.places import Place, Point, points
from colrow.recording import Chunk, Key, Recorder, gather_shares
from colrow.together import gather_objects
from colrow.trial import Trial
from colrow.verdict import Divergence, Gradient, Settings, exceeds, largest, relative

BUDGET: Final = 1 << 30
"""Bytes of one process's tensors that are held at a time."""
SMALLEST: Final = 1e-3
"""What is smaller than this part of the largest of its kind is measured against that part: it may be all rounding."""


def first_divergence(trial: Trial, gradients: Sequence[Gradient], budget: int = BUDGET) -> Divergence | None:
    """To be called on every rank; the answer is the first one's. None: all that can be compared agrees.

    Arguments:
        gradients: those of parameters that are too far off, in the model's order.
    """
    where, found = _weights(trial)
    found = found or _activations(trial, where, budget)
    if found is None and gradients:
        found = _gradient_of(trial, gradients[-1].name)
    return found


def _weights(trial: Trial) -> tuple[dict[str, Point], Divergence | None]:
    """The points of the split model, and the first parameter that is not the whole model's."""
    model, _ = trial.parted()
    named: dict[str, Tensor] = {}
    with trial.alike():
        if trial.meshes.judges:
            named = dict(trial.plain().named_parameters())
    found = None
    for name, param, split in named_parts(model):
        shares = gather_shares(local_of(param), trial.meshes.tp)
        want = named.pop(name, None)
        if shares is None or want is None or found is not None:
            continue
        found = _of_parameter(name, want, shares, places.of_parameter(split), causes.of_parameter)
    return points(model), gather_objects(found, trial.meshes.every)[0]


def _activations(trial: Trial, where: Mapping[str, Point], budget: int) -> Divergence | None:
    """The first output, or gradient of one, that differs."""
    start, scale = 0, {False: 0.0, True: 0.0}  # of values, and of gradients
    while True:
        want: dict[Key, Tensor] = {}
        own: dict[Key, Tensor] = {}
        with trial.alike():
            if trial.meshes.judges:
                want = _record_whole(trial, where, Chunk(start, budget), double=True)
                if trial.settings.dtype != "float64":
                    own = _record_whole(trial, where, want, double=False)
        keys = gather_objects(list(want), trial.meshes.every)[0]
        if not keys:
            return None
        got, now = _record_split(trial, set(keys))
        found = None
        for key in keys:
            shares = gather_shares(got.pop(key, None), trial.meshes.tp)
            with trial.alike():
                if found is not None or shares is None or key not in want:
                    continue
                exact = want.pop(key)
                scale[key[3]] = max(scale[key[3]], float(exact.abs().max()) if exact.numel() else 0.0)
                found = _judge(key, shares, exact, own.get(key), now[key[0]], trial.settings, scale[key[3]] * SMALLEST)
        found = gather_objects(found, trial.meshes.every)[0]
        if found is not None:
            return found
        start += len(keys)


def _record_whole(
    trial: Trial, where: Mapping[str, Point], wanted: Chunk | Mapping[Key, Tensor], *, double: bool
) -> dict[Key, Tensor]:
    model, batch = trial.whole(double=double)
    keep = wanted if isinstance(wanted, Chunk) else lambda key, x: key in wanted
    with Recorder(model, where, keep) as recorder:
        trial.run(model, batch)
    return recorder.found


def _record_split(trial: Trial, keys: set[Key]) -> tuple[dict[Key, Tensor], dict[str, Point]]:
    model, batch = trial.parted()
    now = points(model)
    with Recorder(model, now, lambda key, x: key in keys) as recorder:
        trial.run(model, batch)
    return recorder.found, now


def _judge(
    key: Key, shares: list[Tensor], want: Tensor, own: Tensor | None, point: Point, s: Settings, least: float
) -> Divergence | None:
    """The divergence at one place, if there is one."""
    name, _, end, gradient = key
    place = places.place(point, end, [tuple(share.shape) for share in shares], tuple(want.shape), gradient=gradient)
    if place is None:
        return None
    want, shares = place.whole(want), [share.double() for share in shares]
    got = place.join(shares, want, add=gradient)
    error = largest(relative(share, want, least) for share in (shares if place.kind == "same" else [got]))
    if not exceeds(error, s.tolerance(0.0 if own is None else relative(place.whole(own), want, least))):
        return None
    evidence = Evidence(want, got, shares, place, point, end)
    return _said(name, (causes.of_gradient if gradient else causes.of_value)(evidence), error)


def _gradient_of(trial: Trial, name: str) -> Divergence | None:
    """Why the gradient of one parameter differs."""
    want: Tensor | None = None
    with trial.alike():
        if trial.meshes.judges:
            model, batch = trial.whole(double=True)
            trial.run(model, batch)
            want = next(
                (unshard(p.grad, split) for at, p, split in named_parts(model) if at == name and p.grad is not None),
                None,
            )
            del model
    model, batch = trial.parted()
    trial.run(model, batch)
    found = Divergence(_module(name), "parameter gradient", 1.0, "It has no gradient on one side.", None, name)
    for at, param, split in named_parts(model):
        if at != name:
            continue
        grad = param.grad
        shares = gather_shares(None if grad is None else local_of(grad), trial.meshes.tp)
        partial = isinstance(grad, DTensor) and isinstance(grad.placements[-1], Partial)
        if shares is not None and want is not None:
            place = places.of_parameter(split, partial=partial)
            found = _of_parameter(name, want, shares, place, causes.of_parameter_gradient)
    return gather_objects(found, trial.meshes.every)[0]


def _of_parameter(
    name: str, want: Tensor, shares: list[Tensor], place: Place, why: Callable[[Traces], Cause]
) -> Divergence | None:
    """How a parameter, or its gradient, differs; None if it does not."""
    found = Traces(want, place.join(shares, want, add=False), shares, place)
    return _said(_module(name), why(found), found.error, name) if found.error else None


def _said(module: str, cause: Cause, error: float, parameter: str | None = None) -> Divergence:
    where, why, ratio = cause
    return Divergence(module, where, error, why, ratio, parameter)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
