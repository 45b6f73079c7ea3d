# cython: language_level=3
"""Recorder: when what happened in the newest steps of one reducer, on this rank. Phases: what the
time of its steps goes into, summed up.

A Recorder owns one row of times for each step, made once: noting a gradient is one look at the
clock and one store. Phases keep no times, and so are always on: they take one look at the clock and
one addition where a phase ends. Neither knows a reducer or a transport; steps.py says what the rows
mean.
"""

import itertools
import math

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from torch.autograd import Variable


# What a row begins with, in this order. Times are of CLOCK_MONOTONIC, in ns; 0 means unknown.
cdef enum:
    KIND, NUMBER
    FORWARD_BEGIN, FORWARD_END, FORWARD_NS
    BACKWARD_BEGIN, BACKWARD_END, FINISHED
    OPTIMIZER_BEGIN, OPTIMIZER_END, OPTIMIZER_NS
    N_FIELDS

# Then come the times at which the gradients were ready, then these of each bucket.
cdef enum:
    LAUNCH, LAUNCHED, GATHERED, START, END, WAIT, WAITED
    N_EVENTS

cdef enum:
    OPEN, REDUCED, BY_HAND, ACCUMULATED, ABANDONED

KINDS = ("open", "reduced", "by hand", "accumulated", "abandoned")
# For how many steps a transport is asked again for times that it did not know.
cdef int PATIENCE = 3


