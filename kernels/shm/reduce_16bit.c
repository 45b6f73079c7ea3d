/* float16 and bfloat16 by the conversions of AVX2 and F16C, which compilers do not find in the
 * portable loops of reduce.c. Results have the same bits, whether the processor flushes subnormals
 * or not: of halves these conversions flush none, and a NaN keeps its sign alone, as there.
 *
 * Eight elements at a time. The last ones, fewer than eight, go through a padded copy. */
#include "reduce_16bit.h"

#include <string.h>

#if defined(__x86_64__) && !defined(FASTCOMM_PORTABLE)

#include <cpuid.h>
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))
#define INLINE_AVX2 AVX2 static inline __attribute__((always_inline))

enum { LANES = 8, AT_A_TIME = 512 }; /* elements: of a vector, and accumulated at a time */

INLINE_AVX2 __m256 widen_halves(__m128i halves) {
    return _mm256_cvtph_ps(halves);
}

INLINE_AVX2 __m128i narrow_halves(__m256 wide) {
    const __m128i halves = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
    const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi16(0x7fff));
    const __m128i is_nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x7c00));
    const __m128i payload = _mm_and_si128(is_nan, _mm_set1_epi16(0x01ff));
    return _mm_andnot_si128(payload, halves);
}

INLINE_AVX2 __m256 widen_brains(__m128i brains) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(brains), 16));
}

INLINE_AVX2 __m128i narrow_brains(__m256 wide) {
    const __m256i bits = _mm256_castps_si256(wide), upper = _mm256_srli_epi32(bits, 16);
    const __m256i is_odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i just_below_half = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, just_below_half), 16);
    const __m256i quiet_nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    const __m256i all = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

INLINE_AVX2 __m256 add(__m256 a, __m256 b) {
    return _mm256_add_ps(a, b);
}

INLINE_AVX2 __m256 multiply(__m256 a, __m256 b) {
    return _mm256_mul_ps(a, b);
}

/* A NaN in `b` wins because it differs from itself, one in `a` because nothing compares with it. */
INLINE_AVX2 __m256 least(__m256 a, __m256 b) {
    const __m256 is_less = _mm256_cmp_ps(b, a, _CMP_LT_OQ),
                 is_nan = _mm256_cmp_ps(b, b, _CMP_UNORD_Q);
    return _mm256_blendv_ps(a, b, _mm256_or_ps(is_less, is_nan));
}

INLINE_AVX2 __m256 greatest(__m256 a, __m256 b) {
    const __m256 is_greater = _mm256_cmp_ps(b, a, _CMP_GT_OQ),
                 is_nan = _mm256_cmp_ps(b, b, _CMP_UNORD_Q);
    return _mm256_blendv_ps(a, b, _mm256_or_ps(is_greater, is_nan));
}

INLINE_AVX2 __m128i load(const void *array, size_t index) {
    return _mm_loadu_si128((const __m128i *)((const uint16_t *)array + index));
}

INLINE_AVX2 void store(void *array, size_t index, __m128i elements) {
    _mm_storeu_si128((__m128i *)((uint16_t *)array + index), elements);
}

/* What is infinite or NaN has all ones in its exponent: with one more they carry into the place of
 * the sign. */
