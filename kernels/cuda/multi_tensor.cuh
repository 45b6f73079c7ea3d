/* What the multi-tensor kernels (flatten.cu, unflatten.cu) have in common: the dtypes and their
 * conversions, how a warp walks through its tiles, how statistics are gathered, and what makes a
 * kernel of a function. Nothing here needs a header of CUDA, so that NVRTC compiles it with this
 * folder alone, and a plain C++ compiler through tests/kernels/host_shim.h
 * (-DFASTCOMM_HOST).
 *
 * A kernel is a function of one lane that does not synchronise (`..._lane`), compiled alike for the
 * device and for the host, and a frame around it: MT_KERNEL, which launches the lanes and, where
 * the lanes return a share, adds the shares up. */
#ifndef FASTCOMM_MULTI_TENSOR_CUH
#define FASTCOMM_MULTI_TENSOR_CUH

#ifdef __CUDACC_RTC__ /* NVRTC comes without <stdint.h> */
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

#include "multi_tensor.h"

/* The number of this lane in its warp, of this warp in the grid, and of all warps in the grid. */
struct mt_place {
    uint32_t lane, warp, n_warps;
};

#ifdef FASTCOMM_HOST
#include "host_shim.h"
#else
#define MT_INLINE __device__ __forceinline__
#define MT_UNROLL _Pragma("unroll")
#define MT_NO_UNROLL _Pragma("unroll 1")
#endif

template <int CAPACITY> struct mt_pointers {
    void *tensor[CAPACITY];
};

/* ---- dtypes: their bits in memory, and the conversions to and from the type used for arithmetic
 * ---- */

typedef float f32;
typedef double f64;
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
struct e4m3 { /* the variant without infinities, torch.float8_e4m3fn */
    uint8_t bits;
};
struct e5m2 {
    uint8_t bits;
};

/* The supported dtypes of a gradient and of its image in the flat buffer: X(GRAD, WIRE, CAPACITY).
 * Each pair has a kernel per direction and capacity; the capacity is the largest number of tensors
 * that a launch takes. */
#define MT_PAIRS_OF_F32(X, N)                                                                      \
    X(f32, f32, N) X(f32, f16, N) X(f32, bf16, N) X(f32, f64, N) X(f32, e4m3, N) X(f32, e5m2, N)
#define MT_PAIRS_OF_F16(X, N)                                                                      \
    X(f16, f16, N) X(f16, f32, N) X(f16, bf16, N) X(f16, e4m3, N) X(f16, e5m2, N)
#define MT_PAIRS_OF_BF16(X, N)                                                                     \
    X(bf16, bf16, N) X(bf16, f32, N) X(bf16, f16, N) X(bf16, e4m3, N) X(bf16, e5m2, N)
#define MT_PAIRS_OF_F64(X, N) X(f64, f64, N) X(f64, f32, N) X(f64, f16, N) X(f64, bf16, N)
#define MT_PAIRS_OF_ALL(X, N)                                                                      \
    MT_PAIRS_OF_F32(X, N) MT_PAIRS_OF_F16(X, N) MT_PAIRS_OF_BF16(X, N) MT_PAIRS_OF_F64(X, N)
#define MT_PAIRS(X) MT_PAIRS_OF_ALL(X, 504) MT_PAIRS_OF_ALL(X, 4000)
#define MT_GRADS_OF_ALL(X, N) X(f32, N) X(f16, N) X(bf16, N) X(f64, N)
#define MT_GRADS(X) MT_GRADS_OF_ALL(X, 504) MT_GRADS_OF_ALL(X, 4000)
static_assert(MT_SMALL == 504 && MT_LARGE == 4000,
              "the names of the kernels end with the capacities of multi_tensor.h");

#ifndef FASTCOMM_HOST /* else in host_shim.h */
MT_INLINE float mt_float_of_bits(uint32_t bits) {
    return __uint_as_float(bits);
}
MT_INLINE uint32_t mt_bits_of_float(float value) {
    return __float_as_uint(value);
}
MT_INLINE float mt_float_of_half(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
MT_INLINE uint16_t mt_half_of_float(float value) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
MT_INLINE uint16_t mt_brain_of_float(float value) {
    uint16_t brain;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(brain) : "f"(value));
    return brain;
}
/* Rounded by itself: not fused with an addition, which would change the sum's bits. */
MT_INLINE float mt_product(float a, float b) {
    return __fmul_rn(a, b);
}
#endif

