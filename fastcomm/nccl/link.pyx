# cython: language_level=3
"""Link: what the ranks of an NcclCommunicator share. Makes their lanes, watches them, ends them,
and lets the ranks meet anew.

Everything that is launched goes through `_begin` and `_end` here, under the watchdog's eyes. What
is launched is in communicator.pyx and bucket.pyx.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref

import torch

from fastcomm import collective
from fastcomm.communicator import is_abandoned_already
from fastcomm.errors import FastcommError, InitError, NcclError, PeerLostError
from fastcomm.lifetime import again
from fastcomm.nccl.library import load, unique_id, version_text
from fastcomm.watchdog import Watchdog, failure_note

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc
from posix.unistd cimport usleep

from fastcomm.cuda.driver cimport (
    CU_GRAPH_USER_OBJECT_MOVE, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUgraph, CUuserObject, check, driver,
)
from fastcomm.nccl.lane cimport MEETING, REGISTRATION
from fastcomm.nccl.library cimport (
    error_of, nccl, ncclComm_t, ncclInProgress, ncclRemoteError, ncclSuccess,
)
from fastcomm.nccl.memory cimport pool_of


cdef unsigned int POLL_US = 50
cdef double ABORT_S = 10  # NCCL's abort may hang itself; nobody waits longer for it


@cython.no_gc_clear
cdef class Link:
    """The connection of `world_size` ranks. An error that ends it is raised by the next call, and
    by every one after it.
    """

    def __cinit__(
        self, int rank, int world_size, int local_rank, object bootstrap, object timeout,
        object device, list neighbours,
    ):
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device, self.timeout, self.timeout_s = device, timeout, timeout.total_seconds()
        self.life, self.bootstrap, self.left_in_backward = Lifetime(), bootstrap, -1
        self.tickets, self.lanes = weakref.WeakSet(), []
        self.in_flight, self.buckets, self.ending = {}, weakref.WeakSet(), threading.Lock()
        self.n_graphs = <int *>calloc(1, sizeof(int))
        if self.n_graphs == NULL:
            raise MemoryError("out of memory")
        self.cuda = Device(device)
        version, path = load()
        facts = bootstrap.exchange(_facts(version, path, device))
        refuse_different_versions(facts)
        refuse_shared_cards(facts)
        self.pids = tuple(theirs["pid"] for theirs in facts)
        self.pool = pool_of(self.cuda)
        try:
            self._add_lane(bootstrap.look)
            self.watchdog = Watchdog(self, bootstrap, self.timeout_s, neighbours)
        except BaseException:
            self._abort_lanes()
            raise

    @property
    def failure(self):
        """See Communicator.failure."""
        return self.life.failure

    cdef _add_lane(self, look):
        with self.cuda.selected():
            lane = Lane(self.cuda)
        self._connect(lane, len(self.lanes), look, look)
        self.tickets.add((<Lane>lane).ticket)
        self.lanes.append(lane)

    cdef _connect(self, Lane lane, int place, look, look_for_all):
        """Collective. The first lane meets over the store, the others over the first."""
        if place:
            lane.split_from(self.lanes[0], self.rank, self.timeout_s, look)
        else:
            mine = unique_id() if self.rank == 0 else None
            # Named, and not counted: a rank that abandons one round after the other leaves out
            # meetings that others have waited in.
            identifier = self.bootstrap.exchange(mine, look_for_all, name=f"epoch {self.epoch}")[0]
            lane.connect(identifier, self.rank, self.world_size, self.timeout_s, look)

    cdef Lane _lane(self, int place):
        while len(self.lanes) <= place:
            # NCCL splits no communicator that is at work
            self._wait_for((<Lane>self.lanes[0]).ticket)
            with self._meeting():
                self._add_lane(self._look)
        return self.lanes[place]

    cdef _wait_for(self, Ticket ticket):
        """Until the newest collective launched with the ticket is over. Blocks.

        What a signal handler raises meanwhile (Ctrl-C) is raised then, because the peers count on
        this rank; what it raises a second time is raised at once, and aborts the communicator.
        """
        deferred = None
        while not self._is_over(ticket.done):
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                if deferred is not None:
                    self.abort()
                    raise
                deferred = error
            with nogil:
                usleep(POLL_US)
            if self.life.failure is not None or self.interruption is not None:
                break
        try:
            self._check_alive()
        except FastcommError as error:
            if deferred is not None:
                raise deferred from error
            raise
        if deferred is not None:
            raise deferred

    @contextlib.contextmanager
    def _meeting(self):
        """The ranks meet once more, under the watchdog's eyes. An error of one ends the
        communicator on all.
        """
        cdef Lane lane = self.lanes[0]
        cdef Ticket ticket = self._new_ticket()
        ticket.kind = MEETING
        self._begin(lane, ticket, None)
        try:
            try:
                yield
            finally:
                self._end(lane, ticket, True)
        except FastcommError as error:
            raise self._reason(error) from error
        except BaseException:  # Ctrl-C: the other ranks have met without this one
            self.abort()
            raise

    def _look(self):
        """While a rank calls NCCL to meet the others once more: raises when the watchdog has found
        that they will not.
        """
        if self.life.failure is not None:
            raise again(self.life.failure)

    def _look_for_all(self):
        """As _look, as long as nobody is inside NCCL: another rank may have abandoned the round
        before it has come.
        """
        self._look()
        if self.interruption is not None:
            raise self.interruption

    cdef Ticket _new_ticket(self):
        cdef CUcontext before = self.cuda.enter()
        try:
            ticket = Ticket()
        finally:
            self.cuda.leave(before)
        self.tickets.add(ticket)
        return ticket

    def close(self, double timeout=30):
        """Ends the use of this communicator on this rank, when what was launched is done, or after
        `timeout` seconds. Tensors stay valid.

        Peers that still wait for this rank get PeerLostError. Raises FastcommError while a CUDA
        graph lives that has captured collectives: NCCL would wait for ever for it to go;
        TimeoutError or NcclError when the end was not in order. May be called twice.
        """
        if self.life.is_forked() or self.life.failure is not None:
            return
        if self.n_graphs[0] > 0:
            raise FastcommError(f"{self.n_graphs[0]} CUDA graph(s) with collectives of this "
                                "communicator are alive: delete them first")
        self.life.end(FastcommError(f"rank {self.rank} has closed this communicator"))
        self.is_closed = True
        self.watchdog.stop()
        self._leave_note(f"closed/{self.rank}", json.dumps([self.epoch, self.number]))
        errors = []
        for lane in reversed(self.lanes):
            try:
                (<Lane>lane).close(timeout, self._forget_memory)
            except FastcommError as error:
                errors.append(error)
        self.in_flight.clear()
        if errors:
            raise errors[0]

    def abort(self):
        """Ends the use of this communicator at once, on this rank and, by PeerLostError, on the
        others.
        """
        if not self.life.is_forked() and self.life.failure is None:
            message = f"rank {self.rank} (pid {os.getpid()}) aborted its communicator"
            self._leave_note("failure", failure_note(PeerLostError(message)))
            self.is_closed = True
            self._fail(FastcommError(f"rank {self.rank} has aborted this communicator"))
            self.watchdog.stop()

    def abandon(self, *, bint in_any_case=False):
        """See Communicator.abandon. Ends NCCL's communicators on every rank; the ranks meet anew at
        their next collective.

        What other ranks have launched on gradients of this round is of no use, and their hosts may
        hear of it a step later.
        """
        self._check_open()
        if not in_any_case and is_abandoned_already(self):
            return
        self.n_abandoned += 1
        if self.interruption is not None:  # another rank has abandoned the same: this one joins it
            self.interruption = None
            return
        if self.n_graphs[0] > 0:
            self._give_up_graphs(f"rank {self.rank} abandoned what was under way")
            return
        # the ranks have not met since the last time: this is about the round for which they will
        if self.is_split_up:
            self.epoch += 1
        self.is_split_up = True  # first, or the watchdog takes the note for another rank's
        self._leave_note(
            f"abandoned/{self.epoch}",
            f"{collective.abandonment([self.rank])}. If the optimizer has made it already, the "
            "parameters differ between the ranks: restore them, or call refresh() on every rank",
        )
        self._abort_lanes()

    def check(self):
        """See Communicator.check."""
        if not self.is_closed:
            self._check_alive()

    cdef _leave_note(self, key, value):
        """For the other ranks' watchdogs. The store may be gone with its rank; then there is nobody
        to tell.
        """
        with contextlib.suppress(RuntimeError):
            self.bootstrap.write_once(key, value)

    cdef _abort_lanes(self):
        cdef ncclComm_t comm
        self.is_split_up = True
        with self.ending:
            self.pool.n_ending += 1
            try:
                for lane in self.lanes:
                    comm = (<Lane>lane).comm
                    self.pool.forget(comm)
                    (<Lane>lane).abort(ABORT_S)
            finally:
                self.pool.n_ending -= 1

    cdef _meet_again(self):
        """After abandon(): new communicators for the old lanes. Collective."""
        with self.ending:  # the watchdog may not be through with the old ones
            pass
        self.epoch += 1
        self.number = 0
        self.in_flight.clear()
        self.is_split_up = False
        with self._meeting():
            for place, lane in enumerate(self.lanes):
                self._connect(lane, place, self._look, self._look_for_all)
        if self.interruption is not None:  # this round, too, was abandoned, after all had come
            self._abort_lanes()
            self._check_alive()
        # not as windows: which buckets are left is each rank's own affair
        for bucket in self.buckets:
            bucket.register_memory()

    # -- what the watchdog asks for; see fastcomm.watchdog.Watched --

    def _enter_thread(self):
        # or its queries would end other threads' captures
        cdef int mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.cuda.enter()
        check(driver.exchange_capture_mode(&mode), b"cuThreadExchangeStreamCaptureMode")

    def _oldest_unfinished(self):
        cdef Ticket ticket, oldest = self.calling
        cdef uint64_t number
        for candidate in _members(self.tickets):
            ticket, number = candidate, (<Ticket>candidate).number
            if ticket.is_pending and ticket is not self.calling:
                # Both give way to other threads, which may launch the same bucket anew.
                is_over = self._is_over(ticket.done)
                has_progress = ticket.is_marked and self._is_over(ticket.mark)
                if number != ticket.number:
                    continue
                if is_over:
                    ticket.is_pending = False
                    self.in_flight.pop(ticket, None)
                    continue
                if has_progress:
                    ticket.is_marked, ticket.since = False, time.monotonic()
                if oldest is None or ticket.number < oldest.number:
                    oldest = ticket
        if oldest is None:
            return None
        return oldest.number, time.monotonic() - oldest.since, oldest.describe()

    def _asynchronous_error(self):
        cdef int code = ncclSuccess
        cdef Lane lane
        for candidate in self.lanes:
            lane = candidate
            if lane.comm != NULL:
                is_known = nccl.async_error(lane.comm, &code) == ncclSuccess
                if is_known and code not in (ncclSuccess, ncclInProgress):
                    error = self._error(code, b"ncclCommGetAsyncError: a collective")
                    return PeerLostError(str(error)) if code == ncclRemoteError else error
        return None

    def _fail(self, error):
        if self.life.failure is None:
            self.life.end(error)
            self._abort_lanes()

    def _interrupt(self, error, epoch):
        if self.is_split_up or epoch != self.epoch:
            return
        if self.n_graphs[0] > 0:
            self._give_up_graphs(str(error))
            return
        self.is_split_up, self.interruption = True, error
        self._abort_lanes()

    cdef _give_up_graphs(self, str why):
        """NCCL cannot end a communicator that captured graphs hold on to, nor could they be
        replayed over another.
        """
        self.watchdog.give_up(self, FastcommError(f"{why}; the captured CUDA graphs are of no use "
                                                  "any more: make a new communicator"))

    def _has_graphs(self):
        return self.n_graphs[0] > 0

    def _forget_memory(self, size_t comm):
        """Before a lane's communicator is destroyed, and after its last collective."""
        self.pool.deregister_all(<ncclComm_t>comm)

    # -- around every launch --

    cdef _register(self, Lane lane, memory, uint32_t label):
        """Of a bucket's memory. Under the watchdog's eyes: as a window it waits for the peers."""
        cdef Ticket ticket = self._new_ticket()
        ticket.kind, ticket.label = REGISTRATION, label
        ticket.dtype, ticket.numel = memory.dtype, memory.numel()
        self._begin(lane, ticket, None)
        try:
            try:
                self.pool.register(<void *><size_t>memory.data_ptr(), lane, self.world_size > 1)
            finally:
                self._end(lane, ticket, True)
        except NcclError as error:
            raise self._reason(error) from error

    cdef int _check_usable(self) except -1:
        """Before every launch. After an abandoned round the ranks meet anew here."""
        self._check_alive()
        if self.busy:
            raise FastcommError(collective.OTHER_THREAD)
        if self.is_split_up:
            self._meet_again()
        return 0

    cdef int _check_alive(self) except -1:
        """Raises what has ended the communicator, or, once, what has made the ranks meet anew."""
        self._check_open()
        if self.interruption is not None:
            error, self.interruption = self.interruption, None
            self.n_abandoned += 1
            raise error
        return 0

    cdef int _check_open(self) except -1:
        """Raises what has ended the communicator."""
        if self.life.failure is not None or self.life.is_forked():
            raise self.life.refusal()
        return 0

    cdef int _check_work(self, int epoch) except -1:
        """As _check_alive, for a collective that was launched in that epoch."""
        self._check_alive()
        if self.is_split_up or epoch != self.epoch:
            raise FastcommError("this collective was abandoned with all that was under way")
        return 0

    cdef object _error(self, int code, const char *call):
        """As the other ranks read it, too: they are told which rank it was."""
        return NcclError(f"rank {self.rank}: {error_of(code, call)}")

    cdef object _reason(self, error):
        """Why a call into NCCL has failed: because the watchdog has ended it, or for a reason of
        its own, which ends the communicator.
        """
        if self.interruption is not None:
            interruption, self.interruption = self.interruption, None
            self.n_abandoned += 1
            return interruption
        if self.life.failure is None:
            self.watchdog.give_up(self, error)
        return again(self.life.failure)

    cdef int _begin(self, Lane lane, Ticket ticket, op) except -1:
        """From here on the watchdog counts the launch as unfinished."""
        self.number += 1
        ticket.number, ticket.op = self.number, op
        if not ticket.is_pending:  # else the one before has not ended, as far as is known
            ticket.since = time.monotonic()
        self.calling, lane.in_call, self.busy = ticket, True, True
        return 0

    cdef int _end(self, Lane lane, Ticket ticket, bint is_captured) except -1:
        """The launch has returned. What is only captured does not run, and its events must not be
        looked at.
        """
        ticket.is_pending = not is_captured
        if ticket.is_pending and not ticket.is_marked:
            ticket.is_marked = (
                driver.record_event(ticket.mark.handle, lane.stream.handle) == CUDA_SUCCESS
            )
        self.calling, lane.in_call, self.busy = None, False, False
        return 0

    cdef CUstream _order_current_after(self, Event done) except? NULL:
        """Returns the current stream, on which all that comes now comes after `done`."""
        cdef CUstream current = self.cuda.current_stream()
        cdef CUcontext before = self.cuda.enter()
        try:
            check(driver.wait_event(current, done.handle, 0), b"cuStreamWaitEvent")
        finally:
            self.cuda.leave(before)
        return current

    cdef bint _is_over(self, Event done) except -1:
        cdef int code
        with nogil:
            code = driver.query_event(done.handle)
        if code != CUDA_ERROR_NOT_READY:
            check(code, b"cuEventQuery")
        return code == CUDA_SUCCESS

    cdef bint _note_capture(self, CUstream current) except -1:
        """Whether the stream is being captured into a CUDA graph. Each graph is counted until it,
        and all that was made of it, is gone.
        """
        cdef int status = 0
        cdef unsigned long long identifier = 0
        cdef CUgraph graph = NULL
        cdef CUuserObject counted = NULL
        if current == NULL:  # the legacy default stream, which cannot be captured
            return False
        check(driver.capture_info(current, &status, &identifier, &graph, NULL, NULL),
              b"cuStreamGetCaptureInfo")
        if status != CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return False
        if identifier != self.last_graph:
            self.last_graph = identifier
            check(driver.create_user_object(&counted, self.n_graphs, _graph_is_gone, 1,
                                            CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                  b"cuUserObjectCreate")
            check(driver.retain_user_object(graph, counted, 1, CU_GRAPH_USER_OBJECT_MOVE),
                  b"cuGraphRetainUserObject")
            fastcomm_count_up(self.n_graphs)
        return True


cdef extern from *:
    """
    static void fastcomm_count_up(void *counter) {
        __atomic_add_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    static void fastcomm_count_down(void *counter) {
        __atomic_sub_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    """
    void fastcomm_count_up(void *counter) noexcept nogil
    void fastcomm_count_down(void *counter) noexcept nogil


cdef void _graph_is_gone(void *counter) noexcept nogil:
    """Called by the driver, on a thread of its own."""
    fastcomm_count_down(counter)


cdef list _members(weak_set):
    """Of a WeakSet to which other threads add."""
    while True:
        try:
            return list(weak_set)
        except RuntimeError:  # it has changed meanwhile
            pass


# ---- what the ranks must agree on before they connect --------------------------------------------

def _facts(version, path, device):
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {
        "pid": os.getpid(), "host": os.environ.get("NCCL_HOSTID", socket.gethostname()),
        "version": version, "path": path, "card": card,
        "device": str(device), "may_share": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    }


def refuse_different_versions(facts):
    """Raises InitError, on every rank, when the ranks have found different versions of NCCL: those
    would not understand each other.
    """
    if len({theirs["version"] for theirs in facts}) > 1:
        found = "; ".join(
            f"rank {r}: {version_text(theirs['version'])} in {theirs['path']}"
            for r, theirs in enumerate(facts)
        )
        raise InitError(f"the ranks have different versions of NCCL: {found}")


def refuse_shared_cards(facts):
    """Raises InitError, on every rank, when two ranks use one GPU without having been set up for
    it.
    """
    seen = {}
    for r, theirs in enumerate(facts):
        if theirs["card"] is None or (theirs["may_share"] and theirs["version"] >= 23000):
            continue
        first = seen.setdefault((theirs["host"], theirs["card"]), r)
        if first != r:
            raise InitError(
                f"ranks {first} and {r} use the same GPU ({theirs['device']} on "
                f"{theirs['host']}): pass device=f'cuda:{{local_rank}}', or "
                "set CUDA_VISIBLE_DEVICES for each rank. To share one on purpose, for tests: "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or "
                "newer), or a NCCL_HOSTID of its own for each rank"
            )
