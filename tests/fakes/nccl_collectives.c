/* The collectives of the stand-in for NCCL, its sends and receives, and groups of all of them. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_calls.h"
#include "nccl_reduce.h"

struct operation {
    enum kind kind;
    const void *input;
    void *output;
    size_t count;
    int dtype, op, root; /* or peer */
    ncclComm_t comm;
    cudaStream_t stream;
};

static _Thread_local int group_depth;
static _Thread_local ncclResult_t group_failure; /* of a call in it: then nothing of it runs */
static _Thread_local struct operation *queue;
static _Thread_local size_t n_queued;

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static void inputs_at(const struct world *world, int n_ranks, size_t offset, const void **inputs) {
    for (int r = 0; r < n_ranks; r++) {
        inputs[r] = world_slot(world, r) + offset;
    }
}

/* The collectives, a part of at most a slot at a time: `done` elements are over, `n` follow. What
 * is lent is a copy, so that the output may be written as soon as the round is over. */

static bool all_reduce_part(const struct operation *o, const struct intent *intent, size_t done,
                            size_t n) {
    struct world *world = o->comm->world;
    size_t nbytes = dtype_nbytes(o->dtype);
    if (!world_round(world, intent, (const char *)o->input + done * nbytes, n * nbytes)) {
        return false;
    }
    const void *inputs[MAX_RANKS];
    inputs_at(world, o->comm->n_ranks, 0, inputs);
    reduce(o->dtype, o->op, n, inputs, o->comm->n_ranks, (char *)o->output + done * nbytes);
    return true;
}

/* The root alone has an output. */
static bool reduce_part(const struct operation *o, const struct intent *intent, size_t done,
                        size_t n) {
    struct world *world = o->comm->world;
    size_t nbytes = dtype_nbytes(o->dtype);
    if (!world_round(world, intent, (const char *)o->input + done * nbytes, n * nbytes)) {
        return false;
    }
    if (o->comm->rank == o->root) {
        const void *inputs[MAX_RANKS];
        inputs_at(world, o->comm->n_ranks, 0, inputs);
        reduce(o->dtype, o->op, n, inputs, o->comm->n_ranks, (char *)o->output + done * nbytes);
    }
    return true;
}

static bool broadcast_part(const struct operation *o, const struct intent *intent, size_t done,
                           size_t n) {
    struct world *world = o->comm->world;
    size_t nbytes = dtype_nbytes(o->dtype);
    bool is_root = o->comm->rank == o->root;
    if (!world_round(world, intent, is_root ? (const char *)o->input + done * nbytes : NULL,
                     is_root ? n * nbytes : 0)) {
        return false;
    }
    memcpy((char *)o->output + done * nbytes, world_slot(world, o->root), n * nbytes);
    return true;
}

static bool all_gather_part(const struct operation *o, const struct intent *intent, size_t done,
                            size_t n) {
    struct world *world = o->comm->world;
    size_t nbytes = dtype_nbytes(o->dtype);
    if (!world_round(world, intent, (const char *)o->input + done * nbytes, n * nbytes)) {
        return false;
    }
    for (int r = 0; r < o->comm->n_ranks; r++) {
        memcpy((char *)o->output + ((size_t)r * o->count + done) * nbytes, world_slot(world, r),
               n * nbytes);
    }
    return true;
}

static bool reduce_scatter_part(const struct operation *o, const struct intent *intent, size_t done,
                                size_t n) {
    struct world *world = o->comm->world;
    size_t nbytes = dtype_nbytes(o->dtype);
    char *lent = world_next_slot(world);
    for (int r = 0; r < o->comm->n_ranks; r++) {
        memcpy(lent + (size_t)r * n * nbytes,
               (const char *)o->input + ((size_t)r * o->count + done) * nbytes, n * nbytes);
    }
    if (!world_round(world, intent, NULL, 0)) {
        return false;
    }
    const void *inputs[MAX_RANKS];
    inputs_at(world, o->comm->n_ranks, (size_t)o->comm->rank * n * nbytes, inputs);
    reduce(o->dtype, o->op, n, inputs, o->comm->n_ranks, (char *)o->output + done * nbytes);
    return true;
}

