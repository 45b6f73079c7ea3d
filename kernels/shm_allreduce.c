/* Collectives over shared memory: see shm_allreduce.h for the contract.
 *
 * Every rank keeps a ring of SHM_RING descriptor slots. Posting collective number `seq` fills slot seq % SHM_RING and raises the
 * slot's own flag, so one cache line tells the peers both that we arrived and what we want. `reduced` says up to which number this
 * rank has finished reading its peers' memory; a slot, a mailbox or a tensor is reused only when all ranks have got that far.
 *
 * Reduction order is rank 0, 1, 2, ... for every element, so the result is bitwise the same on every rank and in every run. */
#define _GNU_SOURCE
#include "shm_allreduce.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "shm_wait.h"

#define CACHE_LINE 64

struct slot {
    _Alignas(CACHE_LINE) struct shm_flag arrived;
    struct shm_descriptor descriptor;
};

/* The head of every segment. All zero to begin with. */
struct control {
    struct slot slots[SHM_RING];
    _Alignas(CACHE_LINE) struct shm_flag reduced;
    _Alignas(CACHE_LINE) struct shm_flag staged_in;  /* chunks copied into staging_in, counted over all staged collectives */
    _Alignas(CACHE_LINE) struct shm_flag staged_out; /* chunks whose part of this rank is reduced into staging_out */
    _Alignas(CACHE_LINE) _Atomic int32_t state;      /* enum shm_state */
    _Atomic int32_t blames;                          /* the rank it gave up on, plus one */
    _Alignas(CACHE_LINE) char mailbox[SHM_RING][SHM_INLINE_BYTES];
    _Alignas(4096) char staging_in[SHM_STAGING_SLOTS][SHM_STAGING_BYTES];
    _Alignas(4096) char staging_out[SHM_STAGING_SLOTS][SHM_STAGING_BYTES];
};

enum path { UNDECIDED = 0, INLINE, DIRECT, STAGED };

struct collective {
    struct shm_descriptor descriptor;
    const char *input;
    char *output;
    const struct shm_piece *pieces;
    size_t n_pieces;
    enum path path;
    int status;
    uint32_t flags;
    uint64_t n_in, n_worked, n_out; /* staged path: chunks that passed each of the three stages */
};

/* What we wait for when nothing can be done. */
struct stall {
    struct shm_flag *flag;
    uint32_t target;
    int rank;
};

struct shm_comm {
    int rank, world_size;
    bool yield_early;
    uint32_t next;    /* number of the next collective to be posted; the first is 1 */
    uint32_t head;    /* oldest that this rank has not finished; == next when there is none */
    uint32_t settled; /* all ranks are known to have finished up to here */
    uint32_t chunk;   /* number of chunks in all finished staged collectives */
    struct stall stall;
    struct collective ring[SHM_RING];
    uint32_t disagreed_seq;
    struct shm_descriptor disagreed[SHM_MAX_RANKS];
    struct pollfd pidfds[SHM_MAX_RANKS];
    char *segments[SHM_MAX_RANKS];
};

struct range {
    uint64_t begin, end;
};

size_t shm_control_bytes(void) {
    return sizeof(struct control);
}

static inline struct control *control_of(const struct shm_comm *comm, int rank) {
    return (struct control *)comm->segments[rank];
}

static inline struct slot *slot_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return &control_of(comm, rank)->slots[seq % SHM_RING];
}

static inline uint64_t min64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* The part of `numel` elements that `rank` reduces. Parts begin on cache lines, so no two ranks write the same line. */
static struct range shard_of(uint64_t numel, size_t itemsize, int rank, int world_size) {
    uint64_t per_line = CACHE_LINE / itemsize;
    uint64_t lines = (numel + per_line - 1) / per_line;
    uint64_t per_rank = (lines + (uint64_t)world_size - 1) / (uint64_t)world_size * per_line;
    uint64_t begin = min64(per_rank * (uint64_t)rank, numel);
    return (struct range){begin, min64(begin + per_rank, numel)};
}

/* ---- the inline path ---------------------------------------------------------------------------------------------------------- */

static bool fits_mailbox(const struct shm_descriptor *d, int world_size) {
    /* Every rank reads every mailbox, so with many ranks the direct path wins earlier. */
    size_t nbytes = d->numel * shm_dtype_size(d->dtype);
    return d->kind == SHM_BARRIER || (nbytes <= SHM_INLINE_BYTES && nbytes * (size_t)world_size <= 4 * SHM_INLINE_BYTES);
}

