/* The three ways a collective goes through shared memory: inline, direct, staged. docs/design.md
 * says when each is taken. */
#include "internal.h"

/* A block of a result that is counted while it is in the cache. */
enum { COUNTED_BYTES = 1 << 16 };

/* ---- the tensor of an all_reduce ---- */

/* Elements that lie together, at `data`. */
struct run {
    uint64_t begin, end;
    char *data;
};

/* The elements from `begin` to `end`, as far as they lie together. `i`: 0 for the first run; then
 * as the call for the one before has left it. */
static struct run run_from(const struct collective *c, uint64_t begin, uint64_t end, size_t *i) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    if (!is_scattered(c)) {
        return (struct run){begin, end, c->output + begin * itemsize};
    }
    while (c->pieces[*i].offset + c->pieces[*i].numel <= begin) {
        ++*i;
    }
    const struct shm_piece *piece = &c->pieces[*i];
    return (struct run){begin, min64(end, piece->offset + piece->numel),
                        (char *)piece->source + (begin - piece->offset) * itemsize};
}

void shm_read_elements(const struct collective *c, struct range range, char *to) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype), i = 0;
    while (range.begin < range.end) {
        struct run run = run_from(c, range.begin, range.end, &i);
        memcpy(to, run.data, (run.end - run.begin) * itemsize);
        to += (run.end - run.begin) * itemsize;
        range.begin = run.end;
    }
}

static void write_elements(const struct collective *c, struct range range, const char *from) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype), i = 0;
    while (range.begin < range.end) {
        struct run run = run_from(c, range.begin, range.end, &i);
        memcpy(run.data, from, (run.end - run.begin) * itemsize);
        from += (run.end - run.begin) * itemsize;
        range.begin = run.end;
    }
}

/* ---- the inline path ---- */

bool shm_fits_mailbox(const struct announcement *d, int world_size) {
    /* Every rank reads every mailbox, so with many ranks the direct path wins earlier. */
    size_t nbytes = d->numel * shm_dtype_size(d->dtype);
    size_t of_one = d->kind == CALL_SCATTER ? nbytes * (size_t)world_size : nbytes;
    return d->kind == CALL_BARRIER || d->kind == CALL_ABANDON ||
           (of_one <= SHM_INLINE_BYTES && nbytes * (size_t)world_size <= 4 * SHM_INLINE_BYTES);
}

/* ---- parts ---- */

/* What rank `from` has for rank `to`, in elements of its input. */
static struct range part_of(const struct shm_comm *comm, const struct collective *c, int from,
                            int to) {
    const struct announcement *d = &c->announcement;
    uint64_t world_size = (uint64_t)comm->world_size, numel = d->numel;
    if (d->kind == CALL_GATHER) {
        return (struct range){0, to == (int)d->root ? numel : 0};
    }
    if (d->kind == CALL_SCATTER && from != (int)d->root) {
        return (struct range){0, 0};
    }
    if (c->bounds != NULL) {
        const uint64_t *row = c->bounds + (world_size + 1) * (uint64_t)from;
        return (struct range){row[to], row[to + 1]};
    }
    numel = d->kind == CALL_SCATTER ? numel : numel / world_size;
    return (struct range){numel * (uint64_t)to, numel * ((uint64_t)to + 1)};
}

/* The elements of a part that lie in `chunk`, which counts from where the part begins. */
static struct range cut(struct range part, struct range chunk) {
    uint64_t begin = min64(part.begin + chunk.begin, part.end);
    return (struct range){begin, min64(part.begin + chunk.end, part.end)};
}

/* Copies what lies in `chunk` of the parts that this rank gets. `sources[r]`: where rank r has the
 * first of these elements. */
static void take_parts(const struct shm_comm *comm, const struct collective *c, struct range chunk,
                       const char *const *sources) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    uint64_t place = 0;
    for (int r = 0; r < comm->world_size; r++) {
        struct range part = part_of(comm, c, r, comm->rank), piece = cut(part, chunk);
        if (piece.begin < piece.end) {
            memmove(c->output + (place + piece.begin - part.begin) * itemsize, sources[r],
                    (piece.end - piece.begin) * itemsize);
        }
        place += part.end - part.begin;
    }
}

