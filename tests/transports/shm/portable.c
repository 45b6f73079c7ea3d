/* The portable kernels beside those for AVX2 and F16C: every 16-bit float with others near and far,
 * and with what is special, gives the same bits, and both tell whether all are finite. Which of two
 * NaNs a sum becomes is the compiler's choice. */
#define FASTCOMM_PORTABLE
#define shm_reduce portable_reduce
#define shm_reduce_weighted portable_reduce_weighted
#define shm_dtype_size portable_dtype_size
#define shm_copy portable_copy
#define shm_reduce_16bit no_reduce_16bit
#include "shm/reduce.c"
#include "shm/reduce_16bit.c"
#undef shm_reduce
#undef shm_reduce_weighted

#include <stdbool.h>
#include <stdio.h>

#include "portable.h"

enum { VALUES = 1 << 16, MOST = 5 };

bool shm_reduce(enum shm_dtype dtype, enum shm_op op, size_t numel, const void *const *inputs,
                int n_inputs, void *const *outputs, int n_outputs);
bool shm_reduce_weighted(enum shm_dtype dtype, size_t numel, const void *const *inputs,
                         const double *factors, int n_inputs, void *const *outputs, int n_outputs);

static const double factors[MOST] = {0.625, 0.1875, 0.1, 0.05, 3};

static uint16_t in[MOST][VALUES + 1], portable[MOST][VALUES + 1], fast[MOST][VALUES + 1];

static int infinity_of(enum shm_dtype dtype) {
    return dtype == SHM_FLOAT16 ? 0x7c00 : 0x7f80;
}

static int is_nan(enum shm_dtype dtype, uint16_t bits) {
    return (bits & 0x7fff) > infinity_of(dtype);
}

static int count_differences(enum shm_dtype dtype, enum shm_op op, int n, size_t numel, size_t at) {
    const void *inputs[MOST];
    void *one[MOST], *other[MOST];
    bool found[2], is_finite = true;
    int differences = 0;
    for (int r = 0; r < n; r++) {
        inputs[r] = in[r] + at;
        one[r] = portable[r] + at;
        other[r] = fast[r] + at;
    }
    if (op == SHM_WEIGHTED_MEAN) {
        found[0] = portable_reduce_weighted(dtype, numel, inputs, factors, n, one, n);
        found[1] = shm_reduce_weighted(dtype, numel, inputs, factors, n, other, n);
    } else {
        found[0] = portable_reduce(dtype, op, numel, inputs, n, one, n);
        found[1] = shm_reduce(dtype, op, numel, inputs, n, other, n);
    }
    for (size_t i = at; i < at + numel; i++) {
        int n_nans = 0;
        for (int r = 0; r < n; r++) {
            n_nans += is_nan(dtype, in[r][i]);
        }
        for (int r = 0; r < n; r++) {
            uint16_t a = portable[r][i], b = fast[r][i];
            bool two_nans = n_nans > 1 || n > 2; /* infinities can make one, too */
            differences += a != b && !(two_nans && is_nan(dtype, a) && is_nan(dtype, b));
        }
        is_finite = is_finite && (portable[0][i] & 0x7fff) < infinity_of(dtype);
    }
    return differences + (found[0] == is_finite) + (found[1] == is_finite);
}

int compare_16bit_kernels(void) {
    static const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3800,
                                       0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01,
                                       0x7e00, 0xfe01, 0x7f7f, 0x7f80, 0xff80, 0x7f81, 0x7fc0};
    enum { SPECIAL = sizeof special / sizeof *special, NEAR = 4 };
    static const uint16_t near[NEAR] = {1, 1023, 4097, 30001};
    int differences = 0;
    for (int round = 0; round < SPECIAL + NEAR; round++) {
        for (int i = 0; i < VALUES; i++) {
            in[0][i] = (uint16_t)i;
            for (int r = 1; r < MOST; r++) {
                in[r][i] = round < SPECIAL ? special[(round + 5 * (r - 1)) % SPECIAL]
                                           : (uint16_t)(i + r * near[round - SPECIAL]);
            }
        }
        for (enum shm_op op = SHM_SUM; op <= SHM_WEIGHTED_MEAN; op++) {
            for (int n = op == SHM_WEIGHTED_MEAN ? 1 : 2; n <= MOST; n++) {
                differences += count_differences(SHM_FLOAT16, op, n, VALUES, 0);
                differences += count_differences(SHM_BFLOAT16, op, n, VALUES, 0);
                /* ends that fill no vector, from where no vector begins */
                differences += count_differences(SHM_FLOAT16, op, n, (size_t)(round % 9), 1);
                differences += count_differences(SHM_BFLOAT16, op, n, (size_t)(500 + round), 3);
            }
        }
    }
    return differences;
}
