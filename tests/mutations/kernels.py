"""kernels: the protocol and the arithmetic of shared memory, and the kernels for GPUs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROTOCOL = "kernels/shm/protocol.c"
PATHS = "kernels/shm/paths.c"
REDUCE = "kernels/shm/reduce.c"
REDUCE_16BIT = "kernels/shm/reduce_16bit.c"
MULTI_TENSOR = "kernels/cuda/multi_tensor.cuh"

QUICK_DRIVER = ("tests/transports/shm/test_core.py::test_driver[threads-quick]",)
CORE = "tests/transports/shm/test_core.py"
KERNELS = "tests/kernels/test_kernels.py"
FRAMES = "tests/kernels/test_frames.py"
RACES = f"{FRAMES}::test_lanes_and_blocks_do_not_race"

MUTATIONS = (
    Mutation(
        name="kernels: parts of any sizes are taken for equal ones",
        file=PATHS,
        within="part_of",
        old="if (c->bounds != NULL) {",
        new="if (false) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a chunk of a part goes on behind its end",
        file=PATHS,
        within="cut",
        old="min64(part.begin + chunk.end, part.end)",
        new="part.begin + chunk.end",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a filled mailbox is all that a free slot needs",
        file=PROTOCOL,
        within="owes",
        old="&& d->kind != SHM_ABANDON && is_done == is_complete;",
        new="&& d->kind != SHM_ABANDON;",
        tests=("tests/transports/shm/test_full_ring.py",),
    ),
    Mutation(
        name="kernels: a filled mailbox is all that an abandonment needs",
        file=PROTOCOL,
        within="owes",
        old="&& d->kind != SHM_ABANDON && is_done == is_complete;",
        new="&& is_done == is_complete;",
        tests=("tests/transports/shm/test_abandon.py",),
    ),
    Mutation(
        name="kernels: a slot is reused one collective too early",
        file=PROTOCOL,
        within="shm_post",
        old="if (!is_settled(comm, number - SHM_RING)) {",
        new="if (!is_settled(comm, number - SHM_RING - 1)) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: descriptors are equal whatever the step",
        file=PROTOCOL,
        within="same_collective",
        old="&& a->step == b->step",
        new="",
        tests=("tests/reducer/test_steps.py",),
    ),
    Mutation(
        name="kernels: descriptors are equal whatever the label",
        file=PROTOCOL,
        within="same_collective",
        old="&& a->label == b->label &&",
        new="&&",
        tests=(
            "tests/contract/test_mismatches.py::"
            "test_ranks_that_launch_different_buckets_hear_of_it",
        ),
    ),
    Mutation(
        name="kernels: a tensor is free while peers still read it",
        file=PROTOCOL,
        within="is_awaited_by_all",
        old="return c->path == DIRECT || c->descriptor",
        new="return c->descriptor",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: who has aborted takes results along that it has",
        file=PROTOCOL,
        within="find_aborter",
        old=("== SHM_ABORTED &&\n            !shm_reached(&control_of(comm, r)->reduced, seq)) {"),
        new="== SHM_ABORTED) {",
        tests=(
            "tests/transports/shm/test_lost_peers.py::"
            "test_a_result_that_all_ranks_have_is_good_though_a"
            "_peer_has_aborted_since",
        ),
    ),
    Mutation(
        name="kernels: an abandoned collective leaves no room",
        file=PROTOCOL,
        within="shm_make_room",
        old="return status == SHM_MISMATCH || status == SHM_ABANDONED",
        new="return status == SHM_MISMATCH",
        tests=(
            "tests/reducer/test_failed_steps.py::test_an_exception_while_more_buckets_wait_than"
            "_the_ring_holds_is_an_error_for_one_step_only",
        ),
    ),
    Mutation(
        name="kernels: what ranks disagreed on is read after they have gone on",
        file=PROTOCOL,
        within="shm_descriptor_of",
        old="return failed ? comm->disagreed",
        new="return !failed ? comm->disagreed",
        tests=("tests/transports/shm/test_full_ring.py",),
    ),
    Mutation(
        name="kernels: chunks that move do not count as progress",
        file=PROTOCOL,
        within="shm_progress",
        old="return comm->head + comm->chunk + c->n_in + c->n_worked + c->n_out;",
        new="return comm->head + comm->chunk;",
        tests=("tests/transports/shm/test_deadlines.py",),
    ),
    Mutation(
        name="kernels: a rank's own shard is not gathered for staging",
        file=PROTOCOL,
        within="decide",
        old="c->path == STAGED && c->descriptor.where != SHM_PRIVATE && c->status == SHM_OK",
        new="c->path == UNDECIDED",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: what is abandoned is gathered all the same",
        file=PROTOCOL,
        within="decide",
        old="c->descriptor.where != SHM_PRIVATE && c->status == SHM_OK",
        new="c->descriptor.where != SHM_PRIVATE",
        tests=("tests/transports/shm/test_abandon.py",),
    ),
    Mutation(
        name="kernels: a piece is read from its begin wherever the shard begins",
        file=PATHS,
        within="shm_gather_pieces",
        old="(const char *)piece->source + (begin - piece->offset) * itemsize;",
        new="(const char *)piece->source;",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: the end of a shard behind the last piece is not reduced",
        file=PATHS,
        within="reduce_part",
        old="if (at < part.end) {",
        new="if (at < part.begin) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a chunk is reduced before all ranks have copied it in",
        file=PATHS,
        within="all_staged",
        old="uint32_t target = comm->chunk + (uint32_t)index + 1;",
        new="uint32_t target = comm->chunk + (uint32_t)index;",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a rank's arrival always announces its first chunk",
        file=PATHS,
        within="all_staged",
        old="index == 0 && slot_of(",
        new="index == 0 || slot_of(",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a first chunk is staged where earlier chunks may lie",
        file=PATHS,
        within="shm_stage_first",
        old="if (comm->head != comm->next) {",
        new="if (comm->head == comm->next + 1) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a rank keeps its shard from the others in one hop, too",
        file=PATHS,
        within="copy_in",
        old="if (is_one_hop(comm, d)) {",
        new="if (false) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: the sums go into one peer's slot only",
        file=PATHS,
        within="reduce_chunk",
        old="outputs[n_outputs++] = (void *)inputs[r];",
        new="outputs[n_outputs = 1] = (void *)inputs[r], n_outputs++;",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: in one hop, too, the sums go into slots that others may still read",
        file=PATHS,
        within="reduce_chunk",
        old="r < comm->world_size && !is_one_hop(comm, d); r++",
        new="r < comm->world_size; r++",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a chunk leaves before all ranks have worked on it",
        file=PATHS,
        within="shm_run_staged",
        old="(one_hop ||",
        new="(true ||",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: what lies behind a rank's own shard is not staged",
        file=PATHS,
        within="copy_peers_shards",
        old="memcpy(to + end, from + end, numel * itemsize - end);",
        new="",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a chunk enters however many have not left",
        file=PATHS,
        within="shm_run_staged",
        old="c->n_in < c->n_out + SHM_STAGING_SLOTS &&",
        new="true &&",
        equivalent="Every rank works on chunk k only when all have copied it in, before which each "
        "has worked on chunk k - 2. Its results are collected first. So n_worked is at most "
        "n_out + 2 here, and the other bound, n_worked + 2, the narrower one.",
    ),
    Mutation(
        name="kernels: halves are rounded up where they lie between two",
        file=REDUCE,
        within="narrow_float16",
        old="<< 23) + 0xfffu + ((magnitude",
        new="<< 23) + 0x1000u + ((magnitude",
        tests=(f"{CORE}::test_ties_go_to_even", *QUICK_DRIVER),
    ),
    Mutation(
        name="kernels: brains are rounded up where they lie between two",
        file=REDUCE_16BIT,
        within="narrow_brains",
        old="_mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff))",
        new="_mm256_set1_epi32(0x8000)",
        tests=(f"{CORE}::test_ties_go_to_even",),
    ),
    Mutation(
        name="kernels: a NaN among halves keeps its payload",
        file=REDUCE_16BIT,
        within="narrow_halves",
        old="return _mm_andnot_si128(payload, halves);",
        new="return payload[0] == 1 ? payload : halves;",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: elements that fill no vector are left out",
        file=REDUCE_16BIT,
        within="",
        old="if (whole.numel < job->numel) {",
        new="if (whole.numel > job->numel) {",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: a NaN of a later rank is no maximum",
        file=REDUCE,
        within="",
        old="#define GREATEST_OR_NAN(a, b) (((b) > (a)) | ((b) != (b)) ? (b) : (a))",
        new="#define GREATEST_OR_NAN(a, b) ((b) > (a) ? (b) : (a))",
        tests=(f"{CORE}::test_a_nan_of_any_shard_reaches_the_result",),
    ),
    Mutation(
        name="kernels: the sum that an integer mean divides overflows",
        file=REDUCE,
        within="FLOAT_REDUCTIONS",
        old="INTEGER_REDUCTIONS(int64, int64_t, uint64_t, __int128)",
        new="INTEGER_REDUCTIONS(int64, int64_t, uint64_t, int64_t)",
        tests=(f"{CORE}::test_an_integer_mean_does_not_overflow_on_the_way",),
    ),
    Mutation(
        name="kernels: the elements after the last pack of a tile stay behind",
        file=MULTI_TENSOR,
        within="mt_walk_tile",
        old="lane : head + n_packs * WIDTH + lane - 16;",
        new="lane : head + n_packs * WIDTH + lane - 15;",
        tests=(KERNELS,),
    ),
    Mutation(
        name="kernels: the squares of a tile are added to the next one's",
        file=MULTI_TENSOR,
        within="",
        old=("of_tile = 0;\n}"),
        new="}",
        tests=(KERNELS,),
    ),
    Mutation(
        name="kernels: infinities are finite",
        file=MULTI_TENSOR,
        within="",
        old="n_nonfinite += value * 0 != 0;",
        new="n_nonfinite += value != value;",
        tests=(KERNELS,),
    ),
    Mutation(
        name="kernels: the packs after the last full round of a tile stay behind",
        file=MULTI_TENSOR,
        within="mt_walk_packs",
        old="mt_take_packs<WIDTH, N>(in, out, n_left, action);",
        new="",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: a shuffle adds the lane next to it at every distance",
        file=MULTI_TENSOR,
        within="mt_add_warp",
        old="__shfl_down_sync(~0u, sum.square_sum, distance);",
        new="__shfl_down_sync(~0u, sum.square_sum, 1);",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: the sum over a warp begins with its quarters",
        file=MULTI_TENSOR,
        within="mt_add_warp",
        old="for (int distance = 16; distance > 0;",
        new="for (int distance = 8; distance > 0;",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: half of the warp shuffles under a mask that lacks it",
        file=MULTI_TENSOR,
        within="mt_add_warp",
        old="__shfl_down_sync(~0u, (unsigned long long)sum.n_nonfinite, distance);",
        new="__shfl_down_sync(0xffffu, (unsigned long long)sum.n_nonfinite, distance);",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: warps' sums are read before they are all there",
        file=MULTI_TENSOR,
        within="mt_add_block",
        old="__syncthreads();",
        new="",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: the barrier comes after the warps' sums are read",
        file=MULTI_TENSOR,
        within="mt_add_block",
        old=(
            "__syncthreads();\n"
            "return mt_add_warp(lane < blockDim.x / 32 ? of_warp[lane] : mt_stats{0, 0});"
        ),
        new=(
            "sum = lane < blockDim.x / 32 ? of_warp[lane] : mt_stats{0, 0};\n"
            "__syncthreads();\n"
            "return mt_add_warp(sum);"
        ),
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: sums of warps that a block does not have are added",
        file=MULTI_TENSOR,
        within="mt_add_block",
        old="mt_add_warp(lane < blockDim.x / 32 ? of_warp[lane] : mt_stats{0, 0});",
        new="mt_add_warp(of_warp[lane]);",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: lanes ask whether their block is the last before it knows",
        file=MULTI_TENSOR,
        within="mt_publish",
        old="__syncthreads();",
        new="",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: the first block to be done publishes",
        file=MULTI_TENSOR,
        within="mt_publish",
        old="atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;",
        new="atomicInc(ticket, gridDim.x - 1) == 0;",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: the ticket does not come back to zero",
        file=MULTI_TENSOR,
        within="mt_publish",
        old="atomicInc(ticket, gridDim.x - 1) ==",
        new="atomicInc(ticket, gridDim.x) ==",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: blocks beyond the first lanes' are not added",
        file=MULTI_TENSOR,
        within="mt_publish",
        old="block < gridDim.x; block += blockDim.x) {",
        new="block < gridDim.x && block < blockDim.x; block += blockDim.x) {",
        tests=(FRAMES,),
    ),
    Mutation(
        name="kernels: a share may come after the ticket that announces it",
        file=MULTI_TENSOR,
        within="mt_publish",
        old=("__threadfence();\nis_last"),
        new="is_last",
        tests=(RACES,),
    ),
    Mutation(
        name="kernels: a share is stored behind its fence",
        file=MULTI_TENSOR,
        within="mt_publish",
        old=("stats[1 + blockIdx.x] = share;\n__threadfence();"),
        new=("__threadfence();\nstats[1 + blockIdx.x] = share;"),
        tests=(RACES,),
    ),
    Mutation(
        name="kernels: shares may be read before the ticket that announces them",
        file=MULTI_TENSOR,
        within="mt_publish",
        old=("gridDim.x - 1;\n        __threadfence();"),
        new="gridDim.x - 1;",
        tests=(RACES,),
    ),
)
