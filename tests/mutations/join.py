"""Ranks without data: join(), and what transports do for it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

JOIN = "fastcomm/reducer/features/join.py"
PROGRESS = "fastcomm/reducer/features/progress.py"
CALL = "fastcomm/transports/group/call.py"
TESTS = "tests/reducer/features/test_join.py"
ENDS = "tests/reducer/features/test_join_ends.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_TRAINING = _test("test_training_is_that_of_one_process_that_averages_over_ranks_with_data")
_BEHIND = _test("test_a_learning_rate_that_has_fallen_behind_is_found")
_OTHERS = (f"{ENDS}::test_other_collectives_beside_a_rank_without_data",)
_OTHER_REDUCER = (
    f"{ENDS}::test_another_reducer_of_the_communicator_that_cannot_join_is_told_from_this_one",
)
_IN_ANY_WAY = (f"{ENDS}::test_a_block_may_be_left_in_any_way",)

MUTATIONS = (
    Mutation(
        name="join: a weight that was set for no batch counts in the next step",
        file=JOIN,
        within="Join._end",
        old="weighting.forget()",
        new="",
        tests=_test("test_a_weight_for_a_batch_that_has_not_come_is_forgotten"),
    ),
    Mutation(
        name="join: an exception that leaves the block waits until the others are done",
        file="fastcomm/reducer/features/join.py",
        within="Join.__exit__",
        old="self._fail(error)",
        new="self._end()",
        tests=(
            "tests/reducer/features/test_join_ends.py::test_an_exception_in_a_loop_ends_all_ranks",
        ),
    ),
    Mutation(
        name="join: a rank that breaks out of a loop that stops leaves the others voting",
        file="fastcomm/reducer/features/join.py",
        within="Join._end",
        old="self._all_go_on(False)",
        new="pass",
        tests=("tests/reducer/features/test_join.py::test_a_rank_that_breaks_stops_all",),
    ),
    Mutation(
        name="join: batches go on after their block",
        file="fastcomm/reducer/features/join.py",
        within="Join._loop",
        old="not self._is_open",
        new="False",
        tests=("tests/reducer/features/test_join_ends.py::test_batches_end_with_their_block",),
    ),
    Mutation(
        name="join: what a failed backward has left is taken for a model",
        file=JOIN,
        within="Join._reducers",
        old="free_failed_backwards()",
        new="",
        tests=(
            "tests/reducer/test_lifetimes.py::"
            "test_a_join_does_not_take_in_a_model_that_went_after_its_backward_had_failed",
        ),
    ),
    Mutation(
        name="join: on shm a mean is over all ranks",
        file="kernels/shm/protocol.c",
        within="weigh",
        old="total += is_shadow(d) ? 0 : weight;",
        new="total += weight;",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: on shm the shard of a rank without data is left out",
        file="kernels/shm/protocol.c",
        within="decide",
        old="c->descriptor = *all.wanted;",
        new="c->descriptor = *all.wanted, c->descriptor.numel = 0;",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: on shm any all_reduce admits ranks without data",
        file="kernels/shm/protocol.c",
        within="admits_shadows",
        old="d->kind == SHM_ALL_REDUCE && d->label != 0 &&",
        new="d->kind == SHM_ALL_REDUCE &&",
        tests=_OTHERS,
    ),
    Mutation(
        name="join: between hosts a mean is over all ranks",
        file=CALL,
        within="factors_of",
        old="float(call != WITHOUT_DATA)",
        new="1.0",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: between hosts any all_reduce admits ranks without data",
        file=CALL,
        within="Call.admits_shadows",
        old='self.kind == "all_reduce" and self.label != 0',
        new='self.kind == "all_reduce"',
        tests=_OTHERS,
    ),
    Mutation(
        name="join: between hosts a rank without data adds its old NaNs times 0",
        file="fastcomm/transports/group/work.py",
        within="GroupBucket.prepare_shadow",
        old="self._flat.zero_()",
        new="",
        tests=_test("test_a_wire_dtype"),
    ),
    Mutation(
        name="join: between hosts the used mask of a coded bucket goes another way",
        file="fastcomm/transports/group/work.py",
        within="GroupBucket.prepare_shadow",
        old="self._is_coded",
        new="False",
        tests=_test("test_a_wire_dtype"),
    ),
    Mutation(
        name="join: over NCCL ranks without data count as such with data",
        file="fastcomm/transports/nccl/rounds.py",
        within="shadow",
        old="_part_of_totals(comm, 0.0, 0, 0)",
        new="_part_of_totals(comm, 1.0, 0, 0)",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: over NCCL ranks without data take part for the first reducer alone",
        file="fastcomm/transports/nccl/rounds.py",
        within="shadow",
        old="round(sum_of_numbers / n_ranks)",
        new="min(one.label // BUCKETS_PER_REDUCER for one in comm.buckets)",
        tests=_test("test_random_plans"),
    ),
    Mutation(
        name="join: over NCCL two reducers begin rounds in one backward",
        file=JOIN,
        within="_Announcing.before_round",
        old="any(other.round is not None for other in self._join.joined)",
        new="False",
        tests=(f"{ENDS}::test_one_backward_over_nccl_is_of_one_reducer",),
    ),
    Mutation(
        name="join: over NCCL other collectives are let through",
        file="fastcomm/transports/nccl/rounds.py",
        within="refuse_in_join",
        old="comm.reduces_buckets_only",
        new="False",
        tests=(f"{ENDS}::test_other_collectives_over_nccl_are_refused_at_once",),
    ),
    Mutation(
        name="join: the ranks end as rank 0",
        file=JOIN,
        within="Join._meet",
        old='rounds.index((min if self._strategy == "stop" else max)(rounds))',
        new="0",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: rounds and steps are not made equal",
        file=JOIN,
        within="Join._meet",
        old="reducer.n_rounds, reducer.steps.n, reducer.steps.record = furthest",
        new="",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: gradients of different steps stay",
        file=JOIN,
        within="Join._meet",
        old="if is_uneven:",
        new="if False:",
        tests=_test("test_gradients_of_different_steps_are_dropped"),
    ),
    Mutation(
        name="join: an abandoned step ends it on a rank without data",
        file=JOIN,
        within="Join._follow",
        old="continue",
        new="return",
        tests=_test("test_a_step_that_was_abandoned_is_no_end"),
    ),
    Mutation(
        name="join: an optimizer that fell behind steps on",
        file=PROGRESS,
        within="Progress.left_behind",
        old="one.keeps_state and not one.is_given",
        new="False",
        tests=_test("test_an_optimizer_whose_state_has_fallen_behind_does_not_step"),
    ),
    Mutation(
        name="join: options that differ are not looked at",
        file=PROGRESS,
        within="why_apart",
        old="not may_agree",
        new="False",
        tests=_test("test_options_that_a_scheduler_has_moved_apart_are_found"),
    ),
    Mutation(
        name="join: a scheduler that is given is taken for its optimizer's options",
        file=PROGRESS,
        within="why_apart",
        old="ranks[0].has_schedule and not is_loaded",
        new="ranks[0].has_schedule",
        tests=_BEHIND,
    ),
    Mutation(
        name="join: a scaler that is given is taken for a scheduler",
        file=PROGRESS,
        within="Progress.of",
        old="(torch.optim.Optimizer, GradScaler)",
        new="torch.optim.Optimizer",
        tests=_test("test_a_grad_scaler_that_is_off_or_given_hides_no_scheduler"),
    ),
    Mutation(
        name="join: an optimizer that a rank does not know is not asked for",
        file=PROGRESS,
        within="_differ",
        old="any(one.is_scheduled() for one in most[len(known) :])",
        new="False",
        tests=_BEHIND,
    ),
    Mutation(
        name="join: only an outer block's state is made equal",
        file=JOIN,
        within="Join._begin",
        old="outer._states += [one for one in self._state if not holds(outer._states, one)]",
        new="_ = [one for one in self._state if not holds(outer._states, one)]",
        tests=_test("test_blocks_of_several_reducers_are_one"),
    ),
    Mutation(
        name="join: ranks that vote on a batch after an abandoned step go on with the old vote",
        file=JOIN,
        within="Join._all_go_on",
        old="vote.fill_(has_batch)",
        new="return True",
        tests=_test("test_a_step_that_was_abandoned_in_a_loop_that_stops"),
    ),
    Mutation(
        name="join: what was accumulated when the data ended is lost",
        file=JOIN,
        within="_refuse_pending",
        old="reducer.buckets if reducer.n_unsynced else ()",
        new="()",
        tests=(f"{ENDS}::test_data_that_ends_inside_an_accumulation",),
    ),
    Mutation(
        name="join: an exception leaves the others waiting",
        file=JOIN,
        within="Join._fail",
        old="self._comm.abort()",
        new="pass",
        tests=(f"{ENDS}::test_an_exception_that_leaves_the_block_ends_it_on_all_ranks",),
    ),
    Mutation(
        name="join: a scheduler that goes along is not counted on",
        file=PROGRESS,
        within="why_apart",
        old="ranks[0].has_schedule and not is_loaded",
        new="False",
        tests=_test("test_state_goes_to_the_ranks_that_have_ended_earlier"),
    ),
    Mutation(
        name="join: a rank that has made no step has other optimizers",
        file=PROGRESS,
        within="_differ",
        old="is_behind",
        new="len(known) != len(most)",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: an optimizer with an empty state keeps something",
        file=PROGRESS,
        within="_keeps_state",
        old="value is not None",
        new="True",
        equivalent="SGD without momentum keeps a None in older versions of torch alone",
    ),
    Mutation(
        name="join: other reducers of the communicator are not asked",
        file=JOIN,
        within="Join.__init__",
        old="self._reducers()",
        new="[reducer]",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: what another reducer does is said of this one",
        file=JOIN,
        within="_about",
        old="joined is asked",
        new="True",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: models in a circle take part until they are collected",
        file=JOIN,
        within="Join._reducers",
        old="gc.collect()",
        new="",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: a rank without data adds to errors that are fed back",
        file="fastcomm/reducer/features/compatibility.py",
        within="",
        old="(Feature.JOIN, Feature.ERROR_FEEDBACK)",
        new="(Feature.JOIN, Feature.ROUNDING)",
        tests=(f"{ENDS}::test_error_feedback_cannot_join",),
    ),
    Mutation(
        name="join: a generator that is closed in the block is an exception",
        file=JOIN,
        within="Join.__exit__",
        old="error is None or isinstance(error, GeneratorExit)",
        new="error is None",
        tests=_IN_ANY_WAY,
    ),
    Mutation(
        name="join: a rank that ends its process in order aborts",
        file=JOIN,
        within="Join._fail",
        old="not (isinstance(error, SystemExit) and not error.code)",
        new="True",
        tests=_IN_ANY_WAY,
    ),
)
