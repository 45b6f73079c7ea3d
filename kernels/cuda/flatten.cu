/* Gathers the tensors of one bucket into its flat buffer, times a scale, in the dtype that goes
 * over the wire:
 *
 *     flatten_<grad>_<wire>_<capacity>(pointers, tiles, n_tiles, flat, scale, divisor)
 *
 * The scale is divided by the number at `divisor`, which another kernel may compute, unless that is
 * NULL; where the number is 0, the scale is 0. One launch takes up to `capacity` tensors. With
 * equal dtypes the tensors may be views of the flat buffer, which are then scaled in place. */
#include "multi_tensor.cuh"

/* Block: 32 * MT_WARPS threads. Grid: any; a warp takes every n-th tile, so a few blocks per
 * multiprocessor are enough for all tiles. Tensors and `flat` need the alignment of their elements;
 * loads and stores take 16 bytes where a tensor and its slot in `flat` are aligned alike (layout.py
 * pads, allocators align). Moves numel * (sizeof(Grad) + sizeof(Wire)) bytes: bandwidth-bound. */
template <class Grad, class Wire, int CAPACITY>
MT_INLINE void flatten_lane(mt_place place, const mt_pointers<CAPACITY> &pointers,
                            const mt_tile *tiles, uint32_t n_tiles, void *flat, double scale,
                            const double *divisor) {
    if (divisor) {
        scale = *divisor > 0 ? scale / *divisor : 0;
    }
    mt_copying<Grad, Wire> action = {(mt_wide<Grad, Wire>)scale};
    mt_tile tile;
    for (mt_tile_walk walk(place, tiles, n_tiles); walk.advance(tile);) {
        const Grad *in = (const Grad *)pointers.tensor[tile.tensor] + (size_t)MT_TILE * tile.start;
        mt_walk_tile(in, (Wire *)flat + tile.offset, tile.numel, place.lane, action);
    }
}

#define FLATTEN(GRAD, WIRE, CAPACITY)                                                              \
    MT_KERNEL(flatten_##GRAD##_##WIRE##_##CAPACITY, (flatten_lane<GRAD, WIRE, CAPACITY>),          \
              (const __grid_constant__ mt_pointers<CAPACITY> pointers, const mt_tile *tiles,       \
               uint32_t n_tiles, void *flat, double scale, const double *divisor),                 \
              (mt_here(), pointers, tiles, n_tiles, flat, scale, divisor))
MT_PAIRS(FLATTEN)
