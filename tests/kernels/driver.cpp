/* Drives the kernels (kernels/cuda/flatten.cu, unflatten.cu, blocks.cu), compiled for the host,
 * without Python, so that they can run under the sanitizers: lane by lane, or with
 * -DFASTCOMM_EMULATED with their own frames.
 *
 *     driver [<blocks> <threads of a block>]
 *
 * Every pair of dtypes in both directions and norm, with odd sizes and all alignments of tensors
 * and flat buffer to each other; a tensor ends where its memory ends, so that AddressSanitizer sees
 * an access behind it. Results are compared with a reference that decodes and rounds numbers by
 * arithmetic in double, not by their bits. Exits with 1 at the first difference. */
#include "cuda/blocks.h"
#include "pairs.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

/* ---- the reference ---- */

/* A dtype: digits after the point, the exponent of the smallest normal number, the largest number,
 * and what is beyond it. */
struct format {
    size_t nbytes;
    int mantissa, min_exponent;
    double largest;
    bool saturates;
};

template <class T> format format_of();
template <> inline format format_of<f64>() {
    return {8, 52, -1022, 0, false};
}
template <> inline format format_of<f32>() {
    return {4, 23, -126, 0x1.fffffep127, false};
}
template <> inline format format_of<f16>() {
    return {2, 10, -14, 65504, false};
}
template <> inline format format_of<bf16>() {
    return {2, 7, -126, 0x1.fep127, false};
}
template <> inline format format_of<e4m3>() {
    return {1, 3, -6, 448, true};
}
template <> inline format format_of<e5m2>() {
    return {1, 2, -14, 57344, false};
}

double decode(const format &f, const char *memory) {
    if (f.nbytes == 8) {
        double value;
        memcpy(&value, memory, sizeof value);
        return value;
    }
    uint32_t bits = 0;
    memcpy(&bits, memory, f.nbytes); /* little-endian */
    const int n_magnitude_bits = 8 * (int)f.nbytes - 1;
    const uint32_t magnitude = bits & ((1u << n_magnitude_bits) - 1);
    const uint32_t field = magnitude >> f.mantissa,
                   last_field = (1u << (n_magnitude_bits - f.mantissa)) - 1;
    const uint32_t digits = magnitude & ((1u << f.mantissa) - 1);
    double value;
    if (field == last_field && !f.saturates) {
        value = digits ? NAN : INFINITY;
    } else if (f.saturates && field == last_field && digits == (1u << f.mantissa) - 1) {
        value = NAN;
    } else {
        const int exponent = f.min_exponent + (field ? (int)field - 1 : 0);
        value =
            std::ldexp((double)(digits + (field ? 1u << f.mantissa : 0)), exponent - f.mantissa);
    }
    return bits >> n_magnitude_bits ? -value : value;
}

double rounded(const format &f, double value) {
    if (f.nbytes == 8 || value == 0 || std::isnan(value)) {
        return value;
    }
    double result = value;
    if (std::isfinite(value)) {
        const int exponent = std::max(std::ilogb(value), f.min_exponent) - f.mantissa;
        result = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
    }
    return std::fabs(result) <= f.largest
               ? result
               : std::copysign(f.saturates ? f.largest : INFINITY, value);
}

/* What the cast of one number with this scale should give: in float, or in double where one of the
 * two is. */
double cast(const format &in, const format &out, double value, double scale) {
    if (in.nbytes == 8 || out.nbytes == 8) {
        const double product = value * scale;
        return rounded(out, out.nbytes < 4 ? (double)(float)product : product);
    }
    return rounded(out, (double)((float)value * (float)scale));
}

