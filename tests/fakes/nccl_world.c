/* Rounds and mailboxes in shared memory. For rounds there are two sets of slots, used in turn: a
 * rank that begins round k + 2 knows that all have begun round k + 1, and so have read what was
 * lent in round k. */
#define _GNU_SOURCE
#include "nccl_world.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPINS = 2000,                /* about 50 us, if every rank has a core */
    YIELDS = 200,                /* about as long again, if it has not */
    SLEEP_NS = 10 * 1000 * 1000, /* then sleep; not for ever, in case that a rank died between its
                                    arrival and its knock */
    PAUSE_NS = 1000 * 1000,
};

struct place {
    alignas(64) _Atomic uint32_t round; /* the last one that this rank has begun */
    _Atomic uint32_t taken;
    atomic_bool is_leaving;
};

struct arena {
    uint64_t key;
    _Atomic uint32_t knocks, sleepers; /* the futex of all, and how many sleep on it */
    struct place places[MAX_RANKS];
    struct intent intents[2][MAX_RANKS];
    alignas(4096) char slots[2][MAX_RANKS][SLOT_BYTES];
    struct mailbox mailboxes[MAX_RANKS][MAX_RANKS]; /* pages nobody touches cost nothing */
};

struct world {
    struct arena *arena;
    uint32_t round;
    int rank, n_ranks;
    atomic_int
        descriptor; /* of the memory, where this process made it and it is still open; else -1 */
    bool crowded;   /* more ranks than cores: whom we wait for may need ours */
    atomic_bool abandoned;
};

/* ---- meeting ---- */

static struct arena *map(int descriptor) {
    void *memory =
        mmap(NULL, sizeof(struct arena), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return memory != MAP_FAILED ? memory : NULL;
}

bool world_create(struct address *address) {
    *address = (struct address){.pid = getpid(),
                                .descriptor = memfd_create("fastcomm-stand-in", MFD_CLOEXEC)};
    bool is_random = getrandom(&address->key, sizeof address->key, 0) == sizeof address->key;
    struct arena *arena = is_random && ftruncate(address->descriptor, sizeof *arena) == 0
                              ? map(address->descriptor)
                              : NULL;
    if (arena == NULL) {
        world_discard(address);
        return false;
    }
    arena->key = address->key;
    munmap(arena, sizeof *arena);
    return true;
}

void world_discard(const struct address *address) {
    if (address->descriptor >= 0) {
        close(address->descriptor);
    }
}

static struct arena *find(const struct address *address) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", address->pid, address->descriptor);
    /* The descriptor may have been closed since, and be another file now, hence the looks at size
     * and key. */
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    bool fits = descriptor >= 0 && fstat(descriptor, &status) == 0 &&
                (size_t)status.st_size == sizeof(struct arena);
    struct arena *arena = fits ? map(descriptor) : NULL;
    if (descriptor >= 0) {
        close(descriptor);
    }
    if (arena != NULL && arena->key != address->key) {
        munmap(arena, sizeof *arena);
        return NULL;
    }
    return arena;
}

struct world *world_join(const struct address *address, int rank, int n_ranks) {
    struct arena *arena = find(address);
    struct world *world = arena != NULL ? calloc(1, sizeof *world) : NULL;
    if (world == NULL || atomic_exchange(&arena->places[rank].taken, 1) != 0) {
        if (arena != NULL) {
            munmap(arena, sizeof *arena);
        }
        free(world);
        return NULL;
    }
    world->arena = arena;
    world->rank = rank;
    world->n_ranks = n_ranks;
    world->descriptor = address->pid == getpid() ? address->descriptor : -1;
    world->crowded = n_ranks > sysconf(_SC_NPROCESSORS_ONLN);
    return world;
}

/* Once all ranks are there, nobody needs the address any more. */
static void close_descriptor(struct world *world) {
    int descriptor = atomic_exchange(&world->descriptor, -1);
    if (descriptor >= 0) {
        close(descriptor);
    }
}

