/* What protocol.c and paths.c share: the layout of a segment and the state of a communicator. Not
 * for users. */
#ifndef FASTCOMM_SHM_INTERNAL_H
#define FASTCOMM_SHM_INTERNAL_H

#include <poll.h>
#include <string.h>

#include "core.h"
#include "wait.h"

#define CACHE_LINE 64

struct slot {
    _Alignas(CACHE_LINE) struct shm_flag arrived;
    struct announcement announcement;
};
_Static_assert(sizeof(struct slot) == CACHE_LINE, "a rank's arrival is one cache line");

/* What a rank has counted in its part of collective `seq`. */
struct counted {
    _Alignas(CACHE_LINE) uint32_t seq;
    struct shm_statistics statistics;
};

/* The head of every segment. All zero to begin with. */
struct control {
    struct slot slots[SHM_RING];
    _Alignas(CACHE_LINE) struct shm_flag reduced;
    _Alignas(CACHE_LINE) struct shm_flag
        staged_in; /* chunks copied into staging, counted over all staged collectives */
    _Alignas(CACHE_LINE) struct shm_flag
        staged_out; /* chunks whose part of this rank is reduced into the peers' staging */
    _Alignas(CACHE_LINE) _Atomic int32_t state; /* enum shm_state */
    _Atomic int32_t blames;                     /* the rank it gave up on, plus one */
    struct counted counted[SHM_RING];
    _Alignas(CACHE_LINE) char mailbox[SHM_RING][SHM_INLINE_BYTES];
    _Alignas(4096) char staging[SHM_STAGING_SLOTS][SHM_STAGING_BYTES];
};

enum path { UNDECIDED = 0, INLINE, DIRECT, STAGED };

struct collective {
    struct announcement announcement;
    const char *input;
    char *output;
    const struct shm_piece *pieces;
    size_t n_pieces;
    const uint64_t *bounds; /* of the ranks' shards or parts, or NULL */
    struct shm_counting counting;
    struct shm_statistics statistics; /* of this rank's part; on the inline path, of all */
    enum path path;
    bool lacks_data; /* this rank has none; `announcement` is what the others have posted */
    int status;
    bool is_skipped;                /* some rank votes so */
    uint64_t n_in, n_worked, n_out; /* staged path: chunks that passed each of the three stages */
    uint64_t began_ns, ended_ns;    /* noted while comm->n_timekeepers > 0 */
};

/* The flag that this rank waits for when it can do nothing else. */
struct stall {
    struct shm_flag *flag;
    uint32_t target;
    int rank;
};

struct shm_comm {
    int rank, world_size;
    bool yield_early;
    int n_timekeepers;   /* how many ask for times */
    uint32_t next;       /* number of the next collective to be posted; the first is 1 */
    uint32_t head;       /* oldest that this rank has not finished; == next when there is none */
    uint32_t n_finished; /* all ranks are known to have finished up to here */
    uint32_t chunk;      /* number of chunks in all finished staged collectives */
    struct stall stall;
    struct collective ring[SHM_RING];
    /* The ranks' announcements of a collective that failed, kept for the message: the peers reuse
     * their slots. */
    struct announcement disagreed[SHM_RING][SHM_MAX_RANKS];
    bool has_factors; /* the ranks' tensors count differently in the collective at `head` */
    double factors[SHM_MAX_RANKS]; /* then: by what they are multiplied */
    struct pollfd pidfds[SHM_MAX_RANKS];
    char *segments[SHM_MAX_RANKS];
    size_t nbytes[SHM_MAX_RANKS]; /* of the segments */
};

struct range {
    uint64_t begin, end;
};

static inline struct control *control_of(const struct shm_comm *comm, int rank) {
    return (struct control *)comm->segments[rank];
}

static inline struct slot *slot_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return &control_of(comm, rank)->slots[seq % SHM_RING];
}

static inline uint64_t min64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* The part of `numel` elements that `rank` reduces. Parts begin on cache lines, so no two ranks
 * write the same line. */
static inline struct range shard_of(uint64_t numel, size_t itemsize, int rank, int world_size) {
    uint64_t per_line = CACHE_LINE / itemsize;
    uint64_t lines = (numel + per_line - 1) / per_line;
    uint64_t per_rank = (lines + (uint64_t)world_size - 1) / (uint64_t)world_size * per_line;
    uint64_t begin = min64(per_rank * (uint64_t)rank, numel);
    return (struct range){begin, min64(begin + per_rank, numel)};
}

/* The part of a collective's tensor that this rank reduces on the direct path. */
static inline struct range own_part(const struct shm_comm *comm, const struct collective *c) {
    if (c->bounds != NULL) {
        return (struct range){c->bounds[comm->rank], c->bounds[comm->rank + 1]};
    }
    return shard_of(c->announcement.numel, shm_dtype_size(c->announcement.dtype), comm->rank,
                    comm->world_size);
}

enum which_flag { ARRIVED, REDUCED, STAGED_OUT };

/* Whether every rank has raised its flag to `target`; if not, remembers whom we wait for. */
static inline bool shm_all_reached(struct shm_comm *comm, enum which_flag which, uint32_t target) {
    for (int r = 0; r < comm->world_size; r++) {
        struct control *control = control_of(comm, r);
        struct shm_flag *flag = which == ARRIVED   ? &slot_of(comm, r, target)->arrived
                                : which == REDUCED ? &control->reduced
                                                   : &control->staged_out;
        if (!shm_reached(flag, target)) {
            comm->stall = (struct stall){flag, target, r};
            return false;
        }
    }
    return true;
}

/* Whether the payload travels in mailboxes. */
bool shm_fits_mailbox(const struct announcement *d, int world_size);

/* How many elements this rank puts into its mailbox. */
uint64_t shm_mailbox_numel(const struct shm_comm *comm, const struct collective *c);

static inline bool moves_parts(const struct announcement *d) {
    return d->kind == CALL_GATHER || d->kind == CALL_SCATTER || d->kind == CALL_ALL_TO_ALL;
}

/* Whether the tensor of an all_reduce is its pieces, and lies nowhere else. */
static inline bool is_scattered(const struct collective *c) {
    return c->output == NULL && c->n_pieces > 0;
}

/* Copies elements of an all_reduce's tensor out of it. */
void shm_read_elements(const struct collective *c, struct range range, char *to);

/* Copies the parts of the pieces inside `range` to where they belong in the tensor, unless it is
 * scattered. */
void shm_gather_pieces(const struct collective *c, struct range range);

/* Copies the first chunk of a collective that is being posted into the staging area, if that is
 * free, so that its arrival announces the chunk as well. Returns whether it has. */
bool shm_stage_first(struct shm_comm *comm, struct collective *c);

/* Each runs a collective that all ranks have posted, over one path. The staged path may have to
 * wait for the peers half-way; it returns whether it is done. */
void shm_run_inline(const struct shm_comm *comm, uint32_t seq, struct collective *c);
void shm_run_direct(const struct shm_comm *comm, uint32_t seq, struct collective *c);
bool shm_run_staged(struct shm_comm *comm, struct collective *c);

#endif
