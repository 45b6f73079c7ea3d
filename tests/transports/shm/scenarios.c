/* What the driver has the ranks do: every collective, many at once, with damaged announcements,
 * past a counter's end. Ranks that disagree, come late, leave or die are those of tests/contract.
 */
#include <signal.h>

#include "driver.h"

static void all_reduce_ints(struct rank *me, uint64_t numel, char *room) {
    struct request q = prepare(me, CALL_ALL_REDUCE, SHM_SUM, SHM_INT32, numel, room);
    run_and_verify(me, &q);
}

enum { SHARED, PRIVATE, MIXED, PLACES };

static char *room_of(struct rank *me, int place, size_t skew) {
    bool is_private = place == PRIVATE || (place == MIXED && me->rank == me->world_size - 1);
    return (is_private ? me->private : me->shared) + skew;
}

static void one_of(struct rank *me, uint32_t kind, uint32_t op, uint32_t dtype, uint64_t numel,
                   int place) {
    if (kind == CALL_REDUCE_SCATTER || kind == CALL_ALL_TO_ALL) {
        uint64_t n = (uint64_t)me->world_size;
        numel = (numel + n - 1) / n * n;
    }
    /* Every second tensor is aligned to its elements only. */
    struct request q = prepare(me, kind, op, dtype, numel,
                               room_of(me, place, numel % 2 ? shm_dtype_size(dtype) : 0));
    run_and_verify(me, &q);
}

static void every_collective(struct rank *me) {
    for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype++) {
        uint64_t itemsize = shm_dtype_size(dtype);
        uint64_t in_mailbox = SHM_INLINE_BYTES / itemsize, in_slot = SHM_STAGING_BYTES / itemsize;
        uint64_t in_chunk = SHM_CHUNK_BYTES / itemsize;
        uint64_t limits = me->world_size > 2 ? 4 : 2; /* twice as much where ranks yield early */
        uint64_t in_one_hop = limits * SHM_ONE_HOP_BYTES / itemsize / (uint64_t)me->world_size;
        uint64_t sizes[] = {
            0,
            1,
            37,
            in_mailbox - 1,
            in_mailbox,
            in_mailbox + 1,
            in_one_hop,
            in_one_hop + 1,
            in_chunk + 1,
            in_slot - 1,
            in_slot + 1,
            in_slot,
            /* 1 MiB: */ (1u << 20) / itemsize + 3,
        };
        /* The way through memory is the same for all dtypes, and among few ranks and many: what
         * does not fit one hop, for one narrow dtype and one wide, and what takes longest, among
         * three ranks. */
        bool is_large = dtype == SHM_FLOAT32 || dtype == SHM_FLOAT16;
        bool every_size = full && me->world_size <= 3 && is_large;
        size_t n_sizes = every_size ? sizeof sizes / sizeof *sizes
                         : is_large ? 10 + (dtype == SHM_FLOAT16)
                                    : 8;
        for (size_t i = 0; i < n_sizes; i++) {
            for (int place = 0; place < PLACES; place++) {
                /* Large sizes with one operation each: it is their way through memory that matters.
                 */
                uint32_t any = (uint32_t)(i + dtype + (unsigned)place) % 5;
                for (uint32_t op = 0; op < 5; op++) {
                    if (op == any || (sizes[i] * itemsize <= SHM_INLINE_BYTES * 2 && full)) {
                        one_of(me, CALL_ALL_REDUCE, op, dtype, sizes[i], place);
                        one_of(me, CALL_REDUCE_SCATTER, op, dtype, sizes[i], place);
                    }
                }
                one_of(me, CALL_BROADCAST, 0, dtype, sizes[i], place);
                one_of(me, CALL_ALL_GATHER, 0, dtype, sizes[i], place);
                one_of(me, CALL_GATHER, 0, dtype, sizes[i], place);
                one_of(me, CALL_SCATTER, 0, dtype, sizes[i], place);
                one_of(me, CALL_ALL_TO_ALL, 0, dtype, sizes[i], place);
                one_of(me, CALL_BARRIER, 0, 0, 0, place);
            }
        }
    }
}

