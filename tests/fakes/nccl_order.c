/* Tells the stand-in for the CUDA driver what collectives read and write, and what becomes of
 * memory; asks it for devices and graphs: see cuda_order.h and cuda_driver.h. The two are libraries
 * of their own, opened with RTLD_LOCAL; a process may have only this one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nccl_calls.h"

static const struct timespec PAUSE = {.tv_nsec = 1000 * 1000};

/* A function of the driver's stand-in, or NULL. Kept, as to look for one takes longer than all the
 * rest of a collective. */
static void *found(const char *function) {
    enum { MOST = 16 };
    static _Thread_local char opened[PATH_MAX];
    static _Thread_local void *library;
    static _Thread_local struct {
        const char *name; /* one of the literals below */
        void *address;
    } known[MOST];
    const char *path = getenv("FASTCOMM_CUDA_LIBRARY");
    if (path == NULL) {
        return NULL;
    }
    if (library == NULL || strcmp(path, opened) != 0) {
        library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        snprintf(opened, sizeof opened, "%s", path);
        memset(known, 0, sizeof known);
    }
    if (library == NULL) {
        return NULL;
    }
    int i = 0;
    while (i < MOST - 1 && known[i].name != NULL && known[i].name != function) {
        i++;
    }
    if (known[i].name != function) {
        known[i].name = function;
        known[i].address = dlsym(library, function);
    }
    return known[i].address;
}

/* What the driver's stand-in answers to a question; 0 where there is none. */
static int asked(const char *question) {
    int (*answer)(void) = found(question);
    return answer != NULL ? answer() : 0;
}

static int asked_of(size_t stream, const char *question) {
    int (*answer)(size_t) = found(question);
    return answer != NULL ? answer(stream) : 0;
}

void order_collective(ncclComm_t comm, size_t stream, const char *function,
                      const struct range *ranges, size_t n) {
    void (*use)(size_t, const char *, const struct range *, size_t) = found("stand_in_use");
    void (*note)(size_t) = found("stand_in_note_collective");
    if (use != NULL && note != NULL) {
        use(stream, function, ranges, n);
        note(stream);
        bool is_captured = asked_of(stream, "stand_in_is_captured") != 0;
        int n_destroyed = asked("stand_in_graphs_destroyed");
        pthread_mutex_lock(&nccl_mutex);
        comm->has_stream = true;
        comm->stream = stream;
        comm->is_captured = comm->is_captured || is_captured;
        comm->graphs_then = is_captured ? n_destroyed : comm->graphs_then;
        pthread_mutex_unlock(&nccl_mutex);
    }
}

void order_end(ncclComm_t comm) {
    void (*end)(size_t) = found("stand_in_end_collectives");
    pthread_mutex_lock(&nccl_mutex);
    bool has_stream = comm->has_stream;
    size_t stream = comm->stream;
    pthread_mutex_unlock(&nccl_mutex);
    if (end != NULL && has_stream) {
        end(stream);
    }
}

bool order_finish(ncclComm_t comm) {
    while (comm->has_stream && asked("stand_in_events_are_held") &&
           !world_is_abandoned(comm->world)) {
        nanosleep(&PAUSE, NULL);
    }
    if (!world_is_abandoned(comm->world)) {
        order_end(comm);
    }
    return !world_is_abandoned(comm->world);
}

bool has_graphs(ncclComm_t comm) {
    return comm->is_captured && asked("stand_in_graphs_destroyed") == comm->graphs_then;
}

void wait_for_graphs(ncclComm_t comm) {
    while (has_graphs(comm)) {
        nanosleep(&PAUSE, NULL);
    }
}

bool has_context(void) {
    return asked("stand_in_current_device") >= 0;
}

int runtime_device(void) {
    return has_context() ? asked("stand_in_current_device") : 0;
}

bool is_stream_of(size_t stream, int device) {
    int its = asked_of(stream, "stand_in_device_of_stream");
    return its < 0 || its == device;
}

void order_hand_out(const void *address, size_t nbytes) {
    void (*hand_out)(const void *, size_t) = found("stand_in_hand_out");
    if (hand_out != NULL) {
        hand_out(address, nbytes);
    }
}

void order_free(const void *address, size_t nbytes) {
    void (*free_memory)(const void *, size_t) = found("stand_in_free_memory");
    if (free_memory != NULL) {
        free_memory(address, nbytes);
    }
}