MT_INLINE float mt_widen(f32 x) {
    return x;
}
MT_INLINE double mt_widen(f64 x) {
    return x;
}
MT_INLINE float mt_widen(f16 x) {
    return mt_float_of_half(x.bits);
}
MT_INLINE float mt_widen(bf16 x) {
    return mt_float_of_bits((uint32_t)x.bits << 16);
}

/* Rounds the magnitude of a float to nearest even in a format with `MANTISSA` bits after the point
 * and this bias. What is above the largest number comes out as a larger code. */
template <unsigned MANTISSA, unsigned BIAS> MT_INLINE uint32_t mt_round(uint32_t magnitude) {
    constexpr uint32_t dropped = 23 - MANTISSA, first_normal = (128 - BIAS) << 23;
    /* A power of two whose last place is the unit of the subnormals: adding it rounds to that. */
    constexpr uint32_t unit_in_last_place = (128 - BIAS - MANTISSA + 23) << 23;
    if (magnitude < first_normal) {
        return mt_bits_of_float(mt_float_of_bits(magnitude) +
                                mt_float_of_bits(unit_in_last_place)) -
               unit_in_last_place;
    }
    return (magnitude - ((127 - BIAS) << 23) + (1u << (dropped - 1)) - 1 +
            (magnitude >> dropped & 1u)) >>
           dropped;
}

#include "bytes.cuh"

MT_INLINE void mt_narrow(float value, f32 &x) {
    x = value;
}
MT_INLINE void mt_narrow(double value, f64 &x) {
    x = value;
}
MT_INLINE void mt_narrow(float value, f16 &x) {
    x.bits = mt_half_of_float(value);
}
MT_INLINE void mt_narrow(float value, bf16 &x) {
    x.bits = mt_brain_of_float(value);
}
/* Through float, as torch does: this rounds twice. */
template <class T> MT_INLINE void mt_narrow(double value, T &x) {
    mt_narrow((float)value, x);
}

/* The type for arithmetic between `A` and `B`: double if one of them is double, else float. */
template <class A, class B> using mt_wide = decltype(mt_widen(A()) + mt_widen(B()));

template <class In, class Out> MT_INLINE void mt_cast(In x, mt_wide<In, Out> scale, Out &y) {
    mt_narrow((mt_wide<In, Out>)mt_widen(x) * scale, y);
}
/* Without conversion and scaling the bits pass unchanged, those of a NaN too. */
template <class T> MT_INLINE void mt_cast(T x, mt_wide<T, T> scale, T &y) {
    T scaled;
    mt_narrow(mt_widen(x) * scale, scaled);
    y = scale == 1 ? x : scaled;
}

/* ---- what is done with the elements: they are copied, summed, or both ---- */

/* Elements that lie together, loaded or stored at once. */
template <class T, unsigned WIDTH> struct alignas(sizeof(T) * WIDTH) mt_pack {
    T element[WIDTH];
};

#ifdef MT_CONVERTS_BYTES
/* Two elements at an even place of a pack. */
template <class T> MT_INLINE mt_floats mt_widen_two(const T *two) {
    if constexpr (sizeof(T) == 1) {
        return mt_floats_of_bytes(*(const uint16_t *)two, *two);
    } else {
        return {mt_widen(two[0]), mt_widen(two[1])};
    }
}
template <class T> MT_INLINE void mt_narrow_two(mt_floats values, T *two) {
    if constexpr (sizeof(T) == 1) {
        *(uint16_t *)two = mt_bytes_of_floats(values.low, values.high, T());
    } else {
        mt_narrow(values.low, two[0]);
        mt_narrow(values.high, two[1]);
    }
}
#endif

template <class In, class Out, unsigned WIDTH>
MT_INLINE void mt_cast_pack(const mt_pack<In, WIDTH> &from, mt_wide<In, Out> scale,
                            mt_pack<Out, WIDTH> &to) {
#ifdef MT_CONVERTS_BYTES
    if constexpr (WIDTH % 2 == 0 && (sizeof(In) == 1 || sizeof(Out) == 1)) {
        for (unsigned i = 0; i < WIDTH; i += 2) {
            const mt_floats two = mt_widen_two(&from.element[i]);
            mt_narrow_two({two.low * scale, two.high * scale}, &to.element[i]);
        }
    } else
#endif
        for (unsigned i = 0; i < WIDTH; i++) {
            mt_cast(from.element[i], scale, to.element[i]);
        }
}

/* A lane's part of the statistics. The squares of a tile's elements are added in float (float64 in
 * double), the tiles in double. */