static void reduce_mailboxes(const struct shm_comm *comm, uint32_t seq, const struct collective *c, size_t offset, size_t numel) {
    const void *inputs[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        inputs[r] = control_of(comm, r)->mailbox[seq % SHM_RING] + offset;
    }
    void *output = c->output;
    shm_reduce(c->descriptor.dtype, c->descriptor.op, numel, inputs, comm->world_size, &output, 1);
}

static void run_inline(const struct shm_comm *comm, uint32_t seq, const struct collective *c) {
    const struct shm_descriptor *d = &c->descriptor;
    size_t nbytes = d->kind == SHM_BARRIER ? 0 : d->numel * shm_dtype_size(d->dtype);
    size_t part = nbytes / (size_t)comm->world_size;
    switch (d->kind) {
    case SHM_ALL_REDUCE:
        reduce_mailboxes(comm, seq, c, 0, d->numel);
        break;
    case SHM_REDUCE_SCATTER:
        reduce_mailboxes(comm, seq, c, part * (size_t)comm->rank, d->numel / (uint64_t)comm->world_size);
        break;
    case SHM_BROADCAST:
        if ((int)d->root != comm->rank) {
            memcpy(c->output, control_of(comm, (int)d->root)->mailbox[seq % SHM_RING], nbytes);
        }
        break;
    case SHM_ALL_GATHER:
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(c->output + nbytes * (size_t)r, control_of(comm, r)->mailbox[seq % SHM_RING], nbytes);
        }
        break;
    default: /* a barrier moves nothing */
        break;
    }
}

/* ---- the direct path ---------------------------------------------------------------------------------------------------------- */

static inline char *tensor_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return comm->segments[rank] + slot_of(comm, rank, seq)->descriptor.where;
}

/* Copies the parts of the pieces inside `range` to where they belong in the input. */
static void gather_pieces(const struct collective *c, struct range range) {
    size_t itemsize = shm_dtype_size(c->descriptor.dtype);
    for (size_t i = 0; i < c->n_pieces; i++) {
        const struct shm_piece *piece = &c->pieces[i];
        uint64_t begin = piece->offset > range.begin ? piece->offset : range.begin;
        uint64_t end = min64(piece->offset + piece->numel, range.end);
        if (begin < end) {
            const char *source = (const char *)piece->source + (begin - piece->offset) * itemsize;
            shm_copy(c->output + begin * itemsize, source, (end - begin) * itemsize);
        }
    }
}

/* Reduces `range` of every rank's tensor into every rank's tensor, our own input being read at `own`. */
static void reduce_range(const struct shm_comm *comm, uint32_t seq, const struct collective *c, struct range range, const char *own) {
    size_t itemsize = shm_dtype_size(c->descriptor.dtype);
    const void *inputs[SHM_MAX_RANKS];
    void *outputs[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        outputs[r] = tensor_of(comm, r, seq) + range.begin * itemsize;
        inputs[r] = r == comm->rank ? own : outputs[r];
    }
    if (comm->world_size > 1 || inputs[0] != outputs[0]) {
        shm_reduce(c->descriptor.dtype, c->descriptor.op, range.end - range.begin, inputs, comm->world_size, outputs, comm->world_size);
    }
}

/* Our own shard is read straight from the pieces: it is never copied into the bucket before the reduction. */
static void all_reduce_direct(const struct shm_comm *comm, uint32_t seq, const struct collective *c) {
    size_t itemsize = shm_dtype_size(c->descriptor.dtype);
    struct range shard = shard_of(c->descriptor.numel, itemsize, comm->rank, comm->world_size);
    uint64_t at = shard.begin;
    for (size_t i = 0; i < c->n_pieces && at < shard.end; i++) {
        const struct shm_piece *piece = &c->pieces[i];
        if (piece->offset + piece->numel <= at) {
            continue;
        }
        uint64_t begin = min64(piece->offset > at ? piece->offset : at, shard.end);
        uint64_t end = min64(piece->offset + piece->numel, shard.end);
        if (at < begin) {
            reduce_range(comm, seq, c, (struct range){at, begin}, c->output + at * itemsize);
        }
        if (begin < end) {
            reduce_range(comm, seq, c, (struct range){begin, end}, (const char *)piece->source + (begin - piece->offset) * itemsize);
        }
        at = end > begin ? end : begin;
    }
    if (at < shard.end) {
        reduce_range(comm, seq, c, (struct range){at, shard.end}, c->output + at * itemsize);
    }
}

