/* What the driver (driver.c) and its scenarios (scenarios.c) share. The protocol's private
 * header is included for one reason: to start counters just below their wrap-around. */
#ifndef FASTCOMM_SHM_DRIVER_H
#define FASTCOMM_SHM_DRIVER_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "shm/internal.h"

enum { AREA_BYTES = 9 << 20 }; /* room for an all_gather of a little over 1 MiB on 7 ranks */

struct world {
    int world_size;
    char *segments[SHM_MAX_RANKS];
    _Atomic int pids[SHM_MAX_RANKS];
    _Atomic int gathered[2]; /* a barrier that does not rest on what is tested */
};

/* One rank. `shared` and `private` are AREA_BYTES * 2 each: inputs first, outputs in the second
 * half. */
struct rank {
    int rank, world_size;
    struct world *world;
    struct shm_comm *comm;
    char *shared, *private;
};

extern bool forked, full;

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: rank %d of %d: %s: ", __func__, __LINE__, me->rank,            \
                    me->world_size, #condition);                                                   \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* A collective and its tensors. */
struct request {
    struct announcement announcement;
    uint32_t seed;
    bool in_arena;
    char *input, *output;
    size_t n_pieces;
    struct shm_piece pieces[8];
    bool has_parts;                     /* an all_to_all, its parts of any sizes */
    uint64_t bounds[SHM_MAX_RANKS + 1]; /* of the shards or parts, where there are any */
};

/* Fills in the collective and its inputs. `room` begins where this rank may put the tensors;
 * outputs lie AREA_BYTES behind inputs. */
struct request prepare(struct rank *me, uint32_t kind, uint32_t op, uint32_t dtype, uint64_t numel,
                       char *room);

bool is_in_place(uint32_t kind);

/* Writes the canary behind the output again, where its size has changed since prepare(). */
void place_canary(const struct rank *me, const struct request *q);

/* Posts, waiting for room if need be; waits; checks every element of the output, the canary behind
 * it and that the input is unchanged. */
uint32_t post(struct rank *me, struct request *q);
int wait_for(struct rank *me, uint32_t seq);
void verify(struct rank *me, const struct request *q);
void run_and_verify(struct rank *me, struct request *q);

struct scenario {
    const char *name;
    void (*body)(struct rank *me);
    enum { ALWAYS, KILLS } kind; /* KILLS: the last rank ends by SIGKILL, so it must be a process */
};

/* These run on 1 and more ranks, on 2 and more, and on 64. */
extern const struct scenario basic_scenario, scenarios[], crowd_scenario;
extern const size_t n_scenarios;

#endif
