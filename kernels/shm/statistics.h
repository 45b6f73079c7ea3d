/* What is counted of a reduction's result while it is in the cache. Plain C11. */
#ifndef FASTCOMM_SHM_STATISTICS_H
#define FASTCOMM_SHM_STATISTICS_H

#include "reduce.h"

/* Of floats: how many are infinite or NaN, and the sum of their squares, NaN if it is unknown. */
struct shm_statistics {
    uint64_t n_nonfinite;
    double square_sum;
};

/* How many elements are infinite or NaN. */
uint64_t shm_count_nonfinite(enum shm_dtype dtype, size_t numel, const void *array);

/* The sum of squares of finite elements: the same bits whatever the processor. */
double shm_add_squares(enum shm_dtype dtype, size_t numel, const void *array);

#endif