/* Copies whole parts out of the ranks' inputs. */
static void take_parts_of(const struct shm_comm *comm, const struct collective *c,
                          const char *const *inputs) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    const char *sources[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        sources[r] = inputs[r] + part_of(comm, c, r, comm->rank).begin * itemsize;
    }
    take_parts(comm, c, (struct range){0, UINT64_MAX / 2}, sources);
}

uint64_t shm_mailbox_numel(const struct shm_comm *comm, const struct collective *c) {
    const struct announcement *d = &c->announcement;
    bool is_root = (int)d->root == comm->rank;
    if (d->kind == CALL_SCATTER || d->kind == CALL_ALL_TO_ALL) {
        return part_of(comm, c, comm->rank, comm->world_size - 1).end;
    }
    return d->kind == CALL_BROADCAST && !is_root ? 0 : d->numel;
}

/* Reduces all ranks' inputs by the collective's op. Returns false if the result is finite. */
static bool reduce_inputs(const struct shm_comm *comm, const struct announcement *d, size_t numel,
                          const void *const *inputs, void *const *outputs, int n_outputs) {
    if (comm->has_factors) {
        return shm_reduce_weighted(d->dtype, numel, inputs, comm->factors, comm->world_size,
                                   outputs, n_outputs);
    }
    return shm_reduce(d->dtype, d->op, numel, inputs, comm->world_size, outputs, n_outputs);
}

/* Reduces elements [begin, begin + numel) of the tensor, and counts what is asked for in the
 * result. `inputs` and `outputs` are the addresses of element `begin`; they are changed. */
static void reduce_elements(const struct shm_comm *comm, struct collective *c, uint64_t begin,
                            uint64_t numel, const void **inputs, void **outputs, int n_outputs) {
    const struct announcement *d = &c->announcement;
    size_t itemsize = shm_dtype_size(d->dtype);
    uint64_t end = is_float(d->dtype) ? c->counting.numel : 0;
    while (begin < end && numel > 0) {
        uint64_t length = min64(min64(numel, end - begin), COUNTED_BYTES / itemsize);
        if (reduce_inputs(comm, d, length, inputs, outputs, n_outputs)) {
            c->statistics.n_nonfinite += shm_count_nonfinite(d->dtype, length, outputs[0]);
        }
        if (c->counting.adds_squares) {
            c->statistics.square_sum += shm_add_squares(d->dtype, length, outputs[0]);
        }
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = (const char *)inputs[r] + length * itemsize;
        }
        for (int j = 0; j < n_outputs; j++) {
            outputs[j] = (char *)outputs[j] + length * itemsize;
        }
        begin += length;
        numel -= length;
    }
    if (numel > 0) {
        reduce_inputs(comm, d, numel, inputs, outputs, n_outputs);
    }
}

static char *mailbox_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return control_of(comm, rank)->mailbox[seq % SHM_RING];
}

static void reduce_mailboxes(const struct shm_comm *comm, uint32_t seq, struct collective *c,
                             size_t offset, size_t numel, void *output) {
    const void *inputs[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        inputs[r] = mailbox_of(comm, r, seq) + offset;
    }
    reduce_elements(comm, c, 0, numel, inputs, &output, 1);
}

static void reduce_whole_mailboxes(const struct shm_comm *comm, uint32_t seq,
                                   struct collective *c) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype), i = 0;
    uint64_t at = 0, end = c->announcement.numel;
    while (at < end) {
        struct run run = run_from(c, at, end, &i);
        reduce_mailboxes(comm, seq, c, at * itemsize, run.end - at, run.data);
        at = run.end;
    }
}

/* Copies rank r's shard from a copy of the whole tensor. */
static void copy_shard(const struct collective *c, int r, const char *tensor) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype), begin = c->bounds[r] * itemsize;
    memcpy(c->output + begin, tensor + begin, c->bounds[r + 1] * itemsize - begin);
}

