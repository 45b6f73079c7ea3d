/* Collectives over shared memory, the protocol: see core.h for the contract.
 *
 * Every rank keeps a ring of SHM_RING announcement slots. Posting collective number `seq` fills
 * slot seq % SHM_RING and raises the slot's own flag, so one cache line tells the peers both that
 * we arrived and what we want. `reduced` says up to which number this rank has finished reading its
 * peers' memory; a slot, a mailbox or a tensor is reused only when all ranks have got that far.
 *
 * Reduction order is rank 0, 1, 2, ... for every element, so the result is bitwise the same on
 * every rank and in every run. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"

/* ---- moving collectives forward ---- */

bool shm_is_possible(const struct shm_comm *comm, int rank, const struct announcement *d) {
    if (!is_collective(d, comm->world_size)) {
        return false;
    }
    bool has_shards = d->kind == CALL_REDUCE_SCATTER_V || d->kind == CALL_ALL_GATHER_V;
    if (d->place != IN_ARENA) {
        return !has_shards || shm_fits_mailbox(d, comm->world_size);
    }
    uint64_t end = comm->nbytes[rank], itemsize = shm_dtype_size(d->dtype);
    return d->kind != CALL_SCATTER && /* numel is of the output */
           d->offset >= sizeof(struct control) && d->offset <= end && d->offset % itemsize == 0 &&
           d->numel * itemsize <= end - d->offset;
}

/* Called when all ranks have arrived: compares what they want, and chooses the path. */
static void conclude(struct shm_comm *comm, uint32_t seq, struct collective *c) {
    const struct announcement *all[SHM_MAX_RANKS];
    bool are_possible = true, is_direct = true;
    for (int r = 0; r < comm->world_size; r++) {
        all[r] = &slot_of(comm, r, seq)->announcement;
        are_possible = are_possible && shm_is_possible(comm, r, all[r]);
        is_direct = is_direct && (all[r]->place == IN_ARENA || all[r]->presence == HAS_NO_DATA);
    }
    struct verdict v = decide(all, comm->world_size, are_possible, comm->factors);
    bool has_path = v.wanted == NULL || is_direct || shm_fits_mailbox(v.wanted, comm->world_size);
    if (v.outcome == ALL_AGREE && v.lacks_data && !has_path) {
        v.outcome = THEY_DIFFER;
    }
    c->is_skipped = v.is_skipped;
    comm->has_factors = v.has_factors;
    if (v.outcome != ALL_AGREE) {
        c->status = v.outcome == ONE_ABANDONS ? SHM_ABANDONED : SHM_MISMATCH;
        for (int r = 0; r < comm->world_size; r++) {
            comm->disagreed[seq % SHM_RING][r] = *all[r];
        }
    }
    if (v.lacks_data) { /* a rank that has not been asked to count */
        c->counting.numel = 0;
    }
    c->lacks_data = c->announcement.presence == HAS_NO_DATA;
    if (c->lacks_data && v.wanted != NULL && c->status == SHM_OK) {
        c->announcement = *v.wanted;
        c->output = comm->segments[comm->rank]; /* not NULL; nobody reads or writes there */
    }
    c->path = shm_fits_mailbox(&c->announcement, comm->world_size) ? INLINE
              : is_direct                                          ? DIRECT
                                                                   : STAGED;
    /* shm_post has expected the direct path, which gathers this rank's own part itself. Behind an
     * abandoned collective, what this would read may be gone. */
    if (c->path == STAGED && c->announcement.place == IN_ARENA && c->status == SHM_OK) {
        shm_gather_pieces(c, shard_of(c->announcement.numel, shm_dtype_size(c->announcement.dtype),
                                      comm->rank, comm->world_size));
    }
}

static inline void note_time(const struct shm_comm *comm, uint64_t *time_ns) {
    if (comm->n_timekeepers > 0) {
        *time_ns = shm_now_ns();
    }
}

