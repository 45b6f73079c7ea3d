"""fastcomm/reducer: rounds, buckets, where gradients come from, and optimizers' steps."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ROUND = "fastcomm/reducer/round.py"
BUCKET = "fastcomm/reducer/bucket.py"
GRADIENTS = "fastcomm/reducer/gradients.pyx"

UNREDUCED = "tests/reducer/test_unreduced.py"
UNREDUCED_TESTS = (UNREDUCED,)

DEFECTS = "tests/reducer/test_defects.py"

MUTATIONS = (
    Mutation(
        name="reducer: slices that autograd has cut from one piece are the user's",
        file="fastcomm/reducer/autograd.py",
        within="is_gradient_held",
        old="parameter.grad._base is not None",
        new="parameter.grad.untyped_storage().nbytes() > parameter.grad.nbytes",
        tests=(f"{DEFECTS}::test_gradients_that_autograd_has_cut_from_one_piece_are_views",),
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
        name="rounds: a skipped round says that it has settled",
        file=ROUND,
        within="Round._settle_or_drop",
        old="return State.SKIPPED",
        new="return State.SETTLED",
        tests=("tests/reducer/features/test_skips.py",),
    ),
    Mutation(
        name="reducer: a spent gradient may be written to",
        file=GRADIENTS,
        within="Gradients._state",
        old="if noted == SPENT and",
        new="if noted == REDUCED and",
        tests=UNREDUCED_TESTS,
    ),
    Mutation(
        name="reducer: norms are taken of what a moved gradient has left behind",
        file=BUCKET,
        within="Bucket._elsewhere",
        old="self._remake_views()",
        new="pass",
        tests=("tests/reducer/test_gradients.py",),
    ),
    Mutation(
        name="norms: a gradient that is missing here leaves no gap",
        file="fastcomm/reducer/statistics.py",
        within="_gradients",
        old="p is not None",
        new="p is not None and p.grad is not None",
        tests=(f"{DEFECTS}::test_ranks_clip_alike_where_one_has_zeros_and_another_nothing",),
    ),
)