cdef class Recorder:
    """The newest n_steps steps of a reducer that has so many gradients and buckets. A step is one
    backward, the forwards before it and the optimizer's step after it.
    """

    def __cinit__(self, Py_ssize_t n_steps, Py_ssize_t n_gradients, Py_ssize_t n_buckets):
        if n_steps < 1:
            raise ValueError(f"steps must be at least 1; got {n_steps}")
        self.n_steps, self.n_gradients, self.n_buckets = n_steps, n_gradients, n_buckets
        self.width = N_FIELDS + n_gradients + n_buckets * N_EVENTS
        self.rows = <int64_t *>calloc(n_steps * self.width, sizeof(int64_t))
        if self.rows == NULL:
            raise MemoryError("out of memory")
        self.unread = []

    def __dealloc__(self):
        free(self.rows)

    @property
    def nbytes(self):
        """The memory that the rows take."""
        return self.n_steps * self.width * sizeof(int64_t)

    # -- forward -----------------------------------------------------------------------------------

    def begin_forward(self):
        """A forward begins. One inside a backward belongs to that."""
        if self.open != NULL and self.open[KIND] == ACCUMULATED:
            self.open = NULL
        if self.open == NULL:
            self.forward_began = now()
            if not self.forward_ns:  # one that had begun before this has raised
                self.forward_began_first = self.forward_began

    def end_forward(self):
        if self.forward_began:
            self.forward_ended = now()
            self.forward_ns += self.forward_ended - self.forward_began
            self.forward_began = 0

    def reach_output(self):
        """A backward has come to the model's output."""
        if self.open != NULL and self.open[KIND] == ACCUMULATED:
            self.open = NULL
        if self.open == NULL:
            self.backward_began = now()

    # -- backward ----------------------------------------------------------------------------------

    cdef int64_t *_begin_row(self, int64_t kind, int64_t number) noexcept:
        cdef int64_t *row = self.rows + self.n_begun % self.n_steps * self.width
        memset(row, 0, self.width * sizeof(int64_t))
        self.n_begun += 1
        if self.latest == row:  # there is one row only
            self.latest = NULL
        row[KIND], row[NUMBER] = kind, number
        row[FORWARD_BEGIN], row[FORWARD_END] = self.forward_began_first, self.forward_ended
        row[FORWARD_NS] = self.forward_ns
        row[BACKWARD_BEGIN] = self.backward_began or now()
        self.forward_began = self.forward_began_first = self.forward_ended = self.forward_ns = 0
        self.backward_began = 0
        self.open = row
        return row

    cdef void note_ready(self, Py_ssize_t i) noexcept:
        """Gradient i is ready, in a round."""
        if self.open != NULL:
            self.open[N_FIELDS + i] = now()

    cdef void note_unsynced(self, Py_ssize_t i) noexcept:
        """Gradient i is ready, under no_sync(). Nobody tells when such a backward begins or ends:
        its first gradient is one that the backward before has had, too.
        """
        if self.open == NULL or (
            self.open[KIND] == ACCUMULATED and self.open[N_FIELDS + i] != 0
        ):
            self._begin_row(ACCUMULATED, 0)
        self.open[N_FIELDS + i] = now()
        if self.open[KIND] == ACCUMULATED:
            self.open[BACKWARD_END] = self.open[FINISHED] = self.open[N_FIELDS + i]
            self.latest = self.open

    def begin_round(self, int64_t number):
        """A round begins, which has this number among the reducer's."""
        self.read_late_times()
        self._begin_row(OPEN, number)

    def reduce_by_hand(self):
        """The round that has begun reduces what stands in .grad: there is no backward."""
        if self.open != NULL:
            self.open[KIND] = BY_HAND

    def end_backward(self):
        """The gradients are all there: from now on the caller waits. The first call counts."""
        if self.open != NULL and not self.open[BACKWARD_END]:
            self.open[BACKWARD_END] = now()

    def end_round(self):
        """All gradients are reduced."""
        cdef int64_t *row = self.open
        if row != NULL:
            row[FINISHED] = now()
            if row[KIND] == OPEN:
                row[KIND] = REDUCED
            self.latest, self.open = row, NULL

    def drop_round(self):
        """The round was abandoned."""
        if self.open != NULL:
            self.open[FINISHED], self.open[KIND] = now(), ABANDONED
            self.latest = self.open = NULL

    # -- buckets -----------------------------------------------------------------------------------

    cdef int64_t *_events_of(self, int64_t *row, Py_ssize_t bucket) except NULL:
        if not 0 <= bucket < self.n_buckets:
            raise IndexError(f"there is no bucket {bucket}")
        return row + N_FIELDS + self.n_gradients + bucket * N_EVENTS

    def begin_launch(self, Py_ssize_t bucket):
        if self.open != NULL:
            self._events_of(self.open, bucket)[LAUNCH] = now()

    def end_launch(self, Py_ssize_t bucket):
        if self.open != NULL:
            self._events_of(self.open, bucket)[LAUNCHED] = now()

    def begin_wait(self, Py_ssize_t bucket):
        cdef int64_t *events
        if self.open != NULL:
            events = self._events_of(self.open, bucket)
            if not events[WAIT]:  # else a signal handler has ended the wait, which begins again
                events[WAIT] = now()

    def end_wait(self, Py_ssize_t bucket, work):
        """work: of the newest launch. Knows when the reduction began and ended, now or later."""
        if self.open == NULL:
            return
        cdef int64_t *events = self._events_of(self.open, bucket)
        events[WAITED] = now()
        times = work.times()
        if times is not None:
            events[GATHERED], events[START], events[END] = times
        else:
            self.unread.append((self.n_begun - 1, bucket, work))

    def read_late_times(self):
        """Asks for times that were not known before: over NCCL the device is ahead of nobody."""
        cdef int64_t *events
        cdef Py_ssize_t number, bucket
        if not self.unread:
            return
        unread, self.unread = self.unread, []
        for number, bucket, work in unread:
            times = work.times()
            if times is not None:
                if self.n_begun - number <= self.n_steps:
                    events = self._events_of(
                        self.rows + number % self.n_steps * self.width, bucket
                    )
                    events[GATHERED], events[START], events[END] = times
            elif self.n_begun - number < PATIENCE:
                self.unread.append((number, bucket, work))

    # -- optimizer ---------------------------------------------------------------------------------

    def begin_optimizer(self):
        """An optimizer steps. Steps of several optimizers add up."""
        if self.open != NULL and self.open[KIND] == ACCUMULATED:
            self.open = NULL
        self.stepping, self.step_began = self.latest, now()

    def end_optimizer(self):
        """Also called after a step whose closure has run backwards: that is not timed."""
        cdef int64_t *row = self.latest
        if row != NULL and row == self.stepping and self.open == NULL:
            row[OPTIMIZER_END] = now()
            row[OPTIMIZER_NS] += row[OPTIMIZER_END] - self.step_began
            if not row[OPTIMIZER_BEGIN]:
                row[OPTIMIZER_BEGIN] = self.step_began
        self.stepping = NULL

    # -- reading -----------------------------------------------------------------------------------

    def read(self):
        """The steps that are kept, the oldest first, but for one whose round is open: of each its
        kind, the fields after it, the gradients' times, and a list of each bucket's times.
        """
        self.read_late_times()
        cdef list steps = []
        cdef Py_ssize_t n, i
        cdef int64_t *row
        for n in range(max(0, self.n_begun - self.n_steps), self.n_begun):
            row = self.rows + n % self.n_steps * self.width
            if not row[FINISHED]:
                continue
            values = [row[i] for i in range(self.width)]
            n_before = N_FIELDS + self.n_gradients
            steps.append((
                KINDS[values[KIND]], tuple(values[KIND + 1:N_FIELDS]), values[N_FIELDS:n_before],
                [values[i:i + N_EVENTS] for i in range(n_before, self.width, N_EVENTS)],
            ))
        return steps