void world_leave(struct world *world) {
    close_descriptor(world);
    munmap(world->arena, sizeof *world->arena);
    free(world);
}

void world_begin_leaving(struct world *world) {
    world->arena->places[world->rank].is_leaving = true;
}

bool world_is_left(const struct world *world) {
    for (int r = 0; r < world->n_ranks; r++) {
        if (!world->arena->places[r].is_leaving) {
            return false;
        }
    }
    return true;
}

uint64_t world_key(const struct world *world) {
    return world->arena->key;
}

/* ---- waiting ---- */

static long futex(_Atomic uint32_t *word, int operation, uint32_t value,
                  const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

void world_knock(struct world *world) {
    struct arena *arena = world->arena;
    atomic_fetch_add(&arena->knocks, 1);
    if (atomic_load(&arena->sleepers) != 0) {
        futex(&arena->knocks, FUTEX_WAKE, INT_MAX, NULL);
    }
}

uint32_t world_knocks(const struct world *world) {
    return atomic_load(&world->arena->knocks);
}

void world_rest(struct world *world, int n_looks, uint32_t knocks) {
    const int spins = world->crowded ? 0 : SPINS;
    if (n_looks >= spins + YIELDS) {
        const struct timespec limit = {.tv_nsec = SLEEP_NS};
        atomic_fetch_add(&world->arena->sleepers, 1);
        futex(&world->arena->knocks, FUTEX_WAIT, knocks, &limit);
        atomic_fetch_sub(&world->arena->sleepers, 1);
    } else if (n_looks >= spins) {
        sched_yield();
    }
}

/* ---- rounds ---- */

char *world_next_slot(struct world *world) {
    return world->arena->slots[(world->round + 1) % 2][world->rank];
}

void world_begin_round(struct world *world, const struct intent *intent, const void *input,
                       size_t nbytes) {
    if (nbytes > 0) {
        memcpy(world_next_slot(world), input, nbytes);
    }
    world->round++;
    world->arena->intents[world->round % 2][world->rank] = *intent;
    atomic_store(&world->arena->places[world->rank].round, world->round);
    world_knock(world);
}

static bool has_met(struct world *world) {
    for (int r = 0; r < world->n_ranks; r++) {
        if ((int32_t)(atomic_load(&world->arena->places[r].round) - world->round) < 0) {
            return false;
        }
    }
    close_descriptor(world);
    return true;
}

bool world_wait(struct world *world) {
    for (int n_looks = 0;; n_looks++) {
        uint32_t knocks = world_knocks(world);
        if (has_met(world) || world->abandoned) {
            return !world->abandoned;
        }
        world_rest(world, n_looks, knocks);
    }
}

bool world_agrees(const struct world *world) {
    const struct intent *intents = world->arena->intents[world->round % 2];
    for (int r = 1; r < world->n_ranks; r++) {
        if (memcmp(&intents[r], &intents[0], sizeof *intents) != 0) {
            return false;
        }
    }
    return true;
}

bool world_round(struct world *world, const struct intent *intent, const void *input,
                 size_t nbytes) {
    if (world->abandoned) {
        return false;
    }
    world_begin_round(world, intent, input, nbytes);
    if (world_wait(world) && !world_agrees(world)) {
        world_wait_until_abandoned(world);
    }
    return !world->abandoned;
}

const char *world_slot(const struct world *world, int rank) {
    return world->arena->slots[world->round % 2][rank];
}

struct mailbox *world_mailbox(struct world *world, int from, int to) {
    return &world->arena->mailboxes[from][to];
}

/* ---- abandoning ---- */

void world_abandon(struct world *world) {
    world->abandoned = true;
    world_knock(world);
}

bool world_is_abandoned(const struct world *world) {
    return world->abandoned;
}

void world_wait_until_abandoned(struct world *world) {
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    while (!world->abandoned) {
        nanosleep(&pause, NULL);
    }
}
