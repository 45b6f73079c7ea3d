/* The dtypes of 8 bits: their conversions to and from float. Part of multi_tensor.cuh, which
 * includes it. GPUs of compute capability 8.9 on convert by instructions (8.9 only where CuPy
 * compiles: the package has sm_80's code for it), the others compute the same. */
#ifndef FASTCOMM_BYTES_CUH
#define FASTCOMM_BYTES_CUH

#if !defined(FASTCOMM_HOST) && __CUDA_ARCH__ >= 890 /* on the host: in host_shim.h */
#define MT_CONVERTS_BYTES
/* Two at a time. The instruction's second operand goes into the lower byte. */
MT_INLINE uint16_t mt_e4m3s_of_floats(float low, float high) {
    uint16_t bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
}
MT_INLINE uint16_t mt_saturated_e5m2s_of_floats(float low, float high) {
    uint16_t bytes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
    return bytes;
}
MT_INLINE uint32_t mt_halves_of_e4m3s(uint16_t bytes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
    return halves;
}
#endif

MT_INLINE float mt_widen(e5m2 x) { /* the first byte of a half */
    return mt_float_of_half((uint16_t)(x.bits << 8));
}

/* Eight-bit floats as torch makes them: rounded to nearest even, e4m3 saturates, of infinity too;
 * e5m2 overflows to infinity; NaN stays NaN. */
#ifdef MT_CONVERTS_BYTES
struct mt_floats {
    float low, high;
};
/* Every e4m3 is a half, too. */
MT_INLINE mt_floats mt_floats_of_bytes(uint16_t bytes, e4m3) {
    const uint32_t halves = mt_halves_of_e4m3s(bytes);
    return {mt_float_of_half((uint16_t)halves), mt_float_of_half((uint16_t)(halves >> 16))};
}
MT_INLINE mt_floats mt_floats_of_bytes(uint16_t bytes, e5m2) {
    return {mt_float_of_half((uint16_t)(bytes << 8)), mt_float_of_half(bytes & 0xff00u)};
}
MT_INLINE float mt_widen(e4m3 x) {
    return mt_floats_of_bytes(x.bits, x).low;
}
/* By the PTX ISA's words on cvt the instruction does the same for every float. .rn rounds to
 * nearest even, subnormals too, and keeps the sign of zero. .satfinite makes the largest number of
 * what is larger, infinity included: for e4m3 as it should be. e5m2 should become infinity, 0x7c,
 * from 61440 on, the middle between the largest number, 0x7b, and what would be the next; so 1 is
 * added to the code there. (Non-finite gradients are counted by that infinity.) NaN becomes NaN,
 * and is not above 61440. Its sign is lost, as any NaN's is in the product before. */
MT_INLINE uint32_t mt_overflows_e5m2(float value) {
    return mt_float_of_bits(mt_bits_of_float(value) & 0x7fffffffu) >= 61440.0f;
}
MT_INLINE uint16_t mt_bytes_of_floats(float low, float high, e4m3) {
    return mt_e4m3s_of_floats(low, high);
}
MT_INLINE uint16_t mt_bytes_of_floats(float low, float high, e5m2) {
    return (uint16_t)(mt_saturated_e5m2s_of_floats(low, high) + mt_overflows_e5m2(low) +
                      (mt_overflows_e5m2(high) << 8));
}
MT_INLINE void mt_narrow(float value, e4m3 &x) {
    x.bits = (uint8_t)mt_bytes_of_floats(value, 0, x);
}
MT_INLINE void mt_narrow(float value, e5m2 &x) {
    x.bits = (uint8_t)mt_bytes_of_floats(value, 0, x);
}
#else
/* Read as the first bits of a float, the exponent is too small by 120, the difference of the
 * biases, for subnormals as well. */
MT_INLINE float mt_widen(e4m3 x) {
    const uint32_t magnitude = x.bits & 0x7fu, sign = (uint32_t)(x.bits & 0x80u) << 24;
    const float value = mt_float_of_bits(magnitude << 20) * 0x1p120f;
    return mt_float_of_bits((magnitude == 0x7fu ? 0x7fc00000u : mt_bits_of_float(value)) | sign);
}
MT_INLINE uint8_t mt_round_to_byte(uint32_t rounded, uint32_t bits, uint32_t largest) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t code = magnitude > 0x7f800000u ? 0x7fu : rounded < largest ? rounded : largest;
    return (uint8_t)(code | (bits >> 24 & 0x80u));
}
MT_INLINE void mt_narrow(float value, e4m3 &x) {
    const uint32_t bits = mt_bits_of_float(value);
    x.bits = mt_round_to_byte(mt_round<3, 7>(bits & 0x7fffffffu), bits, 0x7eu);
}
MT_INLINE void mt_narrow(float value, e5m2 &x) {
    const uint32_t bits = mt_bits_of_float(value);
    x.bits = mt_round_to_byte(mt_round<2, 15>(bits & 0x7fffffffu), bits, 0x7cu);
}
#endif

#endif
