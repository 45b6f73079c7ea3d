"""Ranks without data: join(), and what transports do for it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

JOIN = "fastcomm/reducer/join.py"
PROGRESS = "fastcomm/reducer/progress.py"
CALL = "fastcomm/group/call.py"
TESTS = "tests/reducer/test_join.py"
ENDS = "tests/reducer/test_join_ends.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_TRAINING = _test("test_training_is_that_of_one_process_that_averages_over_ranks_with_data")
_BEHIND = _test("test_a_learning_rate_that_has_fallen_behind_is_found")
_OTHERS = (f"{ENDS}::test_other_collectives_beside_a_rank_without_data",)
_OTHER_REDUCER = (
    f"{ENDS}::test_another_reducer_of_the_communicator_that_cannot_join_is_told_from_this_one",
)
_IN_ANY_WAY = (f"{ENDS}::test_a_loop_may_be_left_in_any_way",)

MUTATIONS = (
    Mutation(
        name="join: what a failed backward has left is taken for a model",
        file=JOIN,
        old="            free_failed_backwards()\n",
        new="",
        tests=(
            "tests/reducer/test_lifetimes.py::"
            "test_a_join_does_not_take_in_a_model_that_went_after_its_backward_had_failed",
        ),
    ),
    Mutation(
        name="join: on shm a mean is over all ranks",
        file="kernels/shm/protocol.c",
        old="        total += is_shadow(d) ? 0 : weight;\n",
        new="        total += weight;\n",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: on shm the shard of a rank without data is left out",
        file="kernels/shm/protocol.c",
        old="        c->descriptor = *all.wanted;\n",
        new="        c->descriptor = *all.wanted, c->descriptor.numel = 0;\n",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: on shm any all_reduce admits ranks without data",
        file="kernels/shm/protocol.c",
        old="d->kind == SHM_ALL_REDUCE && d->label != 0 &&",
        new="d->kind == SHM_ALL_REDUCE &&",
        tests=_OTHERS,
    ),
    Mutation(
        name="join: between hosts a mean is over all ranks",
        file=CALL,
        old="(float(call != WITHOUT_DATA),) * 2",
        new="(1.0,) * 2",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: between hosts any all_reduce admits ranks without data",
        file=CALL,
        old='self.kind == "all_reduce" and self.label != 0',
        new='self.kind == "all_reduce"',
        tests=_OTHERS,
    ),
    Mutation(
        name="join: between hosts a rank without data adds its old NaNs times 0",
        file="fastcomm/group/work.py",
        old="            self._flat.zero_()\n",
        new="",
        tests=_test("test_a_wire_dtype"),
    ),
    Mutation(
        name="join: between hosts the presence of a coded bucket goes another way",
        file="fastcomm/group/work.py",
        old="is_carried = self._is_coded and",
        new="is_carried = False and",
        tests=_test("test_a_wire_dtype"),
    ),
    Mutation(
        name="join: over NCCL ranks without data count as such with data",
        file="fastcomm/nccl/rounds.py",
        old="    totals = _part_of_totals(comm, 0.0, 0, 0)\n",
        new="    totals = _part_of_totals(comm, 1.0, 0, 0)\n",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: over NCCL ranks without data take part for the first reducer alone",
        file="fastcomm/nccl/rounds.py",
        old="    reducer = round(sum_of_numbers / n_ranks)\n",
        new="    reducer = min(one.label // BUCKETS_PER_REDUCER for one in comm.buckets)\n",
        tests=_test("test_random_plans"),
    ),
    Mutation(
        name="join: over NCCL two reducers begin rounds in one backward",
        file=JOIN,
        old="    if any(other._round is not None for other in join.joined):\n",
        new="    if False:\n",
        tests=(f"{ENDS}::test_one_backward_over_nccl_is_of_one_reducer",),
    ),
    Mutation(
        name="join: over NCCL other collectives are let through",
        file="fastcomm/nccl/rounds.py",
        old="    if comm.reduces_buckets_only:\n",
        new="    if False:\n",
        tests=(f"{ENDS}::test_other_collectives_over_nccl_are_refused_at_once",),
    ),
    Mutation(
        name="join: the ranks end as rank 0",
        file=JOIN,
        old='rounds.index((min if self._strategy == "stop" else max)(rounds))',
        new="0",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: rounds and steps are not made equal",
        file=JOIN,
        old="            reducer.n_rounds, reducer._n_steps, reducer.record = furthest\n",
        new="",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: gradients of different steps stay",
        file=JOIN,
        old="            if is_uneven:\n                _drop",
        new="            if False:\n                _drop",
        tests=_test("test_gradients_of_different_steps_are_dropped"),
    ),
    Mutation(
        name="join: an abandoned step ends it on a rank without data",
        file=JOIN,
        old="            except AbandonedError:  # a step of the others, which go on\n"
        "                continue\n",
        new="            except AbandonedError:\n                return\n",
        tests=_test("test_a_step_that_was_abandoned_is_no_end"),
    ),
    Mutation(
        name="join: an optimizer that fell behind steps on",
        file=PROGRESS,
        old="if one.keeps_state and not one.is_given]",
        new="if False]",
        tests=_test("test_an_optimizer_whose_state_has_fallen_behind_does_not_step"),
    ),
    Mutation(
        name="join: options that differ are not looked at",
        file=PROGRESS,
        old="    if not may_agree and any(",
        new="    if False and any(",
        tests=_test("test_options_that_a_scheduler_has_moved_apart_are_found"),
    ),
    Mutation(
        name="join: a scheduler that is given is taken for its optimizer's options",
        file=PROGRESS,
        old="    may_agree = ranks[0].has_schedule and not is_loaded\n",
        new="    may_agree = ranks[0].has_schedule\n",
        tests=_BEHIND,
    ),
    Mutation(
        name="join: a scaler that is given is taken for a scheduler",
        file=PROGRESS,
        old="not isinstance(one, (torch.optim.Optimizer, GradScaler))",
        new="not isinstance(one, torch.optim.Optimizer)",
        tests=_test("test_a_grad_scaler_that_is_off_or_given_hides_no_scheduler"),
    ),
    Mutation(
        name="join: an optimizer that a rank does not know is not asked for",
        file=PROGRESS,
        old="any(one.is_scheduled() for one in most[len(known) :])",
        new="False",
        tests=_BEHIND,
    ),
    Mutation(
        name="join: a scaler that fell behind scales on",
        file=PROGRESS,
        old="        return optimizers + self.scalers\n",
        new="        return optimizers\n",
        tests=_test("test_a_grad_scaler_that_has_fallen_behind_does_not_step"),
    ),
    Mutation(
        name="join: an exception out of an inner loop's iterator is taken for the loop's end",
        file=JOIN,
        old='            return at != "FOR_ITER" or place in asked_at\n',
        new="            return True\n",
        tests=(f"{ENDS}::test_a_loop_that_an_exception_ends_is_not_waited_for",),
    ),
    Mutation(
        name="join: only an outer block's state is made equal",
        file=JOIN,
        old="        outer._states += [",
        new="        _ = [",
        tests=_test("test_blocks_of_several_reducers_are_one"),
    ),
    Mutation(
        name="join: ranks that vote on a batch after an abandoned step go on with the old vote",
        file=JOIN,
        old="                vote.fill_(has_batch)\n",
        new="                return True\n",
        tests=_test("test_a_step_that_was_abandoned_in_a_loop_that_stops"),
    ),
    Mutation(
        name="join: what was accumulated when the data ended is lost",
        file=JOIN,
        old="for bucket in reducer._buckets if reducer._n_unsynced else ():",
        new="for bucket in ():",
        tests=(f"{ENDS}::test_data_that_ends_inside_an_accumulation",),
    ),
    Mutation(
        name="join: an exception in the body of a loop waits until the others are done",
        file=JOIN,
        old="        if not _is_left_in_order(frame, self._asked_at):\n",
        new="        if False:\n",
        tests=(f"{ENDS}::test_a_loop_that_an_exception_ends_is_not_waited_for",),
    ),
    Mutation(
        name="join: what goes wrong after a break is lost",
        file=JOIN,
        old="            self._reducer._deferred = error\n",
        new="            pass\n",
        tests=(f"{ENDS}::test_what_ends_a_loop_that_was_left_is_not_lost",),
    ),
    Mutation(
        name="join: an exception leaves the others waiting",
        file=JOIN,
        old="                self._comm.abort()\n",
        new="                pass\n",
        tests=(f"{ENDS}::test_an_exception_that_leaves_the_block_ends_it_on_all_ranks",),
    ),
    Mutation(
        name="join: a scheduler that goes along is not counted on",
        file=PROGRESS,
        old="    may_agree = ranks[0].has_schedule and not is_loaded\n",
        new="    may_agree = False\n",
        tests=_test("test_state_goes_to_the_ranks_that_have_ended_earlier"),
    ),
    Mutation(
        name="join: a rank that has made no step has other optimizers",
        file=PROGRESS,
        old="    return is_behind or any(ours",
        new="    return len(known) != len(most) or any(ours",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: an optimizer with an empty state keeps something",
        file=PROGRESS,
        old="return any(value is not None for state in",
        new="return bool(optimizer.state) or any(value is not None for state in",
        equivalent="SGD without momentum keeps a None in older versions of torch alone",
    ),
    Mutation(
        name="join: other reducers of the communicator are not asked",
        file=JOIN,
        old="        for joined in self._reducers():\n",
        new="        for joined in [reducer]:\n",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: what another reducer does is said of this one",
        file=JOIN,
        old="    if joined is asked:\n",
        new="    if True:\n",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: models in a circle take part until they are collected",
        file=JOIN,
        old="            gc.collect()\n",
        new="",
        tests=_OTHER_REDUCER,
    ),
    Mutation(
        name="join: a rank without data adds to errors that are fed back",
        file=JOIN,
        old="    if options.error_feedback:\n",
        new="    if False:\n",
        tests=(f"{ENDS}::test_error_feedback_cannot_join",),
    ),
    Mutation(
        name="join: a generator that is closed in the block is an exception",
        file=JOIN,
        old="        if error is None or isinstance(error, GeneratorExit):\n",
        new="        if error is None:\n",
        tests=_IN_ANY_WAY,
    ),
    Mutation(
        name="join: a rank that ends its process in order aborts",
        file=JOIN,
        old="        if not (isinstance(error, SystemExit) and not error.code):\n",
        new="        if True:\n",
        tests=_IN_ANY_WAY,
    ),
)
