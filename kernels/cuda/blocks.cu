/* The wire of 8 bits: float32 numbers in blocks of 256, each with a scale by which its largest
 * magnitude is 127, as between hosts and with the same bits: see kernels/wire/blocks.h.
 *
 *     encode_blocks(values, blocks, n_blocks, numel, covered)
 *     add_blocks(values, blocks, n_blocks, numel, covered, n_rows, own, op)
 *     decode_blocks(values, blocks, n_blocks, numel)
 *
 * The values are numel float32 numbers, aligned to 16 bytes; the last blocks may lie behind their
 * end, in part or altogether: there are zeros, and nothing is written there. `covered` has a bit
 * for each value, the lowest first: without it zero is read, whatever lies there. So what lies
 * between gradients, a NaN perhaps, does not reach the scale of their block. */
#include "multi_tensor.cuh"

#include "blocks.h"

/* A lane's elements of a block: four of its first half, and four of its second. */
struct block_part {
    mt_pack<f32, 4> half[2];
};

MT_INLINE uint64_t place_of(uint64_t block, uint32_t half, uint32_t lane) {
    return block * BLOCK_NUMEL + half * (BLOCK_NUMEL / 2) + 4 * lane;
}

MT_INLINE block_part load_part(const float *values, const uint32_t *covered, uint64_t numel,
                               uint64_t block, uint32_t lane) {
    block_part part = {};
    MT_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
        const uint64_t at = place_of(block, half, lane);
        mt_pack<f32, 4> &pack = part.half[half];
        if (at >= numel) {
            continue;
        }
        if (at + 4 <= numel) {
            pack = *(const mt_pack<f32, 4> *)(values + at);
        } else {
            for (uint32_t i = 0; at + i < numel; i++) {
                pack.element[i] = values[at + i];
            }
        }
        const uint32_t bits = covered[at / 32] >> (at % 32);
        for (uint32_t i = 0; i < 4; i++) {
            pack.element[i] = bits >> i & 1u ? pack.element[i] : 0;
        }
    }
    return part;
}

MT_INLINE void store_part(const block_part &part, float *values, uint64_t numel, uint64_t block,
                          uint32_t lane) {
    MT_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
        const uint64_t at = place_of(block, half, lane);
        if (at + 4 <= numel) {
            *(mt_pack<f32, 4> *)(values + at) = part.half[half];
            continue;
        }
        for (uint32_t i = 0; i < 4; i++) {
            if (at + i < numel) {
                values[at + i] = part.half[half].element[i];
            }
        }
    }
}

