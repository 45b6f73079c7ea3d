/* Drives the shared-memory core (the C files of kernels/shm) without Python, so that it can run
 * under the sanitizers.
 *
 *     driver processes|threads full|quick
 *
 * Ranks are forked processes or threads over the same kind of segments. Every result is compared,
 * bit by bit, with what plain loops give; so it is the same on all ranks. `quick`
 * takes fewer sizes. Prints one line per scenario; exits with 1 at the first failure. The scenarios
 * are in scenarios.c. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "portable.h"
#include "reference.h"

enum { LIMIT_S = 270, CANARY = 0xa5, CANARY_BYTES = 64 };

bool forked, full;

/* ---- one collective ---- */

static bool has_shards(uint32_t kind) {
    return kind == CALL_REDUCE_SCATTER_V || kind == CALL_ALL_GATHER_V;
}

bool is_in_place(uint32_t kind) {
    return kind == CALL_ALL_REDUCE || kind == CALL_BROADCAST || has_shards(kind);
}

/* Where the parts of an all_to_all begin that rank `src` sends, and where the last one ends. */
static const uint64_t *parts_of(const struct rank *me, const struct request *q, int src) {
    return q->bounds + src * (me->world_size + 1);
}

/* How many elements rank `src` has for this one. */
static uint64_t part_from(const struct rank *me, const struct request *q, int src) {
    const uint64_t *parts = parts_of(me, q, src);
    return parts[me->rank + 1] - parts[me->rank];
}

static uint64_t output_numel(const struct rank *me, const struct request *q) {
    const struct announcement *d = &q->announcement;
    uint64_t n = (uint64_t)me->world_size, numel = 0;
    for (int src = 0; q->has_parts && src < me->world_size; src++) {
        numel += part_from(me, q, src);
    }
    if (q->has_parts) {
        return numel;
    }
    bool is_root = (int)d->root == me->rank;
    return d->kind == CALL_ALL_GATHER       ? d->numel * n
           : d->kind == CALL_GATHER         ? (is_root ? d->numel * n : 0)
           : d->kind == CALL_REDUCE_SCATTER ? d->numel / n
                                            : d->numel;
}

struct request prepare(struct rank *me, uint32_t kind, uint32_t op, uint32_t dtype, uint64_t numel,
                       char *room) {
    struct request q = {.in_arena = room >= me->shared && room < me->shared + 2 * AREA_BYTES};
    q.seed = kind * 1000 + op * 100 + dtype * 10 + (uint32_t)numel;
    q.announcement = (struct announcement){
        .kind = (uint8_t)kind, .op = (uint8_t)op, .dtype = (uint8_t)dtype, .numel = numel};
    if (kind == CALL_BARRIER) {
        return q;
    }
    if (kind == CALL_BROADCAST || kind == CALL_GATHER || kind == CALL_SCATTER) {
        q.announcement.root = (uint32_t)numel % (uint32_t)me->world_size;
    }
    q.input = room;
    q.output = is_in_place(kind) ? room : room + AREA_BYTES;
    if (q.in_arena && kind != CALL_SCATTER) {
        q.announcement.place = IN_ARENA;
        q.announcement.offset = (uint64_t)(room - me->world->segments[me->rank]);
    }
    size_t itemsize = shm_dtype_size(dtype);
    uint64_t n_parts = kind == CALL_SCATTER ? (uint64_t)me->world_size : 1;
    for (uint64_t i = 0; i < numel * n_parts; i++) {
        union element e = element_of(dtype, q.seed, me->rank, i);
        memcpy(q.input + i * itemsize, &e, itemsize);
    }
    place_canary(me, &q);
    return q;
}

void place_canary(const struct rank *me, const struct request *q) {
    size_t nbytes = output_numel(me, q) * shm_dtype_size(q->announcement.dtype);
    memset(q->output + nbytes, CANARY, CANARY_BYTES);
}

/* The rank in whose shard the element lies; world_size for one behind the shards. */
static int owner_of(const struct rank *me, const struct request *q, uint64_t index) {
    int owner = 0;
    while (owner < me->world_size && index >= q->bounds[owner + 1]) {
        owner++;
    }
    return owner;
}