template <class T> struct mt_sums {
    mt_wide<T, T> of_tile = 0;
    double square_sum = 0;
    uint32_t n_nonfinite = 0;

    MT_INLINE void add(T x) {
        const auto value = mt_widen(x);
        of_tile += value * value;
        /* value * 0 is NaN for infinity and NaN. `value - value` would not do: fused with the
         * multiplication that made `value`, it need not be 0. */
        n_nonfinite += value * 0 != 0;
    }
    MT_INLINE void end_tile() {
        square_sum += of_tile;
        of_tile = 0;
    }
    MT_INLINE mt_stats share() const {
        return {square_sum, n_nonfinite};
    }
};

template <class In, class Out> struct mt_copying {
    mt_wide<In, Out> scale;

    template <unsigned WIDTH> MT_INLINE void operator()(const mt_pack<In, WIDTH> &from, Out *to) {
        mt_pack<Out, WIDTH> pack;
        mt_cast_pack(from, scale, pack);
        *(mt_pack<Out, WIDTH> *)to = pack;
    }
};

template <class T> struct mt_summing {
    mt_sums<T> sums;

    template <unsigned WIDTH> MT_INLINE void operator()(const mt_pack<T, WIDTH> &from, T *) {
        for (unsigned i = 0; i < WIDTH; i++) {
            sums.add(from.element[i]);
        }
    }
};

template <class In, class Out> struct mt_copying_and_summing {
    mt_wide<In, Out> scale;
    mt_sums<Out> sums;

    template <unsigned WIDTH> MT_INLINE void operator()(const mt_pack<In, WIDTH> &from, Out *to) {
        mt_pack<Out, WIDTH> pack;
        mt_cast_pack(from, scale, pack);
        for (unsigned i = 0; i < WIDTH; i++) {
            sums.add(pack.element[i]);
        }
        *(mt_pack<Out, WIDTH> *)to = pack;
    }
};

/* ---- how a warp walks through a tile ---- */

/* A lane's next N packs of WIDTH elements, or the first n_left of them: all are loaded before the
 * first is stored. */
template <unsigned WIDTH, unsigned N, class In, class Out, class Action>
MT_INLINE void mt_take_packs(const In *in, Out *out, uint32_t n_left, Action &action) {
    mt_pack<In, WIDTH> packs[N] = {};
    MT_UNROLL
    for (uint32_t i = 0; i < N; i++) {
        if (i < n_left) {
            packs[i] = *(const mt_pack<In, WIDTH> *)(in + 32 * WIDTH * i);
        }
    }
    MT_UNROLL
    for (uint32_t i = 0; i < N; i++) {
        if (i < n_left) {
            action(packs[i], out + 32 * WIDTH * i);
        }
    }
}

/* Packs of WIDTH elements, the first to lane 0, the second to lane 1. A multiprocessor has at least
 * 24 warps (MT_LAUNCH_BOUNDS). With four packs of 16 bytes per lane, they have 48 KiB in flight,
 * several times what it takes to hide the latency of memory. */
template <unsigned WIDTH, class In, class Out, class Action>
MT_INLINE void mt_walk_packs(const In *in, Out *out, uint32_t n_packs, uint32_t lane,
                             Action &action) {
    constexpr uint32_t N = WIDTH == 1 ? 8 : 4;
    uint32_t n_left = (n_packs + 31 - lane) / 32;
    in += lane * WIDTH;
    out += lane * WIDTH;
    MT_NO_UNROLL
    for (; n_left >= N; n_left -= N) {
        mt_take_packs<WIDTH, N>(in, out, N, action);
        in += 32 * WIDTH * N;
        out += 32 * WIDTH * N;
    }
    mt_take_packs<WIDTH, N>(in, out, n_left, action);
}

/* A tile whose two sides are aligned alike goes in packs of 16 bytes (of the wider dtype), except
 * for the elements before the first aligned one and after the last pack: fewer than 16 each, so
 * half a warp each. Any other tile goes element by element. */
template <class In, class Out, class Action>
MT_INLINE void mt_walk_tile(const In *in, Out *out, uint32_t numel, uint32_t lane, Action &action) {
    constexpr uint32_t WIDTH = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
    const uint32_t past_in = (size_t)in / sizeof(In) % WIDTH,
                   past_out = (size_t)out / sizeof(Out) % WIDTH;
    const uint32_t head = (WIDTH - past_in) % WIDTH;
    if (past_in != past_out || head > numel) {
        mt_walk_packs<1>(in, out, numel, lane, action);
        return;
    }
    const uint32_t n_packs = (numel - head) / WIDTH;
    mt_walk_packs<WIDTH>(in + head, out + head, n_packs, lane, action);
    const uint32_t at = lane < 16 ? lane : head + n_packs * WIDTH + lane - 16;
    if (at < (lane < 16 ? head : numel)) {
        action(*(const mt_pack<In, 1> *)(in + at), out + at);
    }
}

