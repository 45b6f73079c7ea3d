/* A stand-in for libnccl.so.2, which tests load through FASTCOMM_NCCL_LIBRARY: communicators of the
 * processes of one host whose collectives, sends and receives work, on host memory, and are over
 * when the call returns, or its group's end, whatever the stream. It keeps a log, and fails or
 * hangs on order.
 *
 * As with NCCL, ranks that do not ask for the same, and ranks whose peers are gone, wait until
 * somebody aborts; the waiting call then returns ncclInternalError. Unlike NCCL it finds every use
 * of a communicator that is gone, and two threads in one communicator. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_calls.h"

/* Compiled with -DTOO_OLD, it is a library of before 2.18, for whatever looks at the version or for
 * these functions. */
#ifdef TOO_OLD
#define SINCE_2_18
#define VERSION 21701
#else
#define SINCE_2_18 EXPORT
#define VERSION 22907
#endif

enum { NO_COLOR = -1 };

/* ---- the library ---- */

EXPORT ncclResult_t ncclGetVersion(int *version) {
    const char *asked = getenv("FASTCOMM_STAND_IN_NCCL_VERSION");
    *version = asked != NULL ? atoi(asked) : VERSION;
    return begin_without_comm("ncclGetVersion", stand_in_asked("ncclGetVersion"));
}

EXPORT const char *ncclGetErrorString(ncclResult_t code) {
    static const char *const texts[ncclNumResults] = {
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
        "timeout",
    };
    return (unsigned)code < ncclNumResults ? texts[code] : "unknown result code";
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    ncclResult_t result = begin_without_comm("ncclGetUniqueId", stand_in_called("ncclGetUniqueId"));
    if (result != ncclSuccess) {
        return result;
    }
    struct address address;
    if (!world_create(&address)) {
        return fail(ncclSystemError, "ncclGetUniqueId", "no shared memory");
    }
    memset(id, 0, sizeof *id);
    memcpy(id, &address, sizeof address);
    return ncclSuccess;
}

/* ---- communicators ---- */

static int version(void) {
    int version;
    ncclGetVersion(&version);
    return version;
}

/* A communicator that has arrived in its world, where others may be missing. One call, the
 * caller's, is inside. */
static ncclComm_t arrive(const struct address *address, int rank, int n_ranks, int device) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    struct world *world = comm != NULL ? world_join(address, rank, n_ranks) : NULL;
    if (world == NULL) {
        free(comm);
        return NULL;
    }
    *comm = (struct ncclComm){.world = world, .rank = rank, .n_ranks = n_ranks, .device = device};
    const struct intent intent = {.kind = JOIN, .count = (uint64_t)version()};
    world_begin_round(world, &intent, NULL, 0);
    add_comm(comm);
    return comm;
}

/* Waits for the other ranks. The caller is inside no longer; the communicator is gone unless this
 * succeeds. */
static ncclResult_t form(ncclComm_t *comm, const char *function) {
    ncclComm_t formed = *comm;
    bool has_met = world_wait(formed->world), agrees = has_met && world_agrees(formed->world);
    leave(formed);
    if (agrees) {
        return ncclSuccess;
    }
    *comm = NULL;
    if (!has_met) { /* whoever aborted it disposes of it */
        return fail(ncclInternalError, function, "aborted");
    }
    dispose(formed);
    return fail(ncclInvalidUsage, function, "the ranks have different versions of NCCL");
}

/* In a group it is executed at once all the same: groups that make communicators are for several
 * devices of one process. */
SINCE_2_18 ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id,
                                               int rank, void *config) {
    const char *function = "ncclCommInitRankConfig";
    int fault = stand_in_called("ncclCommInitRankConfig rank=%d world_size=%d", rank, n_ranks);
    ncclResult_t result = begin_without_comm(function, fault);
    *comm = NULL;
    if (result != ncclSuccess) {
        return result;
    }
    if (config != NULL || n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks) {
        return fail(ncclInvalidArgument, function, "no such rank, or a config");
    }
    struct address address;
    memcpy(&address, &id, sizeof address);
    *comm = arrive(&address, rank, n_ranks, runtime_device());
    return *comm != NULL
               ? form(comm, function)
               : fail(ncclSystemError, function,
                      "nobody is at the unique id's address, or this rank has been there");
}

/* What each rank tells the others when they split. Every rank offers a world; the first of a color
 * gives it. */
struct split {
    int color, key;
    struct address address;
};

static bool comes_before(const struct split *a, int rank_a, const struct split *b, int rank_b) {
    return a->key < b->key || (a->key == b->key && rank_a < rank_b);
}

/* NULL if the system has no memory. */
static ncclComm_t arrive_in_part(ncclComm_t parent, const struct split *ours) {
    int rank = 0, n_ranks = 0, first = parent->rank;
    struct split leader = *ours;
    for (int r = 0; r < parent->n_ranks; r++) {
        struct split theirs;
        memcpy(&theirs, world_slot(parent->world, r), sizeof theirs);
        if (theirs.color != ours->color) {
            continue;
        }
        n_ranks++;
        rank += comes_before(&theirs, r, ours, parent->rank);
        if (comes_before(&theirs, r, &leader, first)) {
            leader = theirs;
            first = r;
        }
    }
    if (first != parent->rank) {
        world_discard(&ours->address);
    }
    return arrive(&leader.address, rank, n_ranks, parent->device);
}

