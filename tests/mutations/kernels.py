"""kernels: the protocol and the arithmetic of shared memory, and the kernels for GPUs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROTOCOL = "kernels/shm/protocol.c"
PATHS = "kernels/shm/paths.c"
REDUCE = "kernels/shm/reduce.c"
REDUCE_16BIT = "kernels/shm/reduce_16bit.c"
MULTI_TENSOR = "kernels/cuda/multi_tensor.cuh"
BLOCKS = "kernels/cuda/blocks.cu"

QUICK_DRIVER = ("tests/transports/shm/test_core.py::test_driver[threads-quick]",)
CORE = "tests/transports/shm/test_core.py"
KERNELS = "tests/kernels/test_kernels.py"
FRAMES = "tests/kernels/test_frames.py"
BLOCK_TESTS = "tests/kernels/test_blocks.py"
RACES = f"{FRAMES}::test_lanes_and_blocks_do_not_race"

MUTATIONS = (
    Mutation(
        name="kernels: what ranks disagreed on is read after they have gone on",
        file=PROTOCOL,
        within="shm_announcement_of",
        old="return failed ? comm->disagreed",
        new="return !failed ? comm->disagreed",
        tests=("tests/transports/shm/test_full_ring.py",),
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
        name="kernels: the sums go into one peer's slot only",
        file=PATHS,
        within="reduce_run",
        old="outputs[n_outputs++] = of_rank;",
        new="outputs[n_outputs = 1] = of_rank, n_outputs++;",
        tests=QUICK_DRIVER,
    ),
    Mutation(
        name="kernels: halves are rounded up where they lie between two",
        file=REDUCE,
        within="narrow_float16",
        old="<< 23) + 0xfffu + ((magnitude",
        new="<< 23) + 0x1000u + ((magnitude",
        tests=(f"{CORE}::test_16_bit_results_are_rounded_as_torch_rounds", *QUICK_DRIVER),
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
        name="kernels: the elements after the last pack of a tile stay behind",
        file=MULTI_TENSOR,
        within="mt_walk_tile",
        old="lane : head + n_packs * WIDTH + lane - 16;",
        new="lane : head + n_packs * WIDTH + lane - 15;",
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
        name="kernels: half of the warp shuffles under a mask that lacks it",
        file=MULTI_TENSOR,
        within="mt_add_warp",
        old="__shfl_down_sync(~0u, (unsigned long long)sum.n_nonfinite, distance);",
        new="__shfl_down_sync(0xffffu, (unsigned long long)sum.n_nonfinite, distance);",
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
        name="kernels: blocks beyond the first lanes' are not added",
        file=MULTI_TENSOR,
        within="mt_publish",
        old="block < gridDim.x; block += blockDim.x) {",
        new="block < gridDim.x && block < blockDim.x; block += blockDim.x) {",
        tests=(FRAMES,),
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
        name="kernels: what lies between gradients reaches the scale of their block",
        file=BLOCKS,
        within="load_part",
        old="bits >> i & 1u ? pack.element[i] : 0;",
        new="bits >> i & 1u ? pack.element[i] : pack.element[i];",
        tests=(BLOCK_TESTS,),
    ),
)
