/* A CUDA driver that finds no GPU. It adds a byte to the file $FASTCOMM_STARTS_OF_CUDA whenever a
 * process starts CUDA.
 *
 * libcudart, which torch brings, opens it in place of the machine's, from LD_LIBRARY_PATH.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

enum { SUCCESS = 0, NO_DEVICE = 100, NOT_FOUND = 500, VERSION = 99000 };

EXPORTED int cuInit(unsigned flags) {
    (void)flags;
    int file = open(getenv("FASTCOMM_STARTS_OF_CUDA"), O_WRONLY | O_APPEND);
    if (write(file, ".", 1) != 1) {
        abort();
    }
    close(file);
    return NO_DEVICE;
}

EXPORTED int cuDriverGetVersion(int *version) {
    *version = VERSION; /* newer than any libcudart */
    return SUCCESS;
}

EXPORTED int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    (void)version;
    (void)flags;
    void *self = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = dlsym(self, name);
    return *function == NULL ? NOT_FOUND : SUCCESS;
}

EXPORTED int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                 int *status) {
    int result = cuGetProcAddress(name, function, version, flags);
    if (status != NULL) {
        *status = result == SUCCESS ? 0 : 1;
    }
    return result;
}
