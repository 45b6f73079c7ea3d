/* Drives the kernels (kernels/cuda/flatten.cu, unflatten.cu, blocks.cu), compiled for the host,
 * without Python, so that they can run under the sanitizers: lane by lane, or with
 * -DFASTCOMM_EMULATED with their own frames.
 *
 *     driver [<blocks> <threads of a block>]
 *
 * Every pair of dtypes in both directions and norm, with odd sizes and all alignments of tensors
 * and flat buffer to each other; a tensor ends where its memory ends, so that AddressSanitizer sees
 * an access behind it. What the results should be is in test_kernels.py and test_frames.py. */
#include "cuda/blocks.h"
#include "pairs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

/* ---- memory ---- */

/* Elements that begin `past` elements after an aligned address and end with their memory. */
struct array {
    size_t itemsize, past, numel;
    std::unique_ptr<char[]> memory;

    array(size_t itemsize, size_t numel, size_t past)
        : itemsize(itemsize), past(past), numel(numel),
          memory(new char[(past + numel) * itemsize]()) {
    }
    char *begin() const {
        return memory.get() + past * itemsize;
    }
    /* Random bits: numbers of all sizes, subnormals, infinities, NaNs. */
    void fill(uint64_t &state) {
        for (size_t i = 0; i < numel * itemsize; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            begin()[i] = (char)(state >> 56);
        }
    }
};

/* ---- one bucket: there, back, norm ---- */

const size_t SIZES[] = {1, 2, 0, 7, 15, 33, 2047, 2048, 2049, 4500};
#ifdef FEW_PAIRS /* and few launches */
const size_t PASTS[] = {3};
const double SCALES[] = {1.0};
#else
const size_t PASTS[] = {0, 1, 3, 6};
const double SCALES[] = {1.0, 0.1};
#endif
unsigned n_blocks = 3, n_threads = 32 * MT_WARPS;

typedef void kernel(unsigned n_blocks, unsigned n_threads, void **parameters);

/* Tensors lie one after the other in the flat buffer, with no room between them. */
void run(kernel *call, std::vector<void *> arguments) {
    call(n_blocks, n_threads, arguments.data());
#ifdef FASTCOMM_EMULATED
    if (emulator_error()) {
        fprintf(stderr, "%s\n", emulator_error());
        exit(1);
    }
#endif
}

struct bucket {
    std::vector<array> tensors;
    std::vector<size_t> offsets;
    std::vector<mt_tile> tiles;
    void *pointers[MT_LARGE] = {};
    size_t numel = 0;

    bucket(size_t itemsize, size_t past) {
        for (size_t size : SIZES) {
            tensors.emplace_back(itemsize, size, past);
            pointers[offsets.size()] = tensors.back().begin();
            for (size_t start = 0; start < size; start += MT_TILE) {
                const size_t tile_numel = std::min<size_t>(MT_TILE, size - start);
                tiles.push_back({numel + start, (uint32_t)(start / MT_TILE),
                                 (uint16_t)offsets.size(), (uint16_t)tile_numel});
            }
            offsets.push_back(numel);
            numel += size;
        }
    }

    void launch(kernel *call, std::vector<void *> arguments) {
        mt_tile *table = tiles.data();
        uint32_t n_tiles = (uint32_t)tiles.size();
        arguments.insert(arguments.begin(), {(void *)pointers, (void *)&table, (void *)&n_tiles});
        run(call, arguments);
    }
};

void run_pair(size_t grad_nbytes, size_t wire_nbytes, kernel *flatten, kernel *unflatten,
              kernel *norm, size_t past_grad, size_t past_wire, double scale, uint64_t &state) {
    bucket grads(grad_nbytes, past_grad);
    array flat(wire_nbytes, grads.numel, past_wire);
    void *flat_begin = flat.begin();
    for (array &tensor : grads.tensors) {
        tensor.fill(state);
    }
    double divisor = 2, *divisor_pointer = past_grad % 2 ? &divisor : nullptr;
    grads.launch(flatten, {&flat_begin, &scale, &divisor_pointer});
    std::vector<mt_stats> stats(1 + n_blocks);
    mt_stats *stats_begin = stats.data();
    uint32_t ticket = 0, *ticket_pointer = &ticket;
    flat.fill(state);
    grads.launch(unflatten, {&flat_begin, &scale, &stats_begin, &ticket_pointer});
    grads.launch(norm, {&stats_begin, &ticket_pointer});
}

/* Two ranks' values there and back; everything ends where its memory ends. */
void run_blocks(kernel *encode, kernel *add, kernel *decode) {
    for (uint64_t numel : {1, 130, 256, 257, 3000}) {
        uint32_t n = (uint32_t)(numel + BLOCK_NUMEL - 1) / BLOCK_NUMEL;
        std::vector<uint32_t> covered((numel + 31) / 32, ~0u);
        std::vector<float> first(numel, 3), second(numel, -1);
        std::vector<coded_block> rows(2 * n), sum(n);
        const uint32_t *bits = covered.data();
        float *values[] = {first.data(), second.data()};
        coded_block *row[] = {rows.data(), rows.data() + n, sum.data()};
        int n_rows = 2, own = 1, op = 0;
        for (int rank = 0; rank < 2; rank++) {
            run(encode, {&values[rank], &row[rank], &n, &numel, &bits});
        }
        run(add, {&values[1], &row[0], &n, &numel, &bits, &n_rows, &own, &op});
        run(encode, {&values[1], &row[2], &n, &numel, &bits});
        run(decode, {&values[1], &row[2], &n, &numel});
    }
}

} // namespace

extern "C" kernel MT_ON_HOST(encode_blocks), MT_ON_HOST(add_blocks), MT_ON_HOST(decode_blocks);
#define DECLARE_PAIR(GRAD, WIRE, CAPACITY)                                                         \
    extern "C" kernel MT_ON_HOST(flatten_##GRAD##_##WIRE##_##CAPACITY),                            \
        MT_ON_HOST(unflatten_##WIRE##_##GRAD##_##CAPACITY);
MT_PAIRS(DECLARE_PAIR)
#define DECLARE_NORM(GRAD, CAPACITY) extern "C" kernel MT_ON_HOST(norm_##GRAD##_##CAPACITY);
MT_GRADS(DECLARE_NORM)

int main(int argc, char **argv) {
    uint64_t state = 1;
    if (argc == 3) {
        n_blocks = (unsigned)atoi(argv[1]);
        n_threads = (unsigned)atoi(argv[2]);
    }
    int n_kernels = 0;
#define RUN_PAIR(GRAD, WIRE, CAPACITY)                                                             \
    n_kernels++;                                                                                   \
    for (size_t past : PASTS) {                                                                    \
        for (double scale : SCALES) {                                                              \
            run_pair(sizeof(GRAD), sizeof(WIRE), MT_ON_HOST(flatten_##GRAD##_##WIRE##_##CAPACITY), \
                     MT_ON_HOST(unflatten_##WIRE##_##GRAD##_##CAPACITY),                           \
                     MT_ON_HOST(norm_##GRAD##_##CAPACITY), past, past * (size_t)scale, scale,      \
                     state);                                                                       \
        }                                                                                          \
    }
    MT_PAIRS(RUN_PAIR)
    run_blocks(MT_ON_HOST(encode_blocks), MT_ON_HOST(add_blocks), MT_ON_HOST(decode_blocks));
    printf("kernels: %d pairs of dtypes and capacities\n", n_kernels);
}
