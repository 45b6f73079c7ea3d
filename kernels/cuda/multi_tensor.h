/* How the host tells the multi-tensor kernels which tensors there are: shared by the kernels
 * (flatten.cu, unflatten.cu) and by fastcomm/cuda/multi_tensor.pyx, which fills it in.
 *
 * A launch works on up to `capacity` tensors. What is constant, the tiles, lies in device memory;
 * what may change from step to step, the tensors' addresses, travels as a kernel parameter, so that
 * nothing has to be copied to the device and a captured graph keeps its own. */
#ifndef FASTCOMM_MULTI_TENSOR_H
#define FASTCOMM_MULTI_TENSOR_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#endif

/* Elements of a tile, the work one warp does at a time: 8 KiB of float32, so that a bucket of 25
 * MiB occupies 24 warps of every multiprocessor of an H200, and a table of 16 bytes for each costs
 * 0.2 % of the traffic. */
#define MT_TILE 2048

/* A kernel comes in two capacities, because a launch copies all its parameters. 448 addresses fit
 * into 4 KiB, the limit before CUDA 12.1; 4000 fit into 32,764 bytes, the limit since. */
#define MT_SMALL 448
#define MT_LARGE 4000

#define MT_WARPS 8 /* of 32 threads, per block */

/* Up to MT_TILE elements of one tensor: it begins at element MT_TILE * start of the tensor, and at
 * element `offset` of the flat buffer. 16 bytes: one load. */
struct mt_tile {
    uint64_t offset;
    uint32_t start;
    uint16_t tensor; /* its number in the launch */
    uint16_t numel;
};

/* The statistics that unflatten and norm compute. A launch of n blocks needs an array of 1 + n: the
 * first is the result, the others the blocks' shares, added in the order of the blocks. */
struct mt_stats {
    double square_sum;    /* of all elements as they were written */
    uint64_t n_nonfinite; /* how many of them are infinite or NaN */
};

#endif
