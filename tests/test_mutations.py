"""The oracle must be able to fail: each classic mistake, made on purpose on the ranks, is found by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import colrow
from colrow import I, P, R, comm, context, embedding, linear, moves, region
from colrow.gradients import PartialSums, _Term
from colrow.linear import RowLinear
from colrow.params import local, local_of, read
from colrow.split import Split
from oracle import check_grads, compare, cotangent
from own import LLAMA, OwnModel, gpt, ids, own_plan
from pool import mesh

LIMIT = 30.0
Reduce = Callable[..., Tensor]


def scaled(move: Reduce, factor: float) -> Reduce:
    return lambda x, *rest: move(x, *rest) * factor


def forgets_the_move(x: Tensor, mesh: Any, tokens: Any) -> Tensor:
    """f without its backward: the block's input is used as it is (or gathered, and nothing is owed)."""
    return x if tokens is None else context.gather(x.detach(), mesh, tokens, R) + 0 * context.gather(x, mesh, tokens, R)


def gathers_to_i(x: Tensor, mesh: Any, tokens: Any) -> Tensor:
    return x if tokens is None else context.gather(x, mesh, tokens, I)


def bias_inside(self: RowLinear, input: Tensor) -> Tensor:
    split = self.splits["weight"]
    valid = split.valid(self.mesh.get_local_rank())
    weight = read(self.weight, split, self.mesh, R).narrow(1, 0, valid)
    bias = None if self.bias is None else local(self.bias, grad=R)
    y = F.linear(input.narrow(-1, 0, valid), weight, bias)
    return context.leave(y, self.mesh, None if self.dst == I else tuple(y.shape[:-1]))


def no_sums(self: PartialSums, param: Any) -> Any:
    """Each rank's term is taken for the whole."""

    def hook(grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor) or not grad.placements[-1].is_partial():
            return grad
        return DTensor.from_local(local_of(grad), self.mesh, [Replicate()], run_check=False)

    return hook


def settles_accumulated(self: _Term, total: Tensor) -> None:
    """The sum is added to what was accumulated as often as there are ranks."""
    grad = local_of(self.param.grad) if self.param.grad is not None else self.stand_in
    if self.accumulated and grad.data_ptr() != self.stand_in.data_ptr():
        grad.add_(comm.all_reduce(grad, mesh())).add_(total)
    self.stand_in.copy_(total)


def takes_the_first_slice(self: Split, whole: Tensor, rank: int, take: Any = Split.take) -> Tensor:
    return take(self, whole, 0)


def first_token_shard(x: Tensor, mesh: Any, src: Any, dst: Any, sizes: Any) -> Tensor:
    return x.narrow(0, 0, sizes[mesh.get_local_rank()]).clone()


