/* float16 and bfloat16 by the conversions of AVX2 and F16C. Plain C11. */
#ifndef FASTCOMM_SHM_REDUCE_16BIT_H
#define FASTCOMM_SHM_REDUCE_16BIT_H

#include "reduce.h"

struct reduction {
    size_t numel;
    const void *const *inputs;
    void *const *outputs;
    int n_inputs, n_outputs;
    const double *factors; /* of the inputs, for a weighted kernel */
};

/* A kernel is named by its operation, but a mean over a power of two inputs has one of its own, and
 * both weighted operations have one together. */
enum { MEAN_OF_2K = SHM_PLAIN_OPS, WEIGHTED, KERNELS };

/* Reduces at least two inputs, or one that is weighted, with the bits of the portable kernels in
 * reduce.c. Returns false, and has done nothing, where the processor or the dtype is another
 * one. *has_nonfinite: as shm_reduce returns it. */
bool shm_reduce_16bit(enum shm_dtype dtype, int kernel, const struct reduction *job,
                      bool *has_nonfinite);

#endif
