/* The stand-in for NCCL in its parts: the library and its communicators (nccl.c), the orders and
 * checks that every call begins with (nccl_calls.c), collectives and groups (nccl_collectives.c),
 * how sends and receives progress (nccl_messages.c), memory (nccl_memory.c), and what the driver's
 * stand-in hears of it (nccl_order.c). */
#ifndef FASTCOMM_STAND_IN_NCCL_CALLS_H
#define FASTCOMM_STAND_IN_NCCL_CALLS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "cuda_order.h"
#include "nccl_world.h"
#include "stand_in.h"

/* ---- NCCL's interface ---- */

typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress,
    ncclTimeout,
    ncclNumResults
} ncclResult_t;

typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct ncclComm *ncclComm_t;
typedef struct registration *ncclWindow_t;
typedef struct {
    char bytes[128];
} ncclUniqueId;

/* ---- for tests ---- */

/* What ncclCommGetAsyncError reports from now on, for every communicator. */
EXPORT void stand_in_async_error(int code);

/* Calls of this function block until their communicator is aborted; where they have none, or make
 * or abort it, for ever. NULL heals it. */
EXPORT int stand_in_hang(const char *function);

EXPORT int stand_in_live_comms(void);

/* Revocations return only once this many have begun, as if each waited for a kernel that another
 * one ends. 0 lets all of them go. */
EXPORT void stand_in_hold_revocations(int until);

/* From now on Destroy returns only when the other ranks destroy the communicator, too: NCCL 2.31
 * waits for those of the host, and no abort lets it go. 0 ends it. */
EXPORT void stand_in_end_together(int on);

/* Collectives that were revoked or aborted inside their call do not return from it. 0 lets them. */
EXPORT void stand_in_stay_inside(int on);

/* How often a communicator was aborted while it was being revoked, or being destroyed, or while a
 * collective was inside its call after a revocation: with NCCL a use after free. */
EXPORT int stand_in_overtaken(void);

/* How many communicators were freed while a graph that had captured their collectives was alive:
 * with NCCL a use after free as soon as the graph goes. */
EXPORT int stand_in_freed_under_graphs(void);

/* 0: ncclCommWindowRegister succeeds and gives no window, as between hosts without a common NVLink.
 */
EXPORT void stand_in_give_windows(int on);

/* How many windows went with their communicators, not having been deregistered: NCCL unmaps such
 * memory without releasing it. */
EXPORT int stand_in_lost_windows(void);

/* ---- between the parts ---- */

enum kind {
    JOIN,
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    SEND,
    RECV,
    SPLIT,
    WINDOW
};

struct ncclComm {
    ncclComm_t next;
    struct world *world;
    int rank, n_ranks;
    int device;
    int n_inside; /* calls that use it */
    bool is_in_round;
    bool is_being_revoked, is_being_destroyed;
    bool is_finalized, is_revoked;
    bool is_captured; /* some of its collectives, */
    int graphs_then;  /* when so many times the graphs had been destroyed */
    bool has_stream;  /* a collective was launched, on */
    size_t stream;
};

/* Guards the communicators and whatever a part keeps beside them. */
extern pthread_mutex_t nccl_mutex;

/* Remembers why, and returns the code. */
ncclResult_t fail(ncclResult_t code, const char *function, const char *why);

/* A collective that was aborted stays inside its call, as long as tests say. */
void linger(void);

/* A call that no abort can end begins: its fault, its orders. */
ncclResult_t begin_without_comm(const char *function, int fault);

/* A call of a communicator begins. After success the communicator stays until leave(). */
ncclResult_t begin(ncclComm_t comm, const char *function, int fault);
/* The same without orders. */
ncclResult_t enter(ncclComm_t comm, const char *function);
void leave(ncclComm_t comm);

/* The same for calls that talk to the other ranks: no other thread may be in one. */
ncclResult_t begin_round(ncclComm_t comm, const char *function, int fault);
ncclResult_t end_round(ncclComm_t comm, const char *function, bool is_done);

/* Puts a communicator with one call inside, the caller's, among the live ones. */
void add_comm(ncclComm_t comm);
/* Waits until all have left and frees it. False if another thread was quicker. */
bool dispose(ncclComm_t comm);

/* Sets a flag of a communicator whose use has not ended yet; false if it was revoked or finalized.
 */
bool end_use(ncclComm_t comm, bool *flag);

/* A revocation waits for the kernels to leave the device. */
void wait_as_revoked(ncclComm_t comm);
/* A destruction may wait for those of the other ranks. */
void wait_as_destroyed(ncclComm_t comm);
/* Counts an abort that comes before the end of a revocation or of a destruction. */
void note_abort(ncclComm_t comm);

/* Whether NCCL's memory at the address, if it is NCCL's, is on the communicator's device. */
bool is_memory_of(const void *address, int device);

/* A send or a receive, and how far it is (nccl_messages.c). */
struct message {
    bool is_send;
    int peer, dtype;
    size_t count;
    char *buffer;
    size_t done; /* bytes */
    bool has_begun, is_over;
};

/* Why a rank may not post these together; NULL if it may. */
const char *wrong_with_messages(const struct message *messages, size_t n, int rank);
/* Returns when all are over. False if the communicator was abandoned before. */
bool move_messages(ncclComm_t comm, struct message *messages, size_t n);

/* What is registered with a communicator goes with it. */
void forget_registrations(ncclComm_t comm);

/* What the stand-in for the CUDA driver hears of (nccl_order.c), where this process has loaded it.
 * See cuda_order.h. */
void order_collective(ncclComm_t comm, size_t stream, const char *function,
                      const struct range *ranges, size_t n);
/* The communicator's collectives leave the device. */
void order_end(ncclComm_t comm);
/* They are over. False if the communicator was abandoned before. */
bool order_finish(ncclComm_t comm);
/* Whether a graph is alive that has captured some of them. */
bool has_graphs(ncclComm_t comm);
void wait_for_graphs(ncclComm_t comm);

/* The device that the CUDA runtime takes for the calling thread's: that of its context, and the
 * first one where it has none. */
int runtime_device(void);
/* Whether it has one, or there is no driver to ask. */
bool has_context(void);
/* Whether a stream, or NULL, is on this device. */
bool is_stream_of(size_t stream, int device);
void order_hand_out(const void *address, size_t nbytes);
void order_free(const void *address, size_t nbytes);

#endif
