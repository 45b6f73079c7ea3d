/* A block of the wire of 8 bits as it travels: shared by the kernels (blocks.cu) and by
 * fastcomm/transports/cuda/blocks.pyx, which launches them. */
#ifndef FASTCOMM_BLOCKS_H
#define FASTCOMM_BLOCKS_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#endif

#define BLOCK_NUMEL 256 /* 8 elements for each lane of a warp */

/* 260 bytes, aligned to 4. */
struct coded_block {
    float scale;
    uint8_t element[BLOCK_NUMEL];
};

#endif