static union element expected_of_shards(const struct rank *me, const struct request *q,
                                        uint64_t index) {
    const struct announcement *d = &q->announcement;
    int owner = owner_of(me, q, index);
    if (d->kind == CALL_ALL_GATHER_V) {
        return element_of(d->dtype, q->seed, owner < me->world_size ? owner : me->rank, index);
    }
    if (owner == me->rank || owner == me->world_size || shm_fits_mailbox(d, me->world_size)) {
        return reduced(d->dtype, d->op, q->seed, me->world_size, index);
    }
    return element_of(d->dtype, q->seed, me->rank, index);
}

static union element expected_of_parts(const struct rank *me, const struct request *q,
                                       uint64_t index) {
    int src = 0;
    for (; index >= part_from(me, q, src); src++) {
        index -= part_from(me, q, src);
    }
    return element_of(q->announcement.dtype, q->seed, src, parts_of(me, q, src)[me->rank] + index);
}

static union element expected(const struct rank *me, const struct request *q, uint64_t index) {
    const struct announcement *d = &q->announcement;
    switch (d->kind) {
    case CALL_REDUCE_SCATTER_V:
    case CALL_ALL_GATHER_V:
        return expected_of_shards(me, q, index);
    case CALL_BROADCAST:
        return element_of(d->dtype, q->seed, (int)d->root, index);
    case CALL_ALL_TO_ALL: {
        if (q->has_parts) {
            return expected_of_parts(me, q, index);
        }
        uint64_t part = d->numel / (uint64_t)me->world_size;
        return element_of(d->dtype, q->seed, (int)(index / part),
                          part * (uint64_t)me->rank + index % part);
    }
    case CALL_SCATTER:
        return element_of(d->dtype, q->seed, (int)d->root, d->numel * (uint64_t)me->rank + index);
    case CALL_ALL_GATHER:
    case CALL_GATHER:
        return element_of(d->dtype, q->seed, (int)(index / d->numel), index % d->numel);
    case CALL_REDUCE_SCATTER:
        return reduced(d->dtype, d->op, q->seed, me->world_size,
                       index + output_numel(me, q) * (uint64_t)me->rank);
    default:
        return reduced(d->dtype, d->op, q->seed, me->world_size, index);
    }
}

void verify(struct rank *me, const struct request *q) {
    const struct announcement *d = &q->announcement;
    if (d->kind == CALL_BARRIER) {
        return;
    }
    size_t itemsize = shm_dtype_size(d->dtype);
    uint64_t numel = output_numel(me, q);
    /* Of a large output every fifth element: more than one in any cache line, the unit in which
     * ranks share the work. */
    uint64_t stride = numel > 10000 ? 5 : 1;
    for (uint64_t i = 0; i < numel; i += stride) {
        union element e = expected(me, q, i);
        CHECK(memcmp(q->output + i * itemsize, &e, itemsize) == 0,
              "kind %u op %u dtype %u numel %lu, arena %d: element %lu", d->kind, d->op, d->dtype,
              d->numel, q->in_arena, i);
    }
    for (size_t i = 0; i < CANARY_BYTES; i++) {
        CHECK((uint8_t)q->output[numel * itemsize + i] == CANARY,
              "kind %u op %u dtype %u numel %lu wrote too far", d->kind, d->op, d->dtype, d->numel);
    }
    for (uint64_t i = 0; i < d->numel && !is_in_place(d->kind); i += stride) {
        union element e = element_of(d->dtype, q->seed, me->rank, i);
        CHECK(memcmp(q->input + i * itemsize, &e, itemsize) == 0, "kind %u changed its input",
              d->kind);
    }
}

uint32_t post(struct rank *me, struct request *q) {
    uint32_t seq;
    int status;
    /* counts half of the reductions, whose result is the same */
    struct shm_counting counting = {q->seed % 2 * q->announcement.numel, false};
    const uint64_t *bounds = has_shards(q->announcement.kind) || q->has_parts ? q->bounds : NULL;
    while ((status = shm_post(me->comm, &q->announcement, q->input, q->output, q->pieces,
                              q->n_pieces, bounds, counting, &seq)) == SHM_AGAIN) {
        status = shm_make_room(me->comm, UINT64_MAX / 2);
        CHECK(status == SHM_OK, "no room: status %d", status);
    }
    return seq;
}

int wait_for(struct rank *me, uint32_t seq) {
    int status;
    while ((status = shm_wait(me->comm, seq, 50000000)) == SHM_AGAIN) {
    }
    return status;
}

void run_and_verify(struct rank *me, struct request *q) {
    int status = wait_for(me, post(me, q));
    CHECK(status == SHM_OK, "status %d of kind %u op %u dtype %u numel %lu", status,
          q->announcement.kind, q->announcement.op, q->announcement.dtype, q->announcement.numel);
    verify(me, q);
}

