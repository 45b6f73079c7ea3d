/* The kernels for the emulator, with their own frames (-DFASTCOMM_HOST -DFASTCOMM_EMULATED), and
 * for each of them a function emulated_<name>(n_blocks, n_threads, parameters), with the parameters
 * as cuLaunchKernel takes them. */
#include "pairs.h"

#include "cuda/blocks.cu"
#include "cuda/flatten.cu"
#include "cuda/unflatten.cu"

#define DEFINE(KERNEL)                                                                             \
    extern "C" void MT_ON_HOST(KERNEL)(unsigned n_blocks, unsigned n_threads, void **parameters) { \
        emulator_launch(KERNEL, n_blocks, n_threads, parameters);                                  \
    }
#define DEFINE_PAIR(GRAD, WIRE, CAPACITY)                                                          \
    DEFINE(flatten_##GRAD##_##WIRE##_##CAPACITY) DEFINE(unflatten_##WIRE##_##GRAD##_##CAPACITY)
#define DEFINE_NORM(GRAD, CAPACITY) DEFINE(norm_##GRAD##_##CAPACITY)
MT_PAIRS(DEFINE_PAIR)
MT_GRADS(DEFINE_NORM)
DEFINE(encode_blocks) DEFINE(add_blocks) DEFINE(decode_blocks)
