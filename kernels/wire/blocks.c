/* See blocks.h. One pass over memory: a block stays in the innermost cache while its largest
 * magnitude is found and its elements are rounded.
 *
 * There is one source for all instruction sets, without branches, and each step is one rounding of
 * IEEE arithmetic. So every processor gives the same bits. */
#include "blocks.h"

#include <float.h>
#include <stdbool.h>

#include "shm/simd.h"

static const uint32_t SIGN = 1u << 31, INFINITE = 255u << 23, QUIET_NAN = 0x7fc00000u;

/* Each conversion is right where the processor flushes subnormals to zero, too: what it adds and
 * the sum are normal numbers, and what is that small rounds to zero anyway. */

struct rounded {
    uint8_t element;
    float value; /* as widening the element gives it */
};

/* To an integer, in the middle to the even one: the last bits of the sum hold it. */
INLINE struct rounded narrow_int8(float value) {
    const float sum = value + 0x1.8p23f;
    return (struct rounded){(uint8_t)bits_of_float(sum), sum - 0x1.8p23f};
}

INLINE float widen_int8(uint8_t element) {
    return (float)(int8_t)element;
}

/* Of a magnitude that rounds to 448 at most. Adding 2^20 times the magnitude's power of two, that
 * of the smallest normal number at least, leaves as many bits as an element has: the sum's last
 * bits are a mantissa with its leading one. It may carry into the exponent, as it should. */
INLINE struct rounded narrow_float8(float value) {
    const uint32_t magnitude = bits_of_float(value) & ~SIGN, sign = bits_of_float(value) & SIGN;
    const uint32_t own = magnitude & INFINITE, smallest = 121u << 23;
    const uint32_t exponent = own > smallest ? own : smallest, addend = exponent + (20u << 23);
    const float sum = float_of_bits(magnitude) + float_of_bits(addend);
    const uint32_t element =
        ((exponent - smallest) >> 20) + (bits_of_float(sum) - addend) + (sign >> 24);
    const float rounded = sum - float_of_bits(addend);
    return (struct rounded){(uint8_t)element, float_of_bits(bits_of_float(rounded) | sign)};
}

INLINE float widen_float8(uint8_t element) {
    const uint32_t magnitude = element & 0x7fu, sign = (uint32_t)(element & 0x80u) << 24;
    const uint32_t is_subnormal = mask_if(magnitude < 8u);
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal = bits_of_float((float)(int32_t)(magnitude & 7u) * 0x1p-9f);
    return float_of_bits((normal & ~is_subnormal) | (subnormal & is_subnormal) | sign);
}

