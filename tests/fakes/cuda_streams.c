/* Streams and events of the stand-in for the CUDA driver, and what a capture forbids. A stream has
 * nothing to do: who waits for whom is kept here, what that means for memory in cuda_order.c. No
 * number is used twice, so that the use of a destroyed one is found. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "cuda_driver.h"
#include "cuda_order.h"

enum {
    FIRST_STREAM = 16,    /* of those created: 0x10 in the log */
    MAX_HANDLES = 1 << 20 /* more than a test-suite creates; pages nobody touches cost nothing */
};

_Static_assert(FIRST_STREAM >= MAX_DEVICES * DEFAULT_STREAMS, "their numbers come first");

enum capture_mode { NO_CAPTURE, GLOBAL_CAPTURE, THREAD_LOCAL_CAPTURE };

struct stream {
    bool live;
    int device;       /* of one that was created */
    unsigned capture; /* the number of the capture it last took part in */
    unsigned work;    /* how often something was put into it, and */
    unsigned awaited; /* how much of that another stream has waited for */
};

struct event {
    bool live, recorded;
    int device;
    unsigned capture; /* the number of the capture in which it was last recorded, or 0 */
    unsigned work;    /* of its stream at that time */
    size_t stream;
    struct clock *clock; /* what is over when it is reached; NULL before the first record */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t events_released = PTHREAD_COND_INITIALIZER;
static struct stream streams[MAX_HANDLES];
static struct event events[MAX_HANDLES];
static size_t n_streams = FIRST_STREAM, n_events = 1;
static bool events_held;
static struct {
    enum capture_mode mode;
    unsigned number;
    pthread_t thread;
    bool invalidated;
} capture;

static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

size_t number_of(const void *handle) {
    return (size_t)handle;
}

/* The default streams are those of the current context. */
static struct stream *stream_of(CUstream handle) {
    size_t number = number_of(handle);
    int device = current_device();
    if (number < DEFAULT_STREAMS) {
        return device != NO_DEVICE ? &streams[(size_t)device * DEFAULT_STREAMS + number] : NULL;
    }
    bool is_live = number >= FIRST_STREAM && number < n_streams && streams[number].live;
    return is_live ? &streams[number] : NULL;
}

static size_t index_of(const struct stream *stream) {
    return (size_t)(stream - streams);
}

static int device_of_stream(const struct stream *stream) {
    size_t index = index_of(stream);
    return index < FIRST_STREAM ? (int)(index / DEFAULT_STREAMS) : stream->device;
}

int device_of(CUstream handle) {
    pthread_mutex_lock(&mutex);
    const struct stream *stream = stream_of(handle);
    int device = stream != NULL ? device_of_stream(stream) : NO_DEVICE;
    pthread_mutex_unlock(&mutex);
    return device;
}

int stand_in_device_of_stream(size_t stream) {
    return stream < DEFAULT_STREAMS ? NO_DEVICE : device_of((CUstream)stream);
}

static struct event *event_of(CUevent handle) {
    size_t number = number_of(handle);
    return number < n_events && events[number].live ? &events[number] : NULL;
}

size_t stand_in_live_streams(void) {
    size_t n = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = FIRST_STREAM; i < n_streams; i++) {
        n += streams[i].live;
    }
    pthread_mutex_unlock(&mutex);
    return n;
}

size_t stand_in_live_events(void) {
    size_t n = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < n_events; i++) {
        n += events[i].live;
    }
    pthread_mutex_unlock(&mutex);
    return n;
}

/* ---- capture: these are called with the mutex held ---- */

static bool is_capturing(const struct stream *stream) {
    return capture.mode != NO_CAPTURE && stream->capture == capture.number;
}

/* Whether the event belongs to the capture that is running. */
static bool is_being_captured(const struct event *event) {
    return capture.mode != NO_CAPTURE && event->capture == capture.number;
}

static CUresult invalidate(CUresult reason) {
    capture.invalidated = true;
    return reason;
}

/* Whether the calling thread may make a call that a capture would not notice: the rules of
 * cuThreadExchangeStreamCaptureMode. */
