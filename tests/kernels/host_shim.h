/* The kernels on the host: the parts of multi_tensor.cuh that are the device's own, in plain C++.
 * Only for tests, which thus run the index arithmetic and the conversions of the device where there
 * is none, and under sanitizers.
 *
 * A kernel becomes a function of the same name, (n_blocks, n_threads, parameters), with the
 * parameters as cuLaunchKernel takes them: the addresses of the arguments. It runs one lane after
 * the other. With -DFASTCOMM_EMULATED it is the device's own, for tests/kernels/emulator.h. */
#ifndef FASTCOMM_HOST_SHIM_H
#define FASTCOMM_HOST_SHIM_H

#include <stddef.h>
#include <string.h>

#include <type_traits>
#include <utility>
#include <vector>

#define MT_INLINE inline __attribute__((always_inline))
#define MT_UNROLL _Pragma("GCC unroll 8")
#define MT_NO_UNROLL _Pragma("GCC unroll 1")
#define __grid_constant__

MT_INLINE float mt_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MT_INLINE uint32_t mt_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MT_INLINE float mt_float_of_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    /* As the bits of a float the exponent is too small by the difference of the biases, 112, for
     * subnormals as well. */
    const uint32_t finite = mt_bits_of_float(mt_float_of_bits(magnitude << 13) * 0x1p112f);
    return mt_float_of_bits((magnitude < 0x7c00u ? finite : magnitude << 13 | 0x7f800000u) | sign);
}

template <unsigned MANTISSA, unsigned BIAS>
uint32_t mt_round(uint32_t magnitude); /* in multi_tensor.cuh */

MT_INLINE uint16_t mt_half_of_float(float value) {
    const uint32_t bits = mt_bits_of_float(value), magnitude = bits & 0x7fffffffu,
                   sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    }
    const uint32_t rounded = mt_round<10, 15>(magnitude);
    return (uint16_t)(sign | (rounded < 0x7c00u ? rounded : 0x7c00u));
}

/* The two bytes of a bfloat16 are the first two of the float. A NaN stays one when its other bits
 * are dropped. */
