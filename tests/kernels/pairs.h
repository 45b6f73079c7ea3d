/* The pairs of dtypes that a program is compiled with: the kernels' own; for the emulator, where
 * the frame is what matters, both capacities of one pair only; with -DFEW_PAIRS one of each kind:
 * the same dtype, a wider and a narrower wire. */
#ifndef FASTCOMM_PAIRS_H
#define FASTCOMM_PAIRS_H

#include "cuda/multi_tensor.cuh"

#ifdef FEW_PAIRS
#undef MT_PAIRS
#undef MT_GRADS
#define MT_PAIRS(X) X(f32, f32, 504) X(bf16, f32, 504) X(f64, bf16, 4000)
#define MT_GRADS(X) X(f32, 504) X(bf16, 504) X(f64, 4000)
#elif defined FASTCOMM_EMULATED
#undef MT_PAIRS
#define MT_PAIRS(X) MT_PAIRS_OF_ALL(X, 504) X(f32, f32, 4000)
#endif

#endif
