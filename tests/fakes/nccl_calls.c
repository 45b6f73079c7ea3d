/* What every call of the stand-in for NCCL begins with: the orders of tests, and whether the
 * communicator is alive. Keeps the list of those that are, and the last error. */
#define _GNU_SOURCE
#include "nccl_calls.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT_BYTES = 256, NAME_BYTES = 64 };

pthread_mutex_t nccl_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t somebody_left = PTHREAD_COND_INITIALIZER;
static ncclComm_t comms;
static char last_error[TEXT_BYTES];
static char hanging[NAME_BYTES];
static atomic_int async_error;
static pthread_cond_t revocations_go_on = PTHREAD_COND_INITIALIZER;
static atomic_bool ends_together;
static int n_revocations, revocations_needed, n_overtaken, n_freed_under_graphs;
static bool stay_inside;

/* ---- what tests order and ask ---- */

int stand_in_hang(const char *function) {
    if (function != NULL && !stand_in_has(function)) {
        return -1;
    }
    pthread_mutex_lock(&nccl_mutex);
    snprintf(hanging, sizeof hanging, "%s", function != NULL ? function : "");
    pthread_mutex_unlock(&nccl_mutex);
    return 0;
}

void stand_in_hold_revocations(int until) {
    pthread_mutex_lock(&nccl_mutex);
    n_revocations = 0;
    revocations_needed = until;
    pthread_cond_broadcast(&revocations_go_on);
    pthread_mutex_unlock(&nccl_mutex);
}

void stand_in_end_together(int on) {
    ends_together = on != 0;
}

void stand_in_stay_inside(int on) {
    stay_inside = on != 0;
}

int stand_in_overtaken(void) {
    pthread_mutex_lock(&nccl_mutex);
    int n = n_overtaken;
    pthread_mutex_unlock(&nccl_mutex);
    return n;
}

int stand_in_freed_under_graphs(void) {
    pthread_mutex_lock(&nccl_mutex);
    int n = n_freed_under_graphs;
    pthread_mutex_unlock(&nccl_mutex);
    return n;
}

static bool is_to_hang(const char *function) {
    pthread_mutex_lock(&nccl_mutex);
    bool is = strcmp(hanging, function) == 0;
    pthread_mutex_unlock(&nccl_mutex);
    return is;
}

void stand_in_async_error(int code) {
    async_error = code;
}

int stand_in_live_comms(void) {
    int n = 0;
    pthread_mutex_lock(&nccl_mutex);
    for (ncclComm_t comm = comms; comm != NULL; comm = comm->next) {
        n++;
    }
    pthread_mutex_unlock(&nccl_mutex);
    return n;
}

/* ---- beginning and ending a call ---- */

ncclResult_t fail(ncclResult_t code, const char *function, const char *why) {
    pthread_mutex_lock(&nccl_mutex);
    snprintf(last_error, sizeof last_error, "%s : %s", function, why);
    pthread_mutex_unlock(&nccl_mutex);
    return code;
}

/* Another thread may change the text: as with NCCL, it is for people. */
EXPORT const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return last_error;
}

ncclResult_t begin_without_comm(const char *function, int fault) {
    if (fault != 0) {
        return fail((ncclResult_t)fault, function, "told to fail");
    }
    while (is_to_hang(function)) {
        pause();
    }
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    ncclResult_t result =
        begin(comm, "ncclCommGetAsyncError", stand_in_asked("ncclCommGetAsyncError"));
    if (result == ncclSuccess) {
        *error = (ncclResult_t)async_error;
        leave(comm);
    }
    return result;
}

/* Called with the mutex held. The place in the list of communicators, which holds NULL if it is not
 * there. */
static ncclComm_t *link_to(ncclComm_t comm) {
    ncclComm_t *link = &comms;
    while (*link != NULL && *link != comm) {
        link = &(*link)->next;
    }
    return link;
}

void leave(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    comm->n_inside--;
    pthread_cond_broadcast(&somebody_left);
    pthread_mutex_unlock(&nccl_mutex);
}

