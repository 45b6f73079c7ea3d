/* How loops over elements are written, so that the compiler vectorises them once per instruction
 * set and the loader picks. Plain C11. */
#ifndef FASTCOMM_SHM_SIMD_H
#define FASTCOMM_SHM_SIMD_H

#include <stdint.h>
#include <string.h>

/* The loader's choice needs glibc's ifunc. FASTCOMM_NO_CLONES is for sanitizers, whose run time is
 * not ready when ifuncs are resolved. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(FASTCOMM_NO_CLONES)
#define CLONES
#elif defined(__clang__) || __GNUC__ < 12
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else /* with AVX-512BW, which 16-bit floats need to be fast */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

/* No iteration depends on another one: an output is one of the inputs, or overlaps none of them. */
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* All ones where a condition holds. Masks rather than `?:`, which the compiler turns into branches
 * around floating-point operations (they might trap) and then cannot vectorise. */
INLINE uint32_t mask_if(int condition) {
    return -(uint32_t)condition;
}

#endif
