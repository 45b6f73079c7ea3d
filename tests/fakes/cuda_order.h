/* Happens-before, for the stand-in for the CUDA driver. Work is over when its call returns, so a
 * missing wait would still give right data. So every kernel, copy and collective says which bytes
 * it reads and writes, and each must be ordered after what others did with them before: by a
 * stream, an event, or a host thread that has waited. What is not is a race, which a test gets as a
 * line that names both.
 *
 * cuda_order.c keeps the clocks: how much of every stream is known to be over by every stream,
 * event and host thread. cuda_ranges.c keeps who has touched which bytes. cuda_blocks.c plays
 * torch's caching allocator. cuda_kernels.c says what our kernels touch. */
#ifndef FASTCOMM_STAND_IN_CUDA_ORDER_H
#define FASTCOMM_STAND_IN_CUDA_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stand_in.h"

enum {
    CLOCKS = 64
}; /* streams that are told apart; those CLOCKS numbers from each other share one clock */

/* How much of each stream is over. Times of a stream grow with everything put into it. */
struct clock {
    uint32_t times[CLOCKS];
};

struct range {
    const void *address;
    size_t nbytes;
    bool is_write;
};

/* ---- for tests ---- */

/* Copies the races found since the last stand_in_forget_accesses, a line each, as stand_in_log
 * does. Only the first ones are kept. */
EXPORT size_t stand_in_races(char *out, size_t nbytes);

/* Forgets them, and who has touched what. */
EXPORT void stand_in_forget_accesses(void);

/* What torch would launch on the stream touches these bytes; torch works on the host here. */
EXPORT void stand_in_touch(size_t stream, const char *name, const void *address, size_t nbytes,
                           int is_write);

/* The calling thread has waited for all work of the stream, as `item()` does. */
EXPORT void stand_in_wait_for_stream(size_t stream);

/* A block of torch's caching allocator that belongs to the stream: a DLManagedTensor of bytes, for
 * torch.utils.dlpack. When it is freed the allocator gives it to what that stream does next, which
 * is a race with whatever other streams still do to it. NULL without memory. */
EXPORT void *stand_in_block(size_t stream, size_t nbytes);

/* torch's record_stream: the block at this address is not given to others before the work is over
 * that the stream has when it is freed. False if no block is there. */
EXPORT int stand_in_record_stream(const void *address, size_t stream);

/* ---- for the stand-in for NCCL, which finds them by name ---- */

/* The stream does a piece of work that touches these bytes. */
EXPORT void stand_in_use(size_t stream, const char *name, const struct range *ranges, size_t n);

/* A collective is about to be put into the stream for which stand_in_end_collectives may be called
 * later: that ends the stream's collectives, not what stands behind them. */
EXPORT void stand_in_note_collective(size_t stream);
EXPORT void stand_in_end_collectives(size_t stream);

/* Memory is handed out, or freed, which only a thread may do that knows all work on it to be over.
 */
EXPORT void stand_in_hand_out(const void *address, size_t nbytes);
EXPORT void stand_in_free_memory(const void *address, size_t nbytes);

/* ---- between the parts ---- */

/* What happens to streams and events. An event's clock is made at its first record. */
void order_submit(size_t stream);
void order_record(size_t stream, struct clock **event);
void order_wait(size_t stream, const struct clock *event);

/* What happens to the times of events: cuda_timing.c. */
void timing_create(size_t event, unsigned flags);
void timing_record(size_t event);

/* The calling thread has learnt that the event is reached. NULL: one that was never recorded. */
void order_reach(const struct clock *event);

/* All threads have: a capture begins or ends, around which torch synchronises the device. */
void order_for_everyone(void);

/* What a launch of one of our kernels touches. Others touch nothing, as far as is known. */
void order_kernel(size_t stream, const char *name, unsigned n_blocks, void **parameters);

/* The rest is called within order_lock and order_unlock. */
void order_lock(void);
void order_unlock(void);
void join(struct clock *into, const struct clock *from);
/* What is over for the calling thread; with a stream, also what is over for its next work. */
struct clock known_to_thread(void);
struct clock known_to_stream(size_t stream);
uint32_t time_of_stream(size_t stream);
void note_race(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Somebody who knows `known` touches the bytes. Notes races, then, unless `name` is NULL, the
 * access. */
void ranges_touch(size_t stream, uint32_t time, const struct clock *known, const char *name,
                  const struct range *range);
/* Notes races with whoever else uses bytes that are freed: `who` says it. */
void ranges_free(const struct clock *known, const char *who, const void *address, size_t nbytes);
void ranges_forget(const void *address, size_t nbytes);
void ranges_forget_all(void);

#endif
