/* What multi_tensor.cuh takes from CUDA for its frames, on the host: with -DFASTCOMM_EMULATED a
 * kernel runs as it is on the device, whole blocks of lanes that meet in barriers and shuffles, and
 * not lane by lane as in host_shim.h. Only what the kernels use is here.
 *
 * - A lane is a fiber. One thread runs the lanes of a block, in random order; each goes on until it
 *   waits for others. A few blocks run at once, each on another thread.
 * - __shared__ memory is the block's thread's. When a block begins, all its bits are ones, except
 *   under a sanitizer.
 * - Every lane of the block must come to a __syncthreads(), and every lane of the mask to a
 *   shuffle. CUDA leaves open what happens else; here the launch fails (emulator_error).
 * - ThreadSanitizer takes each lane for a thread. Lanes are ordered by what orders them on a
 *   device, and by nothing else: the launch, its end, __syncthreads, and two __threadfence() with
 *   an atomic between them: one after what is published and before the atomic, one after an atomic
 *   that has read from it. An atomic alone is relaxed, and a shuffle orders no memory.
 *
 * Not modelled: the caches of a device, and stores that its hardware lets pass each other. Where
 * these could show, ThreadSanitizer finds that nothing orders the accesses. */
#ifndef FASTCOMM_EMULATOR_H
#define FASTCOMM_EMULATOR_H

#include <stdint.h>
#include <string.h>

#include <functional>
#include <utility>

#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define MT_ON_HOST(NAME) emulated_##NAME

struct emulator_index {
    unsigned x;
};
extern __thread emulator_index threadIdx, blockIdx, blockDim, gridDim;

/* In emulator.cpp, which is compiled without ThreadSanitizer: what happens in there orders no lanes
 * but as it says. */
void emulator_run(unsigned n_blocks, unsigned n_threads, const std::function<void()> &lane);
void emulator_barrier();
uint64_t emulator_shuffle(unsigned mask, uint64_t value, unsigned source);
void emulator_fence();

/* Alive while one lane does something to an atomic: that is one step, and what its last fence
 * published is published with it. */
struct emulator_atomic {
    const void *address;

    explicit emulator_atomic(const void *address);
    ~emulator_atomic();
};

/* What was wrong in the last launch, or null. */
extern "C" const char *emulator_error();

inline void __syncthreads() {
    emulator_barrier();
}

inline void __threadfence() {
    emulator_fence();
}

inline uint32_t atomicInc(uint32_t *address, uint32_t limit) {
    const emulator_atomic step(address);
    const uint32_t before = __atomic_load_n(address, __ATOMIC_RELAXED);
    __atomic_store_n(address, before >= limit ? 0 : before + 1, __ATOMIC_RELAXED);
    return before;
}

/* Who would get the value of a lane behind the warp's end keeps its own. */
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
    const unsigned lane = threadIdx.x % 32, source = lane + distance;
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator_shuffle(mask, bits, source < 32 ? source : lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
    for (unsigned distance = 16; distance > 0; distance /= 2) {
        const unsigned other = (threadIdx.x % 32) ^ distance;
        const uint32_t its = (uint32_t)emulator_shuffle(mask, value, other);
        value = its > value ? its : value;
    }
    return value;
}

template <class... Parameters, size_t... I>
void emulator_launch(void (*kernel)(Parameters...), unsigned n_blocks, unsigned n_threads,
                     void **parameters, std::index_sequence<I...>) {
    emulator_run(n_blocks, n_threads, [=] { kernel(*(Parameters *)parameters[I]...); });
}

/* Launches a kernel with its parameters as cuLaunchKernel takes them. */
template <class... Parameters>
void emulator_launch(void (*kernel)(Parameters...), unsigned n_blocks, unsigned n_threads,
                     void **parameters) {
    emulator_launch(kernel, n_blocks, n_threads, parameters,
                    std::index_sequence_for<Parameters...>());
}

#endif