/* ---- ranks ---- */

static void *map_shared(size_t nbytes) {
    void *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return address;
}

static size_t segment_bytes(void) {
    return shm_control_bytes() + 2 * AREA_BYTES + 4096;
}

static struct rank ranks[SHM_MAX_RANKS];
static const struct scenario *scenario;

/* Opens the communicator once all ranks are there, runs the scenario and frees it once all have
 * finished. */
static void *run_rank(void *argument) {
    struct rank *me = argument;
    int pidfds[SHM_MAX_RANKS];
    size_t nbytes[SHM_MAX_RANKS];
    atomic_store(&me->world->pids[me->rank], getpid());
    for (int r = 0; r < me->world_size; r++) {
        while (atomic_load(&me->world->pids[r]) == 0) {
            usleep(100);
        }
        pidfds[r] = forked && r != me->rank
                        ? (int)syscall(SYS_pidfd_open, atomic_load(&me->world->pids[r]), 0)
                        : -1;
        nbytes[r] = segment_bytes();
    }
    me->comm = shm_open_comm(me->rank, me->world_size, me->world->segments, nbytes, pidfds,
                             me->world_size > 2);
    me->shared = me->world->segments[me->rank] + (shm_control_bytes() + 4095) / 4096 * 4096;
    me->private = malloc(2 * AREA_BYTES);
    CHECK(me->comm != NULL && me->private != NULL, "out of memory");
    atomic_fetch_add(&me->world->gathered[0], 1);
    while (atomic_load(&me->world->gathered[0]) < me->world_size) {
        usleep(100);
    }
    scenario->body(me);
    shm_free_comm(me->comm);
    free(me->private);
    return NULL;
}

static void fork_ranks(int world_size) {
    for (int r = 0; r < world_size; r++) {
        if (fork() == 0) {
            alarm(LIMIT_S);
            run_rank(&ranks[r]);
            _exit(0);
        }
    }
    for (int left = world_size; left > 0; left--) {
        int status = 0;
        wait(&status);
        bool is_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (status != 0 && !(scenario->kind == KILLS && is_killed)) {
            fprintf(stderr, "a rank ended with wait status %#x\n", (unsigned)status);
            exit(1);
        }
    }
}

static void start_threads(int world_size) {
    pthread_t threads[SHM_MAX_RANKS];
    for (int r = 0; r < world_size; r++) {
        if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) {
            perror("pthread_create");
            exit(1);
        }
    }
    for (int r = 0; r < world_size; r++) {
        pthread_join(threads[r], NULL);
    }
}

static void run(const struct scenario *what, int world_size) {
    uint64_t before = shm_now_ns();
    struct world *world = map_shared(sizeof *world);
    world->world_size = world_size;
    for (int r = 0; r < world_size; r++) {
        world->segments[r] = map_shared(segment_bytes());
        ranks[r] = (struct rank){.rank = r, .world_size = world_size, .world = world};
    }
    scenario = what;
    if (forked) {
        fork_ranks(world_size);
    } else {
        start_threads(world_size);
    }
    for (int r = 0; r < world_size; r++) {
        munmap(world->segments[r], segment_bytes());
    }
    munmap(world, sizeof *world);
    printf("%-32s %2d ranks  %5.2f s\n", what->name, world_size,
           (double)(shm_now_ns() - before) * 1e-9);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s processes|threads full|quick\n", argv[0]);
        return 2;
    }
    forked = strcmp(argv[1], "processes") == 0;
    full = strcmp(argv[2], "full") == 0;
    alarm(LIMIT_S);
    /* Which has nothing to do with ranks: once is enough. */
    int differences = full ? 0 : compare_16bit_kernels();
    if (differences > 0) {
        fprintf(stderr, "16-bit kernels: %d differences\n", differences);
        return 1;
    }
    static const int world_sizes[] = {1, 2, 3, 4, 7};
    for (int i = 0; i < (full ? 5 : 3); i++) {
        run(&basic_scenario, world_sizes[i]);
    }
    for (int world_size = 2; world_size <= 3; world_size++) {
        for (size_t i = 0; i < n_scenarios; i++) {
            if (scenarios[i].kind != KILLS || forked) {
                run(&scenarios[i], world_size);
            }
        }
    }
    run(&crowd_scenario, SHM_MAX_RANKS);
    return 0;
}