/* Puts what this rank has counted where its peers look once it has raised `reduced`. */
static void publish_statistics(const struct shm_comm *comm, uint32_t seq, struct collective *c) {
    /* On the inline path a rank cannot know whether the others add squares, and norms that ranks
     * take in different ways may differ in the last bit. */
    if (!c->counting.adds_squares || c->statistics.n_nonfinite > 0 || c->path == INLINE) {
        c->statistics.square_sum = (double)NAN;
    }
    control_of(comm, comm->rank)->counted[seq % SHM_RING] =
        (struct counted){.seq = seq, .statistics = c->statistics};
}

/* Moves the oldest unfinished collective forward as far as possible. Returns whether it is finished
 * on this rank. */
static bool run_head(struct shm_comm *comm) {
    uint32_t seq = comm->head;
    struct collective *c = &comm->ring[seq % SHM_RING];
    if (c->path == UNDECIDED) {
        if (!shm_all_reached(comm, ARRIVED, seq)) {
            return false;
        }
        conclude(comm, seq, c);
        note_time(comm, &c->began_ns);
    }
    if (c->status == SHM_OK && !c->is_skipped) {
        if (c->path == INLINE) {
            shm_run_inline(comm, seq, c);
        } else if (c->path == DIRECT) {
            shm_run_direct(comm, seq, c);
        } else if (!shm_run_staged(comm, c)) {
            return false;
        }
    }
    if (c->counting.numel > 0) {
        publish_statistics(comm, seq, c);
    }
    note_time(comm, &c->ended_ns);
    comm->head = seq + 1;
    shm_raise(&control_of(comm, comm->rank)->reduced, seq);
    return true;
}

/* Whether all ranks are done with `seq`: its slot, mailbox and tensors are free. */
static bool all_have_finished(struct shm_comm *comm, uint32_t seq) {
    if ((int32_t)(comm->n_finished - seq) >= 0) {
        return true;
    }
    if (!shm_all_reached(comm, REDUCED, seq)) {
        return false;
    }
    comm->n_finished = seq;
    return true;
}

/* Whether the collective is complete only when all ranks are done. On the direct path the peers
 * read and write our tensor until then. After CALL_ABANDON no peer may still be busy with an
 * earlier collective. */
static bool is_awaited_by_all(const struct collective *c) {
    return c->path == DIRECT || c->announcement.kind == CALL_ABANDON;
}

/* Whether the result is in place on this rank, and nobody reads or writes its tensors any more. */
static bool is_complete(struct shm_comm *comm, uint32_t seq) {
    if ((int32_t)(comm->head - seq) <= 0) {
        return false;
    }
    const struct collective *c = &comm->ring[seq % SHM_RING];
    return c->status != SHM_OK || !is_awaited_by_all(c) || all_have_finished(comm, seq);
}

/* ---- peers that are gone ---- */

/* Whether collective `seq` still waits for `rank`: for its arrival or, where its mailbox is not
 * enough, for its flag `reduced`. */
static bool owes(struct shm_comm *comm, int rank, uint32_t seq,
                 bool (*is_done)(struct shm_comm *, uint32_t)) {
    const struct announcement *d = &comm->ring[seq % SHM_RING].announcement;
    if (!shm_reached(&slot_of(comm, rank, seq)->arrived, seq)) {
        return true;
    }
    bool mailbox_is_enough =
        shm_fits_mailbox(d, comm->world_size) && d->kind != CALL_ABANDON && is_done == is_complete;
    return !mailbox_is_enough && !shm_reached(&control_of(comm, rank)->reduced, seq);
}

/* A peer that died, or gave up, and that collective `seq` still needs; -1 if there is none. The
 * dead come first: they are the cause. */
static int find_lost_peer(struct shm_comm *comm, uint32_t seq,
                          bool (*is_done)(struct shm_comm *, uint32_t)) {
    int lost = -1;
    poll(comm->pidfds, (nfds_t)comm->world_size, 0);
    for (int r = 0; r < comm->world_size; r++) {
        bool is_dead = comm->pidfds[r].fd >= 0 && (comm->pidfds[r].revents & POLLIN);
        bool gave_up = r != comm->rank && atomic_load(&control_of(comm, r)->state) != SHM_ALIVE;
        if ((is_dead || (gave_up && lost < 0)) && owes(comm, r, seq, is_done)) {
            lost = r;
        }
        if (is_dead && lost == r) {
            break;
        }
    }
    return lost;
}

/* ---- the interface ---- */

