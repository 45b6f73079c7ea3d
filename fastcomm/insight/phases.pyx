# cython: language_level=3
"""Phases: what the time of a reducer's steps goes into on this rank, summed up.

One look at the clock and one addition where a phase ends. Unlike a Recorder it keeps no times, so
it is always on. Where a device does the work, the host's times tell little; some rounds' phases are
then measured in the device's time.
"""

import itertools
import math

from libc.stdint cimport int64_t

from fastcomm.insight.recorder cimport now

from torch.autograd import Variable

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
        """Begins to measure the device's time as well, anew. mark: see Transport.mark; None ends
        it.
        """
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
        """A backward has come to the model's output. One inside no_sync() opens no round: autograd
        tells when it is through.
        """
        self.enter(BACKWARD)
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self):
        if self.phase == BACKWARD:
            self.enter(OTHER)
