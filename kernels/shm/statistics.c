/* Counts what is not finite, and adds squares: in double, in LANES sums side by side, whose order
 * is the same for every instruction set. */
#include "statistics.h"

#include <string.h>

#include "simd.h"

enum { LANES = 16 };

/* A float16 without its sign, as the bits of a float that is 2^-112 of it. */
INLINE double scaled_float16(uint16_t half) {
    return (double)float_of_bits((uint32_t)(half & 0x7fffu) << 13) * 0x1p112;
}

INLINE double of_bfloat16(uint16_t brain) {
    return (double)float_of_bits((uint32_t)brain << 16);
}

#define AS_DOUBLE(a) ((double)(a))

#define SQUARE_SUM(NAME, ELEMENT, WIDEN)                                                           \
    CLONES static double NAME##_square_sum(size_t numel, const ELEMENT *a) {                       \
        double lanes[LANES] = {0}, sum = 0;                                                        \
        size_t i = 0;                                                                              \
        for (; i + LANES <= numel; i += LANES)                                                     \
            for (int k = 0; k < LANES; k++)                                                        \
                lanes[k] += WIDEN(a[i + (size_t)k]) * WIDEN(a[i + (size_t)k]);                     \
        for (; i < numel; i++)                                                                     \
            lanes[i % LANES] += WIDEN(a[i]) * WIDEN(a[i]);                                         \
        for (int k = 0; k < LANES; k++)                                                            \
            sum += lanes[k];                                                                       \
        return sum;                                                                                \
    }

/* How many elements have all ones in the exponent: they are infinite or NaN. */
#define NONFINITE(NAME, BITS, INFINITY_BITS)                                                       \
    CLONES static uint64_t NAME##_nonfinite(size_t numel, const void *array) {                     \
        uint64_t n = 0;                                                                            \
        for (size_t i = 0; i < numel; i++) {                                                       \
            BITS bits;                                                                             \
            memcpy(&bits, (const char *)array + i * sizeof bits, sizeof bits);                     \
            n += (bits & (BITS)((BITS) ~(BITS)0 >> 1)) >= (INFINITY_BITS);                         \
        }                                                                                          \
        return n;                                                                                  \
    }

SQUARE_SUM(float32, float, AS_DOUBLE)
SQUARE_SUM(float64, double, AS_DOUBLE)
SQUARE_SUM(float16, uint16_t, scaled_float16)
SQUARE_SUM(bfloat16, uint16_t, of_bfloat16)
NONFINITE(float32, uint32_t, 0x7f800000u)
NONFINITE(float64, uint64_t, 0x7ff0000000000000u)
NONFINITE(float16, uint16_t, 0x7c00u)
NONFINITE(bfloat16, uint16_t, 0x7f80u)

uint64_t shm_count_nonfinite(enum shm_dtype dtype, size_t numel, const void *array) {
    switch (dtype) {
    case SHM_FLOAT32:
        return float32_nonfinite(numel, array);
    case SHM_FLOAT64:
        return float64_nonfinite(numel, array);
    case SHM_FLOAT16:
        return float16_nonfinite(numel, array);
    default:
        return bfloat16_nonfinite(numel, array);
    }
}

double shm_add_squares(enum shm_dtype dtype, size_t numel, const void *array) {
    switch (dtype) {
    case SHM_FLOAT32:
        return float32_square_sum(numel, array);
    case SHM_FLOAT64:
        return float64_square_sum(numel, array);
    case SHM_FLOAT16:
        return float16_square_sum(numel, array);
    default:
        return bfloat16_square_sum(numel, array);
    }
}