void shm_run_inline(const struct shm_comm *comm, uint32_t seq, struct collective *c) {
    const struct announcement *d = &c->announcement;
    size_t nbytes = d->numel * shm_dtype_size(d->dtype);
    size_t part = nbytes / (size_t)comm->world_size;
    if (c->lacks_data) {
        return; /* the others have all they need */
    }
    switch (d->kind) {
    case CALL_ALL_REDUCE:
    case CALL_REDUCE_SCATTER_V: /* of all shards: there is little */
        reduce_whole_mailboxes(comm, seq, c);
        break;
    case CALL_REDUCE_SCATTER:
        reduce_mailboxes(comm, seq, c, part * (size_t)comm->rank,
                         d->numel / (uint64_t)comm->world_size, c->output);
        break;
    case CALL_BROADCAST:
        if ((int)d->root != comm->rank) {
            memcpy(c->output, mailbox_of(comm, (int)d->root, seq), nbytes);
        }
        break;
    case CALL_ALL_GATHER:
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(c->output + nbytes * (size_t)r, mailbox_of(comm, r, seq), nbytes);
        }
        break;
    case CALL_ALL_GATHER_V:
        for (int r = 0; r < comm->world_size; r++) {
            copy_shard(c, r, mailbox_of(comm, r, seq));
        }
        break;
    case CALL_GATHER:
    case CALL_SCATTER:
    case CALL_ALL_TO_ALL: {
        const char *inputs[SHM_MAX_RANKS];
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = mailbox_of(comm, r, seq);
        }
        take_parts_of(comm, c, inputs);
        break;
    }
    default: /* a barrier moves nothing, nor does CALL_ABANDON */
        break;
    }
}

/* ---- the direct path ---- */

static inline char *tensor_of(const struct shm_comm *comm, int rank, uint32_t seq) {
    return comm->segments[rank] + slot_of(comm, rank, seq)->announcement.offset;
}

void shm_gather_pieces(const struct collective *c, struct range range) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    for (size_t i = 0; i < c->n_pieces && !is_scattered(c); i++) {
        const struct shm_piece *piece = &c->pieces[i];
        uint64_t begin = piece->offset > range.begin ? piece->offset : range.begin;
        uint64_t end = min64(piece->offset + piece->numel, range.end);
        if (begin < end) {
            const char *source = (const char *)piece->source + (begin - piece->offset) * itemsize;
            shm_copy(c->output + begin * itemsize, source, (end - begin) * itemsize);
        }
    }
}

/* Reduces `range` of every rank's tensor into every rank's tensor or, if it is a shard, into this
 * rank's alone. Reads this rank's own input at `own`. */
static void reduce_range(const struct shm_comm *comm, uint32_t seq, struct collective *c,
                         struct range range, const char *own) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    bool is_shard = c->bounds != NULL && range.begin < c->bounds[comm->world_size];
    const void *inputs[SHM_MAX_RANKS];
    void *outputs[SHM_MAX_RANKS];
    int n_outputs = 0;
    for (int r = 0; r < comm->world_size; r++) {
        if (slot_of(comm, r, seq)->announcement.presence == HAS_NO_DATA) {
            inputs[r] = NULL; /* whose factor is 0 */
            continue;
        }
        char *tensor = tensor_of(comm, r, seq) + range.begin * itemsize;
        inputs[r] = r == comm->rank ? own : tensor;
        outputs[n_outputs++] = tensor;
    }
    if (is_shard) {
        outputs[0] = c->output + range.begin * itemsize;
        n_outputs = 1;
    }
    if (comm->world_size > 1 || inputs[0] != outputs[0] || comm->has_factors ||
        c->counting.numel > 0) {
        reduce_elements(comm, c, range.begin, range.end - range.begin, inputs, outputs, n_outputs);
    }
}

/* What pieces hold of the part is read straight from there: it is never copied into the bucket
 * before the reduction. */
