/* Runs the lanes of a launch, and tells the sanitizers of it: see emulator.h.
 *
 * A block goes from lane to lane by swapcontext. The functions of the sanitizers are weak: they are
 * there in an executable that was linked with one. */
#include "emulator.h"

#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

extern "C" {
#define WEAK __attribute__((weak))
WEAK void *__tsan_get_current_fiber();
WEAK void *__tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void *fiber);
WEAK void __tsan_switch_to_fiber(void *fiber, unsigned flags);
WEAK void __tsan_acquire(void *address);
WEAK void __tsan_release(void *address);
WEAK void AnnotateIgnoreWritesBegin(const char *file, int line);
WEAK void AnnotateIgnoreWritesEnd(const char *file, int line);
WEAK void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t nbytes);
WEAK void __sanitizer_finish_switch_fiber(void *save, const void **bottom, size_t *nbytes);
}

__thread emulator_index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t STACK_NBYTES = 256 << 10; /* a launch's parameters lie there, up to 32 KiB */
constexpr unsigned N_RESIDENT = 4;         /* blocks that run at once */
constexpr unsigned WITHOUT_ORDER = 1;      /* a switch that orders nothing, for ThreadSanitizer */

void acquire(void *address) {
    if (__tsan_acquire) {
        __tsan_acquire(address);
    }
}

void release(void *address) {
    if (__tsan_release) {
        __tsan_release(address);
    }
}

struct random_numbers {
    uint64_t state;

    uint64_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return state >> 32;
    }
    unsigned below(unsigned n) {
        return (unsigned)(next() % n);
    }
};

/* ---- one launch ---- */

/* Its address stands for all that a lane has done before one fence. */
struct published {
    char unused;
};

/* std::mutex would order the lanes for ThreadSanitizer. */
struct spin_lock {
    std::atomic_flag flag = ATOMIC_FLAG_INIT;

    void lock() {
        while (flag.test_and_set(std::memory_order_acquire)) {
            sched_yield();
        }
    }
    void unlock() {
        flag.clear(std::memory_order_release);
    }
};

/* While it is alive, memory that a lane allocates or frees is none of ThreadSanitizer's business:
 * it is the emulator's. */
struct own_memory {
    own_memory() {
        if (AnnotateIgnoreWritesBegin) {
            AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
        }
    }
    ~own_memory() {
        if (AnnotateIgnoreWritesEnd) {
            AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        }
    }
};

struct launch {
    const std::function<void()> &lane;
    unsigned n_blocks, n_threads;
    std::vector<unsigned> order; /* of the blocks */

    spin_lock lock; /* of what follows */
    std::deque<published> fences;
    std::map<const void *, std::vector<published *>> of_atomic;
    std::string error;

    /* The first message counts: what follows may come of it. */
    void fail(unsigned block, unsigned lane, const std::string &message) {
        const own_memory unseen;
        const std::lock_guard<spin_lock> guard(lock);
        if (error.empty()) {
            error = "block " + std::to_string(block) + ", lane " + std::to_string(lane) + message;
        }
    }
};

/* ---- one block ---- */

enum state { READY, IN_BARRIER, IN_SHUFFLE, ENDED };
const char *const WHERE[] = {" is on its way", " is in __syncthreads", " is in a shuffle",
                             " has ended"};

struct lane {
    state now = READY;
    unsigned mask = 0, source = 0; /* of the shuffle it is in */
    uint64_t value = 0;            /* what it brings there, then what it gets */
    published *fence = nullptr;    /* its last one */
    std::vector<published *> seen; /* what atomics have told it of, and no fence has acquired yet */

    ucontext_t context;
    char *stack = nullptr;
    void *tsan_fiber = nullptr, *asan_stack = nullptr;
};

class block {
  public:
    block(launch &of, unsigned number, uint64_t seed);
    ~block();
    void run();

    void wait_for_block();
    uint64_t shuffle(unsigned mask, uint64_t value, unsigned source);
    void fence();
    void begin_atomic(const void *address);
    void end_atomic(const void *address);
    /* Other blocks and lanes may go first. */
    void hesitate();

  private:
    static void run_lane();
    void resume(unsigned number);
    void suspend(bool for_good);
    void end_shuffle(unsigned first, unsigned mask);
    void complain();