static void some_on_many_ranks(struct rank *me) {
    for (int place = 0; place < PLACES; place++) {
        one_of(me, CALL_BARRIER, 0, 0, 0, place);
        for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype += 3) {
            one_of(me, CALL_ALL_REDUCE, SHM_SUM, dtype, 37, place);
            one_of(me, CALL_ALL_REDUCE, SHM_MEAN, dtype, 3001, place);
            one_of(me, CALL_REDUCE_SCATTER, SHM_MAX, dtype, 3001, place);
            one_of(me, CALL_ALL_GATHER, 0, dtype, 501, place);
            one_of(me, CALL_GATHER, 0, dtype, 501, place);
            one_of(me, CALL_SCATTER, 0, dtype, 501, place);
            one_of(me, CALL_ALL_TO_ALL, 0, dtype, 3001, place);
            one_of(me, CALL_BROADCAST, 0, dtype, 3001, place);
        }
    }
}

/* More chunks than there are staging slots, one collective right after the other. */
static void many_chunks(struct rank *me) {
    const uint64_t numel = 10 * SHM_STAGING_BYTES / sizeof(float) + 5;
    for (int i = 0; i < 3; i++) {
        one_of(me, CALL_ALL_REDUCE, SHM_SUM, SHM_FLOAT32, numel, PRIVATE);
        one_of(me, CALL_BROADCAST, 0, SHM_FLOAT32, numel + (uint64_t)i, MIXED);
        one_of(me, CALL_ALL_GATHER, 0, SHM_FLOAT32, numel, PRIVATE);
        one_of(me, CALL_GATHER, 0, SHM_FLOAT32, numel / 4, MIXED);
        one_of(me, CALL_SCATTER, 0, SHM_FLOAT32, numel / 4, PRIVATE);
        one_of(me, CALL_ALL_TO_ALL, 0, SHM_FLOAT32, numel, MIXED);
        one_of(me, CALL_REDUCE_SCATTER, SHM_SUM, SHM_FLOAT32, numel, MIXED);
    }
}

/* One staged all_reduce right after the other, some in one hop, while ranks come early and late. */
static void staged_in_a_row(struct rank *me) {
    for (int i = 0; i < 300; i++) {
        if ((i * 7 + me->rank * 3) % 13 == 0) {
            usleep(100);
        }
        all_reduce_ints(me, 200 + (uint64_t)(i * i % 1500), me->private);
    }
}

/* Posts `n` all_reduces of many sizes, some in the arena and some not, then waits for them in an
 * order that differs by rank. */
static void many_under_way(struct rank *me) {
    enum { N = 40, STRIDE = 128 << 10 };
    static _Thread_local struct request requests[N];
    uint32_t seqs[N];
    for (int backwards = 0; backwards < 2; backwards++) {
        int n = backwards ? SHM_RING
                          : N; /* a result can be asked for while it is one of the last SHM_RING */
        for (int i = 0; i < n; i++) {
            uint64_t numel = (uint64_t)(i * i * 37 % 30000);
            char *area = i % 3 == 1 ? me->private : me->shared;
            requests[i] = prepare(me, CALL_ALL_REDUCE, (uint32_t)i % SHM_PLAIN_OPS, SHM_FLOAT32,
                                  numel, area + i * STRIDE);
            seqs[i] = post(me, &requests[i]);
            shm_wait(me->comm, seqs[i * me->rank / me->world_size], 0);
        }
        for (int i = 0; i < n; i++) {
            int j = backwards ? n - 1 - i : i;
            if (n - j <= SHM_RING) {
                CHECK(wait_for(me, seqs[j]) == SHM_OK, "number %d", j);
            }
        }
        one_of(me, CALL_BARRIER, 0, 0, 0, 0);
        for (int i = 0; i < n; i++) {
            verify(me, &requests[i]);
        }
    }
}

/* Cuts the input into pieces that differ from rank to rank, some of which are where they belong
 * already. */