static void run_direct(const struct shm_comm *comm, uint32_t seq, const struct collective *c) {
    const struct shm_descriptor *d = &c->descriptor;
    size_t itemsize = shm_dtype_size(d->dtype);
    if (d->kind == SHM_ALL_REDUCE) {
        all_reduce_direct(comm, seq, c);
    } else if (d->kind == SHM_BROADCAST && (int)d->root != comm->rank) {
        memcpy(c->output, tensor_of(comm, (int)d->root, seq), d->numel * itemsize);
    } else if (d->kind == SHM_ALL_GATHER) {
        for (int r = 0; r < comm->world_size; r++) {
            memmove(c->output + d->numel * itemsize * (size_t)r, tensor_of(comm, r, seq), d->numel * itemsize);
        }
    } else if (d->kind == SHM_REDUCE_SCATTER) {
        uint64_t numel = d->numel / (uint64_t)comm->world_size;
        const void *inputs[SHM_MAX_RANKS];
        void *output = c->output;
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = tensor_of(comm, r, seq) + numel * itemsize * (size_t)comm->rank;
        }
        shm_reduce(d->dtype, d->op, numel, inputs, comm->world_size, &output, 1);
    }
}

/* ---- the staged path ---------------------------------------------------------------------------------------------------------- */
/* A chunk passes three stages: `in` copies what the peers need into our staging area; `work`, once all ranks have copied in, reads
 * the peers' areas; `out`, once all ranks have worked, collects an all_reduce's results. The stages of neighbouring chunks overlap;
 * a chunk may enter only when the chunk SHM_STAGING_SLOTS before it has left, so no slot is overwritten while it is read. */

static uint64_t chunk_numel(const struct shm_comm *comm, const struct shm_descriptor *d) {
    size_t parts = d->kind == SHM_REDUCE_SCATTER ? (size_t)comm->world_size : 1; /* one part of every rank's output in a slot */
    size_t nbytes = SHM_STAGING_BYTES / parts / CACHE_LINE * CACHE_LINE;
    return nbytes / shm_dtype_size(d->dtype);
}

static uint64_t staged_numel(const struct shm_comm *comm, const struct shm_descriptor *d) {
    return d->kind == SHM_REDUCE_SCATTER ? d->numel / (uint64_t)comm->world_size : d->numel;
}

static uint64_t n_chunks(const struct shm_comm *comm, const struct shm_descriptor *d) {
    uint64_t per_chunk = chunk_numel(comm, d);
    return (staged_numel(comm, d) + per_chunk - 1) / per_chunk;
}

static struct range chunk_range(const struct shm_comm *comm, const struct shm_descriptor *d, uint64_t index) {
    uint64_t begin = index * chunk_numel(comm, d);
    return (struct range){begin, min64(begin + chunk_numel(comm, d), staged_numel(comm, d))};
}

static void stage_in(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct shm_descriptor *d = &c->descriptor;
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range chunk = chunk_range(comm, d, index);
    uint64_t numel = chunk.end - chunk.begin;
    const char *input = c->input + chunk.begin * itemsize;
    char *area = control_of(comm, comm->rank)->staging_in[(comm->chunk + index) % SHM_STAGING_SLOTS];
    if (d->kind == SHM_ALL_REDUCE) { /* all but our own shard, which we reduce straight from the tensor */
        struct range own = shard_of(numel, itemsize, comm->rank, comm->world_size);
        memcpy(area, input, own.begin * itemsize);
        memcpy(area + own.end * itemsize, input + own.end * itemsize, (numel - own.end) * itemsize);
    } else if (d->kind == SHM_REDUCE_SCATTER) {
        size_t stride = staged_numel(comm, d) * itemsize;
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(area + chunk_numel(comm, d) * itemsize * (size_t)r, input + stride * (size_t)r, numel * itemsize);
        }
    } else if (d->kind == SHM_ALL_GATHER || (int)d->root == comm->rank) {
        memcpy(area, input, numel * itemsize);
    }
    shm_raise(&control_of(comm, comm->rank)->staged_in, comm->chunk + (uint32_t)index + 1);
}

