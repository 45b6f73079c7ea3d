"""fastcomm/reducer: rounds, buckets, where gradients come from, and optimizers' steps."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REDUCER = "fastcomm/reducer/reducer.py"
ROUND = "fastcomm/reducer/round.py"
ABANDONMENT = "fastcomm/comm/abandonment.py"
OWNERS = "fastcomm/reducer/owners.py"
BUCKET = "fastcomm/reducer/bucket.py"
GRADIENT_STATE = "fastcomm/reducer/gradient_state.pyx"
LAYOUT = "fastcomm/reducer/layout.py"
STEPS = "fastcomm/reducer/optimizer_hooks.py"
NORMS = "fastcomm/reducer/statistics.py"
GUARDS = "fastcomm/reducer/guards.py"

STEPS_TESTS = ("tests/reducer/test_optimizer_steps.py",)
STRANGERS = "tests/reducer/test_strangers.py"
UNREDUCED = "tests/reducer/test_unreduced.py"
UNREDUCED_TESTS = (UNREDUCED,)
DRIFT = "tests/reducer/test_drift.py"
RECORD_TESTS = "tests/reducer/test_steps.py"

DEFECTS = "tests/reducer/test_defects.py"
ROUNDS = "tests/reducer/test_rounds.py"
HELD_ALIKE = f"{DEFECTS}::test_ranks_clip_alike_where_one_holds_its_gradients"
HELD_TESTS = f"{DEFECTS}::test_gradients_that_the_user_holds_too_stay_his"

MUTATIONS = (
    Mutation(
        name="reducer: gradients that the user holds are replaced",
        file="fastcomm/reducer/bucket.py",
        within="Bucket._note_staying",
        old="self._staying.update(self._held)",
        new="",
        tests=(HELD_TESTS,),
    ),
    Mutation(
        name="reducer: views of the user's are replaced",
        file="fastcomm/reducer/autograd.py",
        within="is_gradient_held",
        old="parameter.grad._base is not None",
        new="False",
        tests=(HELD_TESTS,),
    ),
    Mutation(
        name="reducer: gradients in a list of the user's are replaced",
        file="fastcomm/reducer/autograd.py",
        within="is_gradient_held",
        old="_n_names(parameter) > _N_NAMES",
        new="False",
        tests=(HELD_TESTS,),
    ),
    Mutation(
        name="reducer: slices that autograd has cut from one piece are the user's",
        file="fastcomm/reducer/autograd.py",
        within="is_gradient_held",
        old="parameter.grad._base is not None",
        new="parameter.grad.untyped_storage().nbytes() > parameter.grad.nbytes",
        tests=(f"{DEFECTS}::test_gradients_that_autograd_has_cut_from_one_piece_are_views",),
    ),
    Mutation(
        name="reducer: a held gradient that no rank has made is reduced again",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.settle",
        old="parameter is not None and i not in left",
        new="parameter is not None",
        tests=(f"{DEFECTS}::test_a_held_gradient_of_an_unused_parameter_is_left_as_it_is",),
    ),
    Mutation(
        name="reducer: a dropped round takes from the user what he holds",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.drop_gradients",
        old="self._taken.update(self._held or ())",
        new="",
        tests=(f"{DEFECTS}::test_held_gradients_come_back_after_a_round_that_was_dropped",),
    ),
    Mutation(
        name="steps: those within a step are recorded, too",
        file="fastcomm/reducer/optimizer_hooks.py",
        within="_after_step",
        old="reducer.steps.record = record",
        new="pass",
        tests=(
            f"{DRIFT}::test_an_optimizer_that_steps_a_part_on_each_rank_and_shares_it_may_step",
        ),
    ),
    Mutation(
        name="steps: what they have made of the parameters is not compared",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.note_step",
        old="checksum(self._references, n_rounds)",
        new="0",
        tests=(f"{DRIFT}::test_ranks_that_drift_apart_hear_of_it_in_the_next_backward",),
    ),
    Mutation(
        name="steps: torch's compiler traces the hooks on optimizers",
        file=STEPS,
        within="watch_steps",
        old="Untraced(_before_step)",
        new="_before_step",
        tests=(f"{RECORD_TESTS}::test_a_compiled_step_is_not_compiled_again_and_again",),
    ),
    Mutation(
        name="reducer: zeros are unknown after a refresh",
        file=GRADIENT_STATE,
        within="GradientState.hand_over",
        old="setattr(gradient, MARK, (ACCEPTED, NO_VERSION))",
        new="pass",
        tests=(f"{RECORD_TESTS}::test_zeros_that_a_refresh_has_kept_may_be_stepped",),
    ),
    Mutation(
        name="steps: which parameters were stepped is not compared",
        file="fastcomm/reducer/optimizer_hooks.py",
        within="StepRecord.note",
        old="sum([len(slots) for _, slots in stepped]) != n_all",
        new="False",
        tests=(f"{RECORD_TESTS}::test_ranks_that_made_as_many_steps_but_others_all_hear_of_it",),
    ),
    Mutation(
        name="steps: how gradients are clipped is not compared",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.clip_grad_norm_",
        old="math.isfinite(max_norm) and not self.skipped and not self.steps_alone",
        new="False",
        tests=(f"{RECORD_TESTS}::test_ranks_that_made_as_many_steps_but_others_all_hear_of_it",),
    ),
    Mutation(
        name="reducer: what no_sync() has made is so for ever",
        file=BUCKET,
        within="Bucket.reset",
        old="self.gradient_state.begin_period()",
        new="",
        tests=("tests/reducer/test_unreduced.py::test_what_no_sync_has_made_is_reduced_once",),
    ),
    Mutation(
        name="reducer: a gradient that no rank has made anew is kept as its reduction",
        file=BUCKET,
        within="Bucket._fill_missing",
        old="gradient.clone()",
        new="gradient",
        tests=UNREDUCED_TESTS,
    ),
    Mutation(
        name="reducer: ranks ask each other for missing gradients in every round",
        file=BUCKET,
        within="Bucket.reset",
        old="self._untouched.clear()",
        new="",
        tests=("tests/reducer/test_buckets.py",),
    ),
    Mutation(
        name="reducer: gradients stay in the flat buffer after detach()",
        file=BUCKET,
        within="Bucket.release",
        old="gradient.clone() if inside([gradient]) else gradient",
        new="gradient",
        tests=("tests/reducer/test_buckets.py",),
    ),
    Mutation(
        name="reducer: a reducer keeps its model alive",
        file=REDUCER,
        within="Reducer._remember",
        old="reference_to(source)",
        new="lambda: source",
        tests=("tests/reducer/test_buckets.py",),
    ),
    Mutation(
        name="reducer: a bucket keeps its parameters alive",
        file=BUCKET,
        within="Bucket._hold",
        old="weakref.ref(parameter)",
        new="lambda parameter=parameter: parameter",
        tests=("tests/reducer/test_buckets.py",),
    ),
    Mutation(
        name="reducer: a step ends rounds in any order",
        file=STEPS,
        within="_Known.__init__",
        old="sorted({one for one in owners if one is not None}, key=lambda r: r.number)",
        new="[one for one in set(owners) if one is not None]",
        tests=STEPS_TESTS,
    ),
    Mutation(
        name="reducer: an optimizer forgets its last step when a model is attached",
        file=STEPS,
        within="_known_of",
        old="known.seen.update(before.seen)",
        new="pass",
        tests=STEPS_TESTS,
    ),
    Mutation(
        name="reducer: a round that ended within a step counts as stepped",
        file=STEPS,
        within="_after_step",
        old="slots if is_of_one_round else []",
        new="slots",
        tests=STEPS_TESTS,
    ),
    Mutation(
        name="reducer: the last bucket is launched before the end of backward",
        file=ROUND,
        within="Round.launch_full_buckets",
        old="len(self.buckets) - 1",
        new="len(self.buckets)",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_an_exception_after_the_last_gradient_costs_all_ranks_the_step",
        ),
    ),
    Mutation(
        name="reducer: a round goes on after abandon()",
        file=ROUND,
        within="Round._launch_next",
        old="self._comm.n_abandoned != self._n_abandoned",
        new="False",
        tests=("tests/reducer/test_failed_steps.py",),
    ),
    Mutation(
        name="rounds: the state says nothing of a launch",
        file=ROUND,
        within="Round.state",
        old="State.LAUNCHING if self._n_launched else State.OPEN",
        new="State.OPEN",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="rounds: a skipped round says that it has settled",
        file=ROUND,
        within="Round._settle_or_drop",
        old="return State.SKIPPED",
        new="return State.SETTLED",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="rounds: a signal after the last launch drops the round on one rank",
        file=ROUND,
        within="Round.finish",
        old="self._settle_in_spite_of(error)",
        new="self.abort(error)",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="rounds: a dropped round is not over",
        file=ROUND,
        within="Round._drop",
        old="self._close()",
        new="pass",
        tests=(ROUNDS,),
    ),
    Mutation(
        name="reducer: a round that ended with another rank's is abandoned again",
        file=ROUND,
        within="Round._leave",
        old="return",
        new="pass",
        tests=("tests/reducer/test_failed_steps.py", "tests/contract/test_abandon.py"),
    ),
    Mutation(
        name="reducer: half reduced gradients stay",
        file=ROUND,
        within="Round._drop",
        old="bucket.drop_gradients()",
        new="pass",
        tests=("tests/reducer/test_failed_steps.py",),
    ),
    Mutation(
        name="reducer: an error in a dropped backward is lost",
        file=REDUCER,
        within="Reducer._backward_was_dropped",
        old="self.deferred = error",
        new="pass",
        tests=("tests/reducer/test_failed_steps.py", "tests/reducer/test_interrupts.py"),
    ),
    Mutation(
        name="reducer: what a failed backward has left outlives the next attach()",
        file=REDUCER,
        within="Reducer.attach",
        old="free_failed_backwards()",
        new="pass",
        tests=(
            "tests/reducer/test_lifetimes.py::"
            "test_a_model_whose_backward_has_failed_goes_before_the_next_is_attached",
        ),
    ),
    Mutation(
        name="reducer: no_sync() inside no_sync() ends both",
        file=REDUCER,
        within="Reducer.no_sync",
        old="before",
        new="True",
        tests=("tests/reducer/test_backward.py",),
    ),
    Mutation(
        name="reducer: what has heard of an abandonment is abandoned once more",
        file=ABANDONMENT,
        within="told",
        old="note_abandoned(comm, copy)",
        new="",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_an_abandonment_that_is_heard_of_before_the_backward_is_not_abandoned_again",
        ),
    ),
    Mutation(
        name="reducer: an exception hides the abandonment that it was raised while handling",
        file=ABANDONMENT,
        within="is_abandoned_already",
        old="error.__cause__ or (None if error.__suppress_context__ else error.__context__)",
        new="error.__cause__",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_an_exception_that_hides_an_abandonment_is_not_abandoned_again",
        ),
    ),
    Mutation(
        name="reducer: an exception that was abandoned once is never abandoned again",
        file="fastcomm/transports/shm/communicator.pyx",
        within="ShmCommunicator.note_settled",
        old="self.abandonment = None",
        new="",
        tests=(
            "tests/reducer/test_failed_steps.py::test_one_exception_raised_in_two_steps_abandons_both",
        ),
    ),
    Mutation(
        name="reducer: a backward goes on that a hook has abandoned",
        file=ABANDONMENT,
        within="error_in_abandoned_backward",
        old="newest is None",
        new="True",
        tests=(
            "tests/reducer/test_failed_steps.py::test_a_hook_that_abandons_costs_all_ranks_the_step",
        ),
    ),
    Mutation(
        name="reducer: a backward in no_sync() goes on that a hook has abandoned",
        file="fastcomm/reducer/hooks.pyx",
        within="GradientHook.__call__",
        old="if self.reducer.n_unsynced == 0:",
        new="if self.reducer.n_unsynced < 0:",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_a_backward_that_accumulates_ends_where_its_hook_abandons",
        ),
    ),
    Mutation(
        name="reducer: a signal in a round that another rank abandons ends the communicator",
        file=ROUND,
        within="Round._settle_in_spite_of",
        old="self.abort(interruption)",
        new="self._comm.abort()",
        tests=(
            "tests/reducer/test_interrupts.py::"
            "test_an_interrupt_of_a_round_that_another_rank_abandons_costs_that_step",
        ),
    ),
    Mutation(
        name="reducer: a rank that abandons a step keeps what it has accumulated",
        file=OWNERS,
        within="_drop_steps",
        old="reducer.drop_step()",
        new="",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_a_rank_that_abandons_a_step_keeps_no_gradient_of_it",
        ),
    ),
    Mutation(
        name="reducer: weights and votes outlive a step that was abandoned",
        file=REDUCER,
        within="Reducer.drop_step",
        old="extension.dropped()",
        new="",
        tests=(
            "tests/reducer/test_failed_steps.py::"
            "test_weights_and_votes_go_with_the_step_that_was_abandoned",
        ),
    ),
    Mutation(
        name="reducer: reducers of one communicator have the same number",
        file=OWNERS,
        within="next_number",
        old="number + 1",
        new="number",
        tests=(
            "tests/contract/test_mismatches.py::test_ranks_that_train_different_models_hear_of_it",
        ),
    ),
    Mutation(
        name="reducer: steps count on after refresh()",
        file=REDUCER,
        within="Reducer._attach",
        old="self.steps = StepRecord(compares)",
        new="self.steps.record = 0",
        tests=("tests/reducer/test_steps.py",),
    ),
    Mutation(
        name="reducer: a failed refresh() lets a loop train on",
        file=REDUCER,
        within="Reducer.refresh",
        old="self.stand_still(model)",
        new="pass",
        tests=("tests/reducer/test_refusals.py", "tests/reducer/test_disagreement.py"),
    ),
    Mutation(
        name="reducer: a gradient that no_sync() made is fresh",
        file=GRADIENT_STATE,
        within="GradientState.note_unsynced",
        old="self.reduced_by[i] = NEVER",
        new="",
        tests=(
            "tests/reducer/test_unreduced.py::"
            "test_no_sync_after_a_round_does_not_vouch_for_gradients_made_by_hand",
        ),
    ),
    Mutation(
        name="reducer: a gradient is fresh as long as the last step saw it",
        file=GRADIENT_STATE,
        within="GradientState._is_fresh",
        old="return self.reduced_by[i] > (self.stepped_at[i]",
        new="return self.reduced_by[i] >= (self.stepped_at[i]",
        tests=UNREDUCED_TESTS,
    ),
    Mutation(
        name="reducer: gradients are as they were though somebody has written to them",
        file=GRADIENT_STATE,
        within="GradientState._is_accepted",
        old="return self._is_in_place(i) and self.views[i]._version == self.versions[i]",
        new="return self._is_in_place(i)",
        tests=UNREDUCED_TESTS,
    ),
    Mutation(
        name="reducer: norms are taken of what a moved gradient has left behind",
        file=BUCKET,
        within="Bucket._outside",
        old="self._remake_views()",
        new="",
        tests=("tests/reducer/test_gradients.py",),
    ),
    Mutation(
        name="reducer: clipped gradients may not be stepped again",
        file=NORMS,
        within="clip_",
        old="bucket.gradient_state.note_scaled()",
        new="pass",
        tests=UNREDUCED_TESTS,
    ),
    Mutation(
        name="reducer: the norm of halves is taken in halves",
        file=NORMS,
        within="_norm_of",
        old="gradient.float() if gradient.dtype.itemsize < 4 else gradient",
        new="gradient",
        tests=(
            "tests/reducer/test_defects.py::test_the_norm_of_16_bit_gradients_is_taken_in_float32",
        ),
    ),
    Mutation(
        name="reducer: a bucket is closed when it exceeds its cap",
        file=LAYOUT,
        within="plan_buckets",
        old="bucket.numel * itemsize >= bucket.cap_bytes",
        new="bucket.numel * itemsize > bucket.cap_bytes",
        tests=("tests/reducer/test_layout.py", "tests/reducer/test_buckets.py"),
    ),
    Mutation(
        name="reducer: modules that come later have no guards",
        file=GUARDS,
        within="_on_module",
        old="guards is not None",
        new="guards is None",
        tests=("tests/reducer/test_refusals.py",),
    ),
    Mutation(
        name="reducer: what came past torch's hooks is stepped",
        file=STEPS,
        within="_name_strangers",
        old=(
            "if name is None and is_mixed:\n"
            '    name = f"of shape {tuple(parameter.shape)}, which is outside the attached model,"'
        ),
        new=(
            "name = None\n"
            "if is_mixed:\n"
            '    name = f"of shape {tuple(parameter.shape)}, which is outside the attached model,"'
        ),
        tests=(
            f"{STRANGERS}::test_an_optimizer_of_its_own_does_not_step_a_part_of_an_attached_model",
        ),
    ),
    Mutation(
        name="reducer: nobody hears that attach() was forgotten",
        file=STEPS,
        within="_Known.__init__",
        old="unowned and not reducers and not self.strangers",
        new="not unowned",
        tests=(f"{STRANGERS}::test_a_step_warns_where_no_model_was_attached_to_a_reducer",),
    ),
    Mutation(
        name="reducer: a Reducer that was attached counts as forgotten",
        file=STEPS,
        within="was_attached",
        old="_unattached.discard(reducer)",
        new="pass",
        tests=(f"{STRANGERS}::test_a_model_whose_reducer_has_another_one_is_stepped_in_silence",),
    ),
    Mutation(
        name="reducer: reduce() leaves out gradients that no bucket holds",
        file=GUARDS,
        within="Guards.find_gradient",
        old="parameter.grad",
        new="None",
        tests=(f"{STRANGERS}::test_the_other_ranks_hear_of_a_reduce_that_one_rank_refuses",),
    ),
    Mutation(
        name="reducer: a bucket is launched before the hooks of the parameter that fills it",
        file="fastcomm/reducer/hooks.pyx",
        within="GradientHook.__call__",
        old="and self.reducer.overlap and self._runs_last(parameter):",
        new="and self.reducer.overlap:",
        tests=(f"{UNREDUCED}::test_what_a_parameters_own_hook_makes_of_its_gradient_is_reduced",),
    ),
    Mutation(
        name="reducer: writes to a gradient that is being reduced go unseen",
        file=GRADIENT_STATE,
        within="GradientState.first_changed",
        old="parameter.grad is not view or view._version != self.watched[i]",
        new="parameter.grad is not view",
        tests=(
            f"{UNREDUCED}::test_a_gradient_that_another_layers_hook_changes_meanwhile_is_an_error",
        ),
    ),
    Mutation(
        name="norms: gradients that the user holds are added where they lie",
        file=LAYOUT,
        within="laid_out_as",
        old="gradient is view or view.is_sparse",
        new="True",
        tests=(HELD_ALIKE,),
    ),
    Mutation(
        name="norms: what the user holds is not brought to the flat buffer",
        file=BUCKET,
        within="Bucket._is_in_flat",
        old="self.views[i].data.copy_(gradient)",
        new="pass",
        tests=(HELD_ALIKE,),
    ),
    Mutation(
        name="norms: writes to a gradient that the user holds are not counted",
        file="fastcomm/reducer/sample.py",
        within="Sample._count_writes",
        old="(self._flat, *self._views, *held)",
        new="(self._flat, *self._views)",
        tests=(HELD_ALIKE,),
    ),
    Mutation(
        name="norms: on a device what lies elsewhere is left out",
        file=BUCKET,
        within="Bucket._count_with",
        old="place.copy_(gradient)",
        new="pass",
        tests=(f"{DEFECTS}::test_a_norm_leaves_alone_what_the_user_has_taken_out",),
    ),
    Mutation(
        name="norms: on a device what the user has a name for is written over",
        file=BUCKET,
        within="Bucket._count_with",
        old="place.copy_(values)",
        new="pass",
        tests=(f"{DEFECTS}::test_a_norm_leaves_alone_what_the_user_has_taken_out",),
    ),
    Mutation(
        name="norms: on a device what the user has dropped counts",
        file=BUCKET,
        within="Bucket._count_with",
        old="place.zero_()",
        new="pass",
        tests=(f"{DEFECTS}::test_a_norm_leaves_alone_what_the_user_has_taken_out",),
    ),
    Mutation(
        name="norms: a gradient that is missing here leaves no gap",
        file="fastcomm/reducer/statistics.py",
        within="_gradients",
        old="p is not None",
        new="p is not None and p.grad is not None",
        tests=(f"{DEFECTS}::test_ranks_clip_alike_where_one_has_zeros_and_another_nothing",),
    ),
    Mutation(
        name="norms: a copy of a reduced gradient is taken for another one",
        file=BUCKET,
        within="Bucket._is_in_flat",
        old="not torch.equal(gradient, self.views[i])",
        new="True",
        tests=(f"{DEFECTS}::test_ranks_clip_alike_where_one_has_copied_its_gradients",),
    ),
    Mutation(
        name="norms: a number of the user's is clipped in the factor's dtype",
        file=BUCKET,
        within="Bucket.scale_",
        old="torch.atleast_1d(g.detach())",
        new="g.detach()",
        tests=(f"{DEFECTS}::test_ranks_clip_numbers_alike_where_one_has_copied_its_gradients",),
    ),
    Mutation(
        name="norms: clipping scales what the user has taken out",
        file=BUCKET,
        within="Bucket.scale_",
        old="place.copy_(values)",
        new="pass",
        tests=(f"{DEFECTS}::test_a_norm_leaves_alone_what_the_user_has_taken_out",),
    ),
    Mutation(
        name="norms: clipping leaves out gradients that the user holds",
        file=BUCKET,
        within="Bucket.scale_",
        old="gradient.copy_(product)",
        new="pass",
        tests=(HELD_ALIKE,),
    ),
)