static void scatter_input(struct rank *me, struct request *q, char *elsewhere) {
    size_t itemsize = shm_dtype_size(q->announcement.dtype);
    uint64_t at = 0, numel = q->announcement.numel;
    for (int i = 0; i < 12 && q->n_pieces < 8 && at < numel; i++) {
        uint64_t length = min64(numel - at, numel * (uint64_t)((i * 7 + me->rank * 5) % 11) / 40 +
                                                (uint64_t)(i % 2));
        if (i % 3 != me->rank % 3) {
            memcpy(elsewhere + at * itemsize, q->input + at * itemsize, length * itemsize);
            memset(q->input + at * itemsize, 0xee, length * itemsize);
            q->pieces[q->n_pieces++] = (struct shm_piece){elsewhere + at * itemsize, at, length};
        }
        at += length;
    }
}

static void pieces(struct rank *me) {
    uint64_t sizes[] = {1, 100, 1025, 5000, 70000, full ? 300001 : 66000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int place = 0; place < PLACES; place++) {
            for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype += 2) {
                struct request q =
                    prepare(me, CALL_ALL_REDUCE, SHM_SUM, dtype, sizes[i], room_of(me, place, 0));
                scatter_input(me, &q, me->private + AREA_BYTES);
                run_and_verify(me, &q);
            }
        }
    }
}

/* Cuts the tensor into pieces, of which some are short, and which are all that is left of it. They
 * lie at `elsewhere` from the last to the first. */
static void take_apart(struct request *q, char *elsewhere) {
    size_t itemsize = shm_dtype_size(q->announcement.dtype);
    uint64_t at = 0, numel = q->announcement.numel;
    for (uint64_t i = 0; i < 8 && at < numel; i++) {
        uint64_t length = i == 7 ? numel - at : min64(numel - at, 1 + numel * (i * i % 5) / 12);
        char *place = elsewhere + (numel - at - length) * itemsize;
        memcpy(place, q->input + at * itemsize, length * itemsize);
        q->pieces[q->n_pieces++] = (struct shm_piece){place, at, length};
        at += length;
    }
    memset(q->input, 0xee, numel * itemsize);
    q->input = q->output = NULL;
}

static void scattered(struct rank *me) {
    uint64_t sizes[] = {1, 100, 1025, 5000, 70000, full ? 300001 : 66000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype++) {
            struct request whole = prepare(me, CALL_ALL_REDUCE, dtype % 2 ? SHM_SUM : SHM_MEAN,
                                           dtype, sizes[i], me->private);
            struct request q = whole;
            take_apart(&q, me->private + AREA_BYTES);
            int status = wait_for(me, post(me, &q));
            CHECK(status == SHM_OK, "status %d of dtype %u numel %lu", status, dtype, sizes[i]);
            for (size_t j = 0; j < q.n_pieces; j++) {
                size_t itemsize = shm_dtype_size(dtype);
                memcpy(whole.output + q.pieces[j].offset * itemsize, q.pieces[j].source,
                       q.pieces[j].numel * itemsize);
            }
            verify(me, &whole);
        }
    }
}

/* Rank r's shard is `numel` * r / n long, so rank 0 has none; `behind` elements follow the last. */
static struct request request_of_shards(struct rank *me, uint32_t kind, uint32_t dtype,
                                        uint64_t numel, uint64_t behind) {
    struct request q = prepare(me, kind, SHM_SUM, dtype, numel + behind, me->shared);
    uint64_t n = (uint64_t)me->world_size;
    for (uint64_t r = 0; r < n; r++) {
        q.bounds[r + 1] = r + 1 == n ? numel : numel * r * (r + 1) / (n * n);
    }
    return q;
}

static void shards(struct rank *me) {
    uint64_t sizes[] = {0, 1, 90, 1025, 5000, 70000, full ? 300001 : 66000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype += 2) {
            for (int scattered = 0; scattered < 2; scattered++) {
                struct request q =
                    request_of_shards(me, CALL_REDUCE_SCATTER_V, dtype, sizes[i], i % 3 * 7);
                if (scattered) {
                    scatter_input(me, &q, me->private + AREA_BYTES);
                }
                run_and_verify(me, &q);
            }
            struct request q = request_of_shards(me, CALL_ALL_GATHER_V, dtype, sizes[i], i % 3 * 7);
            run_and_verify(me, &q);
        }
    }
}

/* Parts of an all_to_all from nothing to `numel`, which go through the mailboxes where all are
 * small, and chunk by chunk. */
