"""Which rank the others wait for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STRAGGLERS = "fastcomm/insight/stragglers.py"
REDUCER = "fastcomm/reducer/reducer.py"
TEST = "tests/insight/test_stragglers.py::test_"
NAMED = f"{TEST}a_rank_that_sleeps_is_named_with_the_phase"
DEVICE_TIMES = "tests/insight/test_device_times.py::test_"
JOINED = f"{TEST}ranks_tell_each_other_again_after_a_join"
COPY = f"{TEST}what_watches_a_forward_goes_with_no_copy_of_the_model"

MUTATIONS = (
    Mutation(
        name="stragglers: waiting counts as work",
        file=STRAGGLERS,
        within="find",
        old="sum(one) - one[WAITING]",
        new="sum(one)",
        tests=(NAMED,),
    ),
    Mutation(
        name="stragglers: a straggler costs what it is late by, also where another is later",
        file=STRAGGLERS,
        within="find",
        old="own - max(others)",
        new="own - min(others)",
        tests=(f"{TEST}the_cost_of_one_of_two_late_ranks_is_what_it_has_over_the_other",),
    ),
    Mutation(
        name="stragglers: an unseen forward is told from data",
        file=STRAGGLERS,
        within="Stragglers.tell",
        old="all(one[-1] for one in ranks)",
        new="True",
        tests=(f"{TEST}a_forward_that_nobody_watches_is_not_told_from_data",),
    ),
    Mutation(
        name="stragglers: rank 0 warns again and again",
        file=STRAGGLERS,
        within="Stragglers.warn",
        old="self._n_windows >= WARNING_WINDOWS and self._warned_of != self.newest[0].rank",
        new="self._n_windows >= WARNING_WINDOWS",
        tests=(f"{TEST}rank_0_warns_once_of_a_rank_that_stays_late",),
    ),
    Mutation(
        name="stragglers: the wait for the others is part of the backward",
        file=REDUCER,
        within="Reducer._synchronize",
        old="self.phases.enter(WAITING)",
        new="pass",
        tests=(NAMED,),
    ),
    Mutation(
        name="stragglers: who waits in a launch is late in its backward",
        file="fastcomm/reducer/round.py",
        within="Round.launch_full_buckets",
        old="self._phases.enter(WAITING)",
        new="pass",
        tests=(f"{TEST}a_victim_that_waits_inside_its_backward_is_none",),
    ),
    Mutation(
        name="stragglers: data that come after a round are part of the wait",
        file=REDUCER,
        within="Reducer._close_round",
        old="self.phases.enter(OTHER)",
        new="pass",
        tests=(NAMED,),
    ),
    Mutation(
        name="stragglers: what comes after an optimizer's step is part of it",
        file=REDUCER,
        within="Reducer.after_step",
        old="self.phases.enter(OTHER)",
        new="pass",
        tests=(NAMED,),
    ),
    Mutation(
        name="stragglers: ranks tell each other inside a join()",
        file=REDUCER,
        within="Reducer._audit_and_tell",
        old="self.n_rounds >= self._stragglers.due_at and not is_joining(self.comm)",
        new="self.n_rounds >= self._stragglers.due_at",
        tests=(JOINED,),
    ),
    Mutation(
        name="stragglers: what a rank without data has waited for is its own time",
        file="fastcomm/reducer/features/join.py",
        within="Join._meet",
        old="reducer.forget_phases()",
        new="pass",
        tests=(JOINED,),
    ),
    Mutation(
        name="stragglers: waits for other ranks' shards are the optimizer's",
        file="fastcomm/optim/sharded.py",
        within="ShardedOptimizer.step",
        old="self.reducer.phases.enter(OPTIMIZER)",
        new="pass",
        tests=(f"{TEST}the_wait_for_other_ranks_shards_is_no_work",),
    ),
    Mutation(
        name="stragglers: a model that is hooked up anew is not watched",
        file=REDUCER,
        within="Reducer.hook_up",
        old="self._stragglers.follow(source)",
        new="pass",
        tests=(COPY,),
    ),
    Mutation(
        name="stragglers: a mark that is not reached yet counts",
        file="fastcomm/insight/phases.pyx",
        within="Phases.take_measured",
        old="math.nan if ns is None else ns",
        new="ns or 0",
        tests=(f"{DEVICE_TIMES}a_mark_that_is_not_reached_yet_makes_no_time",),
    ),
    Mutation(
        name="stragglers: ranks tell each other in a capture",
        file=STRAGGLERS,
        within="Stragglers._has_measured",
        old="self._comm.has_captured",
        new="False",
        tests=(f"{DEVICE_TIMES}nothing_is_told_once_a_graph_was_captured",),
    ),
    Mutation(
        name="stragglers: over NCCL the host's phases are told",
        file=STRAGGLERS,
        within="Stragglers.tell",
        old="self._measured() if comm.has_streams else self.phases.take()",
        new="self.phases.take()",
        tests=(NAMED,),
    ),
    Mutation(
        name="stragglers: what was measured before the ranks begin anew counts",
        file=STRAGGLERS,
        within="Stragglers.begin",
        old="self.phases.measure(None)",
        new="pass",
        tests=(f"{DEVICE_TIMES}what_was_measured_before_the_ranks_begin_anew_is_forgotten",),
    ),
)