# ---- phases --------------------------------------------------------------------------------------

cdef enum:
    N_PHASES = 5

MOST_MARKS = 10_000  # of a device: nobody may ask for long, as in join()
OTHER, FORWARD, BACKWARD, WAITING, OPTIMIZER = range(N_PHASES)
NAMES = ("data and other", "forward", "backward", "the wait for gradients", "optimizer")
UNWATCHED = "data, forward and other"  # OTHER where nobody watches the forward


cdef class Phases:
    """In which phase of a step this rank is, and how long it has been in each since take().

    OTHER is what no other phase is: data, the loss, and the forward where nobody watches it.
    WAITING is from the last gradient to the end of the round, and launches in the backward.

    sees_forward: a forward was seen since take().
    """

    cdef int64_t[N_PHASES] spent
    cdef int64_t since
    cdef int phase
    cdef object mark  # makes the next mark of the device's stream; None: nobody measures
    cdef list marks  # one where each phase began, and that phase
    cdef readonly bint sees_forward
    cdef object __weakref__

    def __cinit__(self):
        self.phase, self.since = 0, now()

    cpdef enter(self, int phase):
        """What comes from now on is of this phase."""
        if not 0 <= phase < N_PHASES:
            raise ValueError(f"there is no phase {phase}")
        cdef int64_t time = now()
        self.spent[self.phase] += time - self.since
        self.phase, self.since = phase, time
        if self.mark is not None and len(self.marks) < MOST_MARKS:
            self.marks.append((self.mark(), phase))

    def take(self):
        """Return the ns spent in each phase, and start again from 0, with no forward seen."""
        self.enter(self.phase)
        cdef list spent = [self.spent[i] for i in range(N_PHASES)]
        for i in range(N_PHASES):
            self.spent[i] = 0
        self.sees_forward = False
        return spent

    def measure(self, mark):
        """Begins to measure the device's time. mark: see Transport.mark; None ends it."""
        self.mark, self.marks = mark, []
        self.enter(self.phase)

    @property
    def is_measured(self):
        return self.mark is not None

    def take_measured(self):
        """Return the ns that the device's stream has spent in each phase, from measure() to the
        newest phase's begin, and end the measurement. NaN where that is unknown: a mark could not
        be made, or is not reached yet.
        """
        cdef list spent = [0.0 if len(self.marks) < MOST_MARKS else math.nan] * N_PHASES
        for (begin, phase), (end, _) in itertools.pairwise(self.marks):
            known = begin is not None and end is not None
            ns = end.ns_since(begin) if known else None
            spent[phase] += math.nan if ns is None else ns
        self.measure(None)
        return spent

    def in_words(self):
        """The phase of now, and for how long. Any thread may ask."""
        name = NAMES[self.phase] if self.phase or self.sees_forward else UNWATCHED
        return f"in {name} for {(now() - self.since) / 1e9:.1f} s"

    # -- for watch_forward() -----------------------------------------------------------------------

    def begin_forward(self):
        """One inside another phase belongs to that; also one of another thread."""
        self.sees_forward = True
        if self.phase == OTHER:
            self.enter(FORWARD)

    def end_forward(self):
        if self.phase == FORWARD:
            self.enter(OTHER)

    def reach_output(self):
        """One inside no_sync() opens no round: autograd tells when it is through."""
        self.enter(BACKWARD)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self):
        if self.phase == BACKWARD:
            self.enter(OTHER)
