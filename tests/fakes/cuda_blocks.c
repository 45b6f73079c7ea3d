/* What torch's caching allocator does with the memory of tensors, for the stand-in for the CUDA
 * driver. A block belongs to the stream on which it was allocated. When its tensor is dropped the
 * host does not wait: the next tensor of that stream gets it. See cuda_order.h. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "cuda_order.h"

enum { ALIGNMENT = 512, ON_CPU = 1, UNSIGNED = 1, BITS_OF_A_WORD = 64 };

_Static_assert((int)CLOCKS <= (int)BITS_OF_A_WORD, "a bit for each clock");

/* DLPack's structures: https://dmlc.github.io/dlpack */
struct tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t n_dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t offset;
};

struct managed {
    struct tensor tensor;
    void *context;
    void (*deleter)(struct managed *);
};

struct block {
    struct managed managed;
    int64_t nbytes;
    size_t stream;
    uint64_t recorded; /* numbers of the streams it was recorded for */
    struct block *next;
};

static struct block *blocks;

/* Torch may drop a tensor on any thread. */
static void free_block(struct managed *managed) {
    struct block *block = managed->context;
    char who[96];
    snprintf(who, sizeof who, "the next tensor of stream 0x%zx gets them", block->stream);
    order_lock();
    struct clock known = known_to_stream(block->stream);
    for (size_t stream = 0; stream < CLOCKS; stream++) {
        if (block->recorded >> stream & 1) {
            const struct clock other = known_to_stream(stream);
            join(&known, &other);
        }
    }
    ranges_free(&known, who, block->managed.tensor.data, (size_t)block->nbytes);
    struct block **link = &blocks;
    while (*link != block) {
        link = &(*link)->next;
    }
    *link = block->next;
    order_unlock();
    free(block->managed.tensor.data);
    free(block);
}

void *stand_in_block(size_t stream, size_t nbytes) {
    struct block *block = calloc(1, sizeof *block);
    void *data = aligned_alloc(ALIGNMENT, (nbytes / ALIGNMENT + 1) * ALIGNMENT);
    if (block == NULL || data == NULL) {
        free(block);
        free(data);
        return NULL;
    }
    *block = (struct block){.nbytes = (int64_t)nbytes, .stream = stream};
    block->managed = (struct managed){
        .tensor = {.data = data,
                   .device_type = ON_CPU,
                   .n_dimensions = 1,
                   .code = UNSIGNED,
                   .bits = 8,
                   .lanes = 1,
                   .shape = &block->nbytes},
        .context = block,
        .deleter = free_block,
    };
    order_lock();
    ranges_forget(data, nbytes);
    block->next = blocks;
    blocks = block;
    order_unlock();
    return &block->managed;
}

int stand_in_record_stream(const void *address, size_t stream) {
    bool found = false;
    order_lock();
    for (struct block *block = blocks; block != NULL && !found; block = block->next) {
        const char *data = block->managed.tensor.data;
        found = (const char *)address >= data && (const char *)address < data + block->nbytes;
        block->recorded |= found ? UINT64_C(1) << (stream % CLOCKS) : 0;
    }
    order_unlock();
    return found;
}
