"""Fixtures for all tests."""

from collections.abc import Callable, Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(n)` is the pool of n ranks, shared by the whole session and started by its first run."""
    pools: dict[int, Pool] = {}

    def of(world_size: int) -> Pool:
        return pools.setdefault(world_size, Pool(world_size))

    yield of
    for pool in pools.values():
        pool.close()
