"""Norms, and counts of what is not finite, that come out of the reduction: made, and held good."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SKIPPING = "fastcomm/reducer/features/skip.py"
SAMPLE = "fastcomm/reducer/sample.py"
STATISTICS = "kernels/shm/statistics.c"
PROTOCOL = "kernels/shm/protocol.c"
PATHS = "kernels/shm/paths.c"
REDUCE = "kernels/shm/reduce.c"
REDUCE_16BIT = "kernels/shm/reduce_16bit.c"
SHM_BUCKET = "fastcomm/transports/shm/bucket.pyx"
BUCKET = "fastcomm/reducer/bucket.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"tests/reducer/test_counts.py::{name}",)


_NORM = _test("test_a_norm_needs_no_second_look")
_FOUND = _test("test_what_is_not_finite_is_counted_and_found_on_its_rank")
_WRITTEN = _test("test_what_is_written_since_is_in_the_norm")
_INFINITE = _test("test_the_norm_of_infinities_is_infinite")
_ARITHMETIC = ("tests/transports/shm/test_core.py::test_one_infinity_is_found_wherever_it_stands",)
_DRIVER = ("tests/transports/shm/test_core.py::test_driver[threads-quick]",)

MUTATIONS = (
    Mutation(
        name="counts: gradients that lie in the buffer are looked at after the reduction",
        file=SKIPPING,
        within="Skipping.inspect",
        old="i not in at_home",
        new="True",
        tests=_test("test_gradients_that_are_at_home_are_looked_at_before"),
    ),
    Mutation(
        name="counts: a rank knows its own part alone",
        file=PROTOCOL,
        within="shm_statistics_of",
        old="statistics->square_sum += theirs->statistics.square_sum;",
        new="statistics->square_sum += r == comm->rank ? theirs->statistics.square_sum : 0;",
        tests=_NORM,
    ),
    Mutation(
        name="counts: a rank takes what another has counted in an earlier collective",
        file=PROTOCOL,
        within="shm_statistics_of",
        old="if (c->path != DIRECT || theirs->seq != seq) {",
        new="if (c->path != DIRECT) {",
        tests=_test("test_one_rank_may_ask_for_the_norm"),
    ),
    Mutation(
        name="counts: the used mask counts as a gradient",
        file=SHM_BUCKET,
        within="ShmBucket.launch",
        old="shm_counting(self.end, self.adds_squares)",
        new="shm_counting(self.flat.numel(), self.adds_squares)",
        tests=_NORM,
    ),
    Mutation(
        name="counts: only the first block is counted",
        file=PATHS,
        within="reduce_elements",
        old="begin += length;",
        new="begin = end;",
        tests=_NORM,
    ),
    Mutation(
        name="counts: the last elements of a block are left out",
        file=STATISTICS,
        within="",
        old="lanes[i % LANES] += WIDEN(a[i]) * WIDEN(a[i]);",
        new="(void)lanes[i % LANES];",
        tests=_NORM,
    ),
    Mutation(
        name="counts: NaNs are counted, infinities are not",
        file=STATISTICS,
        within="",
        old=">> 1)) >= (INFINITY_BITS);",
        new=">> 1)) > (INFINITY_BITS);",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: infinities of float32 carry nothing",
        file=REDUCE,
        within="carry_float32",
        old="0x7fffffffu) + (1u << 23)",
        new="0x7fffffffu) + (1u << 22)",
        tests=_ARITHMETIC,
    ),
    Mutation(
        name="counts: infinities of float64 carry nothing",
        file=REDUCE,
        within="carry_float64",
        old="+ (1ull << 52)",
        new="+ (1ull << 51)",
        tests=_ARITHMETIC,
    ),
    Mutation(
        name="counts: infinities of portable float16 carry nothing",
        file=REDUCE,
        within="carry_float16",
        old="0x7fffu) + (1u << 10)",
        new="0x7fffu) + (1u << 9)",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: large numbers of portable bfloat16 carry",
        file=REDUCE,
        within="carry_bfloat16",
        old="0x7fffu) + (1u << 7)",
        new="0x7fffu) + (1u << 8)",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: infinities of float16 carry nothing",
        file=REDUCE_16BIT,
        within="carry_halves",
        old="_mm_set1_epi16(1 << 10)",
        new="_mm_set1_epi16(1 << 9)",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: large numbers of bfloat16 carry",
        file=REDUCE_16BIT,
        within="carry_brains",
        old="_mm_set1_epi16(1 << 7)",
        new="_mm_set1_epi16(1 << 8)",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: what fills no vector is not looked at",
        file=REDUCE_16BIT,
        within="",
        old="*has_nonfinite |= reduce_tail(",
        new="reduce_tail(",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: only the last 16-bit elements are looked at",
        file=REDUCE_16BIT,
        within="",
        old="*has_nonfinite |= reduce_tail(",
        new="*has_nonfinite = reduce_tail(",
        tests=_ARITHMETIC,
    ),
    Mutation(
        name="counts: only the lower bytes are looked at",
        file=REDUCE_16BIT,
        within="is_carried",
        old="(carries) & 0xaaaa)",
        new="(carries) & 0x5555)",
        tests=_DRIVER,
    ),
    Mutation(
        name="counts: of one rank nobody looks at the result",
        file=REDUCE,
        within="shm_reduce",
        old="return true;",
        new="return false;",
        tests=_INFINITE,
    ),
    Mutation(
        name="counts: the sign bit is taken for a large exponent",
        file=STATISTICS,
        within="",
        old="(BITS)((BITS) ~(BITS)0 >> 1)",
        new="(BITS)~(BITS)0",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: writes that torch counts are not seen",
        file=SAMPLE,
        within="Sample.is_unchanged",
        old="self._values is None or self._count_writes(held) != self._versions",
        new="self._values is None",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: writes past torch are not seen",
        file=SAMPLE,
        within="Sample.is_unchanged",
        old="tells and torch.equal(self._flat[self._places], self._values)",
        new="tells",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: a gradient of the user's own is taken for the reduced one",
        file=BUCKET,
        within="Bucket._is_in_flat",
        old="elif not torch.equal(gradient, self.views[i]):",
        new="elif False:",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: writes to a gradient are looked for in those to the whole buffer",
        file=SAMPLE,
        within="Sample._count_writes",
        old="(self._flat, *self._views, *held)",
        new="(self._flat, *held)",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: infinities of float16 are in the norm as numbers",
        file=PROTOCOL,
        within="publish_statistics",
        old="|| c->statistics.n_nonfinite > 0 ||",
        new="||",
        tests=_INFINITE,
    ),
    Mutation(
        name="counts: without squares their sum is 0",
        file=PROTOCOL,
        within="publish_statistics",
        old="if (!c->counting.adds_squares ||",
        new="if (",
        tests=_test("test_a_norm_that_one_rank_asks_for_changes_no_other"),
    ),
    Mutation(
        name="counts: nothing is counted",
        file=PATHS,
        within="reduce_elements",
        old="c->statistics.n_nonfinite +=",
        new="(void)",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: what is not known is the norm",
        file=SHM_BUCKET,
        within="ShmBucket.square_sum",
        old="or isnan(work.statistics.square_sum)",
        new="",
        tests=_INFINITE,
    ),
    Mutation(
        name="counts: squares that nobody counted are a sum of squares",
        file=PROTOCOL,
        within="publish_statistics",
        old="c->statistics.square_sum = (double)NAN;",
        new="",
        tests=_test("test_a_norm_that_one_rank_asks_for_changes_no_other"),
    ),
    Mutation(
        name="counts: the block in which the used mask begins is counted to its end",
        file=PATHS,
        within="reduce_elements",
        old="min64(min64(numel, end - begin), COUNTED_BYTES / itemsize)",
        new="min64(numel, COUNTED_BYTES / itemsize)",
        tests=_NORM,
    ),
    Mutation(
        name="counts: one rank alone reduces nothing, and counts nothing",
        file=PATHS,
        within="reduce_range",
        old=("|| comm->has_factors ||\n       c->counting.numel > 0) {"),
        new="|| comm->has_factors) {",
        tests=_NORM,
    ),
    Mutation(
        name="counts: ranks with data count beside ranks without",
        file=PROTOCOL,
        within="decide",
        old="c->counting.numel = 0;",
        new="",
        equivalent="a rank without data writes no count: nobody takes those of the others for all",
    ),
    Mutation(
        name="counts: over NCCL what a rank finds in its shard stands for all",
        file=BUCKET,
        within="Bucket.n_nonfinite_in_result",
        old="self._is_sharded and self._has_streams",
        new="False",
        tests=(
            "tests/reducer/features/test_skipped_optimizers.py::test_a_sharded_optimizer_skips",
        ),
    ),
    Mutation(
        name="counts: what some buckets have counted is lost where others have not",
        file="fastcomm/reducer/statistics.py",
        within="n_nonfinite_in_result",
        old="total + here",
        new="here",
        tests=("tests/reducer/features/test_sparse.py::test_ranks_drop_a_step_together",),
    ),
    Mutation(
        name="counts: gradients that were looked at are kept until the next round",
        file=SKIPPING,
        within="Skipping.after_round",
        old="self._kept, self._largest = [], []",
        new="",
        tests=_test("test_gradients_that_were_looked_at_are_let_go"),
    ),
    Mutation(
        name="counts: elements that are 0 tell that nobody has written",
        file=SAMPLE,
        within="Sample.is_unchanged",
        old="tells and torch.equal(self._flat[self._places], self._values)",
        new="torch.equal(self._flat[self._places], self._values)",
        tests=_test("test_what_is_written_to_few_rows_is_in_the_norm"),
    ),
)