size_t shm_control_bytes(void) {
    return sizeof(struct control);
}

struct shm_comm *shm_open_comm(int rank, int world_size, char *const *segments,
                               const size_t *nbytes, const int *pidfds, int yield_early) {
    struct shm_comm *comm = calloc(1, sizeof *comm);
    if (comm == NULL) {
        return NULL;
    }
    comm->rank = rank;
    comm->world_size = world_size;
    comm->yield_early = yield_early != 0;
    comm->next = comm->head = 1;
    for (int r = 0; r < world_size; r++) {
        comm->segments[r] = segments[r];
        comm->nbytes[r] = nbytes[r];
        comm->pidfds[r] = (struct pollfd){.fd = pidfds[r], .events = POLLIN};
    }
    return comm;
}

void shm_free_comm(struct shm_comm *comm) {
    free(comm);
}

int shm_post(struct shm_comm *comm, const struct announcement *announcement, const void *input,
             void *output, const struct shm_piece *pieces, size_t n_pieces, const uint64_t *bounds,
             struct shm_counting counting, uint32_t *seq) {
    uint32_t number = comm->next;
    if (!all_have_finished(comm, number - SHM_RING)) {
        return SHM_AGAIN; /* not all ranks have read the slot */
    }
    struct collective *c = &comm->ring[number % SHM_RING];
    *c = (struct collective){.announcement = *announcement,
                             .input = input,
                             .output = output,
                             .pieces = pieces,
                             .n_pieces = n_pieces,
                             .bounds = bounds,
                             .counting = counting};
    size_t itemsize = shm_dtype_size(announcement->dtype);
    bool staged = false;
    if (shm_fits_mailbox(announcement, comm->world_size)) {
        shm_gather_pieces(c, (struct range){0, announcement->numel});
        uint64_t numel = shm_mailbox_numel(comm, c);
        char *mailbox = control_of(comm, comm->rank)->mailbox[number % SHM_RING];
        if (is_scattered(c)) {
            shm_read_elements(c, (struct range){0, numel}, mailbox);
        } else if (numel > 0) {
            memcpy(mailbox, input, numel * itemsize);
        }
    } else if (announcement->place == PRIVATE_MEMORY) { /* the staged path will be taken */
        shm_gather_pieces(c, (struct range){0, announcement->numel});
        staged = shm_stage_first(comm, c);
    } else { /* our own part is left to the reduction */
        struct range own = own_part(comm, c);
        shm_gather_pieces(c, (struct range){0, own.begin});
        shm_gather_pieces(c, (struct range){own.end, announcement->numel});
    }
    struct slot *slot = slot_of(comm, comm->rank, number);
    slot->announcement = *announcement;
    if (staged) {
        slot->announcement.place = STAGED_IN_PART;
    }
    shm_raise(&slot->arrived, number);
    comm->next = number + 1;
    *seq = number;
    return SHM_OK;
}

static int wait_until(struct shm_comm *comm, bool (*is_done)(struct shm_comm *, uint32_t),
                      uint32_t seq, uint64_t slice_ns) {
    struct shm_patience patience = {0};
    uint64_t end_ns = 0;
    while (!is_done(comm, seq)) {
        bool is_posted_only = (int32_t)(comm->head - seq) <= 0;
        if (is_posted_only && run_head(comm)) {
            patience = (struct shm_patience){0};
            continue;
        }
        if (slice_ns == 0) {
            return SHM_AGAIN;
        }
        if (!shm_back_off(comm->stall.flag, comm->stall.target, &patience, comm->yield_early) ||
            shm_reached(comm->stall.flag, comm->stall.target)) {
            continue;
        }
        int lost = find_lost_peer(comm, is_posted_only ? comm->head : seq, is_done);
        if (lost >= 0) {
            comm->stall.rank = lost;
            return SHM_PEER_LOST;
        }
        uint64_t now = shm_now_ns();
        end_ns = end_ns != 0 ? end_ns : now + slice_ns;
        if (now >= end_ns) {
            return SHM_AGAIN;
        }
    }
    return comm->ring[seq % SHM_RING].status;
}

/* A peer that filled its mailbox, and gave up before it had the result; -1 if there is none. We
 * have come too late then: no rank may go on with this result. */