static void reduce_part(const struct shm_comm *comm, uint32_t seq, struct collective *c,
                        struct range part) {
    size_t itemsize = shm_dtype_size(c->announcement.dtype);
    uint64_t at = part.begin;
    for (size_t i = 0; i < c->n_pieces && at < part.end; i++) {
        const struct shm_piece *piece = &c->pieces[i];
        if (piece->offset + piece->numel <= at) {
            continue;
        }
        uint64_t begin = min64(piece->offset > at ? piece->offset : at, part.end);
        uint64_t end = min64(piece->offset + piece->numel, part.end);
        if (at < begin) {
            reduce_range(comm, seq, c, (struct range){at, begin}, c->output + at * itemsize);
        }
        if (begin < end) {
            reduce_range(comm, seq, c, (struct range){begin, end},
                         (const char *)piece->source + (begin - piece->offset) * itemsize);
        }
        at = end > begin ? end : begin;
    }
    if (at < part.end) {
        reduce_range(comm, seq, c, (struct range){at, part.end}, c->output + at * itemsize);
    }
}

static void all_gather_v(const struct shm_comm *comm, uint32_t seq, const struct collective *c) {
    for (int r = 0; r < comm->world_size; r++) {
        if (r != comm->rank) {
            copy_shard(c, r, tensor_of(comm, r, seq));
        }
    }
}

void shm_run_direct(const struct shm_comm *comm, uint32_t seq, struct collective *c) {
    const struct announcement *d = &c->announcement;
    size_t itemsize = shm_dtype_size(d->dtype);
    if (d->kind == CALL_ALL_REDUCE || d->kind == CALL_REDUCE_SCATTER_V) {
        reduce_part(comm, seq, c, own_part(comm, c));
        if (d->kind == CALL_REDUCE_SCATTER_V && comm->rank == comm->world_size - 1) {
            reduce_part(comm, seq, c, (struct range){c->bounds[comm->world_size], d->numel});
        }
    } else if (d->kind == CALL_ALL_GATHER_V) {
        all_gather_v(comm, seq, c);
    } else if (moves_parts(d)) {
        const char *inputs[SHM_MAX_RANKS];
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = tensor_of(comm, r, seq);
        }
        take_parts_of(comm, c, inputs);
    } else if (d->kind == CALL_BROADCAST && (int)d->root != comm->rank) {
        memcpy(c->output, tensor_of(comm, (int)d->root, seq), d->numel * itemsize);
    } else if (d->kind == CALL_ALL_GATHER) {
        for (int r = 0; r < comm->world_size; r++) {
            memmove(c->output + d->numel * itemsize * (size_t)r, tensor_of(comm, r, seq),
                    d->numel * itemsize);
        }
    } else if (d->kind == CALL_REDUCE_SCATTER) {
        uint64_t numel = d->numel / (uint64_t)comm->world_size;
        const void *inputs[SHM_MAX_RANKS];
        void *output = c->output;
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] = tensor_of(comm, r, seq) + numel * itemsize * (size_t)comm->rank;
        }
        shm_reduce(d->dtype, d->op, numel, inputs, comm->world_size, &output, 1);
    }
}

/* ---- the staged path ---- */
/* A chunk passes three stages: `in` copies what the peers need into our staging area; `work`, once
 * all ranks have copied in, reads the peers' areas and, in an all_reduce, writes this rank's
 * results over what it has read there; `out`, once all ranks have worked, copies the results from
 * our area. The stages of neighbouring chunks overlap; a chunk may enter only when the chunk
 * SHM_STAGING_SLOTS before it has left, so no slot is overwritten while it is read.
 *
 * In an all_reduce each rank reduces its shard of the peers' slots in place: what it has read it
 * may write at once, and the peer then reads what it has written itself. Results that went into an
 * area of their own would be written to lines that the peers' caches still have from an earlier
 * chunk; where the cores share no cache, that takes longer than all else together.
 *
 * The first chunk is copied in when the collective is posted, where that is possible: the ranks'
 * arrival then announces it, and a flag round is saved. Of a small all_reduce every rank reduces
 * all, which saves the round before `out`. A slot is free all the same when it is filled again: a
 * rank works on chunk k - 2 before it stages chunk k, and for that all have to have staged k - 2,
 * before which they have worked on k - 4.
 *
 * Where ranks share cores (yield_early), a flag round takes a turn of the scheduler: there an
 * all_reduce of up to twice the size goes in one round, and a chunk fills its slot. */

