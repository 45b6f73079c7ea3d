/* The stand-in for the CUDA driver in its parts: the driver, and modules (cuda.c); devices
 * and contexts (cuda_contexts.c); streams, events and captures (cuda_streams.c); full queues and
 * slow queries (cuda_queue.c); captures as they are asked for, and what graphs own
 * (cuda_graphs.c). */
#ifndef FASTCOMM_STAND_IN_CUDA_DRIVER_H
#define FASTCOMM_STAND_IN_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

#include "stand_in.h"

/* ---- the driver's interface ---- */

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

enum {
    MAX_DEVICES = 4,
    NO_DEVICE = -1,
    DEFAULT_STREAMS = 3, /* of each context: 0, and the legacy and the per-thread one, whose handles
                            are 1 and 2 */
};

typedef enum { CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16 } CUdevice_attribute;
typedef enum {
    CU_STREAM_CAPTURE_STATUS_NONE,
    CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED
} CUstreamCaptureStatus;
typedef enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CU_STREAM_CAPTURE_MODE_RELAXED
} CUstreamCaptureMode;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUuserObject_st *CUuserObject;
typedef void (*CUhostFn)(void *);

/* ---- for tests ---- */

/* Begins a capture on the NULL stream by this thread, as
 * torch.cuda.graph(capture_error_mode="global") (1) or "thread_local" (2) would, or ends it (0).
 * Streams that were created join when they wait for an event of the capture. Returns what
 * cuStreamEndCapture would. */
EXPORT CUresult stand_in_capture(int mode);

/* Destroys every graph there is, with the objects that only graphs hold: as if the owner of each
 * had let go. */
EXPORT void stand_in_destroy_graphs(void);

/* While set, no recorded event is ever reached: a query says "not ready", and a synchronisation
 * blocks. */
EXPORT void stand_in_hold_events(int hold);

/* The device's queue is full: call number `after` of a function (0: the next one) and all later
 * ones do their work, but return only when NULL has ordered that there is room. For
 * cuLaunchKernel, cuEventRecord and cuStreamWaitEvent. A call gives up after some seconds, and
 * fails, so that a test ends which nobody gets out of it. */
EXPORT void stand_in_fill_queue(const char *function, int after);

/* From now on every query for an event takes so long. */
EXPORT void stand_in_slow_queries(int microseconds);

/* How many calls wait for room. */
EXPORT int stand_in_waiting_for_room(void);

EXPORT size_t stand_in_live_streams(void);
EXPORT size_t stand_in_live_events(void);

/* ---- for the stand-in for NCCL, which finds them by name ---- */

/* The device of the calling thread's context, or NO_DEVICE. */
EXPORT int stand_in_current_device(void);

/* NO_DEVICE for a default stream, which every context has. */
EXPORT int stand_in_device_of_stream(size_t stream);

/* Whether the device does not come to rest: see stand_in_hold_events. */
EXPORT int stand_in_events_are_held(void);

/* Whether the stream is being captured, and how often all graphs have been destroyed. */
EXPORT int stand_in_is_captured(size_t stream);
EXPORT int stand_in_graphs_destroyed(void);

/* ---- between the parts ---- */

/* The same. */
int current_device(void);

/* What a call needs before it looks at its arguments: cuInit, or also a current context. Gives its
 * fault, if it has one. */
enum needs { DRIVER, CONTEXT };
CUresult ready(enum needs needs, int fault);

/* As long as stand_in_slow_queries has ordered, and while a call waits for room. */
void take_time_for_query(void);

/* While a call waits for room. */
void wait_for_lock(void);

/* Waits while the queue is full for this function. Gives the result of the call, or a failure. */
CUresult wait_for_room(const char *function, CUresult result);

/* A launch or a copy comes into the stream, whose number among all contexts' it gives. */
CUresult put_work_into(CUstream stream, size_t *number);

/* Whether a stream is being captured, and the number of the capture. */
CUresult ask_for_capture(CUstream stream, CUstreamCaptureStatus *status,
                         unsigned long long *number);

/* NO_DEVICE if there is no such stream. */
int device_of(CUstream stream);

/* Streams and events are small numbers. */
size_t number_of(const void *handle);

#endif