static const struct {
    const char *function;
    bool (*part)(const struct operation *, const struct intent *, size_t done, size_t n);
} collectives[] = {
    [ALL_REDUCE] = {"ncclAllReduce", all_reduce_part},
    [BROADCAST] = {"ncclBroadcast", broadcast_part},
    [REDUCE] = {"ncclReduce", reduce_part},
    [ALL_GATHER] = {"ncclAllGather", all_gather_part},
    [REDUCE_SCATTER] = {"ncclReduceScatter", reduce_scatter_part},
    [SEND] = {"ncclSend", NULL},
    [RECV] = {"ncclRecv", NULL},
};

static bool is_message(const struct operation *o) {
    return o->kind == SEND || o->kind == RECV;
}

/* What a rank reads and writes in its memory. The root of a broadcast in place only reads, and
 * so do the other ranks of a reduction to one. */
static void note_ranges(const struct operation *o) {
    const size_t nbytes = o->count * dtype_nbytes(o->dtype), n_ranks = (size_t)o->comm->n_ranks;
    const bool is_root = o->comm->rank == o->root;
    struct range ranges[2];
    size_t n = 0;
    if (o->kind != BROADCAST || is_root) {
        ranges[n++] =
            (struct range){o->input, o->kind == REDUCE_SCATTER ? n_ranks * nbytes : nbytes, false};
    }
    const bool is_written =
        o->kind == BROADCAST ? !is_root || o->input != o->output : o->kind != REDUCE || is_root;
    if (is_written) {
        ranges[n++] =
            (struct range){o->output, o->kind == ALL_GATHER ? n_ranks * nbytes : nbytes, true};
    }
    order_collective(o->comm, (size_t)o->stream, collectives[o->kind].function, ranges, n);
}

static ncclResult_t run_collective(const struct operation *o) {
    const char *function = collectives[o->kind].function;
    ncclResult_t result = begin_round(o->comm, function, 0);
    if (result != ncclSuccess) {
        linger(); /* it may have been aborted since the call began */
        return result;
    }
    note_ranges(o);
    const struct intent intent = {.kind = (int32_t)o->kind,
                                  .count = o->count,
                                  .dtype = o->dtype,
                                  .op = o->op,
                                  .root = o->root};
    size_t pieces = o->kind == REDUCE_SCATTER ? (size_t)o->comm->n_ranks : 1;
    size_t most = SLOT_BYTES / pieces / dtype_nbytes(o->dtype);
    bool is_done = true;
    for (size_t done = 0; done < o->count && is_done; done += most) {
        is_done = collectives[o->kind].part(o, &intent, done, least(o->count - done, most));
    }
    if (!is_done) {
        order_end(o->comm); /* what was aborted inside the call is not on the device any more */
        linger();
    }
    return end_round(o->comm, function, is_done);
}

/* ---- sends and receives ----
 *
 * What a group has of them for one communicator progresses together, and is over when the group's
 * end returns; one outside a group is over when its own call returns. So a rank that sends outside
 * a group, to a rank that does the same, waits for ever, even if they receive on other streams.
 * As with NCCL, a rank sends to itself only with the matching receive in the same group.
 *
 * Unlike NCCL, this finds a receive that overlaps another message of its group. It knows no order
 * between the streams of a group, so all of them have to be on one. */

static void note_message(const struct operation *o) {
    const bool is_write = o->kind == RECV;
    const struct range range = {is_write ? o->output : o->input, o->count * dtype_nbytes(o->dtype),
                                is_write};
    order_collective(o->comm, (size_t)o->stream, collectives[o->kind].function, &range, 1);
}

static struct message message_of(const struct operation *o) {
    return (struct message){
        .is_send = o->kind == SEND,
        .peer = o->root,
        .dtype = o->dtype,
        .count = o->count,
        .buffer = o->kind == SEND ? (char *)(uintptr_t)o->input : o->output,
    };
}

static bool are_on_one_stream(const struct operation *operations, size_t n) {
    size_t i = 0;
    while (i < n && operations[i].stream == operations[0].stream) {
        i++;
    }
    return i == n;
}

/* On one communicator. */
static ncclResult_t run_messages(const struct operation *operations, size_t n) {
    ncclComm_t comm = operations[0].comm;
    const char *function = collectives[operations[0].kind].function;
    struct message *messages = malloc(n * sizeof *messages);
    ncclResult_t result = messages != NULL ? begin_round(comm, function, 0)
                                           : fail(ncclSystemError, function, "no memory");
    if (result != ncclSuccess) {
        free(messages);
        return result;
    }
    for (size_t i = 0; i < n; i++) {
        messages[i] = message_of(&operations[i]);
    }
    const char *wrong = are_on_one_stream(operations, n)
                            ? wrong_with_messages(messages, n, comm->rank)
                            : "the messages of a group are on several streams";
    bool is_done = true;
    if (wrong == NULL) {
        for (size_t i = 0; i < n; i++) {
            note_message(&operations[i]);
        }
        is_done = move_messages(comm, messages, n);
    }
    if (!is_done) {
        order_end(comm);
        linger();
    }
    free(messages);
    result = end_round(comm, function, is_done);
    return wrong == NULL ? result : fail(ncclInvalidUsage, function, wrong);
}

