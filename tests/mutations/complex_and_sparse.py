"""Gradients that are not tensors of real numbers: complex ones, and sparse ones."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COLLECTIVE = "fastcomm/comm/collective.py"
COMPLEX = "tests/reducer/test_complex.py"
SPARSE = "tests/reducer/features/test_sparse.py"
CONTRACT = "tests/contract"
BUCKET = "fastcomm/reducer/features/sparse_bucket.py"
ROWS = "fastcomm/reducer/features/sparse_rows.py"


def _complex(name: str) -> tuple[str, ...]:
    return (f"{COMPLEX}::{name}",)


def _sparse(name: str) -> tuple[str, ...]:
    return (f"{SPARSE}::{name}",)


_ONE_PROCESS = "test_gradients_are_those_of_one_process"
_RESOLVED = "test_conjugated_and_transposed_gradients_are_resolved"

MUTATIONS = (
    Mutation(
        name="complex: a view begins at an offset counted in real numbers",
        file="fastcomm/reducer/layout.py",
        within="view_of",
        old="offset //= 2",
        new="pass",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: a slot is as long as the elements, not as the pairs",
        file="fastcomm/reducer/layout.py",
        within="kind_of",
        old="2 * parameter.numel()",
        new="parameter.numel()",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: shared memory reads half of a large gradient",
        file="fastcomm/transports/shm/bucket.pyx",
        within="ShmBucket.__cinit__",
        old="Span(offsets[i], real_numel(view))",
        new="Span(offsets[i], view.numel())",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: a kernel of the GPU gathers half of each gradient",
        file="fastcomm/transports/nccl/bucket.pyx",
        within="NcclBucket.__cinit__",
        old="numels = [real_numel(view) for",
        new="numels = [view.numel() for",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: a conjugated gradient is read as it lies",
        file="fastcomm/comm/gradient_slot.pyx",
        within="GradientSlot.fits",
        old="or (self.is_complex and gradient.is_conj())",
        new="",
        tests=_complex(_RESOLVED),
    ),
    Mutation(
        name="complex: between hosts the gaps of a bucket are looked for in complex elements",
        file="fastcomm/transports/group/exchange.py",
        within="gaps_of",
        old="map(as_pairs, views)",
        new="views",
        tests=_complex("test_narrow_wires_carry_both_parts"),
    ),
    Mutation(
        name="complex: nonfinite_count counts elements, over some transports",
        file="fastcomm/reducer/statistics.py",
        within="_count_nonfinite",
        old="as_pairs(gradient)",
        new="gradient",
        tests=_complex("test_nonfinite_parts_that_come_from_a_round_are_counted"),
    ),
    Mutation(
        name="complex: a reducer takes the greatest of real and imaginary parts",
        file="fastcomm/reducer/options.py",
        within="Options.find_problem",
        old="self.op in LINEAR_OPS",
        new="True",
        tests=_complex("test_what_complex_numbers_do_not_have_is_refused_by_name"),
    ),
    Mutation(
        name="complex: DDP's hook takes the greatest of real and imaginary parts",
        file="fastcomm/torch_backend/ddp_hook.py",
        within="all_reduce_hook",
        old="any(p.is_complex() for p in bucket.parameters())",
        new="False",
        tests=_complex("test_ddps_hook_refuses_the_greatest_of_pairs"),
    ),
    Mutation(
        name="complex: a collective takes the greatest of real and imaginary parts",
        file=COLLECTIVE,
        within="as_pairs",
        old="op not in LINEAR_OPS",
        new="False",
        tests=(f"{CONTRACT}/test_arguments.py::test_what_pairs_cannot_stand_for_is_refused",),
    ),
    Mutation(
        name="complex: a collective takes a conjugated view as it lies",
        file=COLLECTIVE,
        within="as_pairs",
        old="tensor.is_conj()",
        new="False",
        tests=(f"{CONTRACT}/test_arguments.py::test_what_pairs_cannot_stand_for_is_refused",),
    ),
    Mutation(
        name="complex: over shared memory the op of a result is left to chance",
        file="fastcomm/transports/shm/communicator.pyx",
        within="ShmCommunicator._check_out",
        old="d.op = SHM_SUM",
        new="d.op = 99",
        tests=(f"{CONTRACT}/test_results.py::test_complex_tensors_travel_as_pairs",),
    ),
    Mutation(
        name="sparse: hooks wait for the other ranks",
        file=BUCKET,
        within="SparseBucket",
        old="waits_in_launch = True",
        new="waits_in_launch = False",
        tests=_sparse("test_rows_are_asked_for_at_the_end_of_backward"),
    ),
    Mutation(
        name="sparse: a mean is a sum",
        file=BUCKET,
        within="SparseBucket._result",
        old='work.op == "mean"',
        new="False",
        tests=_sparse("test_gradients_are_those_of_one_process"),
    ),
    Mutation(
        name="sparse: a rank keeps back what no backward has touched",
        file=BUCKET,
        within="SparseBucket._taking_part",
        old="is_empty or gradient is None",
        new="is_empty or gradient is None or i in self._untouched",
        tests=_sparse("test_gradients_add_up_over_rounds"),
    ),
    Mutation(
        name="sparse: a rank without data loses what earlier rounds have left",
        file=BUCKET,
        within="SparseBucket.settle",
        old="parameter is not None and i in self._emptied",
        new="False",
        tests=_sparse("test_weights_of_dense_and_of_kept_gradients"),
    ),
    Mutation(
        name="sparse: a dense gradient is not weighted",
        file=BUCKET,
        within="SparseBucket._reduce_densely",
        old="values if factors is None else values * factors[self._comm.rank]",
        new="values",
        tests=_sparse("test_weights_of_dense_and_of_kept_gradients"),
    ),
    Mutation(
        name="sparse: rows are not weighted",
        file=ROWS,
        within="added",
        old="factor",
        new="1",
        tests=_sparse("test_weights_accumulation_and_ranks_without_data"),
    ),
    Mutation(
        name="sparse: a parameter that nobody used gets an empty gradient",
        file=BUCKET,
        within="_SparseWork._form",
        old="not any(offer.is_present[i] for offer in self.offers)",
        new="False",
        tests=_sparse("test_ranks_agree_on_the_form"),
    ),
    Mutation(
        name="sparse: a rank with rows overrules one with a dense gradient",
        file=BUCKET,
        within="_SparseWork._form",
        old="forms.pop() if len(forms) == 1 else _DENSE",
        new="max(forms)",
        tests=_sparse("test_ranks_agree_on_the_form"),
    ),
    Mutation(
        name="sparse: values travel in their own dtype",
        file=BUCKET,
        within="SparseBucket._wire",
        old="self._wire_dtype or dtype",
        new="dtype",
        tests=_sparse("test_narrow_wires_carry_values"),
    ),
    Mutation(
        name="sparse: 16-bit values are added in 16 bits",
        file=ROWS,
        within="added",
        old="torch.float32 if like.dtype in HALVES else like.dtype",
        new="like.dtype",
        tests=_sparse("test_narrow_wires_carry_values"),
    ),
    Mutation(
        name="sparse: indices begin where the values before them end",
        file=ROWS,
        within="Section.end",
        old="math.ceil(nbytes / _INDEX_NBYTES) * _INDEX_NBYTES",
        new="nbytes",
        tests=_sparse("test_narrow_wires_carry_values"),
    ),
    Mutation(
        name="sparse: ranks after different numbers of steps go on",
        file=BUCKET,
        within="SparseBucket._exchange",
        old="len(ops) > 1 or len({offer.step for offer in offers}) > 1",
        new="len(ops) > 1",
        tests=_sparse("test_ranks_that_make_different_steps_are_told"),
    ),
    Mutation(
        name="sparse: a row that comes twice counts twice in a norm",
        file="fastcomm/reducer/layout.py",
        within="values_of",
        old="gradient.coalesce().values",
        new="gradient._values",
        tests=_sparse("test_norms_and_clipping_count_each_row_once"),
    ),
    Mutation(
        name="sparse: rows are not clipped, over some transports",
        file="fastcomm/reducer/statistics.py",
        within="clip_",
        old="scale_(p.grad, factor)",
        new="pass",
        tests=_sparse("test_norms_and_clipping_count_each_row_once"),
    ),
    Mutation(
        name="sparse: what is sparse is not compared",
        file="fastcomm/reducer/validation.py",
        within="signature",
        old="name in sparse",
        new="False",
        tests=_sparse("test_what_is_sparse_is_agreed_on"),
    ),
    Mutation(
        name="sparse: a changed gradient of an earlier round counts as reduced",
        file="fastcomm/reducer/gradient_state.pyx",
        within="stored_values",
        old="return gradient if is_dense(gradient) else gradient._values()",
        new="return gradient if is_dense(gradient) else gradient._values()[:0]",
        tests=_sparse("test_gradients_are_guarded_as_dense_ones_are"),
    ),
    Mutation(
        name="sparse: a vote to drop the step is not heard",
        file=BUCKET,
        within="_SparseWork.is_skipped",
        old="any(offer.op == SKIP for offer in self.offers)",
        new="False",
        tests=_sparse("test_ranks_drop_a_step_together"),
    ),
    Mutation(
        name="sparse: what is not finite among rows is not counted",
        file=BUCKET,
        within="SparseBucket.n_nonfinite_in_result",
        old="total += (~as_pairs(values_of(result)).isfinite()).sum()",
        new="pass",
        tests=_sparse("test_ranks_drop_a_step_together"),
    ),
    Mutation(
        name="sparse: the last bucket is one that waits in its launch",
        file="fastcomm/reducer/plan.py",
        within="make_buckets",
        old="buckets.insert(max(len(buckets) - 1, 0), one)",
        new="buckets.append(one)",
        tests=_sparse("test_rows_are_asked_for_at_the_end_of_backward"),
    ),
    Mutation(
        name="sparse: gradients have the numbers of others in a timeline",
        file="fastcomm/reducer/plan.py",
        within="make_buckets",
        old="bucket.first = before.first + len(before.names)",
        new="",
        tests=_sparse("test_rows_are_asked_for_at_the_end_of_backward"),
    ),
    Mutation(
        name="sparse: over NCCL a vote among rows alone is not counted",
        file=BUCKET,
        within="SparseBucket.n_nonfinite_in_result",
        old="torch.zeros((), dtype=torch.int64, device=self._comm.device) + self.is_skipped()",
        new="torch.zeros((), dtype=torch.int64, device=self._comm.device)",
        tests=_sparse("test_ranks_drop_a_step_together"),
    ),
    Mutation(
        name="sparse: a gradient that a hook has dropped is not missed",
        file=BUCKET,
        within="SparseBucket._taking_part",
        old="self.ready[i] and not is_empty",
        new="False",
        tests=_sparse("test_gradients_are_guarded_as_dense_ones_are"),
    ),
)