static void stage_work(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct shm_descriptor *d = &c->descriptor;
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range chunk = chunk_range(comm, d, index);
    uint64_t numel = chunk.end - chunk.begin;
    uint32_t slot = (comm->chunk + (uint32_t)index) % SHM_STAGING_SLOTS;
    char *output = c->output + chunk.begin * itemsize;
    const void *inputs[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        inputs[r] = control_of(comm, r)->staging_in[slot];
    }
    if (d->kind == SHM_ALL_REDUCE) {
        struct range own = shard_of(numel, itemsize, comm->rank, comm->world_size);
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = (const char *)inputs[r] + own.begin * itemsize;
        }
        inputs[comm->rank] = output + own.begin * itemsize;
        void *outputs[2] = {output + own.begin * itemsize, control_of(comm, comm->rank)->staging_out[slot]};
        shm_reduce(d->dtype, d->op, own.end - own.begin, inputs, comm->world_size, outputs, comm->world_size > 1 ? 2 : 1);
    } else if (d->kind == SHM_REDUCE_SCATTER) {
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = (const char *)inputs[r] + chunk_numel(comm, d) * itemsize * (size_t)comm->rank;
        }
        void *outputs[1] = {output};
        shm_reduce(d->dtype, d->op, numel, inputs, comm->world_size, outputs, 1);
    } else if (d->kind == SHM_ALL_GATHER) {
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(output + d->numel * itemsize * (size_t)r, inputs[r], numel * itemsize);
        }
    } else if ((int)d->root != comm->rank) {
        memcpy(output, inputs[d->root], numel * itemsize);
    }
    shm_raise(&control_of(comm, comm->rank)->staged_out, comm->chunk + (uint32_t)index + 1);
}

static void stage_out(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct shm_descriptor *d = &c->descriptor;
    if (d->kind != SHM_ALL_REDUCE) {
        return;
    }
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range chunk = chunk_range(comm, d, index);
    uint32_t slot = (comm->chunk + (uint32_t)index) % SHM_STAGING_SLOTS;
    for (int r = 0; r < comm->world_size; r++) {
        if (r != comm->rank) {
            struct range theirs = shard_of(chunk.end - chunk.begin, itemsize, r, comm->world_size);
            memcpy(c->output + (chunk.begin + theirs.begin) * itemsize, control_of(comm, r)->staging_out[slot],
                   (theirs.end - theirs.begin) * itemsize);
        }
    }
}

/* ---- moving collectives forward ----------------------------------------------------------------------------------------------- */

enum which_flag { REDUCED, STAGED_IN, STAGED_OUT };

/* Whether every rank has raised its flag to `target`; if not, remembers whom we wait for. */
static bool all_reached(struct shm_comm *comm, enum which_flag which, uint32_t target) {
    for (int r = 0; r < comm->world_size; r++) {
        struct control *control = control_of(comm, r);
        struct shm_flag *flag = which == REDUCED ? &control->reduced : which == STAGED_IN ? &control->staged_in : &control->staged_out;
        if (!shm_reached(flag, target)) {
            comm->stall = (struct stall){flag, target, r};
            return false;
        }
    }
    return true;
}

static bool all_arrived(struct shm_comm *comm, uint32_t seq) {
    for (int r = 0; r < comm->world_size; r++) {
        struct shm_flag *flag = &slot_of(comm, r, seq)->arrived;
        if (!shm_reached(flag, seq)) {
            comm->stall = (struct stall){flag, seq, r};
            return false;
        }
    }
    return true;
}

/* Moves the chunks on as far as the peers allow. Returns whether the whole collective is through. */
static bool run_staged(struct shm_comm *comm, struct collective *c) {
    uint64_t total = n_chunks(comm, &c->descriptor);
    for (;;) {
        if (c->n_out < c->n_worked && all_reached(comm, STAGED_OUT, comm->chunk + (uint32_t)c->n_out + 1)) {
            stage_out(comm, c, c->n_out++);
        } else if (c->n_in < total && c->n_in < c->n_out + SHM_STAGING_SLOTS && c->n_in < c->n_worked + 2) {
            stage_in(comm, c, c->n_in++);
        } else if (c->n_worked < c->n_in && all_reached(comm, STAGED_IN, comm->chunk + (uint32_t)c->n_worked + 1)) {
            stage_work(comm, c, c->n_worked++);
        } else if (c->n_out == total) {
            comm->chunk += (uint32_t)total;
            return true;
        } else {
            return false;
        }
    }
}