static void unequal_parts(struct rank *me) {
    uint64_t sizes[] = {0, 1, 9, 90, 1025, 5000, 70000, full ? 300001 : 66000};
    uint64_t n = (uint64_t)me->world_size;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (uint32_t dtype = 0; dtype < SHM_DTYPES; dtype += 2) {
            char *room = me->private + i % 2 * shm_dtype_size(dtype);
            struct request q = prepare(me, CALL_ALL_TO_ALL, 0, dtype, sizes[i] * n, room);
            q.has_parts = true;
            for (uint64_t src = 0; src < n; src++) {
                uint64_t *parts = q.bounds + src * (n + 1);
                for (uint64_t dst = 0; dst < n; dst++) {
                    parts[dst + 1] = parts[dst] + sizes[i] * ((2 * src + 3 * dst) % 4) / 3;
                }
            }
            place_canary(me, &q);
            run_and_verify(me, &q);
        }
    }
}

static const struct announcement without_data = {.kind = CALL_ALL_REDUCE, .presence = HAS_NO_DATA};

enum { MEAN, SUM, LONGER, LATER, OTHER, WEIGHTED, SKIP, SKIP_LONGER, BARRIER, NO_DATA, ABANDON };

static struct announcement announced(struct rank *me, int what) {
    struct announcement d = {.kind = CALL_ALL_REDUCE, .op = SHM_MEAN, .dtype = SHM_FLOAT32};
    d.numel = what == LONGER || what == SKIP_LONGER ? 21 : 20;
    d.label = what == OTHER ? 6 : 5;
    d.fingerprint = what == LATER ? 4 : 3;
    d.op = what == SUM ? SHM_SUM : what == WEIGHTED ? SHM_WEIGHTED_MEAN : SHM_MEAN;
    d.presence = what == SKIP || what == SKIP_LONGER ? VOTES_TO_SKIP : HAS_DATA;
    d.weight = d.scale = 1;
    d.place = IN_ARENA;
    d.offset = (uint64_t)(me->shared - me->world->segments[me->rank]);
    if (what == BARRIER || what == ABANDON) {
        d = (struct announcement){.kind = what == BARRIER ? CALL_BARRIER : CALL_ABANDON};
    }
    return what == NO_DATA ? without_data : d;
}

/* What the last rank announces and what the others do; what all of them conclude. */
static const struct {
    int last, others, status;
    bool is_skipped, has_no_data;
} verdicts_of[] = {
    {MEAN, MEAN, SHM_OK, false, false},
    {SUM, MEAN, SHM_MISMATCH, false, false},
    {LONGER, MEAN, SHM_MISMATCH, false, false},
    {LATER, MEAN, SHM_MISMATCH, false, false},
    {OTHER, MEAN, SHM_MISMATCH, false, false},
    {BARRIER, MEAN, SHM_MISMATCH, false, false},
    {WEIGHTED, MEAN, SHM_MISMATCH, false, false},
    {WEIGHTED, WEIGHTED, SHM_OK, false, false},
    {SKIP, MEAN, SHM_OK, true, false}, /* a vote goes with any op, and with nothing else */
    {SKIP, WEIGHTED, SHM_OK, true, false},
    {SKIP, SKIP, SHM_OK, true, false},
    {SKIP_LONGER, MEAN, SHM_MISMATCH, true, false},
    {NO_DATA, MEAN, SHM_OK, false, false},
    {NO_DATA, WEIGHTED, SHM_OK, false, false},
    {NO_DATA, SKIP, SHM_OK, true, false},
    {NO_DATA, SUM, SHM_MISMATCH, false, false},
    {NO_DATA, BARRIER, SHM_MISMATCH, false, false},
    {NO_DATA, NO_DATA, SHM_OK, false, true},
    {ABANDON, MEAN, SHM_ABANDONED, false, false}, /* before anything else */
    {ABANDON, SKIP, SHM_ABANDONED, true, false},
    {ABANDON, NO_DATA, SHM_ABANDONED, false, false},
    {ABANDON, ABANDON, SHM_OK, false, false},
};

