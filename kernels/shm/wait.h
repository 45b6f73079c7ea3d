/* Flags in shared memory and how to wait for them: spin, then yield, then sleep on a futex. Plain
 * C11, no Python. */
#ifndef FASTCOMM_SHM_WAIT_H
#define FASTCOMM_SHM_WAIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A counter that one rank raises and the others wait for. It lives in shared memory, alone in its
 * cache line or with the data it announces. Zero is its initial state. Counters wrap around:
 * compare with shm_reached only. */
struct shm_flag {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
};

static inline bool shm_reached(const struct shm_flag *flag, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&flag->value, memory_order_acquire) - target) >= 0;
}

/* Publishes everything written before it, and wakes the sleepers. */
void shm_raise(struct shm_flag *flag, uint32_t value);

/* How long the current wait has lasted; zero it before the first shm_back_off. */
struct shm_patience {
    uint32_t rounds;
    uint64_t yielding_since_ns;
};

/* Waits a little for `flag` to reach `target`, longer with every call. Returns true once it has
 * begun to sleep in the kernel: then a few milliseconds may have passed, and it is time to check
 * that the peers are alive. */
bool shm_back_off(struct shm_flag *flag, uint32_t target, struct shm_patience *patience,
                  bool yield_early);

uint64_t shm_now_ns(void);

#endif
