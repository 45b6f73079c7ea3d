/* Codecs of 8 bits with a scale per block: the arithmetic of fastcomm/transports/group/wire.pyx. It
 * knows nothing of ranks or networks. Plain C11.
 *
 * A block of WIRE_BLOCK float32 numbers becomes as many elements of 8 bits and one float32 scale,
 * by which the largest magnitude of the block is the format's largest number. A block with an
 * infinity or a NaN has a NaN for its scale, and decodes to NaNs altogether. */
#ifndef FASTCOMM_WIRE_BLOCKS_H
#define FASTCOMM_WIRE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

enum { WIRE_BLOCK = 256 };

enum wire_format { WIRE_INT8, WIRE_FLOAT8 /* e4m3fn */ };

/* Every array has n_blocks * WIRE_BLOCK elements, but for `scales`, which has n_blocks. No two of
 * them overlap. */

/* Encodes values + residual, and leaves what that has dropped in `residual`, zero where it is not
 * finite. `residual` may be NULL: then encodes the values. */
void wire_encode(enum wire_format format, size_t n_blocks, const float *values, float *residual,
                 uint8_t *elements, float *scales);

/* values = what the elements stand for */
void wire_decode(enum wire_format format, size_t n_blocks, const uint8_t *elements,
                 const float *scales, float *values);

/* totals = totals + what the elements stand for */
void wire_accumulate(enum wire_format format, size_t n_blocks, const uint8_t *elements,
                     const float *scales, float *totals);

#endif
