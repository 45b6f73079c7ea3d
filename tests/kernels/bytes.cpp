/* The conversions to and from 8 bits for tests/kernels/test_bytes.py: as a pack has them, and one
 * by one. With -DFASTCOMM_BYTE_INSTRUCTIONS those of a GPU that has instructions for them. */
#include "cuda/multi_tensor.cuh"

template <class In, class Out, unsigned WIDTH> void convert(const In *in, Out *out, size_t n) {
    for (size_t i = 0; i < n; i += WIDTH) {
        mt_cast_pack(*(const mt_pack<In, WIDTH> *)(in + i), 1, *(mt_pack<Out, WIDTH> *)(out + i));
    }
}

#define CONVERSION(IN, OUT)                                                                        \
    extern "C" void IN##_to_##OUT(const IN *in, OUT *out, size_t n) {                              \
        convert<IN, OUT, 4>(in, out, n);                                                           \
    }                                                                                              \
    extern "C" void IN##_to_##OUT##_singly(const IN *in, OUT *out, size_t n) {                     \
        convert<IN, OUT, 1>(in, out, n);                                                           \
    }
CONVERSION(f32, e4m3)
CONVERSION(f32, e5m2)
CONVERSION(e4m3, f32)
CONVERSION(e5m2, f32)
