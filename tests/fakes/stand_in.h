/* What the stand-ins for the CUDA driver (cuda.c) and for NCCL (nccl.c) share: a log of the calls,
 * faults to order, and memory that is counted. What is exported is for tests, which call it through
 * ctypes; both libraries export it, so they are opened with RTLD_LOCAL. */
#ifndef FASTCOMM_STAND_IN_H
#define FASTCOMM_STAND_IN_H

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- for tests ---- */

/* Copies the log, at most `nbytes` of it with the final zero, and returns the length of all of it.
 * One call per line, in the order in which they began: name and handles. Calls that only ask
 * (cuEventQuery, ncclCommGetAsyncError) are not in it: pollers would fill it. */
EXPORT size_t stand_in_log(char *out, size_t nbytes);
EXPORT void stand_in_clear_log(void);

/* Makes call number `after` of a function (0: the next one) and all later ones do nothing but
 * return `code`; 0 heals it. Functions are named as in the log. Returns -1, and changes nothing,
 * where the library has no such function. */
EXPORT int stand_in_fail(const char *function, int code, int after);

/* Copies, as stand_in_log does, the functions that were called by a thread that held the lock of
 * the interpreter, a line each: one that has to wait in the driver then keeps all other threads
 * out. */
EXPORT size_t stand_in_calls_with_lock(char *out, size_t nbytes);

/* Device memory that is allocated now. */
EXPORT size_t stand_in_live_bytes(void);

/* ---- for the libraries ---- */

/* Faults that an environment variable orders from the first call on:
 * "cuInit=100,cuLaunchKernel=719". Ends the process over a name or a text it does not understand: a
 * test must not pass because nothing was injected. */
void stand_in_faults_from(const char *variable);

/* Notes a call in the log, as printf would write it, and returns the code it has been told to fail
 * with, or 0. The function's name is the first word. */
int stand_in_called(const char *call, ...) __attribute__((format(printf, 1, 2)));

/* The same without the log. */
int stand_in_asked(const char *function);

bool stand_in_has(const char *function);

void *stand_in_allocate(size_t nbytes, size_t alignment, int device);
/* The device of the allocation that this address lies in; -1 if in none. */
int stand_in_device_at(const void *address);
/* How much was allocated at this address: 0 if nothing. */
size_t stand_in_nbytes_at(const void *address);
/* False if `address` is not the beginning of an allocation. */
bool stand_in_release(void *address);

#endif