/* ---- launches ---- */

/* A collective, or several sends and receives of one communicator. */
static ncclResult_t run(const struct operation *operations, size_t n) {
    return is_message(operations) ? run_messages(operations, n) : run_collective(operations);
}

static ncclResult_t put_in_queue(const struct operation *o) {
    struct operation *longer = realloc(queue, (n_queued + 1) * sizeof *queue);
    if (longer == NULL) {
        return fail(ncclSystemError, collectives[o->kind].function, "no memory");
    }
    queue = longer;
    queue[n_queued++] = *o;
    return ncclSuccess;
}

static ncclResult_t check_and_run(const struct operation o, int fault) {
    const char *function = collectives[o.kind].function;
    ncclResult_t result = begin(o.comm, function, fault);
    if (result != ncclSuccess) {
        return result;
    }
    const int device = o.comm->device;
    bool has_root = o.root >= 0 && o.root < o.comm->n_ranks, is_revoked = o.comm->is_revoked;
    leave(o.comm);
    if (is_revoked) {
        return fail(ncclInvalidUsage, function, "the communicator was revoked");
    }
    if (dtype_nbytes(o.dtype) == 0 || o.op < 0 || o.op >= N_OPS || !has_root) {
        return fail(ncclInvalidArgument, function, "no such dtype, operation, root or peer");
    }
    const bool has_input = o.kind != BROADCAST && o.kind != RECV;
    const bool has_output = o.kind == REDUCE ? o.comm->rank == o.root : o.kind != SEND;
    if (o.count > 0 && ((has_output && o.output == NULL) || (has_input && o.input == NULL))) {
        return fail(ncclInvalidArgument, function, "a buffer is NULL");
    }
    if (!is_memory_of(o.input, device) || !is_memory_of(o.output, device)) {
        return fail(ncclInvalidArgument, function,
                    "the memory is on another device than the communicator");
    }
    if (!is_stream_of((size_t)o.stream, device)) { /* CUDA refuses the kernel's launch */
        return fail(ncclUnhandledCudaError, function, "invalid resource handle");
    }
    return group_depth > 0 ? put_in_queue(&o) : run(&o, 1);
}

static ncclResult_t launch(const struct operation o, int fault) {
    ncclResult_t result = check_and_run(o, fault);
    if (group_depth > 0 && result != ncclSuccess) {
        group_failure = result;
    }
    return result;
}

EXPORT ncclResult_t ncclAllReduce(const void *input, void *output, size_t count,
                                  ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
    int fault = stand_in_called("ncclAllReduce numel=%zu dtype=%d op=%d stream=0x%zx comm=0x%zx",
                                count, dtype, op, (size_t)stream, (size_t)comm);
    return launch((struct operation){ALL_REDUCE, input, output, count, dtype, op, 0, comm, stream},
                  fault);
}

EXPORT ncclResult_t ncclReduce(const void *input, void *output, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    int fault =
        stand_in_called("ncclReduce numel=%zu dtype=%d op=%d root=%d stream=0x%zx comm=0x%zx",
                        count, dtype, op, root, (size_t)stream, (size_t)comm);
    return launch((struct operation){REDUCE, input, output, count, dtype, op, root, comm, stream},
                  fault);
}

EXPORT ncclResult_t ncclBroadcast(const void *input, void *output, size_t count,
                                  ncclDataType_t dtype, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    int fault = stand_in_called("ncclBroadcast numel=%zu dtype=%d root=%d stream=0x%zx comm=0x%zx",
                                count, dtype, root, (size_t)stream, (size_t)comm);
    return launch(
        (struct operation){BROADCAST, input, output, count, dtype, SUM, root, comm, stream}, fault);
}

EXPORT ncclResult_t ncclAllGather(const void *input, void *output, size_t count,
                                  ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
    int fault = stand_in_called("ncclAllGather numel=%zu dtype=%d stream=0x%zx comm=0x%zx", count,
                                dtype, (size_t)stream, (size_t)comm);
    return launch((struct operation){ALL_GATHER, input, output, count, dtype, SUM, 0, comm, stream},
                  fault);
}

