"""The watchdog, the bootstrap and the rendezvous: how ranks meet, and how they notice that one is
gone.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WATCHDOG = "fastcomm/comm/watchdog.py"

WATCHDOG_TESTS = ("tests/comm/test_watchdog.py",)

MUTATIONS = (
    Mutation(
        name="watchdog: an abandonment is heard in another epoch",
        file=WATCHDOG,
        within="Watchdog._hear",
        old='f"abandoned/{newest[1]}"',
        new='f"abandoned/{newest[1] - 1}"',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank that has closed twice holds up the watchdog",
        file=WATCHDOG,
        within="Watchdog._read_closing",
        old='f"closed/{self._n_closings}"',
        new='f"closed/{len(self._closed)}"',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a store that is gone ends those who wait for nothing",
        file=WATCHDOG,
        within="Watchdog._tick",
        old="if stalled is not None:\n    self._give_up_dead(",
        new="if True:\n    stalled = stalled or (0, 0.0, NOTHING)\n    self._give_up_dead(",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="meeting: of a run that is started again, all ranks but the first are not looked for",
        file="fastcomm/launching/bootstrap.py",
        within="MeetingPoint.is_left_to",
        old="return not self.waiting(others, patience=timedelta())",
        new="return True",
        tests=("tests/launching/test_rebuild.py",),
    ),
    Mutation(
        name="script end: a thread stays in Gloo",
        file="fastcomm/transports/group/work_queue.py",
        within="WorkQueue.tell_of_end",
        old="self._end(FastcommError(words.has_ended(self.rank)))",
        new="pass",
        tests=("tests/contract/test_script_end.py",),
    ),
)
