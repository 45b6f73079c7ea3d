/* The clocks of streams, events and host threads, and the races found by them: see cuda_order.h. No
 * order among streams but what is asked for: the default stream waits for none, as ours are made
 * not to wait for it. Work is not put off to threads that play the streams: these would show a
 * missing order when the timing is bad, the clocks show it in every run. */
#define _GNU_SOURCE
#include "cuda_order.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RACES_BYTES = 8192, LINE_BYTES = 512 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct clock streams[CLOCKS];
static struct clock collectives[CLOCKS]; /* of each stream as it was when its last one was over */
static struct clock everyone;            /* what all threads know */
static _Thread_local struct clock thread;
static char races[RACES_BYTES];
static size_t races_length;

void order_lock(void) {
    pthread_mutex_lock(&mutex);
}

void order_unlock(void) {
    pthread_mutex_unlock(&mutex);
}

void join(struct clock *into, const struct clock *from) {
    for (int i = 0; i < CLOCKS; i++) {
        into->times[i] = into->times[i] > from->times[i] ? into->times[i] : from->times[i];
    }
}

struct clock known_to_thread(void) {
    struct clock known = thread;
    join(&known, &everyone);
    return known;
}

struct clock known_to_stream(size_t stream) {
    struct clock known = known_to_thread();
    join(&known, &streams[stream % CLOCKS]);
    return known;
}

uint32_t time_of_stream(size_t stream) {
    return streams[stream % CLOCKS].times[stream % CLOCKS];
}

/* ---- what happens to streams and events ---- */

/* What is put into a stream comes after all that the thread knows to be over. */
static struct clock *submit(size_t stream) {
    struct clock *own = &streams[stream % CLOCKS];
    join(own, &thread);
    join(own, &everyone);
    own->times[stream % CLOCKS]++;
    return own;
}

void order_submit(size_t stream) {
    order_lock();
    submit(stream);
    order_unlock();
}

void order_record(size_t stream, struct clock **event) {
    order_lock();
    *event = *event != NULL ? *event : malloc(sizeof **event);
    const struct clock *own = submit(stream);
    if (*event != NULL) {
        **event = *own;
    }
    order_unlock();
}

void order_wait(size_t stream, const struct clock *event) {
    order_lock();
    struct clock *own = submit(stream);
    if (event != NULL) {
        join(own, event);
    }
    order_unlock();
}

/* ---- what host threads learn ---- */

void order_reach(const struct clock *event) {
    if (event != NULL) {
        order_lock();
        join(&thread, event);
        order_unlock();
    }
}

void stand_in_wait_for_stream(size_t stream) {
    order_reach(&streams[stream % CLOCKS]);
}

void order_for_everyone(void) {
    order_lock();
    for (int i = 0; i < CLOCKS; i++) {
        join(&everyone, &streams[i]);
    }
    order_unlock();
}

void stand_in_note_collective(size_t stream) {
    order_lock();
    collectives[stream % CLOCKS] = *submit(stream);
    order_unlock();
}

void stand_in_end_collectives(size_t stream) {
    order_lock();
    join(&everyone, &collectives[stream % CLOCKS]);
    order_unlock();
}

/* ---- what is done to memory ---- */

void stand_in_use(size_t stream, const char *name, const struct range *ranges, size_t n) {
    order_lock();
    const struct clock *own = submit(stream);
    for (int is_write = 0; is_write <= 1; is_write++) { /* first what is read */
        for (size_t i = 0; i < n; i++) {
            if (ranges[i].is_write == is_write) {
                ranges_touch(stream, time_of_stream(stream), own, name, &ranges[i]);
            }
        }
    }
    order_unlock();
}

void stand_in_touch(size_t stream, const char *name, const void *address, size_t nbytes,
                    int is_write) {
    stand_in_use(stream, name, &(struct range){address, nbytes, is_write != 0}, 1);
}

void stand_in_hand_out(const void *address, size_t nbytes) {
    order_lock();
    ranges_forget(address, nbytes);
    order_unlock();
}

void stand_in_free_memory(const void *address, size_t nbytes) {
    order_lock();
    const struct clock known = known_to_thread();
    ranges_free(&known, "its memory is freed", address, nbytes);
    order_unlock();
}

/* ---- races ---- */

void note_race(const char *format, ...) {
    char line[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t length = strlen(line);
    if (races_length + length + 1 < sizeof races) {
        memcpy(races + races_length, line, length);
        races[races_length + length] = '\n';
        races_length += length + 1;
    }
}

size_t stand_in_races(char *out, size_t nbytes) {
    order_lock();
    size_t length = races_length;
    if (nbytes > 0) {
        size_t copied = length < nbytes ? length : nbytes - 1;
        memcpy(out, races, copied);
        out[copied] = '\0';
    }
    order_unlock();
    return length;
}

void stand_in_forget_accesses(void) {
    order_lock();
    ranges_forget_all();
    races_length = 0;
    order_unlock();
}
