"""Whether parameters have the same bits on all ranks."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

AUDIT = "fastcomm/reducer/features/audit.py"
TEST = "tests/reducer/features/test_audit.py::test_"

MUTATIONS = (
    Mutation(
        name="audit: a few of the parameters are compared",
        file=AUDIT,
        within="Audit._compare",
        old="for bucket in reducer.buckets for pair in bucket.named_parameters()",
        new="for bucket in reducer.buckets[:1] for pair in bucket.named_parameters()",
        tests=(f"{TEST}a_bit_that_turns_in_one_ranks_reduced_gradient_is_named",),
    ),
    Mutation(
        name="audit: ranks compare inside a join()",
        file=AUDIT,
        within="Audit.compare",
        old="is_done or reducer.n_rounds % self._every or is_joining(self._comm)",
        new="is_done or reducer.n_rounds % self._every",
        tests=(f"{TEST}inside_a_join_nobody_compares",),
    ),
    Mutation(
        name="audit: the gradients of a round in which ranks differ stay",
        file=AUDIT,
        within="Audit.compare",
        old="reducer.drop_step()",
        new="pass",
        tests=(f"{TEST}a_bit_that_turns_in_one_ranks_reduced_gradient_is_named",),
    ),
    Mutation(
        name="audit: a signal parts the ranks",
        file=AUDIT,
        within="Audit.compare",
        old="all_or_none(self._comm)",
        new="torch.no_grad()",
        tests=(f"{TEST}a_signal_does_not_part_the_ranks",),
    ),
    Mutation(
        name="audit: a part of a complex number is left out",
        file=AUDIT,
        within="checksum",
        old="torch.view_as_real(tensor) if tensor.is_complex() else tensor",
        new="tensor.real",
        tests=(f"{TEST}no_turned_bit_leaves_the_checksum_alone",),
    ),
    Mutation(
        name="audit: one of two ranks is the culprit",
        file=AUDIT,
        within="_in_words",
        old="n_most > len(rows) / 2",
        new="n_most >= len(rows) / 2",
        tests=(f"{TEST}of_two_ranks_none_is_the_culprit",),
    ),
)
