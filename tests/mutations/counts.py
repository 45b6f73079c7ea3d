"""Norms, and counts of what is not finite, that come out of the reduction: made, and held good."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROTOCOL = "kernels/shm/protocol.c"
REDUCE = "kernels/shm/reduce.c"
REDUCE_16BIT = "kernels/shm/reduce_16bit.c"
SHM_BUCKET = "fastcomm/transports/shm/bucket.pyx"


def _test(name: str) -> tuple[str, ...]:
    return (f"tests/reducer/test_counts.py::{name}",)


_NORM = _test("test_a_norm_needs_no_second_look")
_INFINITE = _test("test_the_norm_of_infinities_is_infinite")
_ARITHMETIC = ("tests/transports/shm/test_core.py::test_one_infinity_is_found_wherever_it_stands",)
_DRIVER = ("tests/transports/shm/test_core.py::test_driver[threads-quick]",)

MUTATIONS = (
    Mutation(
        name="counts: a rank knows its own part alone",
        file=PROTOCOL,
        within="add_counted",
        old="statistics->square_sum += theirs->statistics.square_sum;",
        new="statistics->square_sum += r == comm->rank ? theirs->statistics.square_sum : 0;",
        tests=_NORM,
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
        name="counts: large numbers of portable bfloat16 carry",
        file=REDUCE,
        within="carry_bfloat16",
        old="0x7fffu) + (1u << 7)",
        new="0x7fffu) + (1u << 8)",
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
)
