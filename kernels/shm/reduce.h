/* Element-wise reductions of n arrays into n arrays, in fixed order: the arithmetic under
 * protocol.c. Plain C11. */
#ifndef FASTCOMM_SHM_REDUCE_H
#define FASTCOMM_SHM_REDUCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* By name and number, these and the dtypes are those of comm/collective.py. The weighted ones, of
 * which shm_reduce_weighted computes both, are of buckets alone. */
enum shm_op {
    SHM_SUM,
    SHM_MEAN,
    SHM_MIN,
    SHM_MAX,
    SHM_PROD,
    SHM_WEIGHTED_MEAN,
    SHM_WEIGHTED_SUM,
    SHM_OPS
};

enum { SHM_PLAIN_OPS = SHM_WEIGHTED_MEAN }; /* how many shm_reduce computes: those above */
_Static_assert(SHM_SUM == 0 && (int)SHM_PROD < (int)SHM_PLAIN_OPS, "the plain ones come first");

enum shm_dtype {
    SHM_FLOAT32,
    SHM_FLOAT64,
    SHM_FLOAT16,
    SHM_BFLOAT16,
    SHM_INT32,
    SHM_INT64,
    SHM_UINT8,
    SHM_DTYPES
};

enum { SHM_MAX_INPUTS = 64 }; /* of one reduction */

size_t shm_dtype_size(enum shm_dtype dtype);

/* outputs[j][i] = reduce over r of inputs[r][i], for i < numel and every j. An output may be one of
 * the inputs (same address), or overlap none of them. Sums of floats are added by a binary tree:
 * the first power of two of the inputs apart from the others, and so on in both parts. float16 and
 * bfloat16 accumulate in float32 and are rounded once; integer sums and products wrap around; an
 * integer mean is the exact one truncated towards zero; min and max propagate NaN.
 *
 * Returns false if no element of the result is infinite or NaN. Of one input it always returns
 * true: nobody looks at it. */
bool shm_reduce(enum shm_dtype dtype, enum shm_op op, size_t numel, const void *const *inputs,
                int n_inputs, void *const *outputs, int n_outputs);

/* As shm_reduce, of floats: outputs[j][i] = sum over r of factors[r] * inputs[r][i]. What is added
 * is rounded once for each product and each addition, in float32 or, for float64, in float64. An
 * input whose factor is 0 is not read. */
bool shm_reduce_weighted(enum shm_dtype dtype, size_t numel, const void *const *inputs,
                         const double *factors, int n_inputs, void *const *outputs, int n_outputs);

/* memcpy for data that another core reads next: large copies do not pull the destination into this
 * core's cache. */
void shm_copy(void *destination, const void *source, size_t nbytes);

#endif
