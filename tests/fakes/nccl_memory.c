/* Device memory of the stand-in for NCCL, and what communicators have registered of it. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>

#include "nccl_calls.h"

enum { ALIGNMENT = 4096 }; /* what windows need */

struct registration {
    struct registration *next;
    ncclComm_t comm;
    const char *buffer;
};

static struct registration *registrations;
static int n_lost_windows;
static bool gives_windows = true;

void stand_in_give_windows(int on) {
    gives_windows = on != 0;
}

int stand_in_lost_windows(void) {
    pthread_mutex_lock(&nccl_mutex);
    int n = n_lost_windows;
    pthread_mutex_unlock(&nccl_mutex);
    return n;
}

EXPORT ncclResult_t ncclMemAlloc(void **address, size_t nbytes) {
    ncclResult_t result =
        begin_without_comm("ncclMemAlloc", stand_in_called("ncclMemAlloc nbytes=%zu", nbytes));
    if (result != ncclSuccess) {
        return result;
    }
    *address = stand_in_allocate(nbytes, ALIGNMENT, runtime_device());
    order_hand_out(*address, *address != NULL ? nbytes : 0);
    return *address != NULL ? ncclSuccess
                            : fail(ncclUnhandledCudaError, "ncclMemAlloc", "out of memory");
}

bool is_memory_of(const void *address, int device) {
    int its = stand_in_device_at(address);
    return its < 0 || its == device;
}

static bool is_registered(const char *address) {
    bool is = false;
    pthread_mutex_lock(&nccl_mutex);
    for (const struct registration *one = registrations; one != NULL; one = one->next) {
        is = is || one->buffer == address;
    }
    pthread_mutex_unlock(&nccl_mutex);
    return is;
}

EXPORT ncclResult_t ncclMemFree(void *address) {
    ncclResult_t result = begin_without_comm("ncclMemFree", stand_in_called("ncclMemFree"));
    if (result != ncclSuccess || address == NULL) {
        return result;
    }
    if (!has_context()) { /* NCCL asks the driver whose memory it is */
        return fail(ncclUnhandledCudaError, "ncclMemFree", "invalid device context");
    }
    if (is_registered(address)) {
        return fail(ncclInvalidUsage, "ncclMemFree", "the memory is still registered");
    }
    order_free(address, stand_in_nbytes_at(address));
    return stand_in_release(address)
               ? ncclSuccess
               : fail(ncclInvalidArgument, "ncclMemFree", "not memory of ncclMemAlloc");
}

static struct registration *add_registration(ncclComm_t comm, const void *buffer) {
    struct registration *registration = malloc(sizeof *registration);
    if (registration != NULL) {
        pthread_mutex_lock(&nccl_mutex);
        *registration =
            (struct registration){.next = registrations, .comm = comm, .buffer = buffer};
        registrations = registration;
        pthread_mutex_unlock(&nccl_mutex);
    }
    return registration;
}

void forget_registrations(ncclComm_t comm) {
    pthread_mutex_lock(&nccl_mutex);
    for (struct registration **one = &registrations; *one != NULL;) {
        struct registration *registration = *one;
        if (registration->comm == comm) {
            *one = registration->next;
            n_lost_windows++;
            free(registration);
        } else {
            one = &registration->next;
        }
    }
    pthread_mutex_unlock(&nccl_mutex);
}

EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t nbytes,
                                           ncclWindow_t *window, int flags) {
    const char *function = "ncclCommWindowRegister";
    ncclResult_t result =
        begin_round(comm, function,
                    stand_in_called("ncclCommWindowRegister nbytes=%zu flags=%d comm=0x%zx", nbytes,
                                    flags, (size_t)comm));
    if (result != ncclSuccess) {
        return result;
    }
    const struct intent intent = {.kind = WINDOW, .count = nbytes};
    bool is_aligned = (uintptr_t)buffer % ALIGNMENT == 0;
    bool is_done = !is_aligned || world_round(comm->world, &intent, NULL, 0);
    bool is_given = gives_windows && is_aligned && is_done;
    *window = is_given ? add_registration(comm, buffer) : NULL;
    result = end_round(comm, function, is_done);
    return is_aligned
               ? result
               : fail(ncclInvalidArgument, function, "the buffer is not aligned to 4096 bytes");
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    const char *function = "ncclCommWindowDeregister";
    ncclResult_t result = begin(comm, function, stand_in_called("ncclCommWindowDeregister"));
    if (result != ncclSuccess) {
        return result;
    }
    pthread_mutex_lock(&nccl_mutex);
    struct registration **link = &registrations;
    while (*link != NULL && (*link != window || (*link)->comm != comm)) {
        link = &(*link)->next;
    }
    bool is_found = *link != NULL;
    if (is_found) {
        *link = window->next;
        free(window);
    }
    pthread_mutex_unlock(&nccl_mutex);
    leave(comm);
    return is_found ? ncclSuccess
                    : fail(ncclInvalidArgument, function, "not registered with this communicator");
}