ncclResult_t enter(ncclComm_t comm, const char *function) {
    if (comm == NULL) {
        return fail(ncclInvalidArgument, function, "comm argument is NULL");
    }
    pthread_mutex_lock(&nccl_mutex);
    bool is_live = *link_to(comm) != NULL;
    if (is_live) {
        comm->n_inside++;
    }
    pthread_mutex_unlock(&nccl_mutex);
    return is_live
               ? ncclSuccess
               : fail(ncclInvalidArgument, function, "the communicator was destroyed or aborted");
}

ncclResult_t begin(ncclComm_t comm, const char *function, int fault) {
    ncclResult_t result =
        fault != 0 ? fail((ncclResult_t)fault, function, "told to fail") : enter(comm, function);
    if (result != ncclSuccess) {
        return result;
    }
    if (!is_to_hang(function)) {
        return ncclSuccess;
    }
    if (strcmp(function, "ncclCommFinalize") == 0) {
        end_use(comm, &comm->is_finalized); /* from here on Revoke is refused */
    }
    world_wait_until_abandoned(comm->world);
    leave(comm);
    return fail(ncclInternalError, function, "aborted");
}

ncclResult_t begin_round(ncclComm_t comm, const char *function, int fault) {
    ncclResult_t result = begin(comm, function, fault);
    if (result != ncclSuccess) {
        return result;
    }
    pthread_mutex_lock(&nccl_mutex);
    bool is_in_round = comm->is_in_round;
    comm->is_in_round = true;
    pthread_mutex_unlock(&nccl_mutex);
    if (!is_in_round) {
        return ncclSuccess;
    }
    leave(comm);
    return fail(ncclInvalidUsage, function, "another thread is using the communicator");
}

ncclResult_t end_round(ncclComm_t comm, const char *function, bool is_done) {
    pthread_mutex_lock(&nccl_mutex);
    comm->is_in_round = false;
    pthread_mutex_unlock(&nccl_mutex);
    leave(comm);
    return is_done ? ncclSuccess : fail(ncclInternalError, function, "aborted");
}

/* ---- the life of communicators ---- */

void add_comm(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    comm->n_inside = 1;
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&nccl_mutex);
}

bool end_use(ncclComm_t comm, bool *flag) {
    pthread_mutex_lock(&nccl_mutex);
    bool is_in_use = !comm->is_finalized && !comm->is_revoked;
    *flag = *flag || is_in_use;
    pthread_mutex_unlock(&nccl_mutex);
    return is_in_use;
}

void wait_as_revoked(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    comm->is_being_revoked = true;
    n_revocations++;
    pthread_cond_broadcast(&revocations_go_on);
    while (n_revocations < revocations_needed) {
        pthread_cond_wait(&revocations_go_on, &nccl_mutex);
    }
    comm->is_being_revoked = false;
    pthread_mutex_unlock(&nccl_mutex);
}

void wait_as_destroyed(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    comm->is_being_destroyed = true;
    pthread_mutex_unlock(&nccl_mutex);
    world_begin_leaving(comm->world);
    while (ends_together && !world_is_left(comm->world)) {
        usleep(1000);
    }
}

void linger(void) {
    while (stay_inside) {
        usleep(1000);
    }
}

void note_abort(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    n_overtaken += comm->is_being_revoked || comm->is_being_destroyed ||
                   (comm->is_revoked && comm->is_in_round);
    pthread_mutex_unlock(&nccl_mutex);
}

bool dispose(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    /* It is looked up again after every wait: a destruction that waits for a blocked call may be
     * overtaken by an abort. */
    while (*link_to(comm) != NULL && comm->n_inside > 0) {
        pthread_cond_wait(&somebody_left, &nccl_mutex);
    }
    ncclComm_t *link = link_to(comm);
    bool is_ours = *link != NULL;
    if (is_ours) {
        *link = comm->next;
    }
    pthread_cond_broadcast(&somebody_left);
    pthread_mutex_unlock(&nccl_mutex);
    if (is_ours) {
        if (has_graphs(comm)) {
            pthread_mutex_lock(&nccl_mutex);
            n_freed_under_graphs++;
            pthread_mutex_unlock(&nccl_mutex);
        }
        forget_registrations(comm);
        world_leave(comm->world);
        free(comm);
    }
    return is_ours;
}