static int find_aborter(struct shm_comm *comm, uint32_t seq) {
    for (int r = 0; r < comm->world_size; r++) {
        if (r != comm->rank && atomic_load(&control_of(comm, r)->state) == SHM_ABORTED &&
            !shm_reached(&control_of(comm, r)->reduced, seq)) {
            return r;
        }
    }
    return -1;
}

int shm_wait(struct shm_comm *comm, uint32_t seq, uint64_t slice_ns) {
    int status = wait_until(comm, is_complete, seq, slice_ns);
    int aborter = status == SHM_OK ? find_aborter(comm, seq) : -1;
    if (aborter < 0) {
        return status;
    }
    comm->stall.rank = aborter;
    return SHM_PEER_LOST;
}

int shm_make_room(struct shm_comm *comm, uint64_t slice_ns) {
    int status = wait_until(comm, all_have_finished, comm->next - SHM_RING, slice_ns);
    return status == SHM_MISMATCH || status == SHM_ABANDONED
               ? SHM_OK
               : status; /* shm_wait for that collective reports it */
}

uint64_t shm_progress(const struct shm_comm *comm) {
    const struct collective *c = &comm->ring[comm->head % SHM_RING];
    return comm->head + comm->chunk + c->n_in + c->n_worked + c->n_out;
}

void shm_keep_times(struct shm_comm *comm, int change) {
    comm->n_timekeepers += change;
}

/* Adds up what all ranks have counted. Returns false where they have not. */
static bool add_counted(const struct shm_comm *comm, uint32_t seq,
                        struct shm_statistics *statistics) {
    const struct collective *c = &comm->ring[seq % SHM_RING];
    bool is_counted = c->counting.numel > 0 && is_float(c->announcement.dtype);
    *statistics = c->statistics;
    if (!is_counted || c->path == INLINE) {
        return is_counted;
    }
    *statistics = (struct shm_statistics){0};
    for (int r = 0; r < comm->world_size; r++) {
        const struct counted *theirs = &control_of(comm, r)->counted[seq % SHM_RING];
        if (c->path != DIRECT || theirs->seq != seq) {
            return false;
        }
        statistics->n_nonfinite += theirs->statistics.n_nonfinite;
        statistics->square_sum += theirs->statistics.square_sum;
    }
    return true;
}

struct shm_outcome shm_outcome_of(const struct shm_comm *comm, uint32_t seq) {
    const struct collective *c = &comm->ring[seq % SHM_RING];
    struct shm_outcome outcome = {.has_no_data = c->announcement.presence == HAS_NO_DATA,
                                  .is_skipped = c->is_skipped,
                                  .began_ns = c->began_ns,
                                  .ended_ns = c->ended_ns};
    outcome.is_counted = add_counted(comm, seq, &outcome.statistics);
    return outcome;
}

int shm_stalled_on(const struct shm_comm *comm) {
    return comm->stall.rank;
}

uint32_t shm_posted(const struct shm_comm *comm, int rank) {
    uint32_t last = comm->head - 1; /* all ranks have posted that one: we have finished it */
    while (shm_reached(&slot_of(comm, rank, last + 1)->arrived, last + 1) &&
           last + 1 - comm->head < SHM_RING) {
        last++;
    }
    return last;
}

struct announcement shm_announcement_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    bool failed = (int32_t)(comm->head - seq) > 0 && comm->ring[seq % SHM_RING].status != SHM_OK;
    return failed ? comm->disagreed[seq % SHM_RING][rank] : slot_of(comm, rank, seq)->announcement;
}

int shm_state_of(const struct shm_comm *comm, int rank) {
    return atomic_load(&control_of(comm, rank)->state);
}

int shm_blamed_by(const struct shm_comm *comm, int rank) {
    int blamed = atomic_load(&control_of(comm, rank)->blames) - 1;
    return blamed < comm->world_size ? blamed : -1;
}

void shm_set_state(struct shm_comm *comm, enum shm_state state, int blames) {
    struct control *control = control_of(comm, comm->rank);
    atomic_store(&control->blames, blames + 1);
    atomic_store(&control->state, (int32_t)state);
}
