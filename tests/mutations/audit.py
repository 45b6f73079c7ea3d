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
        old="all_or_none(reducer, lambda _: None)",
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
    Mutation(
        name="audit: what is added again is what the reduction has made",
        file=AUDIT,
        within="Excerpt.take",
        old="self.bucket.given",
        new="self.reduced.clone()",
        tests=(f"{TEST}what_each_rank_adds_for_itself_has_the_same_bits",),
    ),
    Mutation(
        name="audit: a second sum with other bits is fine",
        file=AUDIT,
        within="Excerpt.add_again",
        old="again.view(word) != reduced.view(word)",
        new="(again - reduced).abs() > 1e-3",
        tests=(f"{TEST}a_sum_that_is_wrong_is_named_though_all_ranks_have_it",),
    ),
    Mutation(
        name="audit: only the finder hears of a wrong sum",
        file=AUDIT,
        within="Audit._compare",
        old="self._tell(found)",
        new="found.view(1, -1).repeat(self._comm.world_size, 1)",
        tests=(f"{TEST}a_sum_that_is_wrong_is_named_though_all_ranks_have_it",),
    ),
    Mutation(
        name="audit: a rank that has voted adds what it gave before",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.reset",
        old="self.audited = self.given = None",
        new="self.audited = None",
        tests=(f"{TEST}votes_weights_and_narrow_wires_are_not_taken_for_errors",),
    ),
    Mutation(
        name="audit: what is settled counts as the sum, after a signal",
        file=AUDIT,
        within="Excerpt.take",
        old="self.reduced is None",
        new="True",
        tests=(f"{TEST}a_signal_while_gradients_settle_is_no_error",),
    ),
    Mutation(
        name="audit: gradients that a transport has not moved are left out",
        file="fastcomm/reducer/bucket.py",
        within="Bucket._given",
        old="gradient.data_ptr() != view.data_ptr()",
        new="False",
        tests=(f"{TEST}what_each_rank_adds_for_itself_has_the_same_bits",),
    ),
)