MUTATIONS: dict[str, list[tuple[Any, Any, Any]]] = {
    "none": [],
    "f dropped": [(region, "enter", forgets_the_move)],
    "a reduction doubled": [(moves.MOVES, ("P", "I"), scaled(moves.MOVES["P", "I"], 2.0))],
    "a reduce-scatter doubled": [(moves.MOVES, ("P", "S"), scaled(moves.MOVES["P", "S"], 2.0))],
    "average instead of sum": [
        (moves.MOVES, ("P", "I"), scaled(moves.MOVES["P", "I"], 0.5)),
        (moves.MOVES, ("P", "S"), scaled(moves.MOVES["P", "S"], 0.5)),
    ],
    "g dropped": [(moves.MOVES, ("P", "I"), moves.MOVES["I", "R"])],
    "the row bias inside the sum": [(RowLinear, "forward", bias_inside)],
    "the gather's adjoint is I's": [(region, "enter", gathers_to_i)],
    "partial sums not summed": [(PartialSums, "_take", no_sums)],
    "every rank takes the first slice": [(Split, "take", takes_the_first_slice)],
    "every rank takes the first tokens": [(moves.MOVES, ("I", "S"), first_token_shard)],
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Make the mistake for a while, on this rank."""
    undo = []
    try:
        for owner, key, wrong in MUTATIONS[name]:
            if isinstance(owner, dict):
                undo.append((owner, key, owner[key]))
                owner[key] = wrong
            else:
                undo.append((owner, key, getattr(owner, key)))
                setattr(owner, key, wrong)
        yield
    finally:
        for owner, key, right in undo:
            if isinstance(owner, dict):
                owner[key] = right
            else:
                setattr(owner, key, right)


def verdict(mutation: str, sequence_parallel: bool, kind: str) -> str:
    """What the oracle says of a model that was split and run with the mistake; "equal" if it finds nothing."""
    try:
        with mutated(mutation):
            if kind == "own":
                compare(OwnModel, (ids(vocab=23),), plan=own_plan(), sequence_parallel=sequence_parallel)
            else:
                options = LLAMA if kind == "llama" else {}
                compare(lambda: gpt(**options), (ids(2, 8),), sequence_parallel=sequence_parallel)
    except AssertionError as error:
        return str(error)
    return "equal"


# Where each mistake shows. Sequence parallelism takes other moves, so some can only be made in one of the modes.
OUTPUT, GRADIENT = "output: relative error", "gradient of"
FOUND = [
    ("f dropped", False, GRADIENT),
    ("f dropped", True, GRADIENT),
    ("a reduction doubled", False, OUTPUT),
    ("a reduction doubled", True, OUTPUT),  # the embedding's
    ("a reduce-scatter doubled", True, OUTPUT),
    ("average instead of sum", False, OUTPUT),
    ("average instead of sum", True, OUTPUT),
    ("g dropped", False, OUTPUT),
    ("the row bias inside the sum", False, OUTPUT),
    ("the row bias inside the sum", True, OUTPUT),
    ("the gather's adjoint is I's", False, GRADIENT),
    ("the gather's adjoint is I's", True, GRADIENT),
    ("partial sums not summed", True, GRADIENT),
    ("every rank takes the first slice", False, OUTPUT),
    ("every rank takes the first slice", True, OUTPUT),
    ("every rank takes the first tokens", True, OUTPUT),
]


@pytest.mark.parametrize(("mutation", "sequence_parallel", "where"), FOUND)
def test_a_mistake_is_found(ranks: Any, mutation: str, sequence_parallel: bool, where: str) -> None:
    for said in ranks(2).run(verdict, mutation, sequence_parallel, "gpt", timeout=LIMIT):
        assert said.startswith(where), said


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("kind", ["gpt", "llama", "own"])
def test_control_without_a_mistake_nothing_is_found(ranks: Any, kind: str, sequence_parallel: bool) -> None:
    assert ranks(2).run(verdict, "none", sequence_parallel, kind, timeout=LIMIT) == ["equal"] * 2


def test_partial_sums_matter_without_sequence_parallelism_too(ranks: Any) -> None:
    """NORM-4: q_norm and k_norm on local heads. A sum that is tied to the SP flag leaves this model wrong."""
    for said in ranks(2).run(verdict, "partial sums not summed", False, "own", timeout=LIMIT):
        assert said.startswith(GRADIENT), said
        assert "_norm" in said
    assert ranks(2).run(verdict, "partial sums not summed", False, "gpt", timeout=LIMIT) == ["equal"] * 2


def a_sum_of_what_was_accumulated(wrong: bool) -> str:
    """ACC-1: a hook that reduces the accumulated .grad counts earlier micro-batches again."""
    right: Any = _Term.settle
    try:
        if wrong:
            _Term.settle = settles_accumulated
        torch.manual_seed(0)
        reference = gpt().double()
        split: Any = gpt().double()
        split.load_state_dict(reference.state_dict())
        colrow.parallelize(split, mesh())
        for model in (reference, split):
            for seed in (1, 2):
                y = model(ids(seed=seed))
                y.backward(cotangent(y))
        check_grads(split, reference, 1e-10)
    except AssertionError as error:
        return str(error)
    finally:
        _Term.settle = right
    return "equal"


def test_ACC_1_the_oracle_sees_a_gradient_that_is_summed_again(ranks: Any) -> None:
    assert ranks(2).run(a_sum_of_what_was_accumulated, False, timeout=LIMIT) == ["equal"] * 2
    for said in ranks(2).run(a_sum_of_what_was_accumulated, True, timeout=LIMIT):
        assert said.startswith(GRADIENT), said


def gather_as_replicated(x: Tensor, mesh: Any, tokens: Any, dst: Any) -> Tensor:
    return context.gather(x, mesh, tokens, R)


def wrong_end(reader: Any) -> str:
    """AG-3: the gather after the last norm owes a slice of the gradient, which is whole, and gives its sum."""
    torch.manual_seed(0)
    reference: Any = gpt().double()
    split: Any = gpt().double()
    split.load_state_dict(reference.state_dict())
    colrow.parallelize(split, mesh())
    proper = region.gather
    region.gather = reader or proper
    try:
        y = split(ids())
    finally:
        region.gather = proper
    want = reference(ids())
    y.backward(cotangent(y))
    want.backward(cotangent(want))
    try:
        check_grads(split, reference, 1e-10)
    except AssertionError as error:
        return str(error)
    return "equal"


def test_AG_3_the_oracle_sees_a_wrong_end_of_the_stretch(ranks: Any) -> None:
    assert ranks(2).run(wrong_end, None, timeout=LIMIT) == ["equal"] * 2
    for said in ranks(2).run(wrong_end, gather_as_replicated, timeout=LIMIT):
        assert said.startswith(GRADIENT), said


def everything_is_put_back() -> None:
    before = (dict(moves.MOVES), region.enter, RowLinear.forward, PartialSums._take, Split.take)
    for name in MUTATIONS:
        with mutated(name):
            pass
    assert before == (dict(moves.MOVES), region.enter, RowLinear.forward, PartialSums._take, Split.take)
    assert moves.MOVES["P", "I"] is not moves.MOVES["I", "R"]
    assert (linear.leave, embedding.leave, P.dual) == (context.leave, context.leave, R)


def test_mutations_are_undone(ranks: Any) -> None:
    everything_is_put_back()
    ranks(2).run(everything_is_put_back, timeout=LIMIT)