static bool is_one_hop(const struct shm_comm *comm, const struct announcement *d) {
    size_t nbytes = d->numel * shm_dtype_size(d->dtype);
    size_t limit = comm->yield_early ? 2 * SHM_ONE_HOP_BYTES : SHM_ONE_HOP_BYTES;
    return d->kind == CALL_ALL_REDUCE && nbytes * (size_t)comm->world_size <= 2 * limit;
}

/* The part of a chunk of an all_reduce that this rank reduces. */
static struct range own_shard(const struct shm_comm *comm, const struct announcement *d,
                              uint64_t numel) {
    return is_one_hop(comm, d)
               ? (struct range){0, numel}
               : shard_of(numel, shm_dtype_size(d->dtype), comm->rank, comm->world_size);
}

static uint64_t chunk_numel(const struct shm_comm *comm, const struct announcement *d) {
    bool is_short = d->kind == CALL_ALL_REDUCE && !comm->yield_early;
    size_t nbytes = is_short ? SHM_CHUNK_BYTES : SHM_STAGING_BYTES;
    /* something for every rank in a slot; what is gathered goes to one */
    if (d->kind == CALL_REDUCE_SCATTER || (moves_parts(d) && d->kind != CALL_GATHER)) {
        nbytes = nbytes / (size_t)comm->world_size / CACHE_LINE * CACHE_LINE;
    }
    return nbytes / shm_dtype_size(d->dtype);
}

static uint64_t staged_numel(const struct shm_comm *comm, const struct announcement *d) {
    bool is_cut = d->kind == CALL_REDUCE_SCATTER || d->kind == CALL_ALL_TO_ALL;
    return is_cut ? d->numel / (uint64_t)comm->world_size : d->numel;
}

static uint64_t n_chunks(const struct shm_comm *comm, const struct announcement *d) {
    uint64_t per_chunk = chunk_numel(comm, d);
    return (staged_numel(comm, d) + per_chunk - 1) / per_chunk;
}

static struct range chunk_range(const struct shm_comm *comm, const struct announcement *d,
                                uint64_t index) {
    uint64_t begin = index * chunk_numel(comm, d);
    return (struct range){begin, min64(begin + chunk_numel(comm, d), staged_numel(comm, d))};
}

static char *staging_slot(const struct shm_comm *comm, int rank, uint64_t index) {
    return control_of(comm, rank)->staging[(comm->chunk + (uint32_t)index) % SHM_STAGING_SLOTS];
}

/* The parts of a chunk of an all_reduce that peers reduce: this rank's own shard, which lies
 * between them, never leaves the tensor. */
struct peers_shards {
    struct range before, behind;
    size_t offset; /* of the latter in the slot */
};

static struct peers_shards peers_shards_of(const struct shm_comm *comm,
                                           const struct announcement *d, struct range chunk) {
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range own = shard_of(chunk.end - chunk.begin, itemsize, comm->rank, comm->world_size);
    return (struct peers_shards){{chunk.begin, chunk.begin + own.begin},
                                 {chunk.begin + own.end, chunk.end},
                                 own.end * itemsize};
}

/* The room in a slot for the piece that is meant for rank `to`. */
static char *room_for(const struct shm_comm *comm, const struct announcement *d, char *slot,
                      int to) {
    size_t room = d->kind == CALL_GATHER ? 0 : (size_t)to;
    return slot + chunk_numel(comm, d) * shm_dtype_size(d->dtype) * room;
}

