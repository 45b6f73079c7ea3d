/* What the results of collectives should be: every rank's elements, and their reduction by a
 * plain loop: sums by the tree over the ranks, others rank after rank. Written without regard for
 * speed, and without a line in common with the kernels it judges. */
#ifndef FASTCOMM_SHM_REFERENCE_H
#define FASTCOMM_SHM_REFERENCE_H

#include <math.h>
#include <string.h>

#include "shm/reduce.h"

static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double magnitude = ldexp(exponent ? mantissa + 1024 : mantissa, (exponent ? exponent : 1) - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* Nearest, ties to even; finite values only. */
static uint16_t half_bits(float value) {
    double magnitude = fabs((double)value);
    int exponent;
    frexp(magnitude, &exponent);
    int scale = exponent < -13 || magnitude == 0
                    ? -13
                    : exponent; /* the units of subnormal halves are all alike */
    double units = nearbyint(ldexp(magnitude, 11 - scale));
    uint16_t bits = (uint16_t)((scale + 13) * 1024 +
                               (int)units); /* from 1024 units on they carry into the exponent */
    return (uint16_t)((bits >= 0x7c00 ? 0x7c00 : bits) | (signbit(value) ? 0x8000 : 0));
}

static float brain_value(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t brain_bits(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    uint32_t below = wide & 0xffff;
    wide >>= 16;
    return (uint16_t)(wide + (below > 0x8000 || (below == 0x8000 && (wide & 1)) ? 1 : 0));
}

union element {
    float f32;
    double f64;
    uint16_t bits16;
    int32_t i32;
    int64_t i64;
    uint8_t u8;
};

/* What rank `rank` puts at `index`. Floats of moderate size, so that products of many stay finite;
 * integers of any size. */
static union element element_of(uint32_t dtype, uint32_t seed, int rank, uint64_t index) {
    uint64_t hash =
        (index * 64 + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15u + seed * 0xbf58476d1ce4e5b9u;
    hash = (hash ^ hash >> 29) * 0x94d049bb133111ebu;
    hash ^= hash >> 32;
    union element e = {0};
    switch (dtype) {
    case SHM_FLOAT32:
        e.f32 = (float)((int32_t)hash) * 0x1p-30f;
        break;
    case SHM_FLOAT64:
        e.f64 = (double)((int64_t)hash) * 0x1p-62;
        break;
    case SHM_FLOAT16: /* subnormal, or up to 2 */
        e.bits16 = (uint16_t)hash & 0xbfff;
        break;
    case SHM_BFLOAT16: /* from 2^-7 to 2 */
        e.bits16 = (uint16_t)((hash & 0x807f) | (120 + (hash >> 16 & 7)) << 7);
        break;
    case SHM_INT32:
        e.i32 = (int32_t)hash;
        break;
    case SHM_INT64:
        e.i64 = (int64_t)(hash * hash);
        break;
    default:
        e.u8 = (uint8_t)hash;
    }
    return e;
}

#define STEP(op, total, x)                                                                         \
    ((op) == SHM_MIN    ? ((x) < (total) ? (x) : (total))                                          \
     : (op) == SHM_MAX  ? ((x) > (total) ? (x) : (total))                                          \
     : (op) == SHM_PROD ? (total) * (x)                                                            \
                        : (total) + (x))

#define REDUCE(TYPE, VALUE_OF, MEMBER)                                                             \
    TYPE totals[SHM_MAX_INPUTS];                                                                   \
    for (int r = 0; r < world_size; r++) {                                                         \
        totals[r] = VALUE_OF(element_of(dtype, seed, r, index).MEMBER);                            \
        if (r > 0 && (op) != SHM_SUM && (op) != SHM_MEAN) {                                        \
            totals[0] = STEP(op, totals[0], totals[r]);                                            \
        }                                                                                          \
    }                                                                                              \
    for (int half = 1; half < world_size && ((op) == SHM_SUM || (op) == SHM_MEAN); half *= 2) {    \
        for (int r = 0; r + half < world_size; r += 2 * half) {                                    \
            totals[r] += totals[r + half];                                                         \
        }                                                                                          \
    }                                                                                              \
    const TYPE total = totals[0];

static float reduced_half(uint32_t dtype, uint32_t op, uint32_t seed, int world_size,
                          uint64_t index) {
    if (dtype == SHM_FLOAT16) {
        REDUCE(float, (float)half_value, bits16)
        return op == SHM_MEAN ? total / (float)world_size : total;
    }
    REDUCE(float, brain_value, bits16)
    return op == SHM_MEAN ? total / (float)world_size : total;
}

/* Integers as 64-bit numbers: minimum and maximum need the sign, the rest wraps around. */
static int64_t integer_of(uint32_t dtype, uint32_t seed, int rank, uint64_t index) {
    union element e = element_of(dtype, seed, rank, index);
    return dtype == SHM_INT32 ? e.i32 : dtype == SHM_INT64 ? e.i64 : e.u8;
}

/* Truncated towards zero. Quotients and remainders are added up apart: the sum of the integers
 * themselves may be too large. */
static int64_t mean_of_integers(uint32_t dtype, uint32_t seed, int world_size, uint64_t index) {
    int64_t mean = 0, rest = 0;
    for (int r = 0; r < world_size; r++) {
        int64_t x = integer_of(dtype, seed, r, index);
        mean += x / world_size;
        rest += x % world_size;
    }
    mean += rest / world_size;
    rest %= world_size;
    return mean + (mean < 0 && rest > 0) - (mean > 0 && rest < 0);
}

static int64_t reduced_integer(uint32_t dtype, uint32_t op, uint32_t seed, int world_size,
                               uint64_t index) {
    if (op == SHM_MEAN) {
        return mean_of_integers(dtype, seed, world_size, index);
    }
    int64_t total = integer_of(dtype, seed, 0, index);
    for (int r = 1; r < world_size; r++) {
        int64_t x = integer_of(dtype, seed, r, index);
        if (op == SHM_MIN || op == SHM_MAX) {
            total = STEP(op, total, x);
        } else {
            total = (int64_t)(op == SHM_PROD ? (uint64_t)total * (uint64_t)x
                                             : (uint64_t)total + (uint64_t)x);
        }
    }
    return total;
}

static union element reduced(uint32_t dtype, uint32_t op, uint32_t seed, int world_size,
                             uint64_t index) {
    union element e = {0};
    if (dtype == SHM_FLOAT32) {
        REDUCE(float, , f32)
        e.f32 = op == SHM_MEAN ? total / (float)world_size : total;
    } else if (dtype == SHM_FLOAT64) {
        REDUCE(double, , f64)
        e.f64 = op == SHM_MEAN ? total / world_size : total;
    } else if (dtype == SHM_FLOAT16) {
        e.bits16 = half_bits(reduced_half(dtype, op, seed, world_size, index));
    } else if (dtype == SHM_BFLOAT16) {
        e.bits16 = brain_bits(reduced_half(dtype, op, seed, world_size, index));
    } else {
        int64_t total = reduced_integer(dtype, op, seed, world_size, index);
        if (dtype == SHM_INT32) {
            e.i32 = (int32_t)total;
        } else if (dtype == SHM_INT64) {
            e.i64 = total;
        } else {
            e.u8 = (uint8_t)total;
        }
    }
    return e;
}

#endif
