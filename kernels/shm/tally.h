/* What is counted of a reduction's result while it is in the cache. Plain C11. */
#ifndef FASTCOMM_SHM_TALLY_H
#define FASTCOMM_SHM_TALLY_H

#include <stdbool.h>

#include "reduce.h"

/* Of floats: how many are infinite or NaN, and the sum of their squares, NaN if it is unknown. */
struct shm_tally {
    uint64_t n_nonfinite;
    double square_sum;
};

/* Whether arrays of this dtype are tallied. */
bool shm_is_tallied(enum shm_dtype dtype);

/* Adds an array to the tally. The sum has the same bits whatever the processor. */
void shm_add_to_tally(struct shm_tally *tally, enum shm_dtype dtype, size_t numel,
                      const void *array, bool adds_squares);

#endif
