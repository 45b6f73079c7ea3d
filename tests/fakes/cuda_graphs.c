/* Captures as a program asks for them, and what graphs own, in the stand-in for the CUDA driver. It
 * records no graphs, but what a program ties to their lives works. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "cuda_driver.h"

enum { CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1, CU_GRAPH_USER_OBJECT_MOVE = 1 };

struct CUuserObject_st {
    CUuserObject next;
    void *pointer;
    CUhostFn destroy;
    unsigned n_by_caller; /* references; all others are graphs' */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUuserObject objects;
static atomic_int n_times_destroyed;

/* ---- captures ---- */

/* Only the default streams are nobody's without a current context. */
static enum needs needs_of(CUstream stream) {
    return number_of(stream) < DEFAULT_STREAMS ? CONTEXT : DRIVER;
}

/* The graph of a capture has the capture's number. Nobody asks for what it depends on. */
EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status,
                                          unsigned long long *identifier, CUgraph *graph,
                                          const void *dependencies, size_t *n_dependencies) {
    unsigned long long number;
    CUresult result = ready(needs_of(stream), stand_in_asked("cuStreamGetCaptureInfo"));
    if (result == CUDA_SUCCESS) {
        result = dependencies == NULL && n_dependencies == NULL
                     ? ask_for_capture(stream, status, &number)
                     : CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        if (identifier != NULL) {
            *identifier = number;
        }
        if (graph != NULL) {
            *graph = (CUgraph)(size_t)number;
        }
    }
    return result;
}

int stand_in_is_captured(size_t stream) {
    CUstreamCaptureStatus status;
    unsigned long long number;
    return ask_for_capture((CUstream)stream, &status, &number) == CUDA_SUCCESS &&
           status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* ---- what graphs own ---- */

EXPORT CUresult cuUserObjectCreate(CUuserObject *object, void *pointer, CUhostFn destroy,
                                   unsigned n_references, unsigned flags) {
    CUresult result = ready(DRIVER, stand_in_called("cuUserObjectCreate"));
    if (result != CUDA_SUCCESS || n_references == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    *object = malloc(sizeof **object);
    if (*object == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&mutex);
    **object = (struct CUuserObject_st){objects, pointer, destroy, n_references};
    objects = *object;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count,
                                        unsigned flags) {
    CUresult result =
        ready(DRIVER, stand_in_called("cuGraphRetainUserObject graph=%zu", number_of(graph)));
    if (result != CUDA_SUCCESS || graph == NULL) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&mutex);
    unsigned moved = flags == CU_GRAPH_USER_OBJECT_MOVE ? count : 0;
    if (moved <= object->n_by_caller) {
        object->n_by_caller -= moved;
    } else {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* An object that nobody holds any more, out of the list; or NULL. */
static CUuserObject take_forgotten_object(void) {
    pthread_mutex_lock(&mutex);
    CUuserObject *link = &objects;
    while (*link != NULL && (*link)->n_by_caller > 0) {
        link = &(*link)->next;
    }
    CUuserObject object = *link;
    if (object != NULL) {
        *link = object->next;
    }
    pthread_mutex_unlock(&mutex);
    return object;
}

void stand_in_destroy_graphs(void) {
    CUuserObject object;
    while ((object = take_forgotten_object()) != NULL) {
        object->destroy(object->pointer);
        free(object);
    }
    n_times_destroyed++;
}

int stand_in_graphs_destroyed(void) {
    return n_times_destroyed;
}
