/* The kernels by their names, which do nothing: what a launch takes is then the host's own. */
#include "cuda/multi_tensor.cuh"

#define NOTHING(NAME)                                                                              \
    extern "C" void NAME(unsigned, unsigned, void **) {                                            \
    }
#define NO_PAIR(GRAD, WIRE, CAPACITY)                                                              \
    NOTHING(flatten_##GRAD##_##WIRE##_##CAPACITY)                                                  \
    NOTHING(unflatten_##WIRE##_##GRAD##_##CAPACITY)
#define NO_NORM(GRAD, CAPACITY) NOTHING(norm_##GRAD##_##CAPACITY)
MT_PAIRS(NO_PAIR)
MT_GRADS(NO_NORM)
NOTHING(encode_blocks) NOTHING(add_blocks) NOTHING(decode_blocks)
