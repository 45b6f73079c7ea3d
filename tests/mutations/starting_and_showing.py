"""How ranks are started and end, how they choose the size of their buckets, and timelines."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RUNNER = "tests/test_runner.py"

MUTATIONS = (
    Mutation(
        name="run: ranks outlive a launcher that is killed",
        file="fastcomm/rank_process.py",
        old="    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        new="",
        tests=(f"{RUNNER}::test_ranks_end_with_a_launcher_that_is_killed",),
    ),
    Mutation(
        name="launch: a rank that has returned nothing counts as one that returns None",
        file="fastcomm/runner.py",
        old="    if not answer.exists():\n        raise FastcommError(",
        new="    if not answer.exists():\n        return FastcommError(",
        tests=(f"{RUNNER}::test_a_rank_that_returns_nothing_of_use_is_named",),
    ),
)
