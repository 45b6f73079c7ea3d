"""How ranks are started and end, how they choose the size of their buckets, and timelines."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PLAN = "fastcomm/reducer/plan.py"
TUNING = "tests/reducer/features/test_tuning.py"
INTERRUPTED = "test_a_decision_that_is_interrupted_is_made_by_all_ranks_or_none"
TIMELINE = "tests/insight/test_timeline.py"
RUNNER = "tests/launching/test_runner.py"
SIGNALS = "tests/launching/test_signals.py"
PROCESSES = "fastcomm/launching/processes.py"

MUTATIONS = (
    Mutation(
        name="run: a line without an end is lost",
        file=PROCESSES,
        within="_print",
        old='prefix + line.removesuffix("\\n") + "\\n"',
        new="prefix + line",
        tests=(f"{RUNNER}::test_lines_without_an_end_stay_lines_of_their_own",),
    ),
    Mutation(
        name="run: a signal that is ignored, or the caller's, is handled",
        file=PROCESSES,
        within="Processes.__enter__",
        old="signal.getsignal(number) in _DEFAULTS",
        new="True",
        tests=(f"{SIGNALS}::test_what_was_ignored_at_the_start_stays_ignored",),
    ),
    Mutation(
        name="run: Ctrl-Z stops the launcher alone",
        file=PROCESSES,
        within="Processes._stop",
        old="self._send(signal.SIGSTOP)",
        new="pass",
        tests=(f"{SIGNALS}::test_ctrl_z_stops_the_ranks_until_the_launcher_goes_on",),
    ),
    Mutation(
        name="bench: results go where committed ones are",
        file="bench/lib/report.py",
        within="write_results",
        old=(
            "if options.json is not None:\n    write_json(results, options.json, options, prefix)"
        ),
        new=(
            'folder = Path(__file__).parent.with_name("results")\n'
            'write_json(results, options.json or folder / f"{benchmark}.json", options, prefix)'
        ),
        tests=(
            "tests/bench/test_bench.py::test_without_json_a_benchmark_changes_no_committed_figures",
        ),
    ),
    Mutation(
        name="launch: a rank that has returned nothing counts as one that returns None",
        file="fastcomm/launching/runner.py",
        within="_returned",
        old='raise FastcommError(\n    f"rank {rank} ended with exit code 0',
        new='return FastcommError(\n    f"rank {rank} ended with exit code 0',
        tests=(f"{RUNNER}::test_a_rank_that_returns_nothing_of_use_is_named",),
    ),
    Mutation(
        name="auto: the quickest rank decides",
        file=PLAN,
        within="Planner._decide",
        old="max(one.period_s for one in seen)",
        new="min(one.period_s for one in seen)",
        tests=(f"{TUNING}::test_the_slowest_rank_decides",),
    ),
    Mutation(
        name="auto: a size that was tried last stays",
        file=PLAN,
        within="Planner._try_next",
        old="fastest(self.seconds, self._begins_with_mb)",
        new="self.cap_mb",
        tests=(f"{TUNING}::test_the_slowest_rank_decides",),
    ),
    Mutation(
        name="auto: a signal ends a decision that the other ranks make",
        file="fastcomm/reducer/defer_signals.py",
        within="all_or_none",
        old="defer_signals",
        new="contextlib.nullcontext",
        tests=(f"{TUNING}::{INTERRUPTED}",),
    ),
    Mutation(
        name="timeline: a step begins with a forward that has raised",
        file="fastcomm/insight/recorder.pyx",
        within="Recorder.begin_forward",
        old="if not self.forward_ns:",
        new="if not self.forward_began_first:",
        tests=(f"{TIMELINE}::test_a_forward_that_raises_belongs_to_no_step",),
    ),
)
