/* How the host tells the multi-tensor kernels which tensors there are: shared by the kernels
 * (flatten.cu, unflatten.cu) and by fastcomm/transports/cuda/multi_tensor.pyx, which fills it in.
 *
 * A launch works on up to `capacity` tensors. What is constant, the tiles, lies in device memory;
 * what may change from step to step, the tensors' addresses, travels as a kernel parameter, so that
 * nothing has to be copied to the device and a captured graph keeps its own. */
#ifndef FASTCOMM_MULTI_TENSOR_H
#define FASTCOMM_MULTI_TENSOR_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#endif

/* Elements of a tile, the work one warp does at a time: 8 KiB of float32, four rounds of four loads
 * of 16 bytes per lane. What limits a bucket of n MiB of float32, which has 128 n tiles, by the
 * numbers of an H100 (132 multiprocessors, 3.35 TB/s, and some 700 ns from a load to its data, for
 * which 2.2 MiB must be in flight, half of them loads):
 *
 *     bucket   tiles  blocks  multiprocessors at work  loads in flight  limited by
 *      1 MiB     128      16                       16          256 KiB  latency: four rounds
 *      5 MiB     640      80                       80         1.25 MiB  both
 *     25 MiB    3200     400  132, of 24 to 32 warps          6.25 MiB  bandwidth
 *
 * 25 MiB are one wave of 660 (five blocks per multiprocessor, by their registers), with no warp
 * that has two tiles while another has one, and no tail but the last round. Beyond 41 MiB warps
 * take several tiles; they differ by one at most, see MultiTensor._kernel. A tile of 512 elements
 * would bring all of 1 MiB into flight at once, and save some 2 us of 3, about as much as the
 * launch takes; but 25 MiB would be 12,800 tiles for 5,280 warps, of which some have three and
 * others two: a tail of a fifth. The table costs 16 bytes for each tile, 0.1 % of its traffic. All
 * by calculation. */
#define MT_TILE 2048

/* A kernel comes in two capacities, because a launch copies all its parameters: 504 addresses, and
 * what else there is, fit into 4 KiB, the limit before CUDA 12.1; 4000 fit into 32,764 bytes, the
 * limit since, and take the host 8 us more (H200). */
#define MT_SMALL 504
#define MT_LARGE 4000

#define MT_WARPS 8 /* of 32 threads, per block */

/* Up to MT_TILE elements of one tensor: it begins at element MT_TILE * start of the tensor, and at
 * element `offset` of the flat buffer. 16 bytes: nvcc loads them in two halves. */
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
