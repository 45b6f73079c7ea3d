/* A stand-in for libcuda.so.1, which tests load through FASTCOMM_CUDA_LIBRARY: host memory plays
 * device memory, and a stream is done with a call when the call returns. It checks what the driver
 * checks (handles, contexts, what a capture forbids) and what nothing else would see, the order of
 * streams (cuda_order.h); keeps a log, fails on order, and runs the
 * kernels that the host shim exports (FASTCOMM_STAND_IN_KERNELS). It records no graphs: what is
 * captured runs at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"
#include "cuda_order.h"

enum {
    DRIVER_VERSION = 13000,
    THREADS_PER_BLOCK = 1024,
    THREADS_PER_MULTIPROCESSOR = 2048,
};

struct CUfunc_st {
    CUfunction next;
    int device;
    void (*run)(unsigned n_blocks, unsigned n_threads, void **parameters);
    char name[];
};

struct CUmod_st {
    CUfunction functions;
    int device;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the modules' functions */

__attribute__((constructor)) static void load(void) {
    stand_in_faults_from("FASTCOMM_STAND_IN_CUDA_FAULTS");
}

/* ---- the driver ---- */

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return (CUresult)stand_in_asked("cuDriverGetVersion");
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define ERROR(CODE, TEXT) {CODE, #CODE, TEXT}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
          "system has unsupported display driver / cuda driver combination"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
          "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

static CUresult describe(CUresult code, const char **name, const char **text) {
    *name = *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == code) {
            *name = errors[i].name;
            *text = errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    const char *text;
    return describe(code, name, &text);
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    const char *name;
    return describe(code, &name, text);
}

/* ---- modules ---- */

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CUresult result = ready(CONTEXT, stand_in_called("cuModuleLoadData"));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (image == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *module = calloc(1, sizeof **module);
    if (*module == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*module)->device = current_device();
    return CUDA_SUCCESS;
}

/* The kernels' library stays open: a process has one. */
static void *kernel_named(const char *name) {
    const char *path = getenv("FASTCOMM_STAND_IN_KERNELS");
    void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        fprintf(stderr, "FASTCOMM_STAND_IN_KERNELS: %s\n", path != NULL ? dlerror() : "not set");
        return NULL;
    }
    return dlsym(library, name);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module, const char *name) {
    CUresult result = ready(CONTEXT, stand_in_called("cuModuleGetFunction %s", name));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (module->device != current_device()) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    void *address = kernel_named(name);
    if (address == NULL) {
        return CUDA_ERROR_NOT_FOUND;
    }
    CUfunction function = malloc(sizeof *function + strlen(name) + 1);
    if (function == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    function->device = module->device;
    memcpy(&function->run, &address, sizeof address);
    memcpy(function->name, name, strlen(name) + 1);
    pthread_mutex_lock(&mutex);
    function->next = module->functions;
    module->functions = function;
    pthread_mutex_unlock(&mutex);
    *handle = function;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function,
                                                            int block_size, size_t shared_nbytes) {
    CUresult result = ready(CONTEXT, stand_in_asked("cuOccupancyMaxActiveBlocksPerMultiprocessor"));
    *count = block_size > 0 && shared_nbytes == 0 ? THREADS_PER_MULTIPROCESSOR / block_size : 0;
    return result == CUDA_SUCCESS && function == NULL ? CUDA_ERROR_INVALID_HANDLE : result;
}

/* The kernels of the shim know one dimension, no shared memory, and parameters by address. */
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_nbytes, CUstream stream,
                               void **parameters, void **extra) {
    if (function == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult result = ready(CONTEXT, stand_in_called("cuLaunchKernel %s stream=0x%zx",
                                                     function->name, number_of(stream)));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (function->device != current_device() || device_of(stream) != current_device()) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    bool is_flat = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1 &&
                   shared_nbytes == 0 && extra == NULL;
    if (!is_flat || grid_x == 0 || block_x == 0 || block_x > THREADS_PER_BLOCK) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    size_t number;
    result = put_work_into(stream, &number);
    if (result == CUDA_SUCCESS) {
        order_kernel(number, function->name, grid_x, parameters);
        function->run(grid_x, block_x, parameters);
    }
    return wait_for_room("cuLaunchKernel", result);
}