SINCE_2_18 ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *comm,
                                      void *config) {
    *comm = NULL;
    if (config != NULL) {
        return fail(ncclInvalidArgument, "ncclCommSplit", "a config");
    }
    ncclResult_t result = begin_round(parent, "ncclCommSplit",
                                      stand_in_called("ncclCommSplit color=%d key=%d", color, key));
    if (result != ncclSuccess) {
        return result;
    }
    struct split ours = {.color = color, .key = key};
    const struct intent intent = {.kind = SPLIT};
    bool has_memory = world_create(&ours.address);
    bool is_done = has_memory && world_round(parent->world, &intent, &ours, sizeof ours);
    if (is_done && color != NO_COLOR) {
        *comm = arrive_in_part(parent, &ours);
    } else if (has_memory) {
        world_discard(&ours.address);
    }
    result = end_round(parent, "ncclCommSplit", is_done);
    if (result != ncclSuccess || color == NO_COLOR) {
        return has_memory ? result : fail(ncclSystemError, "ncclCommSplit", "no shared memory");
    }
    return *comm != NULL
               ? form(comm, "ncclCommSplit")
               : fail(ncclSystemError, "ncclCommSplit", "the first rank of the color is gone");
}

/* ---- the ends of communicators ----
 *
 * What NCCL does, by its user guide and, where that is silent, by its sources:
 *
 * - Finalize waits for all that was launched, and for every graph that has captured any of it. It
 *   may be called once, and not after Revoke: ncclInvalidArgument.
 * - Destroy finalizes first, unless Finalize or Revoke came before. Then it frees the communicator.
 * - Revoke takes the kernels off the device and waits until they are gone; calls that wait inside
 *   return ncclInternalError, later collectives ncclInvalidUsage. The communicator stays, to be
 *   destroyed or aborted. It may be called once, and not after Finalize: ncclInvalidArgument.
 * - Abort takes the kernels off the device and frees the communicator. It waits for graphs, too,
 *   unless Finalize or Revoke came before.
 * - A graph writes to the communicators it has captured when it goes: one that is freed before, by
 *   Revoke and then Destroy or Abort, is used after free.
 * - After Destroy or Abort the communicator is gone. Every use of it is found here, and refused:
 *   ncclInvalidArgument.
 * - All four return ncclSuccess for NULL.
 *
 * - Destroy waits until the other ranks of the host destroy theirs, from 2.31 on for ever: an abort
 *   does not count. Here, with stand_in_end_together().
 *
 * What is not as with NCCL: a revoked communicator cannot be split. */

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const char *function = "ncclCommFinalize";
    int fault = stand_in_called("ncclCommFinalize");
    if (comm == NULL && fault == 0) {
        return ncclSuccess;
    }
    ncclResult_t result = begin(comm, function, fault);
    if (result != ncclSuccess) {
        return result;
    }
    if (!end_use(comm, &comm->is_finalized)) {
        result = fail(ncclInvalidArgument, function, "it was finalized or revoked before");
    } else if (!order_finish(comm)) {
        result = fail(ncclInternalError, function, "aborted");
    } else {
        wait_for_graphs(comm);
    }
    leave(comm);
    return result;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const char *function = "ncclCommDestroy";
    int fault = stand_in_called("ncclCommDestroy");
    if (comm == NULL && fault == 0) {
        return ncclSuccess;
    }
    ncclResult_t result = begin(comm, function, fault);
    if (result != ncclSuccess) {
        return result;
    }
    bool is_over = true;
    if (end_use(comm, &comm->is_finalized)) {
        is_over = order_finish(comm);
        wait_for_graphs(comm);
    }
    leave(comm);
    wait_as_destroyed(comm);
    return is_over && dispose(comm) ? ncclSuccess : fail(ncclInternalError, function, "aborted");
}

EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    const char *function = "ncclCommRevoke";
    int fault = stand_in_called("ncclCommRevoke flags=%d", flags);
    if (comm == NULL && fault == 0) {
        return ncclSuccess;
    }
    ncclResult_t result = begin(comm, function, fault);
    if (result != ncclSuccess) {
        return result;
    }
    if (flags != 0 || !end_use(comm, &comm->is_revoked)) {
        leave(comm);
        return fail(ncclInvalidArgument, function, "flags, or it was finalized or revoked before");
    }
    world_abandon(comm->world);
    wait_as_revoked(comm);
    order_end(comm);
    leave(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ncclResult_t result = begin_without_comm("ncclCommAbort", stand_in_called("ncclCommAbort"));
    if (result != ncclSuccess || comm == NULL) {
        return result;
    }
    result = enter(comm, "ncclCommAbort");
    if (result == ncclSuccess) {
        note_abort(comm);
        world_abandon(comm->world);
        order_end(comm);
        if (end_use(comm, &comm->is_finalized)) {
            wait_for_graphs(comm);
        }
        leave(comm);
        dispose(comm);
    }
    return result;
}
