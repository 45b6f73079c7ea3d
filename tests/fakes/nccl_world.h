/* How the ranks of the stand-in for NCCL meet: memory that they share, rounds in which each says
 * what it is doing and lends some bytes to the others, and a mailbox from each rank to each. The
 * memory is a memfd, so nothing is left behind, whoever is killed when. */
#ifndef FASTCOMM_STAND_IN_NCCL_WORLD_H
#define FASTCOMM_STAND_IN_NCCL_WORLD_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAX_RANKS = 16,
    SLOT_BYTES = 1
        << 18, /* what a rank can lend in a round: a part of a core's second-level cache */
    MAIL_BYTES = 1 << 16, /* what one rank can have under way to another */
};

/* Where a world is to be found: the rest of a unique id is zeros. */
struct address {
    uint64_t key; /* random, and in the memory too */
    int32_t pid, descriptor;
};

/* What a rank does in a round. No padding, since it is compared bytewise. */
struct intent {
    uint64_t count;
    int32_t kind, dtype, op, root;
};

/* Where a part of a message lies between two ranks, once the sender has put it there and until the
 * receiver has taken it. */
struct mailbox {
    alignas(64) atomic_bool is_full;
    int32_t dtype;  /* of the message */
    uint64_t count; /* its elements */
    char part[MAIL_BYTES];
};

struct world;

/* Makes an empty world; false if the system does not give the memory. */
bool world_create(struct address *address);
/* Takes back a world of this process that nobody will join. */
void world_discard(const struct address *address);

/* NULL if there is no such world (any more), or if it has that rank already. */
struct world *world_join(const struct address *address, int rank, int n_ranks);
void world_leave(struct world *world);
/* This rank is about to leave. */
void world_begin_leaving(struct world *world);
/* Whether all ranks are, or have left. */
bool world_is_left(const struct world *world);

/* A round: say what you do and lend `nbytes`, at most SLOT_BYTES; wait until all have; read. What
 * was lent can be read until this rank begins its next round. */
void world_begin_round(struct world *world, const struct intent *intent, const void *input,
                       size_t nbytes);
/* False if the world was abandoned meanwhile. */
bool world_wait(struct world *world);
/* Whether all ranks do the same. */
bool world_agrees(const struct world *world);
/* Begins a round and waits for its end. Ranks that do not agree wait for ever, that is until they
 * abandon the world. */
bool world_round(struct world *world, const struct intent *intent, const void *input,
                 size_t nbytes);
const char *world_slot(const struct world *world, int rank);
/* For a rank that lends several pieces: its own slot of the round to come, to be filled before the
 * round begins. */
char *world_next_slot(struct world *world);

struct mailbox *world_mailbox(struct world *world, int from, int to);

/* Waiting for something that another rank does, and then knocks: read the knocks, look, and rest if
 * it is not there. Rests the longer the more often it has looked in vain. */
uint32_t world_knocks(const struct world *world);
void world_rest(struct world *world, int n_looks, uint32_t knocks);
void world_knock(struct world *world);

/* Ends the waiting of this rank, now and from now on: it begins no more rounds. The other ranks do
 * not learn of it. */
void world_abandon(struct world *world);
bool world_is_abandoned(const struct world *world);
void world_wait_until_abandoned(struct world *world);

/* What sets worlds apart, the same on all ranks. */
uint64_t world_key(const struct world *world);

#endif
