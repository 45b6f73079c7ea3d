/* Waiting for flags. Spinning answers within a cache miss and is right while the peer runs on a
 * core of its own; yielding gives the core to a peer that shares it; sleeping leaves the machine to
 * others when a peer is milliseconds away. */
#define _GNU_SOURCE
#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPINS_PER_ROUND = 64,
    SPIN_ROUNDS = 64,        /* about 50 us on current cores */
    SPIN_ROUNDS_CROWDED = 1, /* more ranks than cores: the peer cannot run while we spin */
    YIELD_NS = 1000 * 1000,  /* then yield for 1 ms */
    SLEEP_NS = 10 * 1000 *
        1000, /* then sleep at most this long at a time, so that a dead peer is noticed */
};

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

uint64_t shm_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void shm_raise(struct shm_flag *flag, uint32_t value) {
    /* Sequentially consistent on both sides: either the sleeper's futex call sees the new value, or
     * we see the sleeper. */
    atomic_store(&flag->value, value);
    if (atomic_load(&flag->sleepers) != 0) {
        syscall(SYS_futex, &flag->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
}

static void sleep_on(struct shm_flag *flag, uint32_t target) {
    struct timespec timeout = {.tv_sec = 0, .tv_nsec = SLEEP_NS};
    atomic_fetch_add(&flag->sleepers, 1);
    uint32_t seen = atomic_load(&flag->value);
    if ((int32_t)(seen - target) < 0) {
        syscall(SYS_futex, &flag->value, FUTEX_WAIT, seen, &timeout, NULL, 0);
    }
    atomic_fetch_sub(&flag->sleepers, 1);
}

bool shm_back_off(struct shm_flag *flag, uint32_t target, struct shm_patience *patience,
                  bool yield_early) {
    uint32_t spin_rounds = yield_early ? SPIN_ROUNDS_CROWDED : SPIN_ROUNDS;
    if (patience->rounds < spin_rounds) {
        patience->rounds++;
        for (int i = 0; i < SPINS_PER_ROUND && !shm_reached(flag, target); i++) {
            cpu_relax();
        }
        return false;
    }
    uint64_t now = shm_now_ns();
    if (patience->rounds == spin_rounds) {
        patience->rounds++;
        patience->yielding_since_ns = now;
    }
    if (now - patience->yielding_since_ns < YIELD_NS) {
        sched_yield();
        return false;
    }
    sleep_on(flag, target);
    return true;
}
