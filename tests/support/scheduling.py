"""Which worker of pytest-xdist runs which test."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# What their fixtures make takes long: one worker makes it, and runs all tests that use it.
TOGETHER = ("tests/test_package.py", "tests/test_demo.py", "tests/test_bench.py::test_flatten")


class AnyWorker(LoadScopeScheduling):
    """Gives each worker the next test when it has none: ranks cost next to nothing to start."""

    def _split_scope(self, nodeid: str) -> str:
        return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid)
