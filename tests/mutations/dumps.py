"""What is kept of collectives, when it is dumped, and what is read from the dumps."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RECORDER = "fastcomm/comm/flight_recorder.pyx"
DUMP = "fastcomm/comm/dump.py"
DUMP_FILES = "fastcomm/comm/dump_files.py"
DIAGNOSIS = "fastcomm/insight/diagnosis.py"
TESTS = "tests/insight/test_diagnosis.py::test_"
CONTRACT = "tests/contract/test_flight.py::test_"
LATE = f"{TESTS}a_rank_that_does_not_come_is_named_with_the_place_where_it_stands"

WHEREABOUTS = "fastcomm/comm/whereabouts.py"
DEADLINE = (
    "tests/contract/test_late_ranks.py::test_a_rank_that_does_not_come_is_named_after_the_timeout"
)

MUTATIONS = (
    Mutation(
        name="dumps: a full ring begins with its newest entry",
        file=RECORDER,
        within="FlightRecorder.entries",
        old="kept[first:] + kept[:first]",
        new="kept",
        tests=(f"{TESTS}the_newest_are_kept_in_order",),
    ),
    Mutation(
        name="dumps: every collective has a root",
        file=RECORDER,
        within="FlightRecorder.note",
        old="root if kind in WITH_ROOT else -1",
        new="root",
        tests=(f"{CONTRACT}every_collective_is_noted_alike_on_all_ranks",),
    ),
    Mutation(
        name="dumps: lanes end in one order",
        file=DUMP_FILES,
        within="over_of",
        old="_position(entry) <= newest_ended.get(entry.lane, (0, 0))",
        new="_position(entry) <= newest_ended.get(0, (0, 0))",
        tests=(f"{TESTS}what_comes_before_in_a_lane_is_over",),
    ),
    Mutation(
        name="dumps: what a failure has cut short counts as over",
        file=DUMP_FILES,
        within="_has_ended",
        old="entry.error not in _CUT_SHORT",
        new="True",
        tests=(f"{TESTS}what_a_failure_has_cut_short_is_not_over",),
    ),
    Mutation(
        name="dumps: what a late rank shows is replaced when it comes",
        file=DUMP,
        within="_look",
        old="_settle()",
        new="None",
        tests=(f"{LATE}[shm]",),
    ),
    Mutation(
        name="dumps: a rank that has failed asks nobody",
        file=DUMP,
        within="_dump_failure",
        old="ask(folder, FAILED)",
        new="None",
        tests=(f"{LATE}[shm]",),
    ),
    Mutation(
        name="dumps: a handler of the user's for SIGUSR2 is replaced",
        file=DUMP,
        within="watch",
        old="signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL",
        new="True",
        tests=(f"{TESTS}a_handler_of_the_users_stays",),
    ),
    Mutation(
        name="dumps: closing counts as a failure",
        file=DUMP,
        within="_dump_failure",
        old="type(failure) is not FastcommError",
        new="True",
        tests=(f"{TESTS}a_job_that_ends_well_leaves_nothing",),
    ),
    Mutation(
        name="dumps: the verdict is on the newest collective that somebody waits for",
        file=DIAGNOSIS,
        within="_verdict",
        old="min(position_of(entry) for one in waiting if (entry := one.waits_for(over)))",
        new="max(position_of(one.newest) for one in waiting)",
        tests=(f"{TESTS}the_verdict_is_on_the_oldest_collective_that_somebody_waits_for",),
    ),
    Mutation(
        name="dumps: what is over on another rank counts as unfinished",
        file=DIAGNOSIS,
        within="Rank.waits_for",
        old="not one['is_over'] and position_of(one) not in over",
        new="not one['is_over']",
        tests=(f"{LATE}[nccl]",),
    ),
    Mutation(
        name="dumps: what is fused between hosts has no numbers",
        file="fastcomm/transports/group/work_queue.py",
        within="WorkQueue._begin",
        old="one.entry.number = self.number + place",
        new="pass",
        tests=(
            "tests/transports/group/test_group.py::"
            "test_what_waits_behind_an_all_reduce_is_fused_with_it",
        ),
    ),
    Mutation(
        name="dumps: nobody notes that a small collective over shared memory is over",
        file="fastcomm/transports/shm/ring.pyx",
        within="Ring.call",
        old="entry.end()",
        new="None",
        tests=(f"{CONTRACT}a_collective_is_over_when_it_is[shm-2]",),
    ),
    Mutation(
        name="dumps: the watchdog does not note that a launch is over",
        file="fastcomm/transports/nccl/launches.pyx",
        within="Launches.settle",
        old="in_flight.entry.end()",
        new="None",
        tests=(f"{CONTRACT}a_collective_is_over_when_it_is[nccl-2]",),
    ),
    Mutation(
        name="whereabouts: a process tells every user",
        file=WHEREABOUTS,
        within="_answer",
        old="_peer_of(asker)[1] == os.geteuid()",
        new="True",
        tests=("tests/comm/test_whereabouts.py::test_another_user_is_not_told",),
    ),
    Mutation(
        name="whereabouts: a stopped process is taken for one that computes",
        file=WHEREABOUTS,
        within="ask",
        old='state in "Tt"',
        new="False",
        tests=("tests/comm/test_whereabouts.py::test_a_process_that_is_stopped_is_said_to_be",),
    ),
    Mutation(
        name="whereabouts: a rank of another host that is asked does not say where its script is",
        file="fastcomm/comm/watchdog.py",
        within="Watchdog._publish",
        old="whereabouts() if self._is_asked else ''",
        new="''",
        tests=(f"{DEADLINE}[group-3]",),
    ),
    Mutation(
        name="whereabouts: over shared memory a late rank is not asked",
        file="fastcomm/transports/shm/ring.pyx",
        within="Ring._timeout_message",
        old="where = self._uncut(whereabouts_of, late, self.segments.pids)",
        new='where = ""',
        tests=(f"{DEADLINE}[shm-2]",),
    ),
)