INLINE_AVX2 __m128i carry_halves(__m128i result) {
    return _mm_add_epi16(_mm_and_si128(result, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(1 << 10));
}

INLINE_AVX2 __m128i carry_brains(__m128i result) {
    return _mm_add_epi16(_mm_and_si128(result, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(1 << 7));
}

INLINE_AVX2 bool is_carried(__m128i carries) {
    return (_mm_movemask_epi8(carries) & 0xaaaa) != 0; /* the upper bytes */
}

/* numel is a multiple of LANES. As the kernels of reduce.c: a block is accumulated input by input,
 * and the last input is added while the result is written. */
#define AVX2_REDUCTION(NAME, WIDEN, COMBINE, NARROW, CARRY)                                        \
    AVX2 static bool NAME(const struct reduction *job) {                                           \
        const int last = job->n_inputs - 1;                                                        \
        __m128i carries = _mm_setzero_si128();                                                     \
        const size_t numel = job->numel;                                                           \
        const void *const a = job->inputs[0], *const b = job->inputs[last];                        \
        void *const x = job->outputs[0], *const y = job->outputs[job->n_outputs > 1];              \
        for (size_t i = 0; last == 1 && i < numel; i += LANES) {                                   \
            const __m256 total = COMBINE(WIDEN(load(a, i)), WIDEN(load(b, i)));                    \
            const __m128i result = NARROW(total);                                                  \
            store(x, i, result);                                                                   \
            store(y, i, result);                                                                   \
            carries = _mm_or_si128(carries, CARRY(result));                                        \
        }                                                                                          \
        for (size_t begin = 0; last > 1 && begin < numel; begin += AT_A_TIME) {                    \
            const size_t end = numel - begin < AT_A_TIME ? numel : begin + AT_A_TIME;              \
            __m256 wide[AT_A_TIME / LANES], *at = wide;                                            \
            for (size_t i = begin; i < end; i += LANES)                                            \
                *at++ = COMBINE(WIDEN(load(a, i)), WIDEN(load(job->inputs[1], i)));                \
            for (int r = 2; r < last; r++) {                                                       \
                at = wide;                                                                         \
                for (size_t i = begin; i < end; i += LANES, at++)                                  \
                    *at = COMBINE(*at, WIDEN(load(job->inputs[r], i)));                            \
            }                                                                                      \
            at = wide;                                                                             \
            for (size_t i = begin; i < end; i += LANES) {                                          \
                const __m128i result = NARROW(COMBINE(*at++, WIDEN(load(b, i))));                  \
                store(x, i, result);                                                               \
                store(y, i, result);                                                               \
                carries = _mm_or_si128(carries, CARRY(result));                                    \
            }                                                                                      \
            for (int j = 2; j < job->n_outputs; j++)                                               \
                memcpy((uint16_t *)job->outputs[j] + begin, (uint16_t *)x + begin,                 \
                       (end - begin) * sizeof(uint16_t));                                          \
        }                                                                                          \
        for (int j = 2; last == 1 && j < job->n_outputs; j++)                                      \
            memcpy(job->outputs[j], x, numel * sizeof(uint16_t));                                  \
        return is_carried(carries);                                                                \
    }

#define UNSCALED(total) (total)
#define BY_RECIPROCAL(total) _mm256_mul_ps(total, reciprocal)
#define BY_COUNT(total) _mm256_div_ps(total, count)

/* As SUM in reduce.c, of vectors. */
#define EACH_VECTOR(STATEMENT)                                                                     \
    for (size_t i = 0; i < length; i += LANES) {                                                   \
        STATEMENT;                                                                                 \
    }
#define INPUT_AT(r) ((r) < n ? (const uint16_t *)job->inputs[r] + start : none)
#define ADDED(WIDEN, a, b) _mm256_add_ps(WIDEN(load(a, i)), WIDEN(load(b, i)))
#define FOUR_VECTORS(WIDEN) _mm256_add_ps(ADDED(WIDEN, a, b), ADDED(WIDEN, c, d))
#define WRITE_VECTOR(RESULT, CARRY)                                                                \
    const __m128i result = RESULT;                                                                 \
    store(x, i, result);                                                                           \
    store(y, i, result);                                                                           \
    carries = _mm_or_si128(carries, CARRY(result))
#define AVX2_SUM(NAME, WIDEN, SCALE, NARROW, CARRY)                                                \
    AVX2 static bool NAME(const struct reduction *job) {                                           \
        static const uint16_t none[AT_A_TIME] = {[0 ... AT_A_TIME - 1] = 0x8000};                  \
        const int n = job->n_inputs;                                                               \
        __m128i carries = _mm_setzero_si128();                                                     \
        const size_t numel = job->numel, block = n == 2 ? numel : AT_A_TIME;                       \
        const __m256 count = _mm256_set1_ps((float)n),                                             \
                     reciprocal = _mm256_div_ps(_mm256_set1_ps(1), count);                         \
        (void)reciprocal; /* only a mean looks at it */                                            \
        for (size_t start = 0; start < numel; start += block) {                                    \
            const size_t length = numel - start < block ? numel - start : block;                   \
            uint16_t *const x = (uint16_t *)job->outputs[0] + start,                               \
                            *const y = (uint16_t *)job->outputs[job->n_outputs > 1] + start;       \
            __m256 wide[LEVELS][AT_A_TIME / LANES];                                                \
            int top = -1;                                                                          \
            for (int r = 0; r < n; r += 4) {                                                       \
                const uint16_t *const a = INPUT_AT(r), *const b = INPUT_AT(r + 1),                 \
                                      *const c = INPUT_AT(r + 2), *const d = INPUT_AT(r + 3);      \
                const bool is_last = r + 4 >= n;                                                   \
                if (n == 2)                                                                        \
                    EACH_VECTOR(WRITE_VECTOR(NARROW(SCALE(ADDED(WIDEN, a, b))), CARRY))            \
                else if (is_last && top < 0)                                                       \
                    EACH_VECTOR(WRITE_VECTOR(NARROW(SCALE(FOUR_VECTORS(WIDEN))), CARRY))           \
                else if (is_last && top == 0)                                                      \
                    EACH_VECTOR(const __m256 sum = add(wide[0][i / LANES], FOUR_VECTORS(WIDEN));   \
                                WRITE_VECTOR(NARROW(SCALE(sum)), CARRY))                           \
                else {                                                                             \
                    top++;                                                                         \
                    EACH_VECTOR(wide[top][i / LANES] = FOUR_VECTORS(WIDEN))                        \
                    for (int m = merges_after(r, n, top); m > 0; m--, top--)                       \
                        EACH_VECTOR(__m256 *const sum = &wide[top - 1][i / LANES];                 \
                                    *sum = add(*sum, wide[top][i / LANES]))                        \
                    if (is_last)                                                                   \
                        EACH_VECTOR(const __m256 sum =                                             \
                                        add(wide[0][i / LANES], wide[1][i / LANES]);               \
                                    WRITE_VECTOR(NARROW(SCALE(sum)), CARRY))                       \
                }                                                                                  \
            }                                                                                      \
            for (int j = 2; j < job->n_outputs; j++)                                               \
                memcpy((uint16_t *)job->outputs[j] + start, x, length * sizeof(uint16_t));         \
        }                                                                                          \
        return is_carried(carries);                                                                \
    }

/* As AVX2_REDUCTION, for one input and more, each times its factor. */
#define AVX2_WEIGHTED(NAME, WIDEN, NARROW, CARRY)                                                  \
    AVX2 static bool NAME(const struct reduction *job) {                                           \
        const int last = job->n_inputs - 1;                                                        \
        __m128i carries = _mm_setzero_si128();                                                     \
        const void *const a = job->inputs[0], *const b = job->inputs[last];                        \
        void *const x = job->outputs[0], *const y = job->outputs[job->n_outputs > 1];              \
        const __m256 of_first = _mm256_set1_ps((float)job->factors[0]),                            \
                     of_last = _mm256_set1_ps((float)job->factors[last]);                          \
        for (size_t i = 0; last == 1 && i < job->numel; i += LANES) {                              \
            const __m128i result = NARROW(                                                         \
                add(multiply(WIDEN(load(a, i)), of_first), multiply(WIDEN(load(b, i)), of_last))); \
            store(x, i, result);                                                                   \
            store(y, i, result);                                                                   \
            carries = _mm_or_si128(carries, CARRY(result));                                        \
        }                                                                                          \
        for (int j = 2; last == 1 && j < job->n_outputs; j++)                                      \
            memcpy(job->outputs[j], x, job->numel * sizeof(uint16_t));                             \
        for (size_t begin = 0; last != 1 && begin < job->numel; begin += AT_A_TIME) {              \
            const size_t left = job->numel - begin, end = left < AT_A_TIME ? left : AT_A_TIME;     \
            __m256 wide[AT_A_TIME / LANES];                                                        \
            for (int r = 0; r < job->n_inputs; r++) {                                              \
                const __m256 factor = _mm256_set1_ps((float)job->factors[r]);                      \
                __m256 *at = wide;                                                                 \
                for (size_t i = 0; i < end; i += LANES, at++) {                                    \
                    const __m256 part = multiply(WIDEN(load(job->inputs[r], begin + i)), factor);  \
                    *at = r == 0 ? part : add(*at, part);                                          \
                }                                                                                  \
            }                                                                                      \
            for (size_t i = 0; i < end; i += LANES) {                                              \
                const __m128i result = NARROW(wide[i / LANES]);                                    \
                carries = _mm_or_si128(carries, CARRY(result));                                    \
                for (int j = 0; j < job->n_outputs; j++)                                           \
                    store(job->outputs[j], begin + i, result);                                     \
            }                                                                                      \
        }                                                                                          \
        return is_carried(carries);                                                                \
    }

#define AVX2_REDUCTIONS(KIND)                                                                      \
    AVX2_SUM(KIND##_sum, widen_##KIND, UNSCALED, narrow_##KIND, carry_##KIND)                      \
    AVX2_SUM(KIND##_mean_of_2k, widen_##KIND, BY_RECIPROCAL, narrow_##KIND, carry_##KIND)          \
    AVX2_SUM(KIND##_mean, widen_##KIND, BY_COUNT, narrow_##KIND, carry_##KIND)                     \
    AVX2_REDUCTION(KIND##_min, widen_##KIND, least, narrow_##KIND, carry_##KIND)                   \
    AVX2_REDUCTION(KIND##_max, widen_##KIND, greatest, narrow_##KIND, carry_##KIND)                \
    AVX2_REDUCTION(KIND##_prod, widen_##KIND, multiply, narrow_##KIND, carry_##KIND)               \
    AVX2_WEIGHTED(KIND##_weighted, widen_##KIND, narrow_##KIND, carry_##KIND)

AVX2_REDUCTIONS(halves)
AVX2_REDUCTIONS(brains)

#define AVX2_KERNELS_OF(KIND)                                                                      \
    {                                                                                              \
        [SHM_SUM] = KIND##_sum,       [SHM_MEAN] = KIND##_mean, [SHM_MIN] = KIND##_min,            \
        [SHM_MAX] = KIND##_max,       [SHM_PROD] = KIND##_prod, [MEAN_OF_2K] = KIND##_mean_of_2k,  \
        [WEIGHTED] = KIND##_weighted,                                                              \
    }

static bool (*const avx2_kernels[][KERNELS])(const struct reduction *) = {
    AVX2_KERNELS_OF(halves),
    AVX2_KERNELS_OF(brains),
};

static bool has_instructions;

__attribute__((constructor)) static void look_at_processor(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    has_instructions =
        __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* The elements that fill no vector: from copies that do. What stands behind them counts for
 * nothing. */
static bool reduce_tail(bool (*run)(const struct reduction *), const struct reduction *job,
                        size_t begin) {
    uint16_t copies[SHM_MAX_INPUTS][LANES] = {{0}}, result[LANES];
    const void *inputs[SHM_MAX_INPUTS];
    void *outputs[1] = {result};
    const size_t nbytes = (job->numel - begin) * sizeof(uint16_t);
    for (int r = 0; r < job->n_inputs; r++) {
        memcpy(copies[r], (const uint16_t *)job->inputs[r] + begin, nbytes);
        inputs[r] = copies[r];
    }
    const bool has_nonfinite =
        run(&(struct reduction){LANES, inputs, outputs, job->n_inputs, 1, job->factors});
    for (int j = 0; j < job->n_outputs; j++) {
        memcpy((uint16_t *)job->outputs[j] + begin, result, nbytes);
    }
    return has_nonfinite;
}

bool shm_reduce_16bit(enum shm_dtype dtype, int kernel, const struct reduction *job,
                      bool *has_nonfinite) {
    if (!has_instructions || (dtype != SHM_FLOAT16 && dtype != SHM_BFLOAT16)) {
        return false;
    }
    bool (*run)(const struct reduction *) = avx2_kernels[dtype == SHM_BFLOAT16][kernel];
    struct reduction whole = *job;
    whole.numel = job->numel / LANES * LANES;
    *has_nonfinite = run(&whole);
    if (whole.numel < job->numel) {
        *has_nonfinite |= reduce_tail(run, job, whole.numel);
    }
    return true;
}

#else

bool shm_reduce_16bit(enum shm_dtype dtype, int kernel, const struct reduction *job,
                      bool *has_nonfinite) {
    (void)dtype, (void)kernel, (void)job, (void)has_nonfinite;
    return false;
}

#endif
