/* The devices of the stand-in for the CUDA driver, a primary context each, and which context is
 * current to a host thread: none until the thread sets one. Streams, events, modules and functions
 * belong to the context that is current when they are made. What the driver's reference and the
 * programming guide say of handles of other contexts than the current one is:
 *
 *     refused (CUDA_ERROR_INVALID_HANDLE): to launch a function of another context, or into a
 *         stream of another one; to record an event in a stream of another context than its own
 *     allowed: to let a stream wait for another context's event; to query, to synchronise; copies
 *
 * The handles of the default streams mean those of the current context. Without one, every call
 * that its reference gives CUDA_ERROR_INVALID_CONTEXT among its results fails with that. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda_driver.h"

enum { MULTIPROCESSORS = 2 };

struct CUctx_st {
    char unused; /* it has an address, and a number among the others */
};

static struct CUctx_st contexts[MAX_DEVICES];
static CUdevice devices[MAX_DEVICES] = {0}; /* by ordinal */
static int n_devices = 1;
static atomic_bool initialised;
static _Thread_local CUcontext current;

/* FASTCOMM_STAND_IN_DEVICES gives the devices in the order of their ordinals: "1,0" are two, of
 * which the second one comes first. A communicator of the tests has ordinal 0, as torch knows one
 * CPU; the runtime's device of a thread without a context stays device 0. */
__attribute__((constructor)) static void read_devices(void) {
    const char *order = getenv("FASTCOMM_STAND_IN_DEVICES");
    for (int n = 0, length = 0; order != NULL && *order != '\0'; order += length, n++) {
        if (n == MAX_DEVICES || sscanf(order, "%d%n", &devices[n], &length) != 1 ||
            devices[n] < 0 || devices[n] >= MAX_DEVICES) {
            fprintf(stderr, "FASTCOMM_STAND_IN_DEVICES: cannot make sense of \"%s\"\n", order);
            abort();
        }
        length += order[length] == ',';
        n_devices = n + 1;
    }
}

static bool is_device(CUdevice device) {
    bool is = false;
    for (int i = 0; i < n_devices; i++) {
        is = is || devices[i] == device;
    }
    return is;
}

int current_device(void) {
    return current != NULL ? (int)(current - contexts) : NO_DEVICE;
}

int stand_in_current_device(void) {
    return current_device();
}

CUresult ready(enum needs needs, int fault) {
    if (fault != 0) {
        return (CUresult)fault;
    }
    if (!initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    return needs == CONTEXT && current == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

/* The same for a call that is about a device. */
static CUresult ready_with(CUdevice device, int fault) {
    CUresult result = ready(DRIVER, fault);
    return result == CUDA_SUCCESS && !is_device(device) ? CUDA_ERROR_INVALID_DEVICE : result;
}

EXPORT CUresult cuInit(unsigned flags) {
    int fault = stand_in_called("cuInit");
    initialised = initialised || fault == 0;
    return fault != 0 ? (CUresult)fault : flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- devices ---- */

EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = n_devices;
    return ready(DRIVER, stand_in_called("cuDeviceGetCount"));
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CUresult result = ready(DRIVER, stand_in_called("cuDeviceGet ordinal=%d", ordinal));
    bool exists = ordinal >= 0 && ordinal < n_devices;
    *device = exists ? devices[ordinal] : 0;
    return result == CUDA_SUCCESS && !exists ? CUDA_ERROR_INVALID_DEVICE : result;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? MULTIPROCESSORS : 0;
    return ready_with(device, stand_in_asked("cuDeviceGetAttribute"));
}

/* ---- contexts ---- */

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult result =
        ready_with(device, stand_in_called("cuDevicePrimaryCtxRetain device=%d", device));
    if (result == CUDA_SUCCESS) {
        *context = &contexts[device];
    }
    return result;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return ready(DRIVER, stand_in_asked("cuCtxGetCurrent"));
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    CUresult result = ready(DRIVER, stand_in_asked("cuCtxSetCurrent"));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    bool exists = context == NULL;
    for (int i = 0; i < n_devices; i++) {
        exists = exists || context == &contexts[devices[i]];
    }
    current = exists ? context : current;
    return exists ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5; /* as on current cards */
    return ready(CONTEXT, stand_in_asked("cuCtxGetStreamPriorityRange"));
}
