"""Ranks that step by themselves: LocalSGD and DiLoCo, and how their syncs end."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LOCAL_SGD = "fastcomm/optim/local_sgd.py"
DILOCO = "fastcomm/optim/diloco.py"
SYNC = "fastcomm/optim/sync.py"
SCHEDULE = "fastcomm/optim/schedule.py"
BUCKET = "fastcomm/reducer/bucket.py"
HOOK = "fastcomm/reducer/hooks.pyx"


def _result(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_local_sgd.py::test_{name}",)


def _sync(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_syncs.py::test_{name}",)


_IN_TURN = _result("fragments_sync_in_turn")
_BEFORE_AND_AFTER = _result("steps_before_and_after_are_those_of_all_ranks")
_RESUMED = _result("a_run_that_is_resumed_has_the_same_bits")
_FAILS = _sync("a_sync_that_fails_changes_nothing")
_INTERRUPTED = _sync("an_interrupted_sync_is_applied_all_the_same")
_DIFFERENT = _sync("different_numbers_of_steps_are_an_error_on_all_ranks")
_SEVERAL = _sync("steps_of_several_optimizers_count_as_one")
_OWN = _sync("norms_and_clipping_are_of_own_gradients_of_any_origin")

MUTATIONS = (
    Mutation(
        name="local: an exception that leaves the block leaves it on",
        file="fastcomm/optim/local_sgd.py",
        within="LocalSGD.__exit__",
        old="self.is_on",
        new="False",
        tests=_result("an_exception_that_leaves_the_block_ends_it"),
    ),
    Mutation(
        name="local: parameters loaded after DiLoCo() are pulled back",
        file="fastcomm/optim/diloco.py",
        within="DiLoCo.before_step",
        old="is_written_to and not torch.equal(parameter, self._outer[name])",
        new="False",
        tests=_result("parameters_loaded_after_diloco_has_copied_them_are_refused"),
    ),
    Mutation(
        name="local sgd: what was made alone counts as accumulated afterwards",
        file=LOCAL_SGD,
        within="LocalSGD._forget_own_gradients",
        old="bucket.gradient_state.begin_period()",
        new="pass",
        tests=_sync("what_was_made_alone_is_no_accumulation_afterwards"),
    ),
    Mutation(
        name="local sgd: backwards between syncs reduce",
        file=HOOK,
        within="GradientHook.__call__",
        old="if self.reducer.steps_alone or not self.reducer.reduces_backwards:",
        new="if not self.reducer.reduces_backwards:",
        tests=_BEFORE_AND_AFTER,
    ),
    Mutation(
        name="local sgd: gradients made by hand are refused between syncs",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._require_reduced",
        old=("if self.steps_alone:\n    return"),
        new="",
        tests=_OWN,
    ),
    Mutation(
        name="local sgd: own steps count as the reducer's",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.after_step",
        old="if self.steps_alone:\n    return",
        new="",
        tests=_DIFFERENT,
    ),
    Mutation(
        name="local sgd: gradients in the flat buffers are overwritten",
        file=BUCKET,
        within="Bucket.vacate",
        old="parameter.grad.clone()",
        new="parameter.grad",
        tests=_BEFORE_AND_AFTER,
    ),
    Mutation(
        name="local sgd: gradients after a sync are what was averaged",
        file=SYNC,
        within="_gradients_aside",
        old="parameter.grad = gradient",
        new="pass",
        tests=_BEFORE_AND_AFTER,
    ),
    Mutation(
        name="local sgd: every optimizer's step counts",
        file=LOCAL_SGD,
        within="LocalSGD.after_step",
        old="len(self._stepped) == self._n_parameters",
        new="True",
        tests=_SEVERAL,
    ),
    Mutation(
        name="local sgd: a parameter that nobody steps puts syncs off for ever",
        file=LOCAL_SGD,
        within="LocalSGD.after_step",
        old="self._stepped & slots",
        new="False",
        tests=_sync("a_parameter_that_nobody_steps_is_named"),
    ),
    Mutation(
        name="local sgd: ranks sync though they have made different numbers of steps",
        file=SYNC,
        within="Sync._difference",
        old="all(row == rows[0] for row in rows)",
        new="rows",
        tests=_DIFFERENT,
    ),
    Mutation(
        name="local sgd: fragments that have just synced sync again",
        file=LOCAL_SGD,
        within="LocalSGD.sync",
        old="[i for i, n_steps in enumerate(self._synced_at) if n_steps != self.n_steps]",
        new="[i for i, _ in enumerate(self._synced_at)]",
        tests=_result("a_sync_of_all_is_in_between_the_others"),
    ),
    Mutation(
        name="local sgd: a sync is applied before all buckets are reduced",
        file=LOCAL_SGD,
        within="LocalSGD._sync",
        old="interruption = sync.finish()\n",
        new="self._apply(buckets)\ninterruption = sync.finish()\n",
        tests=_FAILS,
    ),
    Mutation(
        name="local sgd: an interruption drops what all ranks have agreed on",
        file=SYNC,
        within="Sync.finish",
        old=("if not self.is_reduced:\n    raise"),
        new="raise",
        tests=_INTERRUPTED,
    ),
    Mutation(
        name="local sgd: an interrupted launch is left though the others count on it",
        file=SYNC,
        within="Sync.launch",
        old="isinstance(error, FastcommError) or not self._round.is_committed",
        new="True",
        tests=_INTERRUPTED,
    ),
    Mutation(
        name="local sgd: a rank that has not applied a sync goes on",
        file=LOCAL_SGD,
        within="LocalSGD._sync",
        old="self._is_torn = True",
        new="self._is_torn = False",
        tests=_sync("a_sync_that_is_not_applied_ends_training"),
    ),
    Mutation(
        name="local sgd: constant buffers lose their bits",
        file=LOCAL_SGD,
        within="LocalSGD.average_buffers",
        old="buffer.detach().double().reshape(-1)",
        new="buffer.detach().double().reshape(-1) * 1.0000001",
        tests=_result("buffers_stay_own_until_they_are_averaged"),
    ),
    Mutation(
        name="local sgd: an exception in the block leads to a sync",
        file=LOCAL_SGD,
        within="LocalSGD.__exit__",
        old="kind is None",
        new="True",
        tests=_sync("an_exception_ends_the_block_without_a_sync"),
    ),
    Mutation(
        name="local sgd: the reducer stays without reductions after finish()",
        file=LOCAL_SGD,
        within="LocalSGD.finish",
        old="self.reducer.steps_alone = False",
        new="",
        tests=_BEFORE_AND_AFTER,
    ),
    Mutation(
        name="local sgd: the reducer stays without reductions after detach()",
        file=LOCAL_SGD,
        within="LocalSGD.let_go",
        old="self.reducer.steps_alone = False",
        new="",
        tests=_sync("a_reducer_that_is_detached_takes_its_syncs_along"),
    ),
    Mutation(
        name="diloco: the first fragment syncs every time",
        file=SCHEDULE,
        within="Schedule.fragment_at",
        old="(number - 1) % self.n_fragments",
        new="0",
        tests=_IN_TURN,
    ),
    Mutation(
        name="diloco: the outer optimizer steps the other fragments once more",
        file=DILOCO,
        within="DiLoCo._apply",
        old="self.outer_optimizer.zero_grad()",
        new="",
        tests=_IN_TURN,
    ),
    Mutation(
        name="diloco: pseudo-gradients point the other way",
        file=DILOCO,
        within="DiLoCo._fill",
        old="torch._foreach_sub_(views, parameters)",
        new=("torch._foreach_sub_(views, parameters)\ntorch._foreach_neg_(views)"),
        tests=_IN_TURN,
    ),
    Mutation(
        name="diloco: outer parameters are not resumed",
        file=DILOCO,
        within="DiLoCo._load",
        old='outer.copy_(state_dict["outer_parameters"][name])',
        new="pass",
        tests=_RESUMED,
    ),
    Mutation(
        name="diloco: the outer optimizer's state is not resumed",
        file=DILOCO,
        within="DiLoCo._load",
        old='self.outer_optimizer.load_state_dict({**optimizer, "state": states})',
        new="",
        tests=_RESUMED,
    ),
    Mutation(
        name="diloco: a state whose numbers have become strings is lost",
        file=DILOCO,
        within="DiLoCo._load",
        old='{**optimizer, "state": states}',
        new="optimizer",
        tests=_RESUMED,
    ),
    Mutation(
        name="diloco: fragments are of very different sizes",
        file=SCHEDULE,
        within="fragments_of",
        old="sorted(range(len(buckets)), key=lambda i: -buckets[i].flat.nbytes)",
        new="range(len(buckets))",
        tests=_sync("fragments_are_of_about_one_size"),
    ),
    Mutation(
        name="local sgd: what was averaged counts as reduced gradients",
        file=SYNC,
        within="Sync.finish",
        old="bucket.gradient_state.forget_rounds()",
        new="pass",
        tests=_sync("gradients_of_a_ranks_own_are_not_stepped_after_the_last_sync"),
    ),
    Mutation(
        name="local sgd: skip_nonfinite looks at what is not reduced",
        file="fastcomm/reducer/features/compatibility.py",
        within="",
        old="(Feature.LOCAL_STEPS, Feature.SKIP_NONFINITE)",
        new="(Feature.LOCAL_STEPS, Feature.ROUNDING)",
        tests=_sync("reducers_and_numbers_that_are_refused"),
    ),
    Mutation(
        name="local sgd: a loaded checkpoint does not mend what was torn",
        file=LOCAL_SGD,
        within="LocalSGD._load",
        old="self._is_torn = False",
        new="",
        tests=_sync("a_sync_that_is_not_applied_ends_training"),
    ),
    Mutation(
        name="diloco: the outer states that ranks load are not compared",
        file=DILOCO,
        within="DiLoCo._described",
        old="super()._described(state_dict) | contents",
        new="super()._described(state_dict)",
        tests=("tests/optim/test_syncs.py",),
    ),
)
