"""Fixtures of all tests."""

from __future__ import annotations

import collections
import gc
import os
import zlib

# Before torch is imported, here or in the ranks: two cores, several ranks, one thread each.
# Where a test asks for more, those that wait are not to spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.transports import TRANSPORTS

if TYPE_CHECKING:  # imports torch, which the process that only hands out tests has no use for
    from tests.support.ranks import Ranks

settings.register_profile("patient", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # no test is to fail because a machine is slow

LONGEST = (
    "tests.test_package",
    "tests.bench.test_bench",
    "tests.docs.test_examples",
    "tests.launching.test_torchrun",
    "tests.launching.test_lost_ranks",
    "tests.cli.test_demo",
    "tests.transports.shm.test_core",
    "tests.launching.test_runner",
    "tests.docs.test_troubleshooting",
    "tests.programs.test_programs",
    "tests.matrix.test_matrix",
)
# Every parameter of the tests' models in one bucket, and nearly every one in a bucket of its own.
BUCKETS: dict[str, dict[str, float]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": 0.0002},
}


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


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `thorough` what repeats a kind: of the cases of a test over one transport, all but
    one. Begins with the files that take longest, so that none of them is left over for one worker.
    """
    kinds = collections.defaultdict(list)
    for item in items:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        kinds[item.nodeid.partition("[")[0], case.get("transport")].append(item)
    for (test, _), cases in kinds.items():
        # Not always the first: in some test each size, dtype and number of ranks has its turn.
        kept = zlib.crc32(test.encode()) % len(cases)
        for case in cases[:kept] + cases[kept + 1 :]:
            case.add_marker("thorough")
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.module.__name__, len(order)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests were skipped, and why: a line for each reason."""
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    for reason, n in reasons.most_common():
        terminalreporter.write_line(f"{n} skipped: {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import AnyWorker

    return AnyWorker(config, log)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fixture `transport` runs over what a mark says (`transports`, `over`), else over
    TRANSPORTS. Under the mark `pairwise`, a test that takes `buckets` as well runs over each of
    them once, with one bucket and with many in turn: other tests begin with the other.
    """
    test = metafunc.definition
    is_said = any("transport," in mark.args[0] for mark in test.iter_markers("parametrize"))
    if is_said or "transport" not in metafunc.fixturenames:
        return
    mark = test.get_closest_marker("transports")
    names = TRANSPORTS if mark is None else mark.args
    pairs_up = test.get_closest_marker("pairwise") and len(names) >= len(BUCKETS)
    if pairs_up and "buckets" in metafunc.fixturenames:
        first = zlib.crc32(test.name.encode())
        sizes = [list(BUCKETS)[(first + i) % 2] for i in range(len(names))]
        pairs = [
            pytest.param(name, BUCKETS[size], id=f"{name}-{size}")
            for name, size in zip(names, sizes, strict=True)
        ]
        test.add_marker(pytest.mark.parametrize("transport, buckets", pairs, indirect=True))
    else:
        metafunc.parametrize("transport", names, indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[str]:
    """What the test's ranks talk over."""
    ranks.transport = request.param
    yield request.param
    ranks.transport = "shm"


@pytest.fixture(params=BUCKETS.values(), ids=list(BUCKETS))
def buckets(request: pytest.FixtureRequest) -> dict[str, float]:
    """Arguments of Reducer that decide how many buckets a small model gets."""
    return request.param