/* The tiles of this warp. The next one is loaded while the current one is worked on. */
struct mt_tile_walk {
    const mt_tile *tiles;
    uint32_t n_tiles, position, stride;
    mt_tile next;

    MT_INLINE mt_tile_walk(mt_place place, const mt_tile *tiles, uint32_t n_tiles)
        : tiles(tiles), n_tiles(n_tiles), position(place.warp), stride(place.n_warps), next() {
        prefetch();
    }
    MT_INLINE void prefetch() {
        if (position < n_tiles) {
            next = tiles[position];
        }
    }
    MT_INLINE bool advance(mt_tile &tile) {
        if (position >= n_tiles) {
            return false;
        }
        tile = next;
        position += stride;
        prefetch();
        return true;
    }
};

/* ---- the frame around the lanes ---- */

#ifndef MT_LANES_ARE_ALONE /* else in host_shim.h */
/* The largest of what the lanes of a warp have. `of` tells what another lane has, where lanes run
 * one after the other. */
template <class Of> MT_INLINE uint32_t mt_most_in_warp(uint32_t own, const Of &) {
    return __reduce_max_sync(~0u, own);
}
#endif

#ifndef MT_KERNEL /* else in host_shim.h */

MT_INLINE mt_place mt_here() {
    const unsigned warps_of_block = blockDim.x / 32;
    return {threadIdx.x % 32, blockIdx.x * warps_of_block + threadIdx.x / 32,
            gridDim.x * warps_of_block};
}

/* Sums over a warp; lane 0 gets the result. */
MT_INLINE mt_stats mt_add_warp(mt_stats sum) {
    for (int distance = 16; distance > 0; distance /= 2) {
        sum.square_sum += __shfl_down_sync(~0u, sum.square_sum, distance);
        sum.n_nonfinite += __shfl_down_sync(~0u, (unsigned long long)sum.n_nonfinite, distance);
    }
    return sum;
}

/* Sums over a block; thread 0 gets the result. All threads of the block must call it. */
MT_INLINE mt_stats mt_add_block(mt_stats sum) {
    __shared__ mt_stats of_warp[32];
    const unsigned lane = threadIdx.x % 32;
    sum = mt_add_warp(sum);
    if (lane == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    return mt_add_warp(lane < blockDim.x / 32 ? of_warp[lane] : mt_stats{0, 0});
}

/* Each block stores its share. The last block to do so adds them up, always in the same order. Its
 * increment brings the ticket back to 0, which the next launch needs, or the next replay of a
 * graph. */
MT_INLINE void mt_publish(mt_stats share, mt_stats *stats, uint32_t *ticket) {
    __shared__ bool is_last;
    share = mt_add_block(share);
    if (threadIdx.x == 0) {
        stats[1 + blockIdx.x] = share;
        __threadfence();
        is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    mt_stats sum = {0, 0};
    for (unsigned block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
        const volatile mt_stats &other =
            stats[1 + block]; /* volatile: a cached value may miss other blocks' stores */
        sum.square_sum += other.square_sum;
        sum.n_nonfinite += other.n_nonfinite;
    }
    sum = mt_add_block(sum);
    if (threadIdx.x == 0) {
        stats[0] = sum;
    }
}

/* At least three blocks per multiprocessor: with that, no kernel runs out of registers (sm_80 to
 * sm_100). Most have room for five. */
#define MT_LAUNCH_BOUNDS __launch_bounds__(32 * MT_WARPS, 3)

/* Kernels without and with statistics: MT_KERNEL(name, lane, parameters, arguments), the arguments
 * being mt_here() and parameters. */
#define MT_KERNEL(NAME, LANE, PARAMETERS, ARGUMENTS)                                               \
    extern "C" __global__ void MT_LAUNCH_BOUNDS NAME PARAMETERS {                                  \
        LANE ARGUMENTS;                                                                            \
    }
#define MT_KERNEL_WITH_STATS(NAME, LANE, PARAMETERS, ARGUMENTS)                                    \
    extern "C" __global__ void MT_LAUNCH_BOUNDS NAME PARAMETERS {                                  \
        const mt_stats share = LANE ARGUMENTS;                                                     \
        if (stats) {                                                                               \
            mt_publish(share, stats, ticket);                                                      \
        }                                                                                          \
    }
#endif

#endif