static void verdicts(struct rank *me) {
    for (size_t i = 0; i < sizeof verdicts_of / sizeof *verdicts_of; i++) {
        bool is_last = me->rank == me->world_size - 1;
        struct request q = {.input = me->shared, .output = me->shared};
        q.announcement = announced(me, is_last ? verdicts_of[i].last : verdicts_of[i].others);
        if (q.announcement.place != IN_ARENA) {
            q.input = q.output = NULL;
        }
        uint32_t seq = post(me, &q);
        int status = wait_for(me, seq);
        CHECK(status == verdicts_of[i].status, "row %lu ended with status %d", i, status);
        CHECK(shm_outcome_of(me->comm, seq).is_skipped == verdicts_of[i].is_skipped, "row %lu", i);
        CHECK(status != SHM_OK ||
                  shm_outcome_of(me->comm, seq).has_no_data == verdicts_of[i].has_no_data,
              "row %lu", i);
    }
    all_reduce_ints(me, 1000, me->shared);
}

/* Posts in `seq` what the C core would not: some bits of a announcement are others. */
static void post_damaged(struct rank *me, uint32_t seq, struct announcement d) {
    struct shm_comm *comm = me->comm;
    comm->ring[seq % SHM_RING] = (struct collective){.announcement = {.kind = CALL_BARRIER}};
    slot_of(comm, me->rank, seq)->announcement = d;
    shm_raise(&slot_of(comm, me->rank, seq)->arrived, seq);
    comm->next = seq + 1;
}

static uint64_t random_bits(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33 ^ *state << 31;
}

static struct announcement damaged(struct announcement d, uint64_t *state) {
    uint64_t bits = random_bits(state);
    uint64_t wild = bits % 3 == 0   ? random_bits(state)
                    : bits % 3 == 1 ? UINT64_MAX - bits % 99
                                    : bits % 99;
    switch (random_bits(state) % 9) {
    case 0:
        d.kind = (uint8_t)wild;
        break;
    case 1:
        d.op = (uint8_t)wild;
        break;
    case 2:
        d.dtype = (uint8_t)wild;
        break;
    case 3:
        d.root = (uint16_t)wild;
        break;
    case 4:
        d.numel = wild;
        break;
    case 5:
        d.offset = wild;
        break;
    case 6:
        d.numel = wild;
        d.offset = random_bits(state) % (2 * shm_control_bytes());
        break;
    case 7:
        d.presence = (uint8_t)wild;
        break;
    default:
        for (size_t i = 0; i < 3; i++) {
            ((char *)&d)[random_bits(state) % sizeof d] ^= (char)random_bits(state);
        }
    }
    /* One that lies elsewhere would be waited for. */
    d.place = IN_ARENA;
    return d;
}

/* The last rank's announcement is damaged. The others, of which rank 0 may have no data and so take
 * the word of the rest, touch no memory but their tensors'; then all go on. */
static void damaged_announcements(struct rank *me) {
    const struct announcement barrier = {.kind = CALL_BARRIER};
    int last = me->world_size - 1;
    uint64_t state = 7, n_tries = full ? 20000 : 2000;
    for (uint64_t i = 0; i < n_tries; i++) {
        bool is_small = random_bits(&state) % 2;
        struct announcement usual = {.kind = CALL_ALL_REDUCE,
                                     .op = random_bits(&state) % 2 ? SHM_MEAN : SHM_WEIGHTED_MEAN,
                                     .dtype = SHM_FLOAT32,
                                     .numel = is_small ? 20 : 3000,
                                     .label = 5,
                                     .weight = 1,
                                     .scale = 1};
        usual.place = IN_ARENA;
        usual.offset = (uint64_t)(me->shared - me->world->segments[me->rank]);
        struct announcement odd = damaged(usual, &state);
        bool lacks_data = random_bits(&state) % 2;
        struct request q = {.announcement = usual, .input = me->shared, .output = me->shared};
        if (me->rank == 0 && lacks_data) {
            q = (struct request){.announcement = without_data};
        }
        uint32_t seq = me->comm->next;
        if (me->rank == last) {
            while (shm_make_room(me->comm, UINT64_MAX / 2) != SHM_OK) {
            }
            post_damaged(me, seq, odd);
        } else {
            seq = post(me, &q);
        }
        int status = wait_for(me, seq);
        CHECK(status == SHM_OK || status == SHM_MISMATCH || status == SHM_ABANDONED,
              "damaged announcement %lu ended with status %d", i, status);
        struct announcement theirs = shm_announcement_of(me->comm, last, seq);
        CHECK(status != SHM_OK || shm_is_possible(me->comm, last, &theirs), "it was followed");
        q = (struct request){.announcement = barrier};
        CHECK(wait_for(me, post(me, &q)) == SHM_OK, "all go on");
    }
    all_reduce_ints(me, 1000, me->shared);
}