static bool same_collective(const struct shm_descriptor *a, const struct shm_descriptor *b) {
    return a->kind == b->kind && a->op == b->op && a->dtype == b->dtype && a->root == b->root && a->numel == b->numel &&
           a->label == b->label;
}

/* All ranks have arrived: compares what they want and chooses the path from it. */
static void decide(struct shm_comm *comm, uint32_t seq, struct collective *c) {
    bool direct = true;
    for (int r = 0; r < comm->world_size; r++) {
        const struct shm_descriptor *theirs = &slot_of(comm, r, seq)->descriptor;
        if (!same_collective(theirs, &c->descriptor)) {
            c->status = SHM_MISMATCH;
        }
        direct = direct && theirs->where != SHM_PRIVATE;
        c->flags |= theirs->flags;
    }
    if (c->status == SHM_MISMATCH) { /* remembered for the message: the peers may reuse their slots */
        comm->disagreed_seq = seq;
        for (int r = 0; r < comm->world_size; r++) {
            comm->disagreed[r] = slot_of(comm, r, seq)->descriptor;
        }
    }
    c->path = fits_mailbox(&c->descriptor, comm->world_size) ? INLINE : direct ? DIRECT : STAGED;
    if (c->path == STAGED) {
        gather_pieces(c, shard_of(c->descriptor.numel, shm_dtype_size(c->descriptor.dtype), comm->rank, comm->world_size));
    }
}

/* Takes the oldest unfinished collective as far as it goes. Returns whether it is finished on this rank. */
static bool run_head(struct shm_comm *comm) {
    uint32_t seq = comm->head;
    struct collective *c = &comm->ring[seq % SHM_RING];
    if (c->path == UNDECIDED) {
        if (!all_arrived(comm, seq)) {
            return false;
        }
        decide(comm, seq, c);
    }
    if (c->status == SHM_OK) {
        if (c->path == INLINE) {
            run_inline(comm, seq, c);
        } else if (c->path == DIRECT) {
            run_direct(comm, seq, c);
        } else if (!run_staged(comm, c)) {
            return false;
        }
    }
    comm->head = seq + 1;
    shm_raise(&control_of(comm, comm->rank)->reduced, seq);
    return true;
}

/* Whether all ranks are done with `seq`: its slot, mailbox and tensors are free. */
static bool is_settled(struct shm_comm *comm, uint32_t seq) {
    if ((int32_t)(comm->settled - seq) >= 0) {
        return true;
    }
    if (!all_reached(comm, REDUCED, seq)) {
        return false;
    }
    comm->settled = seq;
    return true;
}

/* Whether the result is in place on this rank, and nobody reads or writes its tensors any more. */
static bool is_complete(struct shm_comm *comm, uint32_t seq) {
    if ((int32_t)(comm->head - seq) <= 0) {
        return false;
    }
    const struct collective *c = &comm->ring[seq % SHM_RING];
    return c->path != DIRECT || c->status != SHM_OK || is_settled(comm, seq);
}

/* ---- peers that are gone -------------------------------------------------------------------------------------------------------- */

/* Whether we need `rank` for more than the mailbox it has filled: then it must have raised `reduced`, too. */
static bool owes(struct shm_comm *comm, int rank, uint32_t seq, bool (*is_done)(struct shm_comm *, uint32_t)) {
    const struct shm_descriptor *d = &comm->ring[seq % SHM_RING].descriptor;
    if (!shm_reached(&slot_of(comm, rank, seq)->arrived, seq)) {
        return true;
    }
    bool mailbox_is_enough = fits_mailbox(d, comm->world_size) && is_done == is_complete;
    return !mailbox_is_enough && !shm_reached(&control_of(comm, rank)->reduced, seq);
}

static bool is_dead(struct shm_comm *comm, int rank) {
    return comm->pidfds[rank].fd >= 0 && (comm->pidfds[rank].revents & POLLIN);
}

