# cython: language_level=3
"""Link: connects this rank of an NcclCommunicator to the others. Makes the lanes, has the watchdog
look at them, ends them, and lets the ranks meet again. Launches no collective: communicator.pyx and
bucket.pyx do.
"""

import contextlib
import sys
import threading
import time
import weakref

from fastcomm.comm import forms, words
from fastcomm.comm.deadline import Deadline
from fastcomm.comm.who import PROCESS, own_process, processes_of
from fastcomm.comm.words import has_aborted, has_closed, has_ended
from fastcomm.errors import AbandonedError, FastcommError
from fastcomm.comm.standing import again
from fastcomm.transports.nccl.lane import errors_of
from fastcomm.transports.nccl.library import load, refuse_different_versions, unique_id
from fastcomm.transports.nccl.memory import pool_of
from fastcomm.postmortem.script_end import tell_at_end
from fastcomm.postmortem.whereabouts import whereabouts
from fastcomm.comm.watchdog import (
    Watchdog, leave_abandonment, leave_abort, leave_closing, leave_last_words,
)

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from posix.unistd cimport usleep

from fastcomm.postmortem.flight_recorder cimport FlightRecorder
from fastcomm.transports.nccl.library cimport (
    error_of, nccl, ncclInProgress, ncclSuccess,
)


cdef unsigned int POLL_US = 50
ABORT_S = 10.0  # how long to wait for NCCL to abort all lanes, which may hang
KEEP_POLL_S = 0.001
KEEP_S = 2.0  # how long collectives before an abandoned round have to end, which all have launched
FREE_S = 5.0  # how long close() waits for NCCL to free all lanes, once nothing is under way


