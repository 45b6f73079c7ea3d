"""What a rank's gradients count: weights, from set_weight() to the kernels that add."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WEIGHTS = "fastcomm/reducer/weights.py"
BUCKET = "fastcomm/reducer/bucket.py"
ENDING = "fastcomm/reducer/ending.py"
TESTS = "tests/reducer/test_weights.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_ALL_DATA = _test("test_the_gradients_are_those_of_one_process_on_all_data")

MUTATIONS = (
    Mutation(
        name="weights: a refresh loses a weight or a vote",
        file="fastcomm/reducer/reducer.py",
        old="if self._weighting.of_round() is not None or self._skipping.vote is not None:",
        new="if False:",
        tests=_test("test_a_refresh_loses_neither_weight_nor_vote"),
    ),
    Mutation(
        name="weights: a weight that no backward has used keeps the model",
        file="fastcomm/reducer/uneven_data.py",
        old="        self._weighting.follow(model)\n",
        new="",
        tests=("tests/reducer/test_lifetimes.py::test_a_reducer_goes_with_its_model",),
    ),
    Mutation(
        name="weights: the batches before the last one do not count",
        file=WEIGHTS,
        old="        self._before += self._now\n",
        new="        self._before = 0.0\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: a smaller weight is not scaled",
        file=WEIGHTS,
        old="        elif value < self._unit:\n",
        new="        elif value < 0:\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: what stands in .grad keeps its unit when a larger weight comes",
        file=WEIGHTS,
        old="            if 0 < self._unit < value:\n",
        new="            if False:\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: a batch of weight 0 adds its NaNs times 0",
        file=WEIGHTS,
        old="    return gradient * factor if factor else torch.zeros_like(gradient)\n",
        new="    return gradient * factor\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: hooks of the batch before stay",
        file=WEIGHTS,
        old="        self._drop_hooks()\n        self._watch_earlier(buckets)\n",
        new="        self._watch_earlier(buckets)\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: hooks change what torch.autograd.grad returns",
        file=WEIGHTS,
        old="self._hooks.append((node, node.register_prehook(Untraced(scaled))))",
        new="self._hooks.append((node, parameter.register_hook(lambda g: scaled((g,))[0])))",
        tests=_test("test_gradients_of_torch_autograd_grad_are_not_weighted"),
    ),
    Mutation(
        name="weights: those of gradients that zero_grad() has dropped count on",
        file=WEIGHTS,
        old="not n_unsynced or not any(b.provenance.unsynced_slots() for b in buckets)",
        new="not n_unsynced",
        tests=_test("test_zero_grad_drops_the_weights_of_an_accumulation"),
    ),
    Mutation(
        name="weights: a weight that no backward has used is added",
        file=WEIGHTS,
        old="        elif n_unsynced != self._n_unsynced:\n",
        new="        elif True:\n",
        tests=_test("test_a_weight_that_no_backward_has_used_is_replaced"),
    ),
    Mutation(
        name="weights: a weight holds for the next round, too",
        file=ENDING,
        old="    reducer._weighting.forget()\n",
        new="",
        tests=(
            *_test("test_a_weight_is_of_one_reduction"),
            *_test("test_an_abandoned_round_takes_its_weight_with_it"),
        ),
    ),
    Mutation(
        name="weights: a rank without data takes part with its NaNs",
        file=BUCKET,
        old="        if is_empty:\n            taking_part =",
        new="        if False:\n            taking_part =",
        tests=_test("test_gradients_that_are_made_by_hand"),
    ),
    Mutation(
        name="weights: a rank without data loses what earlier rounds have left",
        file=BUCKET,
        old="            if i in self._emptied:\n",
        new="            if False:\n",
        tests=_test("test_a_reduction_without_data_on_any_rank_leaves_earlier_gradients"),
    ),
    Mutation(
        name="weights: a rank without data drops what it has kept over a refresh",
        file="fastcomm/reducer/provenance.pyx",
        old="        return self._is_known(i, gradient) and bool(values_of(gradient).any())\n",
        new="        return False\n",
        tests=_test("test_after_a_refresh_earlier_gradients_stay_on_a_rank_without_data"),
    ),
    Mutation(
        name="weights: sums are added to what an earlier reduction has left",
        file=ENDING,
        old="        reducer._weighting.refuse_earlier()\n",
        new="",
        tests=_test("test_weights_of_sums_refuse_gradients_of_an_earlier_reduction"),
    ),
    Mutation(
        name="weights: zeros count as gradients of an earlier reduction",
        file=WEIGHTS,
        old="values_of(parameter.grad).any()",
        new="values_of(parameter.grad).new_ones(())",
        tests=_test("test_zeros_that_zero_grad_has_left_are_no_earlier_gradients"),
    ),
    Mutation(
        name="weights: on shm a weight of 0 in all divides by 0",
        file="kernels/shm/protocol.c",
        old="comm->factors[r] = total > 0 ? comm",
        new="comm->factors[r] = total >= 0 ? comm",
        equivalent="then all views are missing, and nobody looks at them",
    ),
    Mutation(
        name="weights: on shm ranks weigh by their own weight alone",
        file="kernels/shm/protocol.c",
        old="        total += is_shadow(d) ? 0 : weight;\n",
        new="        total = is_shadow(d) ? 0 : weight;\n",
        tests=_test("test_the_gradients_are_those_of_one_process_on_all_data"),
    ),
    Mutation(
        name="weights: on shm sums go over the wire as they are",
        file="fastcomm/shm/bucket.pyx",
        old="        if d.scale == d.weight:\n",
        new="        if True:\n",
        tests=_test("test_sums_over_much_data_fit_a_narrow_wire"),
    ),
    Mutation(
        name="weights: between ranks of a group sums go over the wire as they are",
        file="fastcomm/group/exchange.py",
        old="            if factors is None:\n                wire.copy_(flat)\n",
        new="            if True:\n                wire.copy_(flat)\n",
        tests=_test("test_sums_over_much_data_fit_a_narrow_wire"),
    ),
    Mutation(
        name="weights: ranks with other weights are a mismatch",
        file="fastcomm/group/call.py",
        old="    weight: float = field(default=0.0, compare=False)\n",
        new="    weight: float = 0.0\n",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: over NCCL the stream does not wait for the sum of the weights",
        file="fastcomm/nccl/bucket.pyx",
        old="            weight.adding_up.wait()  # the current stream does\n",
        new="",
        tests=_ALL_DATA,
    ),
    Mutation(
        name="weights: over NCCL a bucket in which nothing moves is not scaled",
        file="fastcomm/nccl/bucket.pyx",
        old="or scale != 1 or weight is not None\n",
        new="or scale != 1\n",
        tests=_test("test_gradients_of_an_earlier_reduction_count_once"),
    ),
)
