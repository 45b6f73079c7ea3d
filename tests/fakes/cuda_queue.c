/* What the stand-in for the CUDA driver takes its time for: a full queue, a slow query. A call that
 * waits for room holds the driver's lock, and whoever asks for an event waits for that. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda_driver.h"

enum { NAME_BYTES = 64, PATIENCE_S = 5 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t there_is_room = PTHREAD_COND_INITIALIZER;
static char filled[NAME_BYTES]; /* the function that blocks, or nothing */
static int calls_left, n_waiting;
static atomic_int query_us;

void stand_in_slow_queries(int microseconds) {
    query_us = microseconds;
}

void take_time_for_query(void) {
    if (query_us > 0) {
        usleep((useconds_t)query_us);
    }
    wait_for_lock();
}

void wait_for_lock(void) {
    pthread_mutex_lock(&mutex);
    while (n_waiting > 0) {
        pthread_cond_wait(&there_is_room, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}

void stand_in_fill_queue(const char *function, int after) {
    pthread_mutex_lock(&mutex);
    snprintf(filled, sizeof filled, "%s", function != NULL ? function : "");
    calls_left = after;
    pthread_cond_broadcast(&there_is_room);
    pthread_mutex_unlock(&mutex);
}

int stand_in_waiting_for_room(void) {
    pthread_mutex_lock(&mutex);
    int n = n_waiting;
    pthread_mutex_unlock(&mutex);
    return n;
}

CUresult wait_for_room(const char *function, CUresult result) {
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&mutex);
    if (strcmp(filled, function) == 0 && calls_left-- <= 0) {
        n_waiting++;
        while (*filled != '\0' && result != CUDA_ERROR_UNKNOWN) {
            if (pthread_cond_timedwait(&there_is_room, &mutex, &deadline) != 0) {
                result = CUDA_ERROR_UNKNOWN;
            }
        }
        n_waiting--;
        pthread_cond_broadcast(&there_is_room);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}
