/* When events were recorded: here a stream does at once what it is given. */
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "cuda_driver.h"
#include "cuda_order.h"
#include "stand_in.h"

#define DISABLE_TIMING 2
#define N_EVENTS ((size_t)1 << 16)

static struct {
    bool timed;
    int64_t recorded_ns;
} times[N_EVENTS];

void timing_create(size_t event, unsigned flags) {
    if (event < N_EVENTS) {
        times[event].timed = (flags & DISABLE_TIMING) == 0;
        times[event].recorded_ns = 0;
    }
}

void timing_record(size_t event) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (event < N_EVENTS) {
        times[event].recorded_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
}

EXPORT CUresult cuEventQuery(CUevent event); /* in cuda_streams.c */

EXPORT CUresult cuEventElapsedTime(float *elapsed_ms, CUevent begin, CUevent end) {
    CUevent both[2] = {begin, end};
    for (int i = 0; i < 2; i++) {
        size_t number = (size_t)both[i];
        CUresult result = cuEventQuery(both[i]); /* not reached, or of a capture */
        if (result != CUDA_SUCCESS) {
            return result;
        }
        if (number >= N_EVENTS || !times[number].timed || times[number].recorded_ns == 0) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
    }
    int64_t elapsed_ns = times[(size_t)end].recorded_ns - times[(size_t)begin].recorded_ns;
    *elapsed_ms = (float)((double)elapsed_ns / 1e6);
    return CUDA_SUCCESS;
}
