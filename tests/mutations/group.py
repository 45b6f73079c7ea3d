"""fastcomm/group: the queue of works, how tensors are exchanged, and hosts."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

QUEUE = "fastcomm/transports/group/work_queue.py"
WORK = "fastcomm/transports/group/work.py"
SHARDS = "fastcomm/transports/group/shards.pyx"
WIRE = "fastcomm/transports/group/wire.pyx"
BLOCKS = "kernels/wire/blocks.c"

AHEAD_TESTS = "tests/transports/group/test_ahead.py"
FUSION_TESTS = "tests/transports/group/test_group.py"
WIRE_TESTS = "tests/transports/group/test_wires.py::test_"
BLOCK_TESTS = "tests/transports/group/test_blocks.py::test_"

MUTATIONS = (
    Mutation(
        name="group: autograd does not know what a collective writes to",
        file=WORK,
        within="GroupWork.__init__",
        old="increment_version(written)",
        new="pass",
        tests=("tests/contract/test_autograd.py",),
    ),
    Mutation(
        name="group: ranks that call different collectives go on",
        file="kernels/shm/announcement.h",
        within="is_same_call",
        old="a->op == b->op",
        new="true",
        tests=(
            "tests/contract/test_mismatches.py::"
            "test_ranks_that_disagree_all_hear_of_it_and_of_both_sides[group-3-op]",
        ),
    ),
    Mutation(
        name="group: a mean is scaled in the wire's dtype",
        file=SHARDS,
        within="Chunk.prepare",
        old="self._part.mul_(1 / self._divisor)",
        new="self._sent.copy_(self._part)\nself._sent.mul_(1 / self._divisor)\nreturn",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="wire: a block leaves out what was dropped before",
        file=BLOCKS,
        within="",
        old="wide[i] = block[i] + dropped[i];",
        new="wide[i] = block[i] + 0 * dropped[i];",
        tests=(f"{BLOCK_TESTS}what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations",),
    ),
    Mutation(
        name="wire: one residual for all keys",
        file=WIRE,
        within="Wire.encode",
        old="self._residuals.get(key)",
        new="next(iter(self._residuals.values()), None)",
        tests=(f"{WIRE_TESTS}keys_have_residuals_of_their_own",),
    ),
    Mutation(
        name="wire: int8 cuts off in place of rounding",
        file=BLOCKS,
        within="narrow_int8",
        old="const float sum = value + 0x1.8p23f;",
        new="const float sum = (float)(int)(value == value ? value : 0) + 0x1.8p23f;",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: a block is multiplied by the reciprocal of its scale",
        file=BLOCKS,
        within="",
        old="NARROW(wide[i] / scale)",
        new="NARROW(wide[i] * (1 / scale))",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: float8 has no subnormals",
        file=BLOCKS,
        within="narrow_float8",
        old="own > smallest ? own : smallest, addend",
        new="own > smallest ? own : smallest - (20u << 23), addend",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: float8 rounds to 5 bits and cuts one off",
        file=BLOCKS,
        within="narrow_float8",
        old="addend = exponent + (20u << 23);",
        new="addend = exponent + (20u << 23) + 1;",
        tests=(
            f"{BLOCK_TESTS}every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest",
        ),
    ),
    Mutation(
        name="wire: the used mask is rounded beside the gradients",
        file=SHARDS,
        within="CodedExchanges.__init__",
        old="self.payload = flat[n:]",
        new="self.payload = flat[n:].clone()",
        tests=(f"{WIRE_TESTS}the_used_mask_is_exact_beside_great_gradients",),
    ),
    Mutation(
        name="group: what is fused has the op of the first",
        file=WORK,
        within="GroupWork.fusable_behind",
        old="self.call.is_like(other.call)",
        new="self.call.dtype == other.call.dtype",
        tests=(FUSION_TESTS,),
    ),
    Mutation(
        name="group: a bucket is encoded under the lock",
        file=QUEUE,
        within="WorkQueue.post",
        old="work.prepare()  # before",
        new="with self._lock:\n    work.prepare()  # before",
        tests=(AHEAD_TESTS,),
    ),
)
