# cython: language_level=3
"""FlightRecorder: the newest collectives of one communicator on this rank, kept for dumps, which
dump.py writes.

Every collective comes through here. So noting one is a handful of stores and one look at the coarse
clock, which is right to within 4 ms; the exact one would cost more than everything else here.
"""

import os
import weakref

from fastcomm.comm.collective import ROOTED

cimport cython
from posix.time cimport clock_gettime, timespec


cdef extern from "<time.h>" nogil:
    int CLOCK_REALTIME_COARSE  # the time of day, by which dumps of several hosts are compared


cdef enum:
    KEPT = 2048  # a power of two; as many as torch's own flight recorder keeps
N_KEPT = KEPT
cdef frozenset WITH_ROOT = ROOTED
cdef list recorders = []  # weak references, in the order in which they were made


cdef inline int64_t now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_REALTIME_COARSE, &time)
    return <int64_t>time.tv_sec * 1_000_000_000 + time.tv_nsec


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Entry:
    """One collective. Equal on all ranks: epoch, number, kind, dtype, numel, op, root, label,
    fingerprint.

    number: of the collective; 0 where that is not known yet. epoch: how often the ranks had met
        anew, where numbers begin again then.
    lane: collectives of one lane end in the order of their numbers; below 0: in any order.
    started_ns: when all ranks were there, where that is known: between hosts.
    error: the kind of error that has ended it, or None.
    """

    cpdef void start(self) noexcept:
        """All ranks are there, as far as this one knows."""
        self.started_ns = now()

    cpdef void end(self, error=None) noexcept:
        """It is over, with this error if any."""
        self.ended_ns = now()
        if error is not None:
            self.error = type(error).__name__


@cython.final
cdef class FlightRecorder:
    """The newest N_KEPT collectives of one communicator.

    processes: by rank, each a who.Process. owner: the process that has made it.
    channel: of a channel, from which rank to which its messages go, as their callers number them.
    names: what a bucket holds, by label, for those who read the entries.
    activities: what says by in_words() what the process does, on any thread; by its name,
        "reducer 0". Keeps nothing alive.
    """

    def __cinit__(self, str backend, int rank, tuple processes):
        global recorders
        self.backend, self.rank, self.owner = backend, rank, os.getpid()
        self.pids = tuple(one.pid for one in processes)
        self.names, self.kept = {}, []
        self.activities = weakref.WeakValueDictionary()
        recorders = [one for one in recorders if one() is not None] + [weakref.ref(self)]

    cpdef Entry note(
        self, str kind, dtype, uint64_t numel, uint64_t number=0, str op=None, int root=0,
        uint32_t label=0, uint64_t fingerprint=0,
    ):
        """Notes a collective that is posted now. op, root: as in words.called()."""
        cdef Entry entry = Entry.__new__(Entry)
        entry.kind, entry.dtype, entry.numel, entry.number = kind, dtype, numel, number
        entry.op, entry.root = op, root if kind in WITH_ROOT else -1
        entry.label, entry.fingerprint = label, fingerprint
        entry.epoch, entry.posted_ns = self.epoch, now()
        if self.n_noted < KEPT:
            self.kept.append(entry)
        else:
            with cython.boundscheck(False), cython.wraparound(False):
                self.kept[self.n_noted & (KEPT - 1)] = entry
        self.n_noted += 1
        return entry

    def entries(self):
        """The entries that are kept, the oldest first."""
        cdef list kept = list(self.kept)
        cdef Py_ssize_t first = self.n_noted & (KEPT - 1) if len(kept) == KEPT else 0
        return kept[first:] + kept[:first]


def living():
    """The recorders of this process whose communicators are not gone, the oldest first. Those made
    before a fork are the parent's.
    """
    cdef FlightRecorder recorder
    cdef int pid = os.getpid()
    cdef list found = []
    for reference in recorders:
        recorder = reference()
        if recorder is not None and recorder.owner == pid:
            found.append(recorder)
    return found