MT_INLINE uint16_t mt_brain_of_float(float value) {
    const uint32_t bits = mt_bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

MT_INLINE float mt_product(float a, float b) {
    return a * b; /* the compiler is told not to contract, or does not optimise */
}

#ifdef FASTCOMM_BYTE_INSTRUCTIONS
/* The instructions that convert to and from 8 bits, by the rules of the PTX ISA and by arithmetic,
 * which shares nothing with the kernels' own conversions. */
#define MT_CONVERTS_BYTES
#include <math.h>

template <int MANTISSA, int MIN_EXPONENT> uint8_t mt_satfinite(float value, uint8_t largest) {
    const uint8_t sign = signbit(value) ? 0x80 : 0;
    if (isnan(value)) {
        return 0x7f;
    }
    const double magnitude = fabs((double)value);
    const int last = largest >> MANTISSA,
              digits = (largest & ((1 << MANTISSA) - 1)) | 1 << MANTISSA;
    if (magnitude > ldexp(digits, last - 1 + MIN_EXPONENT - MANTISSA)) {
        return sign | largest;
    }
    int exponent = magnitude == 0 ? MIN_EXPONENT : ilogb(magnitude);
    exponent = exponent < MIN_EXPONENT ? MIN_EXPONENT : exponent;
    const int steps = (int)nearbyint(ldexp(magnitude, MANTISSA - exponent));
    return (uint8_t)(sign | (((exponent - MIN_EXPONENT) << MANTISSA) + steps));
}

inline uint16_t mt_e4m3s_of_floats(float low, float high) {
    return (uint16_t)(mt_satfinite<3, -6>(low, 0x7e) | mt_satfinite<3, -6>(high, 0x7e) << 8);
}

inline uint16_t mt_saturated_e5m2s_of_floats(float low, float high) {
    return (uint16_t)(mt_satfinite<2, -14>(low, 0x7b) | mt_satfinite<2, -14>(high, 0x7b) << 8);
}

inline uint32_t mt_half_of_e4m3(uint8_t bits) {
    const int field = bits >> 3 & 15, digits = bits & 7;
    if ((bits & 0x7f) == 0x7f) {
        return 0x7fff;
    }
    const double value = ldexp(digits + (field ? 8 : 0), (field ? field - 1 : 0) - 6 - 3);
    return mt_half_of_float((float)(bits & 0x80 ? -value : value));
}

inline uint32_t mt_halves_of_e4m3s(uint16_t bytes) {
    return mt_half_of_e4m3((uint8_t)bytes) | mt_half_of_e4m3((uint8_t)(bytes >> 8)) << 16;
}
#endif

#ifdef FASTCOMM_EMULATED
#include "emulator.h"
#else

/* What a program that is compiled with either calls a kernel by. */
#define MT_ON_HOST(NAME) NAME

#define MT_LANES_ARE_ALONE

template <class Of> uint32_t mt_most_in_warp(uint32_t own, const Of &of) {
    for (uint32_t lane = 0; lane < 32; lane++) {
        own = own < of(lane) ? of(lane) : own;
    }
    return own;
}

/* The lanes of all warps that have a tile, in order. */
template <class Run>
void mt_for_each_lane(unsigned n_blocks, unsigned n_threads, uint32_t n_tiles, Run run) {
    const unsigned warps_of_block = n_threads / 32;
    for (unsigned block = 0; block < n_blocks; block++) {
        for (unsigned thread = 0; thread < n_threads; thread++) {
            const unsigned warp = block * warps_of_block + thread / 32;
            if (warp < n_tiles) {
                run(block, thread, mt_place{thread % 32, warp, n_blocks * warps_of_block});
            }
        }
    }
}

inline void mt_add(mt_stats &sum, const mt_stats &other) {
    sum.square_sum += other.square_sum;
    sum.n_nonfinite += other.n_nonfinite;
}

/* Adds the shares of a block's threads in the order in which the device does: a tree in each warp,
 * then one over the warps. */
inline mt_stats mt_add_block(std::vector<mt_stats> shares) {
    mt_stats of_warp[32] = {};
    for (size_t first = 0; first < shares.size(); first += 32) {
        for (unsigned distance = 16; distance > 0; distance /= 2) {
            for (unsigned lane = 0; lane < distance; lane++) {
                mt_add(shares[first + lane], shares[first + lane + distance]);
            }
        }
        of_warp[first / 32] = shares[first];
    }
    for (unsigned distance = 16; distance > 0; distance /= 2) {
        for (unsigned lane = 0; lane < distance; lane++) {
            mt_add(of_warp[lane], of_warp[lane + distance]);
        }
    }
    return of_warp[0];
}

/* The ticket is left as the last block on the device leaves it. */
inline void mt_publish(const std::vector<std::vector<mt_stats>> &shares, mt_stats *stats,
                       uint32_t *ticket) {
    const size_t n_threads = shares[0].size();
    std::vector<mt_stats> sums(n_threads);
    for (size_t block = 0; block < shares.size(); block++) {
        stats[1 + block] = mt_add_block(shares[block]);
        mt_add(sums[block % n_threads], stats[1 + block]);
        *ticket = *ticket >= shares.size() - 1 ? 0 : *ticket + 1;
    }
    stats[0] = mt_add_block(sums);
}

template <class... Parameters, size_t... I>
void mt_launch(void (*lane)(mt_place, Parameters...), unsigned n_blocks, unsigned n_threads,
               void **parameters, std::index_sequence<I...>) {
    const uint32_t n_tiles = *(uint32_t *)parameters[2];
    mt_for_each_lane(n_blocks, n_threads, n_tiles, [&](unsigned, unsigned, mt_place place) {
        lane(place, *(std::remove_reference_t<Parameters> *)parameters[I]...);
    });
}

/* Of a kernel whose lanes return their shares the parameters end with where the statistics go. */
template <class... Parameters, size_t... I>
void mt_launch(mt_stats (*lane)(mt_place, Parameters...), unsigned n_blocks, unsigned n_threads,
               void **parameters, std::index_sequence<I...>) {
    const uint32_t n_tiles = *(uint32_t *)parameters[2];
    mt_stats *const stats = *(mt_stats **)parameters[sizeof...(Parameters)];
    std::vector<std::vector<mt_stats>> shares(n_blocks, std::vector<mt_stats>(n_threads));
    mt_for_each_lane(n_blocks, n_threads, n_tiles,
                     [&](unsigned block, unsigned thread, mt_place place) {
                         shares[block][thread] =
                             lane(place, *(std::remove_reference_t<Parameters> *)parameters[I]...);
                     });
    if (stats) {
        mt_publish(shares, stats, *(uint32_t **)parameters[sizeof...(Parameters) + 1]);
    }
}

template <class Share, class... Parameters>
void mt_launch(Share (*lane)(mt_place, Parameters...), unsigned n_blocks, unsigned n_threads,
               void **parameters) {
    mt_launch(lane, n_blocks, n_threads, parameters, std::index_sequence_for<Parameters...>());
}

#define MT_KERNEL(NAME, LANE, PARAMETERS, ARGUMENTS)                                               \
    extern "C" void NAME(unsigned n_blocks, unsigned n_threads, void **parameters) {               \
        mt_launch(LANE, n_blocks, n_threads, parameters);                                          \
    }
#define MT_KERNEL_WITH_STATS MT_KERNEL

#endif
#endif
