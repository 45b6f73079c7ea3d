/* The reverse of flatten.cu: scatters a bucket's flat buffer into its tensors, times a scale. If
 * `stats` is not null, it also computes the sum of squares and the number of non-finite elements of
 * what it writes. Where gradients are views of the flat buffer, there is nothing to scatter; norm_*
 * computes the same statistics of them:
 *
 *     unflatten_<wire>_<grad>_<capacity>(pointers, tiles, n_tiles, flat, scale, stats, ticket)
 *     norm_<grad>_<capacity>(pointers, tiles, n_tiles, stats, ticket)
 *
 * `ticket` counts the blocks that are done; it is 0 before and after a launch. The statistics of
 * launches with the same grid are the same to the bit. */
#include "multi_tensor.cuh"

/* Block, grid, alignment and bytes moved: as flatten_lane in flatten.cu, in the other direction. */
template <class Wire, class Grad, int CAPACITY>
MT_INLINE mt_stats unflatten_lane(mt_place place, const mt_pointers<CAPACITY> &pointers,
                                  const mt_tile *tiles, uint32_t n_tiles, const void *flat,
                                  double scale) {
    mt_copying_and_summing<Wire, Grad> action = {(mt_wide<Wire, Grad>)scale, {}};
    mt_tile tile;
    for (mt_tile_walk walk(place, tiles, n_tiles); walk.advance(tile); action.sums.end_tile()) {
        Grad *out = (Grad *)pointers.tensor[tile.tensor] + (size_t)MT_TILE * tile.start;
        mt_walk_tile((const Wire *)flat + tile.offset, out, tile.numel, place.lane, action);
    }
    return action.sums.share();
}

/* Block and grid: as flatten_lane in flatten.cu. 16-byte loads from the first element aligned to 16
 * bytes. Reads numel * sizeof(Grad) bytes: bandwidth-bound. */
template <class Grad, int CAPACITY>
MT_INLINE mt_stats norm_lane(mt_place place, const mt_pointers<CAPACITY> &pointers,
                             const mt_tile *tiles, uint32_t n_tiles) {
    mt_summing<Grad> action;
    mt_tile tile;
    for (mt_tile_walk walk(place, tiles, n_tiles); walk.advance(tile); action.sums.end_tile()) {
        Grad *in = (Grad *)pointers.tensor[tile.tensor] + (size_t)MT_TILE * tile.start;
        mt_walk_tile(in, in, tile.numel, place.lane, action);
    }
    return action.sums.share();
}

#define UNFLATTEN(GRAD, WIRE, CAPACITY)                                                            \
    MT_KERNEL_WITH_STATS(                                                                          \
        unflatten_##WIRE##_##GRAD##_##CAPACITY, (unflatten_lane<WIRE, GRAD, CAPACITY>),            \
        (const __grid_constant__ mt_pointers<CAPACITY> pointers, const mt_tile *tiles,             \
         uint32_t n_tiles, const void *flat, double scale, mt_stats *stats, uint32_t *ticket),     \
        (mt_here(), pointers, tiles, n_tiles, flat, scale))
MT_PAIRS(UNFLATTEN)

#define NORM(GRAD, CAPACITY)                                                                       \
    MT_KERNEL_WITH_STATS(norm_##GRAD##_##CAPACITY, (norm_lane<GRAD, CAPACITY>),                    \
                         (const __grid_constant__ mt_pointers<CAPACITY> pointers,                  \
                          const mt_tile *tiles, uint32_t n_tiles, mt_stats *stats,                 \
                          uint32_t *ticket),                                                       \
                         (mt_here(), pointers, tiles, n_tiles))
MT_GRADS(NORM)