/* The bits of the largest magnitude; a NaN's are larger than any number's. */
MT_INLINE uint32_t largest_of(const block_part &part) {
    uint32_t largest = 0;
    MT_UNROLL
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t bits = mt_bits_of_float(part.half[i / 4].element[i % 4]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* No scale is smaller than the smallest normal number: it would lose its own bits. */
MT_INLINE float scale_of(uint32_t largest) {
    const float scale = mt_float_of_bits(largest) / 127.0f;
    return largest >= 0x7f800000u ? mt_float_of_bits(0x7fc00000u)
           : scale < 0x1p-126f    ? 0x1p-126f
                                  : scale;
}

/* Rounds to an integer, in the middle to the even one: the last bits of the sum hold it. */
MT_INLINE uint8_t encoded(float value, float scale) {
    return scale == scale ? (uint8_t)mt_bits_of_float(value / scale + 0x1.8p23f) : 0;
}

MT_INLINE float decoded(uint8_t element, float scale) {
    return mt_product((float)(signed char)element, scale);
}

MT_INLINE block_part decode_part(const coded_block &block, uint32_t lane) {
    block_part part;
    MT_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
        const auto elements =
            *(const mt_pack<uint8_t, 4> *)(block.element + place_of(0, half, lane));
        for (uint32_t i = 0; i < 4; i++) {
            part.half[half].element[i] = decoded(elements.element[i], block.scale);
        }
    }
    return part;
}

/* op: NCCL's number. A NaN makes a NaN of everything. */
MT_INLINE float combined(float a, float b, int op) {
    switch (op) {
    case 0:
        return a + b;
    case 1:
        return mt_product(a, b);
    case 2:
        return b > a || b != b ? b : a;
    default:
        return b < a || b != b ? b : a;
    }
}

/* Block: 32 * MT_WARPS threads. Grid: any; a warp takes every n-th block of the wire. Moves 4 bytes
 * of each element in and 1.02 out: bandwidth-bound. */
MT_INLINE void encode_lane(mt_place place, const float *values, coded_block *blocks,
                           uint32_t n_blocks, uint64_t numel, const uint32_t *covered) {
    for (uint32_t b = place.warp; b < n_blocks; b += place.n_warps) {
        const block_part part = load_part(values, covered, numel, b, place.lane);
        const uint32_t largest = mt_most_in_warp(largest_of(part), [&](uint32_t lane) {
            return largest_of(load_part(values, covered, numel, b, lane));
        });
        const float scale = scale_of(largest);
        if (place.lane == 0) {
            blocks[b].scale = scale;
        }
        MT_UNROLL
        for (uint32_t half = 0; half < 2; half++) {
            mt_pack<uint8_t, 4> elements;
            for (uint32_t i = 0; i < 4; i++) {
                elements.element[i] = encoded(part.half[half].element[i], scale);
            }
            *(mt_pack<uint8_t, 4> *)(blocks[b].element + place_of(0, half, place.lane)) = elements;
        }
    }
}

/* Reduces n_rows ranks' rows of n_blocks in the order of the ranks, into `values`, which are row
 * `own`: what lies there in `blocks` is not read. Block and grid: as encode_lane. Moves 8 bytes of
 * each element, and 1.02 of each of another row. */
MT_INLINE void add_lane(mt_place place, float *values, const coded_block *blocks, uint32_t n_blocks,
                        uint64_t numel, const uint32_t *covered, int n_rows, int own, int op) {
    for (uint32_t b = place.warp; b < n_blocks; b += place.n_warps) {
        block_part total = {};
        for (int row = 0; row < n_rows; row++) {
            const block_part part =
                row == own ? load_part(values, covered, numel, b, place.lane)
                           : decode_part(blocks[(uint64_t)row * n_blocks + b], place.lane);
            MT_UNROLL
            for (uint32_t i = 0; i < 8; i++) {
                const float more = part.half[i / 4].element[i % 4];
                float &sum = total.half[i / 4].element[i % 4];
                sum = row == 0 ? more : combined(sum, more, op);
            }
        }
        store_part(total, values, numel, b, place.lane);
    }
}

/* Block, grid and bytes moved: as encode_lane, in the other direction. */
MT_INLINE void decode_lane(mt_place place, float *values, const coded_block *blocks,
                           uint32_t n_blocks, uint64_t numel) {
    for (uint32_t b = place.warp; b < n_blocks; b += place.n_warps) {
        store_part(decode_part(blocks[b], place.lane), values, numel, b, place.lane);
    }
}

MT_KERNEL(encode_blocks, encode_lane,
          (const float *values, coded_block *blocks, uint32_t n_blocks, uint64_t numel,
           const uint32_t *covered),
          (mt_here(), values, blocks, n_blocks, numel, covered))
MT_KERNEL(add_blocks, add_lane,
          (float *values, const coded_block *blocks, uint32_t n_blocks, uint64_t numel,
           const uint32_t *covered, int n_rows, int own, int op),
          (mt_here(), values, blocks, n_blocks, numel, covered, n_rows, own, op))
MT_KERNEL(decode_blocks, decode_lane,
          (float *values, const coded_block *blocks, uint32_t n_blocks, uint64_t numel),
          (mt_here(), values, blocks, n_blocks, numel))