static void copy_parts_in(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct announcement *d = &c->announcement;
    size_t itemsize = shm_dtype_size(d->dtype);
    char *slot = staging_slot(comm, comm->rank, index);
    for (int r = 0; r < comm->world_size; r++) {
        struct range piece = cut(part_of(comm, c, comm->rank, r), chunk_range(comm, d, index));
        if (r != comm->rank && piece.begin < piece.end) {
            memcpy(room_for(comm, d, slot, r), c->input + piece.begin * itemsize,
                   (piece.end - piece.begin) * itemsize);
        }
    }
}

static void copy_parts_out(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct announcement *d = &c->announcement;
    struct range chunk = chunk_range(comm, d, index),
                 own = cut(part_of(comm, c, comm->rank, comm->rank), chunk);
    const char *sources[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        sources[r] = room_for(comm, d, staging_slot(comm, r, index), comm->rank);
    }
    if (own.begin < own.end) { /* which never leaves the tensor */
        sources[comm->rank] = c->input + own.begin * shm_dtype_size(d->dtype);
    }
    take_parts(comm, c, chunk, sources);
}

static void copy_in(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct announcement *d = &c->announcement;
    if (moves_parts(d)) {
        copy_parts_in(comm, c, index);
        return;
    }
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range chunk = chunk_range(comm, d, index);
    char *area = staging_slot(comm, comm->rank, index);
    if (is_one_hop(comm, d)) {
        shm_read_elements(c, chunk, area);
        return;
    }
    if (d->kind == CALL_ALL_REDUCE) {
        const struct peers_shards theirs = peers_shards_of(comm, d, chunk);
        shm_read_elements(c, theirs.before, area);
        shm_read_elements(c, theirs.behind, area + theirs.offset);
        return;
    }
    uint64_t numel = chunk.end - chunk.begin;
    const char *input = c->input + chunk.begin * itemsize;
    if (d->kind == CALL_REDUCE_SCATTER) {
        size_t stride = staged_numel(comm, d) * itemsize;
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(area + chunk_numel(comm, d) * itemsize * (size_t)r, input + stride * (size_t)r,
                   numel * itemsize);
        }
    } else if (d->kind == CALL_ALL_GATHER || (int)d->root == comm->rank) {
        memcpy(area, input, numel * itemsize);
    }
}

bool shm_stage_first(struct shm_comm *comm, struct collective *c) {
    if (comm->head != comm->next) {
        return false; /* an earlier collective may still stage chunks */
    }
    copy_in(comm, c, c->n_in++);
    return true;
}

static void stage_in(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    copy_in(comm, c, index);
    shm_raise(&control_of(comm, comm->rank)->staged_in, comm->chunk + (uint32_t)index + 1);
}

/* Whether all ranks have copied chunk `index` of the oldest collective in. */
static bool all_staged(struct shm_comm *comm, uint64_t index) {
    uint32_t target = comm->chunk + (uint32_t)index + 1;
    for (int r = 0; r < comm->world_size; r++) {
        struct shm_flag *flag = &control_of(comm, r)->staged_in;
        bool on_arrival =
            index == 0 && slot_of(comm, r, comm->head)->announcement.place == STAGED_IN_PART;
        if (!on_arrival && !shm_reached(flag, target)) {
            comm->stall = (struct stall){flag, target, r};
            return false;
        }
    }
    return true;
}

/* Reduces elements that lie together, of a chunk whose first one has the number `begin`, into the
 * tensor, and into the peers' slots, unless each rank reduces all. */
static void reduce_run(const struct shm_comm *comm, const struct collective *c, uint64_t index,
                       uint64_t begin, struct run run) {
    const struct announcement *d = &c->announcement;
    size_t offset = (run.begin - begin) * shm_dtype_size(d->dtype);
    const void *inputs[SHM_MAX_RANKS];
    void *outputs[SHM_MAX_RANKS] = {run.data};
    int n_outputs = 1;
    for (int r = 0; r < comm->world_size; r++) {
        char *of_rank = r == comm->rank ? run.data : staging_slot(comm, r, index) + offset;
        inputs[r] = of_rank;
        if (r != comm->rank && !is_one_hop(comm, d)) {
            outputs[n_outputs++] = of_rank;
        }
    }
    reduce_inputs(comm, d, run.end - run.begin, inputs, outputs, n_outputs);
}

