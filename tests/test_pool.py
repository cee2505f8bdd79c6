"""The pool of ranks keeps its word: results by rank, errors from every rank, no hang, no spoiled run after it."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pool import Pool, RankFailure, RankTimeout, mesh
from rank_worker import RankError, dumps, loads


def where(tag, *, suffix=""):
    return f"{tag}{dist.get_rank()}/{dist.get_world_size()}{suffix}"


def total(x):
    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return y


def raise_on(failing_ranks, kind="ValueError"):
    if dist.get_rank() in failing_ranks:
        raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind](f"no good on {dist.get_rank()}")
    return "fine"


def raise_while_others_wait():
    if dist.get_rank() == 1:
        raise KeyError("gone")
    total(torch.ones(1))


def wait_without_end():
    if dist.get_rank() == 1:
        threading.Event().wait()
    return "answered"


def missing_partner():
    if dist.get_rank() != 0:
        total(torch.ones(1))


def die():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def leave_a_mess():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def state():
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.rand(1).item()


def meshes():
    pairs = mesh((2, 2), ("dp", "tp"))
    return mesh().size(), mesh() is mesh(), pairs["tp"].get_local_rank(), pairs["dp"].get_local_rank()


def return_a_thread_lock():
    return threading.Lock()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(ranks, world_size):
    got = ranks(world_size).run(where, "r", suffix="!")
    assert got == [f"r{rank}/{world_size}!" for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_adds_over_the_ranks(ranks, world_size):
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    for got in ranks(world_size).run(total, x):
        assert torch.equal(got, x * sum(range(1, world_size + 1)))


def test_ranks_stay_alive_between_runs(ranks):
    pool = ranks(2)
    pool.run(where, "a")
    before = pool.pids()
    pool.run(where, "b")
    assert pool.pids() == before


def test_one_run_does_not_reach_the_next(ranks):
    pool = ranks(2)
    first = pool.run(state)
    pool.run(leave_a_mess)
    assert pool.run(state) == first
    assert first[0][:3] == (torch.float32, True, 1)


def test_meshes_are_made_once(ranks):
    assert ranks(4).run(meshes) == [(4, True, 0, 0), (4, True, 1, 0), (4, True, 0, 1), (4, True, 1, 1)]


def test_an_exception_shows_its_traceback_and_the_pool_goes_on(ranks):
    pool = ranks(2)
    with pytest.raises(RankFailure, match=r"raise_on[\s\S]*no good on 1") as caught:
        pool.run(raise_on, [1])
    assert caught.value.exceptions == {1: ("ValueError", "no good on 1")}
    assert pool.run(where, "r") == ["r0/2", "r1/2"]


def test_every_rank_that_raised_is_shown(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(3).run(raise_on, [0, 2])
    assert caught.value.exceptions == {0: ("ValueError", "no good on 0"), 2: ("ValueError", "no good on 2")}
    assert str(caught.value).count("Traceback (most recent call last)") == 2


def test_expected_errors_come_back_in_place_of_results(ranks):
    ok, error = ranks(2).run(raise_on, [1], expect_errors=True)
    assert ok == "fine"
    assert isinstance(error, RankError)
    assert (error.type_name, error.message) == ("ValueError", "no good on 1")
    assert "raise_on" in error.traceback


@pytest.mark.parametrize(
    ("failing_ranks", "kind", "kept"),
    [([0, 1], "ValueError", True), ([0], "ValueError", False), ([0, 1], "RuntimeError", False)],
    ids=["all ranks: kept", "one rank: replaced", "maybe in a collective: replaced"],
)
def test_ranks_are_replaced_unless_surely_in_step(ranks, failing_ranks, kind, kept):
    pool = ranks(2)
    pool.run(where, "r")
    before = pool.pids()
    pool.run(raise_on, failing_ranks, kind, expect_errors=True)
    assert pool.run(total, torch.ones(1)) == [torch.tensor([3.0])] * 2
    assert (pool.pids() == before) is kept


def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for(ranks):
    pool = ranks(2)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"gone[\s\S]*rank 0: no answer[\s\S]*raise_while_others_wait") as caught:
        pool.run(raise_while_others_wait, grace=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.exceptions == {1: ("KeyError", "'gone'")}
    assert pool.run(total, torch.ones(1))[0].item() == 3


def test_a_hang_is_ended_and_shows_the_stack(ranks):
    pool = ranks(2)
    pool.run(where, "r")
    before = pool.pids()
    start = time.monotonic()
    with pytest.raises(
        RankTimeout, match=r"limit of 1 s\n[\s\S]*rank 0: answered[\s\S]*rank 1:[\s\S]*wait_without_end"
    ):
        pool.run(wait_without_end, timeout=1)
    assert time.monotonic() - start < 10
    assert not any(_alive(pid) for pid in before)
    assert pool.run(where, "r") == ["r0/2", "r1/2"]


def test_a_hang_in_a_collective_shows_every_waiting_rank(ranks):
    with pytest.raises(RankTimeout) as caught:
        ranks(3).run(missing_partner, timeout=1)
    assert str(caught.value).count("in missing_partner") == 2


def test_a_killed_rank_is_reported(ranks):
    pool = ranks(2)
    with pytest.raises(RankFailure, match="exit code -9") as caught:
        pool.run(die)
    assert caught.value.exceptions == {0: ("ProcessDied", "the process ended with exit code -9")}
    assert pool.run(where, "r") == ["r0/2", "r1/2"]


def test_a_result_that_cannot_be_sent_is_an_error_of_the_rank(ranks):
    with pytest.raises(RankFailure, match="pickle"):
        ranks(2).run(return_a_thread_lock)


def test_a_function_without_an_importable_name_is_refused():
    with pytest.raises(TypeError, match="define it at module level"):
        Pool(2).run(lambda: None)


def test_close_ends_every_rank():
    pool = Pool(2)
    pool.run(where, "r")
    before = pool.pids()
    pool.close()
    assert pool.pids() == []
    assert not any(_alive(pid) for pid in before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.arange(4).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["scalar", "empty", "transposed", "expanded", "bfloat16", "bool", "parameter"],
)
def test_tensors_travel_by_value(tensor):
    got = loads(dumps({"x": [tensor]}))["x"][0]
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(got, tensor)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