/* The bits of the largest magnitude; a NaN's are larger than any number's. */
INLINE uint32_t largest_of(const float *values) {
    int32_t largest = 0;
    for (int i = 0; i < WIRE_BLOCK; i++) {
        const int32_t magnitude = (int32_t)(bits_of_float(values[i]) & ~SIGN);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

/* No scale is smaller than FLT_MIN: it would lose its own bits. */
INLINE float scale_of(uint32_t largest, float range) {
    const float scale = float_of_bits(largest) / range;
    return largest >= INFINITE ? float_of_bits(QUIET_NAN) : scale < FLT_MIN ? FLT_MIN : scale;
}

INLINE float without_nonfinite(float value) {
    const uint32_t bits = bits_of_float(value);
    return float_of_bits(bits & mask_if((bits & ~SIGN) < INFINITE));
}

#define CODEC(FORMAT, RANGE, NARROW, WIDEN)                                                        \
    CLONES static void encode_##FORMAT(size_t n_blocks, const float *values, uint8_t *elements,    \
                                       float *scales) {                                            \
        for (size_t b = 0; b < n_blocks; b++) {                                                    \
            const float *const block = values + b * WIRE_BLOCK;                                    \
            uint8_t *const narrow = elements + b * WIRE_BLOCK;                                     \
            const float scale = scales[b] = scale_of(largest_of(block), RANGE);                    \
            const uint8_t is_number = (uint8_t)mask_if(scale == scale);                            \
            INDEPENDENT_ITERATIONS                                                                 \
            for (int i = 0; i < WIRE_BLOCK; i++)                                                   \
                narrow[i] = NARROW(block[i] / scale).element & is_number;                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    CLONES static void encode_and_keep_##FORMAT(                                                   \
        size_t n_blocks, const float *values, float *residual, uint8_t *elements, float *scales) { \
        for (size_t b = 0; b < n_blocks; b++) {                                                    \
            const float *const block = values + b * WIRE_BLOCK;                                    \
            float *const dropped = residual + b * WIRE_BLOCK;                                      \
            uint8_t *const narrow = elements + b * WIRE_BLOCK;                                     \
            float wide[WIRE_BLOCK];                                                                \
            INDEPENDENT_ITERATIONS                                                                 \
            for (int i = 0; i < WIRE_BLOCK; i++)                                                   \
                wide[i] = block[i] + dropped[i];                                                   \
            const float scale = scales[b] = scale_of(largest_of(wide), RANGE);                     \
            const uint8_t is_number = (uint8_t)mask_if(scale == scale);                            \
            INDEPENDENT_ITERATIONS                                                                 \
            for (int i = 0; i < WIRE_BLOCK; i++) {                                                 \
                const struct rounded rounded = NARROW(wide[i] / scale);                            \
                narrow[i] = rounded.element & is_number;                                           \
                dropped[i] = without_nonfinite(wide[i] - rounded.value * scale);                   \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    CLONES static void decode_##FORMAT(size_t n_blocks, const uint8_t *elements,                   \
                                       const float *scales, float *values) {                       \
        for (size_t b = 0; b < n_blocks; b++) {                                                    \
            const uint8_t *const narrow = elements + b * WIRE_BLOCK;                               \
            float *const block = values + b * WIRE_BLOCK;                                          \
            const float scale = scales[b];                                                         \
            INDEPENDENT_ITERATIONS                                                                 \
            for (int i = 0; i < WIRE_BLOCK; i++)                                                   \
                block[i] = WIDEN(narrow[i]) * scale;                                               \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    CLONES static void accumulate_##FORMAT(size_t n_blocks, const uint8_t *elements,               \
                                           const float *scales, float *totals) {                   \
        for (size_t b = 0; b < n_blocks; b++) {                                                    \
            const uint8_t *const narrow = elements + b * WIRE_BLOCK;                               \
            float *const block = totals + b * WIRE_BLOCK;                                          \
            const float scale = scales[b];                                                         \
            INDEPENDENT_ITERATIONS                                                                 \
            for (int i = 0; i < WIRE_BLOCK; i++)                                                   \
                block[i] += WIDEN(narrow[i]) * scale;                                              \
        }                                                                                          \
    }

CODEC(int8, 127.0f, narrow_int8, widen_int8)
CODEC(float8, 448.0f, narrow_float8, widen_float8)

void wire_encode(enum wire_format format, size_t n_blocks, const float *values, float *residual,
                 uint8_t *elements, float *scales) {
    const bool is_int8 = format == WIRE_INT8;
    if (residual == NULL) {
        (is_int8 ? encode_int8 : encode_float8)(n_blocks, values, elements, scales);
    } else {
        (is_int8 ? encode_and_keep_int8 : encode_and_keep_float8)(n_blocks, values, residual,
                                                                  elements, scales);
    }
}

void wire_decode(enum wire_format format, size_t n_blocks, const uint8_t *elements,
                 const float *scales, float *values) {
    (format == WIRE_INT8 ? decode_int8 : decode_float8)(n_blocks, elements, scales, values);
}

void wire_accumulate(enum wire_format format, size_t n_blocks, const uint8_t *elements,
                     const float *scales, float *totals) {
    (format == WIRE_INT8 ? accumulate_int8 : accumulate_float8)(n_blocks, elements, scales, totals);
}