bool is_same(double a, double b) {
    return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

/* ---- memory ---- */

/* Elements that begin `past` elements after an aligned address and end with their memory. */
struct array {
    format dtype;
    size_t past, numel;
    std::unique_ptr<char[]> memory;

    array(const format &dtype, size_t numel, size_t past)
        : dtype(dtype), past(past), numel(numel),
          memory(new char[(past + numel) * dtype.nbytes]()) {
    }
    char *begin() const {
        return memory.get() + past * dtype.nbytes;
    }
    double operator[](size_t i) const {
        return decode(dtype, begin() + i * dtype.nbytes);
    }
    /* Random bits: numbers of all sizes, subnormals, infinities, NaNs. */
    void fill(uint64_t &state) {
        for (size_t i = 0; i < numel * dtype.nbytes; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            begin()[i] = (char)(state >> 56);
        }
    }
};

[[noreturn]] void fail(const char *kernel, size_t tensor, size_t i, double actual,
                       double expected) {
    fprintf(stderr, "%s: element %zu of tensor %zu is %.17g instead of %.17g\n", kernel, i, tensor,
            actual, expected);
    exit(1);
}

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

    bucket(const format &grad, size_t past) {
        for (size_t size : SIZES) {
            tensors.emplace_back(grad, size, past);
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

void check_statistics(const char *name, const bucket &of, const mt_stats &stats, uint32_t ticket) {
    uint64_t n_nonfinite = 0;
    double square_sum = 0;
    for (const array &tensor : of.tensors) {
        for (size_t i = 0; i < tensor.numel; i++) {
            n_nonfinite += !std::isfinite(tensor[i]);
            square_sum += tensor[i] * tensor[i];
        }
    }
    const bool is_close = !std::isfinite(square_sum) ||
                          std::isinf(stats.square_sum) || /* squares overflow sooner in float */
                          std::fabs(stats.square_sum - square_sum) <= 1e-5 * square_sum;
    if (stats.n_nonfinite != n_nonfinite || !is_close || ticket != 0) {
        fprintf(stderr, "%s: statistics %.17g, %lu instead of %.17g, %lu; ticket %u\n", name,
                stats.square_sum, (unsigned long)stats.n_nonfinite, square_sum,
                (unsigned long)n_nonfinite, ticket);
        exit(1);
    }
}

void check_pair(const char *name, const format &grad, const format &wire, kernel *flatten,
                kernel *unflatten, kernel *norm, size_t past_grad, size_t past_wire, double scale,
                uint64_t &state) {
    bucket grads(grad, past_grad);
    array flat(wire, grads.numel, past_wire);
    void *flat_begin = flat.begin();
    for (array &tensor : grads.tensors) {
        tensor.fill(state);
    }
    /* Half of the pairs divide by a number in memory: 1, which changes no bit. */
    double one = 1, *divisor = past_grad % 2 ? &one : nullptr;
    grads.launch(flatten, {&flat_begin, &scale, &divisor});
    for (size_t t = 0; t < grads.tensors.size(); t++) {
        for (size_t i = 0; i < SIZES[t]; i++) {
            const double expected = cast(grad, wire, grads.tensors[t][i], scale),
                         actual = flat[grads.offsets[t] + i];
            if (!is_same(actual, expected)) {
                fail(name, t, i, actual, expected);
            }
        }
    }

    std::vector<mt_stats> stats(1 + n_blocks);
    mt_stats *stats_begin = stats.data();
    uint32_t ticket = 0, *ticket_pointer = &ticket;
    flat.fill(state);
    grads.launch(unflatten, {&flat_begin, &scale, &stats_begin, &ticket_pointer});
    for (size_t t = 0; t < grads.tensors.size(); t++) {
        for (size_t i = 0; i < SIZES[t]; i++) {
            const double expected = cast(wire, grad, flat[grads.offsets[t] + i], scale),
                         actual = grads.tensors[t][i];
            if (!is_same(actual, expected)) {
                fail(name, t, i, actual, expected);
            }
        }
    }
    check_statistics(name, grads, stats[0], ticket);
    grads.launch(norm, {&stats_begin, &ticket_pointer});
    check_statistics(name, grads, stats[0], ticket);
}

/* Two ranks' values there and back; everything ends where its memory ends. */
void check_blocks(kernel *encode, kernel *add, kernel *decode) {
    for (uint64_t numel : {1, 130, 256, 257, 3000}) {
        uint32_t n = (uint32_t)(numel + BLOCK_NUMEL - 1) / BLOCK_NUMEL;
        std::vector<uint32_t> covered((numel + 31) / 32, ~0u);
        std::vector<float> first(numel), second(numel);
        for (uint64_t i = 0; i < numel; i++) {
            first[i] = (float)(i % 201) - 100;
            second[i] = (float)(i % 127) / 2;
        }
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
        for (uint64_t i = 0; i < numel; i++) {
            const double expected = first[i] + (float)(i % 127) / 2;
            if (!(std::fabs(second[i] - expected) <= (100 + 163) / 127.0)) {
                fail("blocks", numel, i, second[i], expected);
            }
        }
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
#define CHECK_PAIR(GRAD, WIRE, CAPACITY)                                                           \
    n_kernels++;                                                                                   \
    for (size_t past : PASTS) {                                                                    \
        for (double scale : SCALES) {                                                              \
            check_pair(#GRAD " and " #WIRE ", " #CAPACITY, format_of<GRAD>(), format_of<WIRE>(),   \
                       MT_ON_HOST(flatten_##GRAD##_##WIRE##_##CAPACITY),                           \
                       MT_ON_HOST(unflatten_##WIRE##_##GRAD##_##CAPACITY),                         \
                       MT_ON_HOST(norm_##GRAD##_##CAPACITY), past, past * (size_t)scale, scale,    \
                       state);                                                                     \
        }                                                                                          \
    }
    MT_PAIRS(CHECK_PAIR)
    check_blocks(MT_ON_HOST(encode_blocks), MT_ON_HOST(add_blocks), MT_ON_HOST(decode_blocks));
    printf("kernels: %d pairs of dtypes and capacities\n", n_kernels);
}