EXPORT ncclResult_t ncclReduceScatter(const void *input, void *output, size_t count,
                                      ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
    int fault =
        stand_in_called("ncclReduceScatter numel=%zu dtype=%d op=%d stream=0x%zx comm=0x%zx", count,
                        dtype, op, (size_t)stream, (size_t)comm);
    return launch(
        (struct operation){REDUCE_SCATTER, input, output, count, dtype, op, 0, comm, stream},
        fault);
}

EXPORT ncclResult_t ncclSend(const void *input, size_t count, ncclDataType_t dtype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    int fault = stand_in_called("ncclSend numel=%zu dtype=%d peer=%d stream=0x%zx comm=0x%zx",
                                count, dtype, peer, (size_t)stream, (size_t)comm);
    return launch((struct operation){SEND, input, NULL, count, dtype, SUM, peer, comm, stream},
                  fault);
}

EXPORT ncclResult_t ncclRecv(void *output, size_t count, ncclDataType_t dtype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    int fault = stand_in_called("ncclRecv numel=%zu dtype=%d peer=%d stream=0x%zx comm=0x%zx",
                                count, dtype, peer, (size_t)stream, (size_t)comm);
    return launch((struct operation){RECV, NULL, output, count, dtype, SUM, peer, comm, stream},
                  fault);
}

/* ---- groups ---- */

EXPORT ncclResult_t ncclGroupStart(void) {
    ncclResult_t result = begin_without_comm("ncclGroupStart", stand_in_called("ncclGroupStart"));
    group_depth += result == ncclSuccess;
    return result;
}

static bool comes_before(const struct operation *a, const struct operation *b) {
    const uint64_t key_a = world_key(a->comm->world), key_b = world_key(b->comm->world);
    return key_a < key_b || (key_a == key_b && !is_message(a) && is_message(b));
}

/* Between communicators a group has no order: the ranks may have queued for them in different ones.
 * So each communicator's operations are brought together, in the order of something all ranks know.
 * Stable, as within a communicator the order does matter; its collectives come before its sends and
 * receives, as with NCCL. */
static void sort_operations(struct operation *operations, size_t n) {
    for (size_t i = 1; i < n; i++) {
        const struct operation o = operations[i];
        size_t j = i;
        for (; j > 0 && comes_before(&o, &operations[j - 1]); j--) {
            operations[j] = operations[j - 1];
        }
        operations[j] = o;
    }
}

/* How many of them run at once: one collective, or all sends and receives of its communicator. */
static size_t count_next(const struct operation *operations, size_t n) {
    size_t i = 1;
    while (is_message(&operations[0]) && i < n && is_message(&operations[i]) &&
           operations[i].comm == operations[0].comm) {
        i++;
    }
    return i;
}

static ncclResult_t run_group(struct operation *operations, size_t n) {
    ncclResult_t result = ncclSuccess;
    size_t n_entered = 0;
    while (n_entered < n && result == ncclSuccess) {
        result = enter(operations[n_entered].comm, "ncclGroupEnd");
        n_entered += result == ncclSuccess;
    }
    if (result == ncclSuccess) {
        sort_operations(operations, n);
    }
    for (size_t i = 0, n_next; i < n_entered; i += n_next) {
        n_next = count_next(&operations[i], n_entered - i);
        if (result == ncclSuccess) {
            result = run(&operations[i], n_next);
        }
        for (size_t j = i; j < i + n_next; j++) {
            leave(operations[j].comm);
        }
    }
    return result;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
    int fault = stand_in_called("ncclGroupEnd");
    if (group_depth == 0) {
        return fail(ncclInvalidUsage, "ncclGroupEnd", "there is no group");
    }
    if (--group_depth > 0) {
        return (ncclResult_t)fault;
    }
    struct operation *operations = queue;
    size_t n = n_queued;
    queue = NULL;
    n_queued = 0;
    ncclResult_t result = group_failure;
    group_failure = ncclSuccess;
    if (result != ncclSuccess) {
        n = 0;
    } else if (n == 0) {
        result = begin_without_comm("ncclGroupEnd", fault);
    } else {
        result = begin(operations[0].comm, "ncclGroupEnd", fault);
        if (result == ncclSuccess) {
            leave(operations[0].comm);
            result = run_group(operations, n);
        }
    }
    free(operations);
    return result;
}
