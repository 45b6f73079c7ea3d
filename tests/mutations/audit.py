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
        old="for bucket in core.buckets for pair in bucket.named_parameters()",
        new="for bucket in core.buckets[:1] for pair in bucket.named_parameters()",
        tests=(f"{TEST}a_bit_that_turns_in_one_ranks_reduced_gradient_is_named",),
    ),
)
