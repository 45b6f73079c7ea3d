"""Which worker of pytest-xdist runs which test."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# What their fixtures make takes long: one worker makes it, and runs all tests that use it.
TOGETHER = (
    "tests/test_package.py",
    "tests/cli/test_demo.py",
    "tests/bench/test_bench.py::test_flatten",
)


class AnyWorker(LoadScopeScheduling):
    """Gives each worker the next test when it has none: ranks cost next to nothing to start."""

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forgets what is done, which would be counted again after every test."""
        super().mark_test_complete(node, item_index, duration)
        units = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(units[scope].values()):
            del units[scope]

    def _split_scope(self, nodeid: str) -> str:
        return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid)