@cython.no_gc_clear
cdef class Link:
    """The connection of `world_size` ranks. An error that ends it is raised by the next call, and
    by every one after it.
    """

    # The watchdog's warning: the garbage collector must not end NCCL's communicators.
    leak = "an NcclCommunicator was dropped without close(): NCCL's part of it lives on"

    def __cinit__(
        self, int rank, int world_size, object bootstrap, double timeout_s, object device,
        list neighbours,
    ):
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.standing, self.bootstrap = Standing(), bootstrap
        self.ending, self.buckets, self.rejoining = threading.Lock(), weakref.WeakSet(), []
        self.cuda, self.lanes = Device(device), []
        self.flattener, self.graphs = Stream(self.cuda), CapturedGraphs(self.cuda)
        facts = bootstrap.exchange([*own_process(), *load()], (*PROCESS, int, str))
        refuse_different_versions([library for _, _, *library in facts])
        self.processes = processes_of(
            [pid for pid, *_ in facts], [host for _, host, *_ in facts]
        )
        self.launches = Launches(
            self.cuda, self.lanes, FlightRecorder("nccl", rank, self.processes)
        )
        self.pool = pool_of(self.cuda)
        try:
            self._add_lane(bootstrap.look)
            self.watchdog = Watchdog(self, bootstrap, timeout_s, neighbours, whereabouts)
        except BaseException:
            self._abort_lanes()
            raise
        tell_at_end(self)

    def tell_of_end(self, bint has_raised):
        if self.standing.refusal() is None:
            leave_last_words(self.bootstrap, self.rank, has_raised)
            self.standing.end(FastcommError(has_ended(self.rank)))
            self.watchdog.stop()

    def _add_lane(self, look):
        cdef Lane lane = Lane(self.cuda, self.graphs)
        lane.index = len(self.lanes)
        self._connect(lane, lane.index, look, look)
        self.launches.records.add(lane.in_flight)
        self.lanes.append(lane)

    def _connect(self, Lane lane, int number, look, look_for_all):
        """Collective. The first lane meets over the store, the others over the first."""
        if number:
            lane.split_from(self.lanes[0], self.rank, self.timeout_s, look)
        else:
            mine = unique_id() if self.rank == 0 else None, _labels(self.rejoining)
            # Named, not numbered: a rank that abandons one round after the other skips meetings
            # that others have waited in.
            form = {None, str}, [forms.NUMBER]
            all_ranks = self.bootstrap.exchange(
                mine, form, look_for_all, name=f"epoch {self.epoch}"
            )
            self.common_labels = set.intersection(*[set(labels) for _, labels in all_ranks])
            lane.connect(all_ranks[0][0], self.rank, self.world_size, self.timeout_s, look)

    cdef Lane lane(self, int number):
        """The lane of that number. Makes it if there is none yet, which is collective."""
        while len(self.lanes) <= number:
            # NCCL cannot split a communicator that is busy
            self.wait_for((<Lane>self.lanes[0]).in_flight)
            with self._meeting():
                self._add_lane(self._look)
        return self.lanes[number]

    def wait_for(self, InFlight in_flight):
        """Blocks until the newest collective launched with the record is over.

        What a signal handler raises meanwhile (Ctrl-C) is raised afterwards, because the peers
        count on this rank. A second exception is raised at once, and aborts the communicator.
        """
        self.is_waited_for = True
        try:
            deferred = self._poll(in_flight)
        finally:
            self.is_waited_for = False
        try:
            self._check_alive()
        except FastcommError as error:
            if deferred is not None:
                raise deferred from error
            raise
        if deferred is not None:
            raise deferred

    def _poll(self, InFlight in_flight):
        """Until it is over, or will never be. Returns what a signal handler has raised."""
        deferred = None
        while not in_flight.done.is_over():
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                if deferred is not None:
                    self.abort()
                    raise
                deferred = error
            with nogil:
                usleep(POLL_US)
            if self.standing.failure is not None or (
                self.interruption is not None and in_flight.number > self.n_kept
            ):
                break
        return deferred

    @contextlib.contextmanager
    def _watched(self, Lane lane, InFlight in_flight):
        """The ranks do something together in the block, and the watchdog watches. An error on one
        rank ends the communicator on all.
        """
        self.launches.begin(lane, in_flight, None)
        try:
            try:
                yield
            finally:
                self.launches.end(lane, in_flight, True)
        except FastcommError as error:
            raise self.reason(error) from error
        except BaseException:  # Ctrl-C: the other ranks have met without this one
            self.abort()
            raise

    def _meeting(self):
        """The ranks meet again in the block."""
        cdef InFlight in_flight = self.launches.new_record()
        in_flight.kind = "meeting of the ranks"
        return self._watched(self.lanes[0], in_flight)

    def _look(self):
        """Called while NCCL lets the ranks meet again. Raises when the watchdog has found that they
        will not.
        """
        if self.standing.failure is not None:
            raise again(self.standing.failure)

    def _look_for_all(self):
        """Looks as _look, while no rank is inside NCCL yet. Also raises when another rank has
        abandoned the round before it came.
        """
        self._look()
        if self.interruption is not None:
            raise again(self.interruption)

    def close(self, double timeout):
        """Waits for what is under way, at most so long, and leaves NCCL."""
        if self.standing.is_forked() or self.standing.failure is not None:
            return
        if self.graphs.count() > 0:
            raise FastcommError(f"{self.graphs.count()} CUDA graph(s) with collectives of this "
                                "communicator are alive: delete them first")
        self.standing.end(FastcommError(has_closed(self.rank)))
        self.is_closed = True
        cdef bint aborts = self.watchdog.misses_a_rank(self)
        self.watchdog.stop()
        with contextlib.suppress(RuntimeError):  # as in leave_abort()
            leave_closing(self.bootstrap, self.rank, self.epoch, self.launches.number)
        errors, freeing = [], []
        for lane in reversed(self.lanes):
            try:
                freeing.append((<Lane>lane).close(timeout, self.pool, aborts))
            except FastcommError as error:
                errors.append(error)
        if errors:  # a lane was aborted: those that close later have to abort it, too
            leave_abort(self.bootstrap, self.processes[self.rank])
        errors += errors_of([call for call in freeing if call is not None], min(timeout, FREE_S))
        self.launches.forget_tensors()
        if errors:
            raise errors[0]

    def abort(self):
        if not self.standing.is_forked() and self.standing.failure is None:
            leave_abort(self.bootstrap, self.processes[self.rank])
            self.is_closed = True
            self._fail(FastcommError(has_aborted(self.rank)))
            self.watchdog.stop()

    def abandon(self):
        """Ends the lanes on every rank; the ranks meet again at their next collective."""
        self.standing.n_abandoned += 1
        self._abandon()
        self.standing.note_abandonment()

    def _abandon(self):
        cdef uint64_t n_kept = 0
        if self.interruption is not None:  # another rank has abandoned this round: join it
            self.interruption = None
            return
        if self.graphs.count() > 0:
            self._give_up_graphs(f"rank {self.rank} abandoned what was under way")
            return
        # the ranks have not met since the last abandonment: this one is about their next meeting
        if self.is_split_up:
            self.epoch += 1
        else:
            n_kept = self._kept_of(self.n_settled)
            if self.interruption is not None:  # meanwhile another rank has abandoned this round
                self.interruption = None
                return
        self.n_kept = n_kept
        self.is_split_up = True  # first, or the watchdog takes the note for another rank's
        why = (
            f"{words.abandonment([self.rank])}. If the optimizer has made it already, the "
            "parameters differ between the ranks: restore them, or call refresh() on every rank"
        )
        with contextlib.suppress(RuntimeError):  # as in leave_abort()
            leave_abandonment(self.bootstrap, self.epoch, n_kept, why)
        self._end_round(f"rank {self.rank} abandoned what was under way")

    def _kept_of(self, uint64_t n):
        """Waits for the first n collectives since the ranks met: they came before the round, and
        some rank may step with them, but they end with NCCL's communicators. Returns n, or 0 where
        they were cut off: no rank can tell how much of them came.
        """
        deadline, epoch = Deadline(KEEP_S), self.epoch
        while n and (oldest := self._oldest_unfinished()) is not None and oldest[0] <= n:
            is_ended = self.standing.failure is not None or self.interruption is not None
            if is_ended or self.is_split_up or epoch != self.epoch or deadline.is_over():
                return 0
            time.sleep(KEEP_POLL_S)
        return n

    cdef hear(self):
        if not self.is_closed:
            self._check_alive()

    def _abort_lanes(self):
        """Ends NCCL's communicators. Returns what an error must say of those that do not end."""
        self.is_split_up = True
        with self.ending:
            were_ending = [(<Lane>lane).ending is not None for lane in self.lanes]
            all_begun = threading.Event()
            try:
                endings = [(<Lane>lane).begin_abort(self.pool, all_begun) for lane in self.lanes]
            finally:
                all_begun.set()
            deadline = Deadline(ABORT_S)
            n_left = 0
            for ending, was_ending in zip(endings, were_ending):
                if ending is not None and not ending.over.is_set():
                    n_left += was_ending or not deadline.await_(ending.over.wait)
        if n_left == 0:
            return ""
        return (f"; NCCL has not ended {n_left} of {len(self.lanes)} lanes within {ABORT_S:g} s: "
                "they are left behind")

    def _end_round(self, str why):
        """Ends the lanes; the ranks meet again. But not on streams that NCCL does not leave."""
        cdef str left_behind = self._abort_lanes()
        if left_behind:
            self.watchdog.give_up(self, FastcommError(f"{why}{left_behind}"))

    def _meet_again(self):
        """Gives the lanes new NCCL communicators after abandon(). Collective."""
        with self.ending:  # the watchdog may still be ending the old ones
            pass
        self.epoch += 1
        self.launches.begin_epoch(self.epoch)
        self.n_settled = 0
        self.is_split_up = False
        self.rejoining = list(self.buckets)
        try:
            with self._meeting():
                for number, lane in enumerate(self.lanes):
                    self._connect(lane, number, self._look, self._look_for_all)
                self._register_again()
        finally:
            self.rejoining = []
        if self.interruption is not None:  # this round was abandoned, too, after all ranks had come
            self._end_round(str(self.interruption))
            self._check_alive()

    def _register_again(self):
        """Windows are collective: the ranks register those of buckets that all have left, in the
        order of their labels.
        """
        for bucket in sorted(self.rejoining, key=lambda bucket: bucket.label):
            if self.world_size > 1 and bucket.label in self.common_labels:
                bucket.register_window()

    # -- what the watchdog asks for; see fastcomm.comm.watchdog.Watched --

    @property
    def number(self):
        return self.launches.number

    def _oldest_unfinished(self):
        self.launches.ask()
        return self.launches.oldest_unfinished()

    def _asynchronous_error(self):
        cdef int code = ncclSuccess
        cdef Lane lane
        for candidate in self.lanes:
            lane = candidate
            if lane.comm != NULL and lane.ending is None:
                # with the GIL: nobody may free the communicator meanwhile
                is_known = nccl.async_error(lane.comm, &code) == ncclSuccess
                if is_known and code not in (ncclSuccess, ncclInProgress):
                    return self.error(code, b"ncclCommGetAsyncError: a collective")
        return None

    def _fail(self, error):
        cdef str left_behind
        if self.standing.failure is None:
            self.standing.end(error)
            left_behind = self._abort_lanes()
            if left_behind:
                error = again(error)
                error.args = (f"{error}{left_behind}", *error.args[1:])
                self.standing.failure = error
                # a thread that stays inside NCCL cannot raise it
                print(f"fastcomm: {error}", file=sys.stderr, flush=True)

    def _interrupt(self, error, epoch, uint64_t n_kept):
        if self.is_split_up or epoch != self.epoch:
            return
        if self.graphs.count() > 0:
            self._give_up_graphs(str(error))
            return
        n_kept = self._kept_of(n_kept)
        # meanwhile this rank has abandoned it, too, or has closed, which waits for what is kept
        if self.is_split_up or epoch != self.epoch or self.standing.failure is not None:
            return
        self.n_kept = n_kept
        self.is_split_up, self.interruption = True, error
        self._end_round(str(error))

    def _give_up_graphs(self, str why):
        """Ends the communicator for good: NCCL cannot end one that captured graphs hold on to, and
        the graphs cannot be replayed over a new one.
        """
        self.watchdog.give_up(self, FastcommError(f"{why}; the captured CUDA graphs are of no use "
                                                  "any more: make a new communicator"))

    def _has_graphs(self):
        return self.graphs.count() > 0

    # -- before and after every launch --

    def register(self, Lane lane, memory, label):
        """Makes memory of NCCL's a window, unless it was registered. Collective. The watchdog
        watches: it waits for the peers.
        """
        if self.world_size == 1 or self.pool.unregistered(memory.data_ptr()) is None:
            return
        cdef InFlight in_flight = self.launches.new_record()
        in_flight.kind, in_flight.label = "registration", label
        in_flight.dtype, in_flight.numel = memory.dtype, memory.numel()
        with self._watched(lane, in_flight):
            self.pool.register(memory.data_ptr(), lane)

    cdef int check_usable(self) except -1:
        """Called before every launch. After an abandoned round the ranks meet again here."""
        self.check_open()
        if self.interruption is not None:
            raise self._take_interruption()
        if self.launches.calling() is not None or self.is_waited_for:
            raise FastcommError(words.OTHER_THREAD)
        if self.is_split_up:
            self._meet_again()
        return 0

    cdef int _check_alive(self) except -1:
        """Raises the error that ended the communicator or, once, that made the ranks meet again, if
        this rank has launched something that was abandoned.
        """
        self.check_open()
        if self.interruption is not None and self.launches.number > self.n_kept:
            raise self._take_interruption()
        return 0

    def _take_interruption(self):
        """Returns the interruption, to be raised, and clears it: it is raised once."""
        interruption, self.interruption = self.interruption, None
        self.standing.n_abandoned += 1
        self.standing.note_abandonment()
        return self.standing.to_raise(interruption)

    cdef int check_open(self) except -1:
        """Raises the error that has ended the communicator."""
        if self.standing.failure is not None or self.standing.is_forked():
            raise self.standing.refusal()
        return 0

    cdef int check_work(self, int epoch, uint64_t number) except -1:
        """Raises as _check_alive, for a collective that was launched in that epoch."""
        self.check_open()
        if epoch == self.epoch and self.is_split_up and number <= self.n_kept:
            return 0  # all ranks have it, and have abandoned a later round
        if self.interruption is not None:
            raise self._take_interruption()
        if self.is_split_up or epoch != self.epoch:
            raise self.standing.to_raise(AbandonedError(
                "this collective was abandoned with all that was under way"
            ))
        return 0

    cdef object error(self, int code, const char *call):
        """Names this rank, because the other ranks read the message, too."""
        error = error_of(code, call)
        return type(error)(f"rank {self.rank}: {error}")

    cdef object reason(self, error):
        """The error to raise after a call into NCCL has failed: the watchdog's, if that ended the
        call; else `error`, which then ends the communicator.
        """
        # this may wait, and another rank abandon meanwhile
        error = self.watchdog.named(self, error)
        if self.interruption is not None:
            return self._take_interruption()
        if self.standing.failure is None:
            self.watchdog.give_up(self, error)
        return again(self.standing.failure)


cdef list _labels(list buckets):
    """The labels that one bucket has."""
    labels = [bucket.label for bucket in buckets]
    return [label for label in labels if labels.count(label) == 1]