    launch &of_;
    unsigned number_, current_ = 0, n_in_barrier_ = 0, n_barriers_ = 0;
    random_numbers random_;
    std::vector<lane> lanes_;
    std::vector<unsigned> ready_;
    /* Their addresses: what lanes have done before a barrier, in turn, and altogether. */
    char barriers_[2] = {}, end_ = 0;
    char *stacks_;
    ucontext_t own_context_;
    void *own_tsan_fiber_ = nullptr;
    const void *own_stack_ = nullptr;
    size_t own_stack_nbytes_ = 0;
};

__thread block *here;

/* The stacks are new memory, where ThreadSanitizer remembers no other lane, and made before the
 * lanes, which begin with what this thread has done so far. */
block::block(launch &of, unsigned number, uint64_t seed)
    : of_(of), number_(number), random_{seed}, lanes_(of.n_threads) {
    stacks_ = (char *)mmap(nullptr, lanes_.size() * STACK_NBYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks_ == MAP_FAILED) {
        perror("stacks of a block");
        abort();
    }
    own_tsan_fiber_ = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
    for (unsigned i = 0; i < lanes_.size(); i++) {
        lane &one = lanes_[i];
        one.stack = stacks_ + i * STACK_NBYTES;
        one.tsan_fiber = __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack;
        one.context.uc_stack.ss_size = STACK_NBYTES;
        makecontext(&one.context, run_lane, 0);
        ready_.push_back(i);
    }
}

block::~block() {
    for (lane &one : lanes_) {
        if (one.tsan_fiber) {
            __tsan_destroy_fiber(one.tsan_fiber);
        }
    }
    munmap(stacks_, lanes_.size() * STACK_NBYTES);
}

/* A lane's first and last function. */
void block::run_lane() {
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(nullptr, &here->own_stack_, &here->own_stack_nbytes_);
    }
    here->of_.lane();
    release(&here->end_);
    here->lanes_[here->current_].now = ENDED;
    here->suspend(true);
}

void block::run() {
    here = this;
    blockIdx.x = number_;
    blockDim.x = (unsigned)lanes_.size();
    gridDim.x = of_.n_blocks;
    while (!ready_.empty()) {
        std::swap(ready_[random_.below((unsigned)ready_.size())], ready_.back());
        const unsigned next = ready_.back();
        ready_.pop_back();
        resume(next);
    }
    acquire(&end_);
    complain();
}

void block::resume(unsigned number) {
    void *asan_stack = nullptr;
    lane &next = lanes_[number];
    current_ = number;
    threadIdx.x = number;
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(&asan_stack, next.stack, STACK_NBYTES);
    }
    if (__tsan_switch_to_fiber) {
        __tsan_switch_to_fiber(next.tsan_fiber, WITHOUT_ORDER);
    }
    swapcontext(&own_context_, &next.context);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(asan_stack, nullptr, nullptr);
    }
}

/* Leaves the current lane until it is resumed. */
void block::suspend(bool for_good) {
    lane &self = lanes_[current_];
    if (__sanitizer_start_switch_fiber) {
        __sanitizer_start_switch_fiber(for_good ? nullptr : &self.asan_stack, own_stack_,
                                       own_stack_nbytes_);
    }
    if (__tsan_switch_to_fiber) {
        __tsan_switch_to_fiber(own_tsan_fiber_, WITHOUT_ORDER);
    }
    swapcontext(&self.context, &own_context_);
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(self.asan_stack, nullptr, nullptr);
    }
}

/* No lane can go on. Unless all have ended, some wait for others that will never come. */
void block::complain() {
    for (unsigned i = 0; i < lanes_.size(); i++) {
        if (lanes_[i].now == ENDED) {
            continue;
        }
        unsigned other = 0;
        while (other < lanes_.size() - 1 && lanes_[other].now == lanes_[i].now) {
            other++;
        }
        of_.fail(number_, i,
                 WHERE[lanes_[i].now] + std::string(" for ever: lane ") + std::to_string(other) +
                     WHERE[lanes_[other].now]);
        return;
    }
}

void block::hesitate() {
    if (random_.below(2)) {
        sched_yield();
    }
    ready_.push_back(current_);
    suspend(false);
}

void block::wait_for_block() {
    char *const barrier = &barriers_[n_barriers_ % 2];
    release(barrier);
    lanes_[current_].now = IN_BARRIER;
    if (++n_in_barrier_ == lanes_.size()) {
        n_in_barrier_ = 0;
        n_barriers_++;
        for (unsigned i = 0; i < lanes_.size(); i++) {
            lanes_[i].now = READY;
            ready_.push_back(i);
        }
    }
    suspend(false);
    acquire(barrier);
}

