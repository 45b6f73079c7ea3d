/* Tells the stand-in for the CUDA driver what collectives read and write, and what becomes of
 * memory: see cuda_order.h. The two are libraries of their own, opened with RTLD_LOCAL; a process
 * may have only this one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "nccl_calls.h"

/* A function of the driver's stand-in, or NULL. */
static void *found(const char *function) {
    const char *path = getenv("FASTCOMM_CUDA_LIBRARY");
    void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (library == NULL) {
        return NULL;
    }
    void *symbol = dlsym(library, function);
    dlclose(library);
    return symbol;
}

void order_collective(ncclComm_t comm, size_t stream, const char *function,
                      const struct range *ranges, size_t n) {
    void (*use)(size_t, const char *, const struct range *, size_t) = found("stand_in_use");
    void (*note)(size_t) = found("stand_in_note_collective");
    if (use != NULL && note != NULL) {
        use(stream, function, ranges, n);
        note(stream);
        pthread_mutex_lock(&nccl_mutex);
        comm->has_stream = true;
        comm->stream = stream;
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
