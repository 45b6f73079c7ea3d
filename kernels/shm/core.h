/* Collectives between the processes of one host over shared memory. Plain C11, no Python.
 *
 * Every rank owns one segment (a mapping all ranks share): a control area (flags, announcements,
 * mailboxes, staging) followed by an arena from which tensors are allocated. `shm_post` posts a
 * collective: what this rank wants, and that its data is ready. `shm_wait` moves collectives
 * forward: there is no thread. All ranks post the same collectives in the same order. The
 * announcements they post are compared before any data is touched, so if ranks disagree, or one has
 * posted what is no collective, all of them get SHM_MISMATCH.
 *
 * One thread at a time may call into a communicator. */
#ifndef FASTCOMM_SHM_CORE_H
#define FASTCOMM_SHM_CORE_H

#include "announcement.h"
#include "statistics.h"

enum {
    SHM_MAX_RANKS = SHM_MAX_INPUTS,
    SHM_RING = 16,               /* collectives that may be under way at once */
    SHM_INLINE_BYTES = 512,      /* largest payload that travels in a mailbox */
    SHM_ONE_HOP_BYTES = 4096,    /* of two ranks: a staged all_reduce that each does for itself */
    SHM_STAGING_BYTES = 1 << 18, /* one staging slot */
    SHM_CHUNK_BYTES = 1 << 16,   /* of it, what an all_reduce takes: all slots fit a core's cache */
    SHM_STAGING_SLOTS = 4,
};

enum shm_status {
    SHM_OK = 0,
    SHM_AGAIN = 1, /* not finished within the slice: call again (lets the caller look at signals and
                      its deadline) */
    SHM_MISMATCH = 2,
    SHM_PEER_LOST = 3, /* a peer died, aborted or closed; see shm_stalled_on */
    SHM_ABANDONED = 4, /* a rank posted CALL_ABANDON in place of this collective: see there */
};

enum shm_state {
    SHM_ALIVE = 0,
    SHM_CLOSED = 1,
    SHM_ABORTED = 2,
    SHM_DROPPED = 3,
    SHM_ENDED = 4,  /* its process comes to its end */
    SHM_RAISED = 5, /* the same, by an exception */
};

/* A part of an all_reduce's input that lies elsewhere: elements [offset, offset + numel) of the
 * tensor are to be taken from `source`. Pieces are sorted by offset and do not overlap. The sources
 * must stay alive until the collective is complete. They are written to only where they are all of
 * the tensor: see shm_post. */
struct shm_piece {
    void *source;
    uint64_t offset, numel;
};

/* What an all_reduce, or REDUCE_SCATTER_V, counts of its result while that is in the cache: in the
 * first `numel` elements, what is not finite, and perhaps the squares. numel 0: nothing. */
struct shm_counting {
    uint64_t numel;
    bool adds_squares;
};

struct shm_outcome {
    bool has_no_data; /* of any rank */
    bool is_skipped;  /* a rank has voted so */
    bool is_counted;  /* then `statistics` are of the whole result */
    struct shm_statistics statistics;
    /* When all ranks were seen to have posted it, and when this rank was through with its part; in
     * ns of CLOCK_MONOTONIC, 0 if not noted. */
    uint64_t began_ns, ended_ns;
};

struct shm_comm;

size_t shm_control_bytes(void);

/* `segments[r]` is where rank r's segment is mapped, `nbytes[r]` how long it is, `pidfds[r]` a
 * pidfd of rank r (or -1: not watched). The arrays are copied. `yield_early` is for more ranks than
 * cores, and the same on all ranks. The segment of this rank must be zeroed. Returns NULL when out
 * of memory. */
struct shm_comm *shm_open_comm(int rank, int world_size, char *const *segments,
                               const size_t *nbytes, const int *pidfds, int yield_early);
void shm_free_comm(struct shm_comm *comm);

/* Posts a collective: publishes the announcement and whatever the peers need to read. `input` and
 * `output` may be the same. Both are NULL in an all_reduce whose tensor is its pieces, one behind
 * the other, in private memory: the result comes into them, and is not counted. Returns the
 * collective's number in `*seq`, or SHM_AGAIN when SHM_RING collectives are already under way: call
 * shm_make_room first.
 *
 * `bounds`: for the kinds with shards. Rank r's shard is [bounds[r], bounds[r + 1]), in elements.
 * Also for ALL_TO_ALL with parts that differ in size: a row for every rank, with where its parts
 * begin, by the rank they are for, and where the last one ends; numel is world_size times the
 * longest part then, and an input after which the segment ends sooner is private. Else NULL.
 * They are equal on all ranks, and must stay alive until the collective is complete. */
int shm_post(struct shm_comm *comm, const struct announcement *announcement, const void *input,
             void *output, const struct shm_piece *pieces, size_t n_pieces, const uint64_t *bounds,
             struct shm_counting counting, uint32_t *seq);

/* Moves collectives forward until `seq` is complete, or `slice_ns` have passed (SHM_AGAIN; 0 =
 * never wait). */
int shm_wait(struct shm_comm *comm, uint32_t seq, uint64_t slice_ns);

/* Waits until one more collective can be posted, with the results of shm_wait. */
int shm_make_room(struct shm_comm *comm, uint64_t slice_ns);

/* Grows whenever a collective moves forward on this rank. While it grows, no deadline is missed. */
uint64_t shm_progress(const struct shm_comm *comm);

/* For timelines: from now on collectives note when they run on this rank; asked for `change` = 1
 * once more, or, with -1, once less. */
void shm_keep_times(struct shm_comm *comm, int change);

/* What has come of collective `seq`, one of the newest SHM_RING that are complete. */
struct shm_outcome shm_outcome_of(const struct shm_comm *comm, uint32_t seq);

/* Whether `d` is what rank `rank` can have posted: a collective, and a tensor in its segment. */
bool shm_is_possible(const struct shm_comm *comm, int rank, const struct announcement *d);

/* For error messages: the rank that is waited for (after SHM_AGAIN or SHM_PEER_LOST), and what rank
 * `rank` last posted. */
int shm_stalled_on(const struct shm_comm *comm);
uint32_t shm_posted(const struct shm_comm *comm, int rank);
struct announcement shm_announcement_of(const struct shm_comm *comm, int rank, uint32_t seq);
int shm_state_of(const struct shm_comm *comm, int rank);

/* The rank that an aborted rank gave up on, or -1. */
int shm_blamed_by(const struct shm_comm *comm, int rank);

/* Tells the peers that this rank will post nothing more: it has closed (SHM_CLOSED), or has ended
 * without (SHM_DROPPED, SHM_ENDED, SHM_RAISED), or gave up (SHM_ABORTED), on rank `blames` or by
 * its own decision (-1). */
void shm_set_state(struct shm_comm *comm, enum shm_state state, int blames);

#endif
