"""What a rank's gradients count: weights, from set_weight() to the kernels that add."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WEIGHTS = "fastcomm/reducer/features/weights.py"
BUCKET = "fastcomm/reducer/bucket.py"
TESTS = "tests/reducer/features/test_weights.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_ALL_DATA = _test("test_the_gradients_are_those_of_one_process_on_all_data")

MUTATIONS = (
    Mutation(
        name="weights: the unit may change in the middle of a reduction",
        file="fastcomm/reducer/features/weights.py",
        within="Weighting.set",
        old="self._now is not None and of != self._of",
        new="n_unsynced != self._n_unsynced and of != self._of",
        tests=_test("test_batches_that_cannot_be_weighted"),
    ),
    Mutation(
        name="weights: a rank that cannot refresh says so to nobody",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._agree_on_refresh",
        old="problem = error",
        new="raise",
        tests=(
            "tests/reducer/test_disagreement.py::test_a_rank_that_cannot_refresh_is_named_to_all",
        ),
    ),
    Mutation(
        name="weights: a refresh loses a weight or a vote",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._agree_on_refresh",
        old="self.awaits_round",
        new="False",
        tests=_test("test_a_refresh_loses_neither_weight_nor_vote"),
    ),
    Mutation(
        name="weights: a weight that no backward has used keeps the model",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.set_weight",
        old="weighting.follow(model)",
        new="",
        tests=("tests/reducer/test_lifetimes.py::test_a_reducer_goes_with_its_model",),
    ),
    Mutation(
        name="weights: the batches before the last one do not count",
        file=WEIGHTS,
        within="Weighting._end_batch",
        old="self._before += self._now",
        new="self._before = 0.0",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: a smaller weight is not scaled",
        file=WEIGHTS,
        within="Weighting._begin_batch",
        old="value < self._unit",
        new="value < 0",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: what stands in .grad keeps its unit when a larger weight comes",
        file=WEIGHTS,
        within="Weighting._begin_batch",
        old="0 < self._unit < value",
        new="False",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: a batch of weight 0 adds its NaNs times 0",
        file=WEIGHTS,
        within="_product",
        old="gradient * factor if factor else torch.zeros_like(gradient)",
        new="gradient * factor",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: hooks of the batch before stay",
        file=WEIGHTS,
        within="Weighting._begin_batch",
        old="self._drop_hooks()",
        new="",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: hooks change what torch.autograd.grad returns",
        file=WEIGHTS,
        within="Weighting._scale_what_comes",
        old="node.register_prehook(Untraced(scaled))",
        new="parameter.register_hook(lambda g: scaled((g,))[0])",
        tests=_test("test_gradients_of_torch_autograd_grad_are_not_weighted"),
    ),
    Mutation(
        name="weights: those of gradients that zero_grad() has dropped count on",
        file=WEIGHTS,
        within="Weighting.set",
        old="not n_unsynced or not any(b.gradient_state.unsynced_slots() for b in buckets)",
        new="not n_unsynced",
        tests=_test("test_zero_grad_drops_the_weights_of_an_accumulation"),
    ),
    Mutation(
        name="weights: a weight that no backward has used is added",
        file=WEIGHTS,
        within="Weighting.set",
        old="n_unsynced != self._n_unsynced",
        new="True",
        tests=_test("test_a_weight_that_no_backward_has_used_is_replaced"),
    ),
    Mutation(
        name="weights: a weight holds for the next round, too",
        file="fastcomm/reducer/features/weights.py",
        within="Weighting.after_round",
        old="self.forget()",
        new="",
        tests=(
            *_test("test_a_weight_is_of_one_reduction"),
            *_test("test_an_abandoned_round_takes_its_weight_with_it"),
        ),
    ),
    Mutation(
        name="weights: a rank without data takes part with its NaNs",
        file=BUCKET,
        within="Bucket.launch",
        old=("if is_empty:\n    taking_part = self._leave_out(taking_part, keeps_graph)"),
        new=("if False:\n    taking_part = self._leave_out(taking_part, keeps_graph)"),
        tests=_test("test_gradients_that_are_made_by_hand"),
    ),
    Mutation(
        name="weights: a rank without data loses what earlier rounds have left",
        file=BUCKET,
        within="Bucket._settle_missing",
        old="i in self._emptied",
        new="False",
        tests=_test("test_a_reduction_without_data_on_any_rank_leaves_earlier_gradients"),
    ),
    Mutation(
        name="weights: a rank without data drops what it has kept over a refresh",
        file="fastcomm/reducer/gradient_state.pyx",
        within="GradientState.holds_earlier",
        old="return self._is_known(i, gradient) and bool(stored_values(gradient).any())",
        new="return False",
        tests=_test("test_after_a_refresh_earlier_gradients_stay_on_a_rank_without_data"),
    ),
    Mutation(
        name="weights: sums are added to what an earlier reduction has left",
        file="fastcomm/reducer/features/weights.py",
        within="Weighting.end_of_backward",
        old="self._refuse_added_to_earlier()",
        new="",
        tests=_test("test_weights_of_sums_refuse_gradients_of_an_earlier_reduction"),
    ),
    Mutation(
        name="weights: zeros count as gradients of an earlier reduction",
        file=WEIGHTS,
        within="Weighting._note_earlier",
        old="values_of(parameter.grad).any()",
        new="values_of(parameter.grad).new_ones(())",
        tests=_test("test_zeros_that_zero_grad_has_left_are_no_earlier_gradients"),
    ),
    Mutation(
        name="weights: on shm a weight of 0 in all divides by 0",
        file="kernels/shm/protocol.c",
        within="weigh",
        old="comm->factors[r] = total > 0 ? comm",
        new="comm->factors[r] = total >= 0 ? comm",
        equivalent="then all views are missing, and nobody looks at them",
    ),
    Mutation(
        name="weights: on shm ranks weigh by their own weight alone",
        file="kernels/shm/protocol.c",
        within="weigh",
        old="total += is_shadow(d) ? 0 : weight;",
        new="total = is_shadow(d) ? 0 : weight;",
        tests=_test("test_the_gradients_are_those_of_one_process_on_all_data"),
    ),
    Mutation(
        name="weights: on shm sums go over the wire as they are",
        file="fastcomm/transports/shm/bucket.pyx",
        within="ShmBucket._narrow",
        old="if d.scale == d.weight:",
        new="if True:",
        tests=_test("test_sums_over_much_data_fit_a_narrow_wire"),
    ),
    Mutation(
        name="weights: between ranks of a group sums go over the wire as they are",
        file="fastcomm/transports/group/shards.pyx",
        within="CastTransfer.prepare",
        old="if op in WEIGHTED_OPS.values():",
        new="if False:",
        tests=_test("test_sums_over_much_data_fit_a_narrow_wire"),
    ),
    Mutation(
        name="weights: ranks with other weights are a mismatch",
        file="fastcomm/transports/group/call.py",
        within="Call",
        old="weight: float = field(default=0.0, compare=False)",
        new="weight: float = 0.0",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: over NCCL the stream does not wait for the sum of the weights",
        file="fastcomm/transports/nccl/bucket.pyx",
        within="NcclBucket.launch",
        old="weight.adding_up.wait()  # the current stream does",
        new="",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: over NCCL a bucket in which nothing moves is not scaled",
        file="fastcomm/transports/nccl/bucket.pyx",
        within="NcclBucket.launch",
        old="or scale != 1 or weight is not None",
        new="or scale != 1",
        tests=_test("test_gradients_of_an_earlier_reduction_count_once"),
    ),
)
