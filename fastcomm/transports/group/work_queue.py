"""WorkQueue: the collectives of one communicator in the order of their calls, and the thread that
runs them.

Owns the works, the thread and the watchdog. Posts, runs and refuses works, lets the ranks
meet again after one of them has abandoned a round, and ends all works after a failure.
communicator.py makes the collectives, exchange.py moves the tensors.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from fastcomm.comm import words
from fastcomm.comm.deadline import running_s
from fastcomm.comm.standing import Standing, again
from fastcomm.comm.times import EXPLAIN_S, INTERRUPTED_S, NAMED_S, SURE_S, TOLD_S, WAITED_S
from fastcomm.comm.watchdog import (
    Notes,
    Watchdog,
    Watched,
    leave_abort,
    leave_closing,
    leave_last_words,
    leave_note,
)
from fastcomm.comm.who import Process, in_words
from fastcomm.control.announcement import Verdict, conclude
from fastcomm.errors import AbandonedError, FastcommError, PeerLostError, TimeoutError
from fastcomm.postmortem.flight_recorder import FlightRecorder
from fastcomm.postmortem.script_end import start_thread, tell_at_end
from fastcomm.postmortem.whereabouts import whereabouts
from fastcomm.transports.group.call import ABANDON, WITHOUT_DATA
from fastcomm.transports.group.exchange import Exchange
from fastcomm.transports.group.shards import Announcement, Transfer, tag_of
from fastcomm.transports.group.work import GroupBucket, GroupWork, see_through

MOST_ANNOUNCED = 64  # calls of this rank that wait for the other ranks' announcements
MOST_RUNNING = 4  # collectives that the thread runs at once


class PeerAbandonment(NamedTuple):
    """Other ranks have abandoned a round. The caller knows of it once n_abandoned is `number`."""

    number: int
    error: FastcommError
    meeting: GroupWork  # ends when all ranks stand at the same number again


class RunningCollective(NamedTuple):
    """A collective that all ranks have announced, and that the thread has not ended. number: see
    WorkQueue. works: one, or those fused. steps: what is left to do.
    """

    number: int
    works: list[GroupWork]
    steps: Iterator[None]
    began_ns: int


class WorkQueue(Watched):
    """What the works and the watchdog (watchdog.Watched) know of a communicator.

    Any number of threads may call it. standing: what the callers still have to be told.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        processes: tuple[Process, ...],
        exchange: Exchange,
        notes: Notes,
        timeout: timedelta,
        neighbours: Sequence[int],
    ) -> None:
        self.rank, self.world_size, self.processes = rank, len(processes), processes
        self.number = 0  # of the newest collective that the thread has begun
        self.n_timekeepers = 0  # how many ask for the times of works
        # By label, for follow(): the other ranks' call says which of them is reduced.
        self.buckets: weakref.WeakValueDictionary[int, GroupBucket] = weakref.WeakValueDictionary()
        self.standing = Standing()
        self.flight = FlightRecorder(backend, rank, processes)
        self._exchange, self._notes = exchange, notes
        self._timeout_s = timeout.total_seconds()
        # Guards what follows. Hold it to resolve a work, so that a resolved one never starts.
        # Reentrant, because a signal handler may call abort(). A handler may also raise while a
        # caller holds it, so only the thread changes what must change together.
        self._lock = threading.RLock()
        self._works: list[GroupWork] = []  # oldest first; a work in this list is posted
        self._announcer = exchange.announcer
        # oldest first; only the thread changes it
        self._running: deque[RunningCollective] = deque()
        # what the thread waits for, its number, and since when
        self._current: tuple[GroupWork, int, float] | None = None
        self._is_meeting = False  # the ranks meet after an abandonment
        self._peer_abandonment: PeerAbandonment | None = None  # the newest
        self._n_met = 0  # how often the ranks have begun to meet again
        # the error that stopped the thread, and when
        self._trouble: tuple[float, Exception] | None = None
        self._failed_at = 0.0
        self._looked_at_s = 0.0  # how long the thread had waited, when connections were looked at
        # Each entry wakes the thread, which then runs all of _works. Entries are works, because
        # these keep this object alive.
        self._wakeups: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        start_thread("fastcomm group", _run_thread, self._wakeups, weakref.ref(self))
        weakref.finalize(self, self._wakeups.put, None)
        # The announcements find ranks that call different collectives, which ends nothing.
        self.watchdog = Watchdog(
            self, notes, self._timeout_s, neighbours, whereabouts, compares=False
        )
        tell_at_end(self)

    # -- the caller's side -------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises what has ended the communicator, or why a forked process cannot use it."""
        refusal = self.standing.refusal()
        if refusal is not None:
            raise refusal

    def refuse_fork(self) -> None:
        """Raises FastcommError in a process forked from the communicator's."""
        if self.standing.is_forked():
            self.check_usable()

    def check(self) -> None:
        """Raises as check_usable; also AbandonedError, once, if others have abandoned the round."""
        self.check_usable()
        theirs = self._unheard()
        if theirs is not None:
            raise self.heard(theirs.error, self.standing.n_abandoned)

    def abandon(self) -> None:
        """Finishes what all ranks have announced, and ends what waits, on all ranks.

        What a signal handler raises is raised once the ranks have met; see GroupWork.wait.
        """
        own: GroupWork | None = None
        theirs: PeerAbandonment | None = None

        def meet(_: BaseException | None) -> None:
            nonlocal own, theirs
            if own is None:
                own = GroupWork(self, ABANDON)
            if not own.is_posted and theirs is None:
                theirs = self._post_abandonment(own)
            if theirs is None:
                own.sleep()
            else:  # they have announced it: this rank joins them
                self.standing.n_abandoned = theirs.number
                theirs.meeting.sleep()

        raised = see_through(meet, self.abort)
        met = own if theirs is None else theirs.meeting
        error = None if met is None else met.error
        if error is None:
            self.standing.note_abandonment()
        if raised is not None:
            raise raised from error
        if error is not None:
            raise again(error)

    def _post_abandonment(self, own: GroupWork) -> PeerAbandonment | None:
        """Posts `own`, unless others have abandoned the round and the caller does not know of it
        yet: then returns theirs.
        """
        refusal = self.standing.refusal()
        if refusal is not None:  # without the lock, which may be locked in a forked process
            own.refuse(refusal)
            return None
        with self._lock:
            theirs = self._unheard()
            if theirs is None:
                self._append(own)
        return theirs

    def abort(self) -> None:
        """Ends the communicator on all ranks."""
        if self.standing.is_forked():
            return
        if self.standing.failure is None:
            leave_abort(self._notes, self.processes[self.rank])
        self._end(FastcommError(words.has_aborted(self.rank)))

    def close(self) -> None:
        """Ends the communicator on this rank."""
        if self.standing.is_forked():
            return
        if self.standing.failure is None:
            with contextlib.suppress(RuntimeError):
                leave_closing(self._notes, self.rank, self.epoch, self._n_finished())
        self._end(FastcommError(words.has_closed(self.rank)))

    def _n_finished(self) -> int:
        """The number of the newest collective all of whose data this rank has."""
        running = tuple(self._running)  # the thread may be changing it
        if running:
            return running[0].number - len(running[0].works)
        return self.number - (bool(self._works) or self._is_meeting)

    def tell_of_end(self, has_raised: bool) -> None:
        if self.standing.refusal() is None:
            leave_last_words(self._notes, self.rank, has_raised)
            self._end(FastcommError(words.has_ended(self.rank)))

    def _end(self, failure: FastcommError) -> None:
        self._fail(failure)
        self._wakeups.put(None)
        self.watchdog.stop()
        self._exchange.close()

    def post(self, work: GroupWork) -> None:
        """Hands the work to the thread, or refuses it. Raises nothing but what work.prepare() does,
        as where memory is used up: then it is not posted.
        """
        work.prepare()  # before the lock, for which the thread may be waiting
        with self._lock:
            theirs = self._unheard()
            if theirs is None:
                self._append(work)
            else:  # it belongs to the abandoned round, not to the next one
                work.refuse(theirs.error)

    def _append(self, work: GroupWork) -> None:
        """Under the lock."""
        if self.standing.failure is not None:
            work.refuse(self.standing.failure)
            return
        if work.entry is None:  # else a signal handler has raised in here, and this is the retry
            work.entry = work.call.noted(self.flight)
        try:
            self._works.append(work)  # this call is what posts it
            if self._can_announce_ahead(work):
                with contextlib.suppress(RuntimeError):  # a broken connection, as the thread finds
                    self._announcer.announce(work)
        finally:
            self._wakeups.put(work)

    def _can_announce_ahead(self, work: GroupWork) -> bool:
        """Whether the work, the newest, is announced at once: not behind one that is not, nor where
        it may be fused with others. Under the lock.
        """
        if self._is_meeting or self._trouble is not None:
            return False
        before = self._works[-2:-1]
        is_next = all(one.is_announced and one.call is not ABANDON for one in before)
        is_alone = work.fusable is None or not before
        return is_next and is_alone and len(self._announcer) < MOST_ANNOUNCED

    def holds(self, work: GroupWork) -> bool:
        """Whether the work is posted and not resolved."""
        return work in self._works

    def heard(self, error: FastcommError, n_abandoned: int) -> FastcommError:
        """Notes that the caller learns of `error`, which may be another rank's abandonment. Takes
        and returns what Standing.to_raise() does.
        """
        theirs = self._unheard()
        if theirs is not None and error is theirs.error:
            self.standing.n_abandoned = theirs.number
            self.standing.note_abandonment()
        return self.standing.to_raise(error, n_abandoned)

    def _unheard(self) -> PeerAbandonment | None:
        """The other ranks' abandonment that the caller does not know of yet, or None. What the
        caller calls once it knows belongs to the next round.
        """
        theirs = self._peer_abandonment
        is_heard = theirs is None or theirs.number <= self.standing.n_abandoned
        return None if is_heard else theirs

    def look_at_clock(self) -> None:
        """Checks the deadline in place of the watchdog, which may be waiting for a store that is
        out of reach. Raises nothing itself.

        Also repeats what a signal handler's exception may have cut short.
        """
        failure, works = self.standing.failure, self._works
        if failure is not None and running_s() - self._failed_at > INTERRUPTED_S:
            self._fail(failure)
        if works and self._current is None:
            self._wakeups.put(works[0])
        oldest = self._oldest_unfinished()
        if oldest is not None and oldest[1] > self._timeout_s + NAMED_S:
            number, _, what = oldest
            message = f"{words.waited(self._timeout_s)}; {words.waits(self.rank, number, what)}"
            store = (
                "the store the ranks met at does not answer either: can this host reach rank 0's?"
            )
            self._fail(TimeoutError(f"{message}; {store}"))

    def _resolve(self, works: list[GroupWork], error: FastcommError | None) -> None:
        """Under the lock."""
        for work in works:
            work.resolve(error)
        self._works = [work for work in self._works if not work.is_completed()]

    # -- the thread's side -------------------------------------------------------------------------

    def _run_works(self) -> None:
        """Runs all works there are. Begins those that all ranks have announced first, so that there
        is always data in flight; else takes a step of the oldest that runs.
        """
        while self._trouble is None:
            with self._lock:
                work = self._next()
            is_ready = work is not None and self._is_ready(work)
            try:
                if work is not None and (is_ready or not self._running):
                    self._begin(work)
                elif self._running:
                    self._take_step(self._running[0])
                else:
                    return
            # torch raises nothing more specific; a PeerLostError from shared memory is one, too
            except RuntimeError as trouble:
                self._trouble = running_s(), trouble
                return  # the watchdog finds out why, and ends the communicator
            except Exception as defect:
                what = self._current[0].call if self._current is not None else "a collective"
                self.watchdog.give_up(
                    self, FastcommError(f"rank {self.rank} failed in {what}: {defect!r}")
                )
                return

    def _next(self) -> GroupWork | None:
        """The oldest work that has not begun. This rank's abandonment, if it is posted, comes
        before all that the other ranks do not know of, which is not begun any more. Under the lock.
        """
        running = {id(work) for one in self._running for work in one.works}
        waiting = [work for work in self._works if id(work) not in running]
        own = self._own_abandonment()
        if own is not None and not waiting[0].is_announced:
            self._resolve_before(own, waiting)
            return own
        return waiting[0] if waiting else None

    def _is_ready(self, work: GroupWork) -> bool:
        """Whether all ranks have announced the work, and the thread may run one more."""
        has_room = len(self._running) < MOST_RUNNING
        return work.is_announced and has_room and self._announcer.has_come()

    def _note_wait(self, work: GroupWork, number: int) -> None:
        """Notes what the thread waits for from now on."""
        self._current = work, number, running_s()

    def _begin(self, work: GroupWork) -> None:
        """Waits until all ranks have announced the work's call, and takes its first step."""
        self._note_wait(work, self.number + 1)
        if work.entry is not None:
            work.entry.number = self.number + 1
        with self._lock:  # now, as a failure may make works forget their tensors at any time
            transfer, behind = work.transfer, work.fusable_behind(self._works)
            flats = [one.fusable for one in (work, *behind) if one.fusable is not None]
        if not work.is_announced:  # and callers announce none that come behind it
            self._announcer.announce(work, [one.call for one in behind])
        self.number += 1
        gathered = self._announcer.take()
        if ABANDON in gathered.calls:
            while self._running:
                self._take_step(self._running[0])
            self._meet_anew(gathered)
            return
        verdict = conclude(gathered.calls)
        if not verdict.is_agreed:
            self._exchange.drain(gathered)
            calls = {r: call.called() for r, call in enumerate(gathered.calls)}
            self._conclude([work], words.mismatch(self.number, calls))
            return
        began_ns = time.monotonic_ns()
        fused = behind[: gathered.n_fused]
        for place, one in enumerate((work, *fused)):
            if one.entry is not None:
                one.entry.number = self.number + place
                one.entry.start()
        self.number += len(fused)
        if fused:
            transfer = self._exchange.fused_transfer_of(flats[: 1 + len(fused)])
        steps = self._steps_of(work, transfer, verdict, gathered)
        running = RunningCollective(self.number, [work, *fused], steps, began_ns)
        self._running.append(running)
        self._take_step(running)

    def _steps_of(
        self, work: GroupWork, transfer: Transfer | None, verdict: Verdict, gathered: Announcement
    ) -> Iterator[None]:
        """What there is to do for what all ranks with data have announced."""
        nothing: Iterator[None] = iter(())
        wanted = verdict.wanted
        lacks_data = work.call == WITHOUT_DATA
        work.has_followed = lacks_data and wanted is not None
        if wanted is None or verdict.is_skipped:
            self._exchange.drain(gathered)
            if wanted is not None:
                work.was_skipped = True
            return nothing
        payloads = gathered.payloads
        if lacks_data:
            bucket = self.buckets.get(wanted.label)
            if bucket is None or not bucket.fits(wanted):
                raise FastcommError(f"rank {self.rank} has no bucket like that of {wanted}")
            transfer, payloads = bucket.transfer, bucket.prepare_without_data(self.world_size)
        if transfer is None:
            return nothing
        if gathered.begun is None:
            transfer.prepare(wanted.op, verdict.factors)
            transfer.begin(tag_of(gathered.index, wanted))
        return transfer.steps(wanted.op, payloads, verdict.factors)

    def _take_step(self, running: RunningCollective) -> None:
        """Takes the collective's next step, or ends it if there is none left."""
        self._note_wait(running.works[0], running.number)
        for _ in running.steps:  # one of them
            self._current = None
            return
        self._running.remove(running)
        if self.n_timekeepers > 0:
            for work in running.works:
                work.noted_times = 0, running.began_ns, time.monotonic_ns()
        self._conclude(running.works, None)

    def _conclude(self, works: list[GroupWork], error: FastcommError | None) -> None:
        with self._lock:
            self._current = None
            self._resolve(works, error)

    def _own_abandonment(self) -> GroupWork | None:
        """This rank's abandonment, if it is posted. Under the lock."""
        return next((work for work in self._works if work.call is ABANDON), None)

    def _resolve_before(self, own: GroupWork, works: list[GroupWork]) -> None:
        """Ends those of the works that were posted before this rank abandoned. Under the lock."""
        self._resolve(works[: works.index(own)], AbandonedError(words.own_abandonment(self.rank)))

    def _meet_anew(self, gathered: Announcement) -> None:
        """Some ranks have abandoned the round. Announces ABANDON, too, until all ranks do so under
        one index. Nothing else is announced meanwhile.
        """
        with self._lock:
            self._is_meeting = True
            self._n_met += 1
            own = self._own_abandonment()
            meeting = own or GroupWork(self, ABANDON)
            self._note_wait(meeting, self.number)
            if own is None:
                calls = gathered.calls
                abandoning = [rank for rank, call in enumerate(calls) if call == ABANDON]
                error = AbandonedError(words.abandonment(abandoning))
                self._peer_abandonment = PeerAbandonment(self._n_met, error, meeting)
                self._resolve(list(self._works), error)
            else:
                self._resolve_before(own, self._works)
        while True:
            self._exchange.drain(gathered)
            if all(call == ABANDON for call in gathered.calls):
                break
            if not self._announcer:
                self._announcer.announce(GroupWork(self, ABANDON))
            self.number += 1
            gathered = self._announcer.take()
        with self._lock:
            self._is_meeting = False
            if own is not None:
                self.standing.n_abandoned = self._n_met
            self._resolve([meeting], None)

    # -- what the watchdog sees; see fastcomm.comm.watchdog.Watched --------------------------------

    def _oldest_unfinished(self) -> tuple[int, float, words.Called] | None:
        current = self._current
        if current is None:
            return None
        work, number, since = current
        return number, running_s() - max(since, self._exchange.moved_at), work.call.called()

    def _asynchronous_error(self) -> FastcommError | None:
        """A broken connection does not tell who broke it. Ranks that have not answered a while
        later count as lost.
        """
        if self._trouble is None:
            self._look_at_connections()
        if self._trouble is None:
            return None
        since, trouble = self._trouble
        age_s = running_s() - since
        # the store may be gone, too, which the watchdog will find
        with contextlib.suppress(RuntimeError):
            if self._notes.read("question") is None:
                leave_note(self._notes, "question", "where are you?")
        if age_s < SURE_S:
            return None
        silent = [
            rank for rank in range(self.world_size) if rank != self.rank and self._is_silent(rank)
        ]
        if age_s < EXPLAIN_S and len(silent) != 1:
            return None
        if isinstance(trouble, FastcommError):
            return trouble
        what = "a connection between the ranks broke"
        gone, how = silent, words.UNREACHABLE
        if not silent:  # one may have closed before the others had read what it sent
            gone, how = self.watchdog.closed(self), words.CLOSED
        if gone:
            what = f"{in_words(self.processes[rank] for rank in gone)} {how}"
        return PeerLostError(
            f"{what}; rank {self.rank} was at collective number {self.number}: {trouble}", silent
        )

    def _look_at_connections(self) -> None:
        """While the thread waits for data: each time after twice as long."""
        oldest = self._oldest_unfinished()
        age_s = 0.0 if oldest is None else oldest[1]
        if age_s < self._looked_at_s:  # there was progress
            self._looked_at_s = 0.0
        if age_s > max(WAITED_S, 2 * self._looked_at_s):
            self._looked_at_s = age_s
            try:
                self._exchange.look_at_connections()
            except RuntimeError as trouble:
                self._trouble = running_s(), trouble

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank has not answered the question."""
        with contextlib.suppress(RuntimeError):
            return self._notes.read(f"here/{rank}") is None
        return False

    def _fail(self, error: FastcommError) -> None:
        """Ends the communicator: all unfinished works end with its failure. May be called again."""
        with self._lock:
            if self.standing.failure is None:
                self._failed_at = running_s()
                self.standing.end(error)
            error = self.standing.failure or error
            has_unfinished = bool(self._unfinished())
        if has_unfinished:
            self._exchange.interrupt()
            # The store may go with this rank's process: leave the others time to read the failure
            # in it.
            if self.rank == 0:
                time.sleep(TOLD_S)
        with self._lock:
            self._resolve(self._unfinished(), error)

    def _unfinished(self) -> list[GroupWork]:
        """All works that somebody may be waiting for. Under the lock."""
        works = list(self._works)
        theirs = self._peer_abandonment
        if theirs is not None and not theirs.meeting.is_completed():
            works.append(theirs.meeting)
        return works


def _run_thread(
    works: queue.SimpleQueue[GroupWork | None], reference: weakref.ref[WorkQueue]
) -> None:
    """Runs the thread. While it waits for work, it does not keep the WorkQueue alive.

    Runs under inference mode, which accepts inference tensors and all others.
    """
    with torch.inference_mode():
        while True:
            work = works.get()
            alive = reference()
            if work is None or alive is None:
                return
            alive._run_works()
            del work, alive