/* A peer that died, or gave up, and that collective `seq` still needs; -1 if there is none. The dead come first: they are the cause. */
static int find_lost_peer(struct shm_comm *comm, uint32_t seq, bool (*is_done)(struct shm_comm *, uint32_t)) {
    poll(comm->pidfds, (nfds_t)comm->world_size, 0);
    for (int r = 0; r < comm->world_size; r++) {
        if (is_dead(comm, r) && owes(comm, r, seq, is_done)) {
            return r;
        }
    }
    for (int r = 0; r < comm->world_size; r++) {
        if (r != comm->rank && atomic_load(&control_of(comm, r)->state) != SHM_ALIVE && owes(comm, r, seq, is_done)) {
            return r;
        }
    }
    return -1;
}

/* ---- the interface -------------------------------------------------------------------------------------------------------------- */

struct shm_comm *shm_open_comm(int rank, int world_size, char *const *segments, const int *pidfds, int yield_early) {
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
        comm->pidfds[r] = (struct pollfd){.fd = pidfds[r], .events = POLLIN};
    }
    return comm;
}

void shm_free_comm(struct shm_comm *comm) {
    free(comm);
}

int shm_post(struct shm_comm *comm, const struct shm_descriptor *descriptor, const void *input, void *output,
             const struct shm_piece *pieces, size_t n_pieces, uint32_t *seq) {
    uint32_t number = comm->next;
    if (!is_settled(comm, number - SHM_RING)) {
        return SHM_AGAIN; /* the slot has not been read by everybody */
    }
    struct collective *c = &comm->ring[number % SHM_RING];
    *c = (struct collective){.descriptor = *descriptor, .input = input, .output = output, .pieces = pieces, .n_pieces = n_pieces};
    size_t itemsize = shm_dtype_size(descriptor->dtype);
    if (fits_mailbox(descriptor, comm->world_size)) {
        gather_pieces(c, (struct range){0, descriptor->numel});
        if (descriptor->numel > 0 && (descriptor->kind != SHM_BROADCAST || (int)descriptor->root == comm->rank)) {
            memcpy(control_of(comm, comm->rank)->mailbox[number % SHM_RING], input, descriptor->numel * itemsize);
        }
    } else { /* our own shard is left to the reduction */
        struct range own = shard_of(descriptor->numel, itemsize, comm->rank, comm->world_size);
        gather_pieces(c, (struct range){0, own.begin});
        gather_pieces(c, (struct range){own.end, descriptor->numel});
    }
    struct slot *slot = slot_of(comm, comm->rank, number);
    slot->descriptor = *descriptor;
    shm_raise(&slot->arrived, number);
    comm->next = number + 1;
    *seq = number;
    return SHM_OK;
}

static int wait_until(struct shm_comm *comm, bool (*is_done)(struct shm_comm *, uint32_t), uint32_t seq, uint64_t slice_ns) {
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

int shm_wait(struct shm_comm *comm, uint32_t seq, uint64_t slice_ns) {
    return wait_until(comm, is_complete, seq, slice_ns);
}

int shm_make_room(struct shm_comm *comm, uint64_t slice_ns) {
    int status = wait_until(comm, is_settled, comm->next - SHM_RING, slice_ns);
    return status == SHM_MISMATCH ? SHM_OK : status; /* whoever waits for that collective hears of it */
}

uint32_t shm_result_flags(const struct shm_comm *comm, uint32_t seq) {
    return comm->ring[seq % SHM_RING].flags;
}

int shm_stalled_on(const struct shm_comm *comm) {
    return comm->stall.rank;
}

uint32_t shm_posted(const struct shm_comm *comm, int rank) {
    uint32_t last = comm->head - 1; /* everybody has posted that one, for we have finished it */
    while (shm_reached(&slot_of(comm, rank, last + 1)->arrived, last + 1) && last + 1 - comm->head < SHM_RING) {
        last++;
    }
    return last;
}

struct shm_descriptor shm_descriptor_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return seq == comm->disagreed_seq ? comm->disagreed[rank] : slot_of(comm, rank, seq)->descriptor;
}

int shm_state_of(const struct shm_comm *comm, int rank) {
    return atomic_load(&control_of(comm, rank)->state);
}

int shm_blamed_by(const struct shm_comm *comm, int rank) {
    return atomic_load(&control_of(comm, rank)->blames) - 1;
}

void shm_set_state(struct shm_comm *comm, enum shm_state state, int blames) {
    struct control *control = control_of(comm, comm->rank);
    atomic_store(&control->blames, blames + 1);
    atomic_store(&control->state, (int32_t)state);
}
