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

/* Sums are added four inputs at a time; a subtree waits until its sibling is complete, and in the
 * end what is left is added from the right. LEVELS: how many wait at a time, at most. */
enum { LEVELS = 5 };
_Static_assert(SHM_MAX_INPUTS <= 4 << (LEVELS - 1), "each level has twice the inputs of another");

/* How many pairs of subtrees to add behind the four inputs from `r` on, which are subtree `top`: of
 * the last inputs, until two are left. */
static inline int merges_after(int r, int n_inputs, int top) {
    return r + 4 >= n_inputs ? top - 1 : __builtin_ctz((unsigned)r / 4 + 1);
}

/* Reduces at least two inputs, or one that is weighted, with the bits of the portable kernels in
 * reduce.c. Returns false, and has done nothing, where the processor or the dtype is another
 * one. *has_nonfinite: as shm_reduce returns it. */
bool shm_reduce_16bit(enum shm_dtype dtype, int kernel, const struct reduction *job,
                      bool *has_nonfinite);

#endif