/* Moves the counters of all ranks to just before they wrap around, as if that many collectives had
 * been done. */
static void wrap_around(struct rank *me) {
    uint32_t next = UINT32_MAX - 50, chunk = UINT32_MAX - 20;
    struct shm_comm *comm = me->comm;
    struct control *control = control_of(comm, me->rank);
    comm->next = comm->head = next;
    comm->n_finished = next - 1;
    comm->chunk = chunk;
    for (uint32_t seq = next - SHM_RING; seq != next; seq++) {
        atomic_store(&control->slots[seq % SHM_RING].arrived.value, seq);
    }
    atomic_store(&control->reduced.value, next - 1);
    atomic_store(&control->staged_in.value, chunk);
    atomic_store(&control->staged_out.value, chunk);
    atomic_fetch_add(&me->world->gathered[1], 1);
    while (atomic_load(&me->world->gathered[1]) < me->world_size) {
        usleep(100);
    }
    for (uint64_t i = 0; i < 120; i++) {
        all_reduce_ints(me, i * 997 % 80000, i % 4 == 1 ? me->private : me->shared);
    }
    CHECK(comm->next < 1000 && comm->chunk < 1000, "the counters have wrapped around: %u, %u",
          comm->next, comm->chunk);
}

/* ---- ranks that go away ---- */

static void expect_lost(struct rank *me, uint32_t seq, int lost) {
    uint64_t before = shm_now_ns();
    int status = wait_for(me, seq);
    uint64_t waited = shm_now_ns() - before;
    CHECK(status == SHM_PEER_LOST, "status %d", status);
    int blamed = shm_stalled_on(me->comm); /* or another rank that gave up on it first */
    CHECK(blamed == lost || shm_blamed_by(me->comm, blamed) == lost, "blamed rank %d, not %d",
          blamed, lost);
    shm_set_state(me->comm, SHM_ABORTED, lost);
    CHECK(waited < (forked ? 1000u : 2000u) * 1000 * 1000, "noticed after %lu ns",
          waited); /* threads: the slow sanitizer builds */
}

/* What a dead rank has put into its mailbox still counts; what comes after does not. */
static void killed_after_its_last_small_one(struct rank *me) {
    int last = me->world_size - 1;
    struct request q = prepare(me, CALL_ALL_REDUCE, SHM_SUM, SHM_INT32, 100, me->private);
    uint32_t seq = post(me, &q);
    if (me->rank == last) {
        kill(getpid(), SIGKILL);
    }
    usleep(50 * 1000);
    CHECK(wait_for(me, seq) == SHM_OK, "all ranks have posted");
    verify(me, &q);
    q = prepare(me, CALL_ALL_REDUCE, SHM_SUM, SHM_INT32, 100, me->private);
    expect_lost(me, post(me, &q), last);
}

const struct scenario basic_scenario = {"every_collective", every_collective, ALWAYS};
const struct scenario crowd_scenario = {"some_on_many_ranks", some_on_many_ranks, ALWAYS};
const struct scenario scenarios[] = {
    {"many_chunks", many_chunks, ALWAYS},
    {"staged_in_a_row", staged_in_a_row, ALWAYS},
    {"many_under_way", many_under_way, ALWAYS},
    {"pieces", pieces, ALWAYS},
    {"scattered", scattered, ALWAYS},
    {"shards", shards, ALWAYS},
    {"unequal_parts", unequal_parts, ALWAYS},
    {"verdicts", verdicts, ALWAYS},
    {"damaged_announcements", damaged_announcements, ALWAYS},
    {"wrap_around", wrap_around, ALWAYS},
    {"killed_after_its_last_small_one", killed_after_its_last_small_one, KILLS},
};
const size_t n_scenarios = sizeof scenarios / sizeof *scenarios;