static CUresult allowed_during_capture(void) {
    if (capture.mode == NO_CAPTURE || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_SUCCESS;
    }
    bool is_ours = pthread_equal(capture.thread, pthread_self());
    bool minds_others =
        thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == GLOBAL_CAPTURE;
    return is_ours || minds_others ? invalidate(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
                                   : CUDA_SUCCESS;
}

static CUresult put_into(struct stream *stream) {
    if (stream == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (is_capturing(stream) && capture.invalidated) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    stream->work++;
    order_submit(index_of(stream));
    return CUDA_SUCCESS;
}

CUresult put_work_into(CUstream handle, size_t *number) {
    pthread_mutex_lock(&mutex);
    struct stream *stream = stream_of(handle);
    CUresult result = put_into(stream);
    *number = stream != NULL ? index_of(stream) : 0;
    pthread_mutex_unlock(&mutex);
    return result;
}

static CUresult end_capture(void) {
    CUresult result = capture.invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    for (size_t i = FIRST_STREAM; i < n_streams && result == CUDA_SUCCESS; i++) {
        if (streams[i].live && is_capturing(&streams[i]) && streams[i].awaited != streams[i].work) {
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        }
    }
    capture.mode = NO_CAPTURE;
    capture.invalidated = false;
    order_for_everyone();
    return result;
}

static CUresult begin_capture(enum capture_mode mode) {
    capture.mode = mode;
    capture.number++;
    capture.thread = pthread_self();
    order_for_everyone();
    int device = current_device() != NO_DEVICE ? current_device() : 0;
    struct stream *defaults = &streams[device * DEFAULT_STREAMS];
    for (size_t i = 0; i < DEFAULT_STREAMS; i++) {
        defaults[i].capture = capture.number;
    }
    return CUDA_SUCCESS;
}

CUresult stand_in_capture(int mode) {
    pthread_mutex_lock(&mutex);
    CUresult result = mode == NO_CAPTURE ? end_capture() : begin_capture((enum capture_mode)mode);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* ---- streams ---- */

/* The number of the next stream or event, or 0 when there are no more. */
static size_t take_number(size_t *next) {
    pthread_mutex_lock(&mutex);
    size_t number = *next < MAX_HANDLES ? (*next)++ : 0;
    pthread_mutex_unlock(&mutex);
    return number;
}

static void set_live(bool *live) {
    pthread_mutex_lock(&mutex);
    *live = true;
    pthread_mutex_unlock(&mutex);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    size_t number = take_number(&n_streams);
    int fault = stand_in_called("cuStreamCreateWithPriority stream=0x%zx flags=%u priority=%d",
                                number, flags, priority);
    CUresult result = ready(CONTEXT, fault);
    if (result != CUDA_SUCCESS || number == 0) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    streams[number].device = current_device();
    set_live(&streams[number].live);
    *stream = (CUstream)number;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    CUresult result =
        ready(CONTEXT, stand_in_called("cuStreamDestroy stream=0x%zx", number_of(handle)));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    struct stream *stream = number_of(handle) >= FIRST_STREAM ? stream_of(handle) : NULL;
    if (stream != NULL) {
        stream->live = false;
    }
    pthread_mutex_unlock(&mutex);
    return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult wait_while_events_are_held(void) {
    while (events_held) {
        pthread_cond_wait(&events_released, &mutex);
    }
    return CUDA_SUCCESS;
}

/* A stream that captures cannot be waited for at all, other streams only by threads that the
 * capture does not concern. */
EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    CUresult result =
        ready(CONTEXT, stand_in_called("cuStreamSynchronize stream=0x%zx", number_of(handle)));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    const struct stream *stream = stream_of(handle);
    if (stream == NULL) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else {
        result = is_capturing(stream) ? invalidate(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
                                      : allowed_during_capture();
    }
    if (result == CUDA_SUCCESS) {
        wait_while_events_are_held();
        stand_in_wait_for_stream(index_of(stream));
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Called with the mutex held. */
static void reach_work_of(int device) {
    for (size_t i = 0; i < n_streams; i++) {
        if (device_of_stream(&streams[i]) == device) {
            stand_in_wait_for_stream(i);
        }
    }
}

EXPORT CUresult cuCtxSynchronize(void) {
    CUresult result = ready(CONTEXT, stand_in_called("cuCtxSynchronize"));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    result = allowed_during_capture();
    if (result == CUDA_SUCCESS) {
        wait_while_events_are_held();
        reach_work_of(current_device());
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Called with the mutex held. */
static CUstreamCaptureStatus status_of(const struct stream *stream) {
    if (!is_capturing(stream)) {
        return CU_STREAM_CAPTURE_STATUS_NONE;
    }
    return capture.invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                               : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult ask_for_capture(CUstream handle, CUstreamCaptureStatus *status,
                         unsigned long long *number) {
    pthread_mutex_lock(&mutex);
    const struct stream *stream = stream_of(handle);
    *status = stream != NULL ? status_of(stream) : CU_STREAM_CAPTURE_STATUS_NONE;
    *number = capture.number;
    pthread_mutex_unlock(&mutex);
    return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUresult result = ready(DRIVER, stand_in_asked("cuThreadExchangeStreamCaptureMode"));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    CUstreamCaptureMode previous = thread_mode;
    thread_mode = *mode;
    *mode = previous;
    return CUDA_SUCCESS;
}

/* ---- events ---- */

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags) {
    wait_for_lock();
    size_t number = take_number(&n_events);
    CUresult result =
        ready(CONTEXT, stand_in_called("cuEventCreate event=%zu flags=%u", number, flags));
    if (result != CUDA_SUCCESS || number == 0) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
    }
    events[number].device = current_device();
    timing_create(number, flags);
    set_live(&events[number].live);
    *event = (CUevent)number;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    wait_for_lock();
    CUresult result =
        ready(CONTEXT, stand_in_called("cuEventDestroy event=%zu", number_of(handle)));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    struct event *event = event_of(handle);
    if (event != NULL) {
        event->live = false;
        free(event->clock);
        event->clock = NULL;
    }
    pthread_mutex_unlock(&mutex);
    return event != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult record(struct event *event, CUstream handle) {
    const struct stream *stream = stream_of(handle);
    if (event == NULL || stream == NULL || event->device != device_of_stream(stream)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (is_capturing(stream) && capture.invalidated) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    event->recorded = true;
    event->stream = index_of(stream);
    event->work = stream->work;
    event->capture = is_capturing(stream) ? capture.number : 0;
    order_record(event->stream, &event->clock);
    timing_record((size_t)(event - events));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream) {
    int fault = stand_in_called("cuEventRecord event=%zu stream=0x%zx", number_of(handle),
                                number_of(stream));
    CUresult result = ready(CONTEXT, fault);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    result = record(event_of(handle), stream);
    pthread_mutex_unlock(&mutex);
    return wait_for_room("cuEventRecord", result);
}

/* An event of a capture takes the waiting stream into the capture; no other event may be waited for
 * there. */
static CUresult wait_for_event(struct stream *stream, const struct event *event) {
    if (stream == NULL || event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!event->recorded) {
        return CUDA_SUCCESS;
    }
    bool is_of_this_capture = is_being_captured(event);
    if (is_capturing(stream) && !is_of_this_capture) {
        return invalidate(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (event->capture != 0 && !is_of_this_capture) {
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (is_of_this_capture && !is_capturing(stream)) {
        stream->capture = capture.number;
    }
    if (stream != &streams[event->stream]) {
        streams[event->stream].awaited = event->work;
    }
    order_wait(index_of(stream), event->clock);
    return put_into(stream);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)flags; /* 0: the other one only matters to graphs */
    int fault = stand_in_called("cuStreamWaitEvent stream=0x%zx event=%zu", number_of(stream),
                                number_of(event));
    CUresult result = ready(CONTEXT, fault);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    result = wait_for_event(stream_of(stream), event_of(event));
    pthread_mutex_unlock(&mutex);
    return wait_for_room("cuStreamWaitEvent", result);
}

/* Whether the host may ask for this event at all. One recorded in a capture is never reached: only
 * its replays are. To ask for it spoils a capture that is running, whatever the thread's mode. */
static CUresult observable(const struct event *event) {
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (is_being_captured(event)) {
        return invalidate(CUDA_ERROR_CAPTURED_EVENT);
    }
    return event->capture != 0 ? CUDA_ERROR_CAPTURED_EVENT : allowed_during_capture();
}

EXPORT CUresult cuEventQuery(CUevent handle) {
    take_time_for_query();
    CUresult result = ready(DRIVER, stand_in_asked("cuEventQuery"));
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&mutex);
    const struct event *event = event_of(handle);
    result = observable(event);
    if (result == CUDA_SUCCESS && event->recorded && events_held) {
        result = CUDA_ERROR_NOT_READY;
    }
    if (result == CUDA_SUCCESS) {
        order_reach(event->clock);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

int stand_in_events_are_held(void) {
    pthread_mutex_lock(&mutex);
    bool are = events_held;
    pthread_mutex_unlock(&mutex);
    return are;
}

void stand_in_hold_events(int hold) {
    pthread_mutex_lock(&mutex);
    events_held = hold != 0;
    pthread_cond_broadcast(&events_released);
    pthread_mutex_unlock(&mutex);
}
