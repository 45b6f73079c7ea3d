"""How ranks are started and end, how they choose the size of their buckets, and timelines."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REDUCER = "fastcomm/reducer/reducer.py"
PLAN = "fastcomm/reducer/plan.py"
ORDERING = "tests/reducer/features/test_ordering.py"
TUNING = "tests/reducer/features/test_tuning.py"
INTERRUPTED = "test_a_decision_that_is_interrupted_is_made_by_all_ranks_or_none"
TIMELINE = "tests/insight/test_timeline.py"
RUNNER = "tests/launching/test_runner.py"
SIGNALS = "tests/launching/test_signals.py"
PROCESSES = "fastcomm/launching/processes.py"

MUTATIONS = (
    Mutation(
        name="run: ranks outlive a launcher that is killed",
        file="fastcomm/launching/rank_process.py",
        within="main",
        old="ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        new="",
        tests=(f"{SIGNALS}::test_ranks_are_killed_with_a_launcher_that_another_signal_ends",),
    ),
    Mutation(
        name="run: a script inherits the __future__ imports of what starts it",
        file="fastcomm/launching/rank_process.py",
        within="run_script",
        old='compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)',
        new='compile(Path(path).read_bytes(), path, "exec")',
        tests=(f"{RUNNER}::test_a_line_that_a_script_writes_in_pieces_stays_whole",),
    ),
    Mutation(
        name="run: a folder whose launcher runs is taken for one left behind",
        file="fastcomm/launching/call_folder.py",
        within="new_folder",
        old="_lock(path, fcntl.LOCK_EX, ours)",
        new="",
        tests=(f"{SIGNALS}::test_the_next_launcher_removes_the_folder_of_one_that_was_killed",),
    ),
    Mutation(
        name="run: a rank that has lost another does not wait for that one to say why",
        file="fastcomm/launching/rank_process.py",
        within="_report",
        old=("if is_lost:\n    _wait_for_cause(folder)"),
        new="",
        tests=(f"{RUNNER}::test_the_rank_is_named_that_others_have_lost",),
    ),
    Mutation(
        name="run: the first rank that has raised is named, whatever it was",
        file="fastcomm/launching/runner.py",
        within="_first_failure",
        old="not one.is_lost",
        new="True",
        tests=(f"{RUNNER}::test_the_first_of_several_causes_is_named",),
    ),
    Mutation(
        name="run: a rank that the launcher has ended is named",
        file="fastcomm/launching/runner.py",
        within="_first_failure",
        old="failures[rank].exit_code > 0",
        new="False",
        tests=(f"{RUNNER}::test_a_rank_that_the_launcher_has_ended_is_not_named",),
    ),
    Mutation(
        name="run: a line without an end is lost",
        file=PROCESSES,
        within="_Lines.end",
        old="if rest",
        new="if False",
        tests=(f"{RUNNER}::test_lines_without_an_end_stay_lines_of_their_own",),
    ),
    Mutation(
        name="run: a signal that is ignored, or the caller's, is handled",
        file=PROCESSES,
        within="Processes._handle",
        old="before in _DEFAULTS",
        new="True",
        tests=(f"{SIGNALS}::test_what_was_ignored_at_the_start_stays_ignored",),
    ),
    Mutation(
        name="run: Ctrl-Z stops the launcher alone",
        file=PROCESSES,
        within="Processes._stop",
        old="self._send(signal.SIGSTOP)",
        new="",
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
        name="auto: buckets change after gradients were dropped",
        file=REDUCER,
        within="Reducer._synchronize",
        old="is_between_steps and not self.skipped",
        new="is_between_steps",
        tests=(f"{TUNING}::test_a_decision_that_is_put_off_for_long_is_given_up",),
    ),
    Mutation(
        name="auto: reduce() puts decisions off",
        file=REDUCER,
        within="Reducer.reduce",
        old="self._synchronize(is_between_steps=True)",
        new="self._synchronize(is_between_steps=False)",
        tests=(f"{TUNING}::test_a_rank_without_a_backward_takes_part_in_what_the_round_decides",),
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
        file="fastcomm/reducer/features/defer_signals.py",
        within="all_or_none",
        old="defer_signals",
        new="contextlib.nullcontext",
        tests=(f"{TUNING}::{INTERRUPTED}",),
    ),
    Mutation(
        name="auto: the others wait for a rank that has left a decision",
        file="fastcomm/reducer/features/defer_signals.py",
        within="all_or_none",
        old="comm.abandon()",
        new="pass",
        tests=(f"{TUNING}::{INTERRUPTED}",),
    ),
    Mutation(
        name="auto: what a late handler raises hides behind the error",
        file="fastcomm/reducer/features/defer_signals.py",
        within="_handle",
        old="raise late from error",
        new="pass",
        tests=("tests/reducer/test_defer_signals.py",),
    ),
    Mutation(
        name="timeline: a step begins with a forward that has raised",
        file="fastcomm/insight/recorder.pyx",
        within="Recorder.begin_forward",
        old="if not self.forward_ns:",
        new="if not self.forward_began_first:",
        tests=(f"{TIMELINE}::test_a_forward_that_raises_belongs_to_no_step",),
    ),
    Mutation(
        name="timeline: its hooks stay on a model that is detached",
        file="fastcomm/insight/timeline.py",
        within="Timeline.let_go",
        old="self._model = None",
        new="",
        tests=(f"{TIMELINE}::test_a_model_that_is_detached_has_no_hook_of_the_timeline",),
    ),
    Mutation(
        name="timeline: rank 0 keeps to itself that it cannot write",
        file="fastcomm/insight/timeline.py",
        within="Timeline._on_rank_0",
        old="told is not None",
        new="False",
        tests=(f"{TIMELINE}::test_where_rank_0_cannot_write_all_ranks_learn_of_it",),
    ),
    Mutation(
        name="ordering: buckets follow a graph that differs from rank to rank",
        file=PLAN,
        within="Planner._follow",
        old="not orders",
        new="True",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: buckets follow one round of two",
        file=PLAN,
        within="Planner._seen_order",
        old="len(steps) >= TRACED_ROUNDS and len(orders) == 1",
        new="orders",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: buckets change under a sharded optimizer",
        file=PLAN,
        within="Planner._seen_order",
        old="not reducer.features().keys() <= _GOES_WITH",
        new="False",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: where a round is skipped that decides, none ever does",
        file=PLAN,
        within="Planner._decide",
        old="can_replan or is_last or None in orders",
        new="True",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: a join() is traced for ever",
        file=PLAN,
        within="Planner.after_round",
        old="self.end_trace(reducer)",
        new="pass",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: ranks with data decide while others have none",
        file=PLAN,
        within="Planner.after_round",
        old="is_joining(reducer.comm)",
        new="False",
        tests=(ORDERING,),
    ),
    Mutation(
        name="ordering: what traces buckets outlives them",
        file=REDUCER,
        within="Reducer._release",
        old="self.planner.end_trace(self)",
        new="pass",
        tests=(ORDERING,),
    ),
    Mutation(
        name="auto: a round that an exception interrupts is not decided about",
        file=REDUCER,
        within="Reducer._confer_in_spite_of",
        old="self._plan_anew(can_replan=False)",
        new="pass",
        tests=(ORDERING,),
    ),
)