/* Reduces this rank's shard of a chunk of an all_reduce. */
static void reduce_chunk(const struct shm_comm *comm, const struct collective *c, uint64_t index) {
    struct range chunk = chunk_range(comm, &c->announcement, index),
                 own = own_shard(comm, &c->announcement, chunk.end - chunk.begin);
    uint64_t at = chunk.begin + own.begin, end = chunk.begin + own.end;
    size_t i = 0;
    while (at < end) {
        struct run run = run_from(c, at, end, &i);
        reduce_run(comm, c, index, chunk.begin, run);
        at = run.end;
    }
}

static void work_on(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct announcement *d = &c->announcement;
    if (moves_parts(d)) {
        copy_parts_out(comm, c, index);
        return;
    }
    if (d->kind == CALL_ALL_REDUCE) {
        reduce_chunk(comm, c, index);
        return;
    }
    size_t itemsize = shm_dtype_size(d->dtype);
    struct range chunk = chunk_range(comm, d, index);
    uint64_t numel = chunk.end - chunk.begin;
    char *output = c->output + chunk.begin * itemsize;
    const void *inputs[SHM_MAX_RANKS];
    for (int r = 0; r < comm->world_size; r++) {
        inputs[r] = staging_slot(comm, r, index);
    }
    if (d->kind == CALL_REDUCE_SCATTER) {
        for (int r = 0; r < comm->world_size; r++) {
            inputs[r] =
                (const char *)inputs[r] + chunk_numel(comm, d) * itemsize * (size_t)comm->rank;
        }
        void *outputs[1] = {output};
        shm_reduce(d->dtype, d->op, numel, inputs, comm->world_size, outputs, 1);
    } else if (d->kind == CALL_ALL_GATHER) {
        for (int r = 0; r < comm->world_size; r++) {
            memcpy(output + d->numel * itemsize * (size_t)r, inputs[r], numel * itemsize);
        }
    } else if ((int)d->root != comm->rank) {
        memcpy(output, inputs[d->root], numel * itemsize);
    }
}

static void stage_work(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    work_on(comm, c, index);
    shm_raise(&control_of(comm, comm->rank)->staged_out, comm->chunk + (uint32_t)index + 1);
}

static void stage_out(struct shm_comm *comm, const struct collective *c, uint64_t index) {
    const struct announcement *d = &c->announcement;
    if (d->kind != CALL_ALL_REDUCE || is_one_hop(comm, d)) {
        return;
    }
    const struct peers_shards theirs = peers_shards_of(comm, d, chunk_range(comm, d, index));
    const char *area = staging_slot(comm, comm->rank, index);
    write_elements(c, theirs.before, area);
    write_elements(c, theirs.behind, area + theirs.offset);
}

bool shm_run_staged(struct shm_comm *comm, struct collective *c) {
    uint64_t total = n_chunks(comm, &c->announcement);
    bool one_hop = is_one_hop(comm, &c->announcement);
    for (;;) {
        if (c->n_out < c->n_worked &&
            (one_hop || shm_all_reached(comm, STAGED_OUT, comm->chunk + (uint32_t)c->n_out + 1))) {
            stage_out(comm, c, c->n_out++);
        } else if (c->n_in < total && c->n_in < c->n_out + SHM_STAGING_SLOTS &&
                   c->n_in < c->n_worked + 2) {
            stage_in(comm, c, c->n_in++);
        } else if (c->n_worked < c->n_in && all_staged(comm, c->n_worked)) {
            stage_work(comm, c, c->n_worked++);
        } else if (c->n_out == total) {
            comm->chunk += (uint32_t)total;
            return true;
        } else {
            return false;
        }
    }
}