uint64_t block::shuffle(unsigned mask, uint64_t value, unsigned source) {
    lane &self = lanes_[current_];
    const unsigned first = current_ / 32 * 32;
    self.now = IN_SHUFFLE;
    self.mask = mask;
    self.value = value;
    self.source = source;
    if (!(mask >> current_ % 32 & mask >> source & 1u)) {
        of_.fail(number_, current_, " is in a shuffle whose mask lacks it or its source");
    }
    end_shuffle(first, mask);
    suspend(false);
    return self.value;
}

/* Lets the lanes of the mask go on with their new values if all are there. */
void block::end_shuffle(unsigned first, unsigned mask) {
    uint64_t values[32] = {};
    for (unsigned i = 0; i < 32; i++) {
        if (mask >> i & 1u) {
            if (first + i >= lanes_.size() || lanes_[first + i].now != IN_SHUFFLE ||
                lanes_[first + i].mask != mask) {
                return;
            }
            values[i] = lanes_[first + i].value;
        }
    }
    for (unsigned i = 0; i < 32; i++) {
        if (mask >> i & 1u) {
            lanes_[first + i].value = values[lanes_[first + i].source];
            lanes_[first + i].now = READY;
            ready_.push_back(first + i);
        }
    }
}

/* The second half of a pair of fences: what the atomics since the last one have told of. The first
 * half: what lanes will know that read an atomic this lane writes from here on. */
void block::fence() {
    lane &self = lanes_[current_];
    for (published *one : self.seen) {
        acquire(one);
    }
    self.seen.clear();
    {
        const own_memory unseen;
        const std::lock_guard<spin_lock> guard(of_.lock);
        of_.fences.emplace_back();
        self.fence = &of_.fences.back();
    }
    release(self.fence);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void block::begin_atomic(const void *address) {
    hesitate();
    const own_memory unseen;
    of_.lock.lock();
    const std::vector<published *> &known = of_.of_atomic[address];
    lanes_[current_].seen.insert(lanes_[current_].seen.end(), known.begin(), known.end());
}

void block::end_atomic(const void *address) {
    if (lanes_[current_].fence) {
        const own_memory unseen;
        of_.of_atomic[address].push_back(lanes_[current_].fence);
    }
    of_.lock.unlock();
    hesitate();
}

/* ---- the blocks of a launch ---- */

/* Fills this thread's __shared__ memory, all thread-local variables of this library or executable,
 * as if another kernel had left something there. */
int fill_shared_memory(dl_phdr_info *info, size_t, void *own) {
    char *const begin = (char *)info->dlpi_tls_data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const size_t nbytes = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS && begin <= own && own < begin + nbytes) {
            memset(begin, 0xff, nbytes);
            return 1;
        }
    }
    return 0;
}

/* As a multiprocessor: every n-th block, one after the other. */
void run_blocks(launch &of, unsigned first, uint64_t seed) {
    const bool is_sanitized = __tsan_create_fiber || __sanitizer_start_switch_fiber;
    for (unsigned i = first; i < of.n_blocks; i += N_RESIDENT) {
        if (!is_sanitized) { /* a sanitizer may have thread-local variables, too */
            dl_iterate_phdr(fill_shared_memory, &here);
        }
        block(of, of.order[i], seed + i).run();
    }
}

std::string last_error;

} // namespace

void emulator_run(unsigned n_blocks, unsigned n_threads, const std::function<void()> &lane) {
    static std::atomic<uint64_t> n_launches{0};
    random_numbers random = {n_launches++};
    launch of = {lane, n_blocks, n_threads, {}, {}, {}, {}, {}};
    for (unsigned i = 0; i < n_blocks; i++) {
        of.order.insert(of.order.begin() + random.below(i + 1), i);
    }
    std::vector<std::thread> threads;
    for (unsigned first = 0; first < std::min(n_blocks, N_RESIDENT); first++) {
        threads.emplace_back(run_blocks, std::ref(of), first, random.next());
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    last_error = of.error;
}

void emulator_barrier() {
    here->wait_for_block();
}

uint64_t emulator_shuffle(unsigned mask, uint64_t value, unsigned source) {
    return here->shuffle(mask, value, source);
}

void emulator_fence() {
    here->fence();
}

emulator_atomic::emulator_atomic(const void *address) : address(address) {
    here->begin_atomic(address);
}

emulator_atomic::~emulator_atomic() {
    here->end_atomic(address);
}

const char *emulator_error() {
    return last_error.empty() ? nullptr : last_error.c_str();
}
