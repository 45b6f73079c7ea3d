"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os

# Before torch is imported, here or in the ranks: two cores, several ranks, one thread each.
# Where a test asks for more, those that wait are not to spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.transports import TRANSPORTS

if TYPE_CHECKING:  # imports torch, which the process that only hands out tests has no use for
    from tests.support.ranks import Ranks

LONGEST = (
    "tests.test_package",
    "tests.test_bench",
    "tests.test_examples",
    "tests.test_torchrun",
    "tests.backend.test_benchmark",
    "tests.test_demo",
    "tests.programs.test_programs",
    "tests.matrix.test_matrix",
)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks that are started once per world size: `ranks(2, body, *args)` runs `body(comm, *args)`
    on both and returns their results.
    """
    from tests.support.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects without looking for garbage: torch, and thousands of tests, are there to stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take longest, so that none of them is left over for one worker."""
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.module.__name__, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import AnyWorker

    return AnyWorker(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fixture `transport` runs over what a mark says (`transports`, `over`), else over
    TRANSPORTS.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    is_said = any("transport," in mark.args[0] for mark in marks)
    if is_said or "transport" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("transports")
    names = TRANSPORTS if mark is None else mark.args
    metafunc.parametrize("transport", names, indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[str]:
    """What the test's ranks talk over."""
    ranks.transport = request.param
    yield request.param
    ranks.transport = "shm"


# Every parameter of the tests' models in one bucket, and nearly every one in a bucket of its own.
@pytest.fixture(
    params=[{}, {"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0001}],
    ids=["one bucket", "many buckets"],
)
def buckets(request: pytest.FixtureRequest) -> dict[str, float]:
    """Arguments of Reducer that decide how many buckets a small model gets."""
    return request.param
