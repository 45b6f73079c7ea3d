/* What the kernels of kernels/cuda/ read and write, by their names and their parameters: see
 * cuda_order.h, and fastcomm/transports/cuda/multi_tensor.pyx, which launches them. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/blocks.h"
#include "cuda/multi_tensor.h"
#include "cuda_order.h"

enum { TYPE_BYTES = 8 };

static size_t nbytes_of(const char *type) {
    return strcmp(type, "f64") == 0                                 ? 8
           : strcmp(type, "f32") == 0                               ? 4
           : strcmp(type, "f16") == 0 || strcmp(type, "bf16") == 0  ? 2
           : strcmp(type, "e4m3") == 0 || strcmp(type, "e5m2") == 0 ? 1
                                                                    : 0;
}

/* What a launch moves, from and to: a norm has no flat buffer. */
struct sides {
    char *const *tensors;
    char *flat;
    size_t tensor_nbytes, flat_nbytes; /* of an element */
    bool flattens;
};

/* Adds a range to a list of n, or to its last range if it goes on there. Returns the new n. */
static size_t add(struct range *ranges, size_t n, const struct range range) {
    struct range *last = n > 0 ? &ranges[n - 1] : NULL;
    if (last && (const char *)last->address + last->nbytes == (const char *)range.address) {
        last->nbytes += range.nbytes;
        return n;
    }
    ranges[n] = range;
    return n + 1;
}

static void use_tiles(size_t stream, const char *name, const struct sides *sides,
                      const struct mt_tile *tiles, size_t n_tiles, const struct range *others,
                      size_t n_others) {
    struct range *ranges = malloc((2 * n_tiles + n_others) * sizeof *ranges);
    if (ranges == NULL) {
        abort();
    }
    size_t n = 0;
    for (size_t i = 0; i < n_tiles; i++) {
        const char *tensor = sides->tensors[tiles[i].tensor];
        n = add(ranges, n,
                (struct range){tensor + (size_t)tiles[i].start * MT_TILE * sides->tensor_nbytes,
                               tiles[i].numel * sides->tensor_nbytes,
                               !sides->flattens && sides->flat != NULL});
    }
    struct range *of_flat = ranges + n;
    size_t n_of_flat = 0;
    for (size_t i = 0; i < n_tiles && sides->flat != NULL; i++) {
        n_of_flat = add(of_flat, n_of_flat,
                        (struct range){sides->flat + tiles[i].offset * sides->flat_nbytes,
                                       tiles[i].numel * sides->flat_nbytes, sides->flattens});
    }
    memcpy(of_flat + n_of_flat, others, n_others * sizeof *others);
    stand_in_use(stream, name, ranges, n + n_of_flat + n_others);
    free(ranges);
}

/* The kernels of blocks.cu. parameters: the values, the blocks, how many blocks a row has, and how
 * many values there are; but for decode the bits that tell which are covered; for add the number of
 * rows. */
static void use_blocks(size_t stream, const char *name, void **parameters) {
    const bool encodes = strncmp(name, "encode", strlen("encode")) == 0;
    const bool adds = strncmp(name, "add", strlen("add")) == 0;
    const size_t n_blocks = *(const uint32_t *)parameters[2];
    const size_t numel = *(const uint64_t *)parameters[3], whole = n_blocks * BLOCK_NUMEL;
    const size_t n_rows = adds ? *(const int *)parameters[5] : 1;
    const size_t n_words = (numel + 31) / 32; /* of bits, which decode does not read */
    const struct range ranges[] = {
        {*(void **)parameters[0], (numel < whole ? numel : whole) * sizeof(float), !encodes},
        {*(void **)parameters[1], n_rows * n_blocks * sizeof(struct coded_block), encodes},
        {encodes || adds ? *(void **)parameters[4] : NULL, n_words * sizeof(uint32_t), false},
    };
    stand_in_use(stream, name, ranges, encodes || adds ? 3 : 2);
}

/* parameters: the tensors' addresses, their tiles and how many; but for norm the flat buffer and
 * the scale; for flatten the scale's divisor, for the others the statistics and the count of blocks
 * that are done. */
void order_kernel(size_t stream, const char *name, unsigned n_blocks, void **parameters) {
    if (strstr(name, "_blocks") != NULL) {
        use_blocks(stream, name, parameters);
        return;
    }
    char pass[16], first[TYPE_BYTES], second[TYPE_BYTES];
    int n_parts = sscanf(name, "%15[a-z]_%7[a-z0-9]_%7[a-z0-9]", pass, first, second);
    bool flattens = n_parts == 3 && strcmp(pass, "flatten") == 0;
    bool unflattens = n_parts == 3 && strcmp(pass, "unflatten") == 0;
    if (!flattens && !unflattens && (n_parts != 3 || strcmp(pass, "norm") != 0)) {
        return;
    }
    const struct sides sides = {
        .tensors = parameters[0],
        .flat = flattens || unflattens ? *(char **)parameters[3] : NULL,
        .tensor_nbytes = nbytes_of(unflattens ? second : first),
        .flat_nbytes = nbytes_of(unflattens ? first : second),
        .flattens = flattens,
    };
    const struct mt_tile *tiles = *(const struct mt_tile **)parameters[1];
    const size_t n_tiles = *(const uint32_t *)parameters[2];
    struct range others[3] = {{tiles, n_tiles * sizeof *tiles, false}};
    size_t n_others = 1;
    if (flattens && *(void **)parameters[5] != NULL) {
        others[n_others++] = (struct range){*(void **)parameters[5], sizeof(double), false};
    }
    void **statistics = parameters + (unflattens ? 5 : 3);
    if (!flattens && *(void **)statistics[0] != NULL) {
        others[n_others++] =
            (struct range){*(void **)statistics[0], (1 + n_blocks) * sizeof(struct mt_stats), true};
        others[n_others++] = (struct range){*(void **)statistics[1], sizeof(uint32_t), true};
    }
    use_tiles(stream, name, &sides, tiles, n_tiles, others, n_others);
}
