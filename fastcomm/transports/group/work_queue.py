"""WorkQueue: the collectives of one communicator in the order of their calls, and the thread that
carries them out.

Owns the works, the thread and the watchdog. Posts, carries out and refuses works, lets the ranks
meet again after one of them has abandoned a round, and ends all works after a failure.
communicator.py makes the collectives, exchange.py moves the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.abandonment import tell_of_abandonment, told
from fastcomm.comm.collective import SKIP, abandonment, mismatch, own_abandonment
from fastcomm.comm.lifetime import Lifetime, again
from fastcomm.comm.script_end import tell_at_end
from fastcomm.comm.transport import Transport
from fastcomm.comm.watchdog import (
    Notes,
    Watchdog,
    failure_note,
    leave_closing,
    leave_last_words,
    leave_note,
)
from fastcomm.errors import (
    AbandonedError,
    FastcommError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    has_closed,
)
from fastcomm.transports.group.call import ABANDON, WITHOUT_DATA, Call, factors_of, with_votes
from fastcomm.transports.group.exchange import Exchange
from fastcomm.transports.group.work import GroupBucket, GroupWork, Move, see_through

# how long the watchdog has to name the missing once a deadline has passed: longer than it takes to
# ask around
VERDICT_S = 4.0
# how long the watchdog has to find out why a connection broke: longer than idle ranks take to
# answer a question
EXPLAIN_S = 3.0
TOLD_S = 0.3  # how long ranks that wait take to read a note
# After a failure: by then the thread that found it has ended all works, unless a signal handler's
# exception has interrupted it.
INTERRUPTED_S = 3.0


@dataclass(frozen=True)
class Interruption:
    """Other ranks have abandoned a round. The caller knows of it once n_abandoned is `number`."""

    number: int
    error: FastcommError
    meeting: GroupWork  # ends when all ranks stand at the same number again


class WorkQueue:
    """What the works and the watchdog (watchdog.Watched) know of a communicator.

    Any number of threads may call it. life: whether the communicator can still be used.
    """

    communicator: weakref.ref[Transport]  # set by the communicator

    # For the watchdog: the garbage collector may end it, and `number` goes on when the ranks meet
    # again.
    leak: str | None = None
    epoch = 0

    def __init__(
        self,
        rank: int,
        pids: tuple[int, ...],
        exchange: Exchange,
        notes: Notes,
        timeout: timedelta,
        neighbours: Sequence[int],
    ) -> None:
        self.rank, self.world_size, self.pids = rank, len(pids), pids
        self.n_abandoned = 0
        self.number = 0  # of the newest collective this rank has announced
        # `number` at the last two announcements: a rank that has answered is at the first at least.
        self._announced = 0, 0
        self.n_timekeepers = 0  # how many ask for the times of works
        # By label, for shadow(): the other ranks' call says which of them is reduced.
        self.buckets: weakref.WeakValueDictionary[int, GroupBucket] = weakref.WeakValueDictionary()
        self.life = Lifetime()
        self._exchange, self._notes = exchange, notes
        self._timeout_s = timeout.total_seconds()
        # Guards what follows. Hold it to resolve a work, so that a resolved one never starts.
        # Reentrant, because a signal handler may call abort(). A handler may also raise while a
        # caller holds it, so only the thread changes what must change together.
        self._lock = threading.RLock()
        self._works: list[GroupWork] = []  # oldest first; a work in this list is posted
        self._current: GroupWork | None = None
        self._since = 0.0  # when the current work was begun
        self._interruption: Interruption | None = None  # the newest
        self._n_met = 0  # how often the ranks have begun to meet again
        # the error that stopped the thread, and when
        self._trouble: tuple[float, Exception] | None = None
        self._failed_at = 0.0
        # Each entry wakes the thread, which then carries out the oldest of _works. Entries are
        # works, because these keep this object alive.
        self._wakeups: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        threading.Thread(
            target=_carry_out_all,
            args=(self._wakeups, weakref.ref(self)),
            name="fastcomm group",
            daemon=True,
        ).start()
        weakref.finalize(self, self._wakeups.put, None)
        self.watchdog = _Watchdog(self, notes, self._timeout_s, neighbours)
        tell_at_end(self)

    # -- the caller's side -------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises what has ended the communicator, or why a forked process cannot use it."""
        refusal = self.life.refusal()
        if refusal is not None:
            raise refusal

    def refuse_fork(self) -> None:
        """Raises FastcommError in a process forked from the communicator's."""
        if self.life.is_forked():
            self.check_usable()

    def check(self) -> None:
        """Raises as check_usable; also AbandonedError, once, if others have abandoned the round."""
        self.check_usable()
        interruption = self._unheard()
        if interruption is not None:
            raise self.heard(interruption.error, self.n_abandoned)

    def abandon(self) -> None:
        """Finishes the collective that has begun, and ends those that wait, on all ranks.

        What a signal handler raises is raised once the ranks have met; see GroupWork.wait.
        """
        own: GroupWork | None = None
        theirs: Interruption | None = None

        def meet(_: BaseException | None) -> None:
            nonlocal own, theirs
            if own is None:
                own = GroupWork(self, ABANDON, None)
            if not own.is_posted and theirs is None:
                theirs = self._post_abandonment(own)
            if theirs is None:
                own.sleep()
            else:  # they have announced it: this rank joins them
                self.n_abandoned = theirs.number
                theirs.meeting.sleep()

        raised = see_through(meet, self.abort)
        met = own if theirs is None else theirs.meeting
        error = None if met is None else met.error
        if error is None:
            tell_of_abandonment(self.communicator)
        if raised is not None:
            raise raised from error
        if error is not None:
            raise again(error)

    def _post_abandonment(self, own: GroupWork) -> Interruption | None:
        """Posts `own`, unless others have abandoned the round and the caller does not know of it
        yet: then returns their interruption.
        """
        refusal = self.life.refusal()
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
        if self.life.is_forked():
            return
        if self.life.failure is None:
            message = f"rank {self.rank} (pid {os.getpid()}) aborted its communicator"
            with contextlib.suppress(RuntimeError):
                leave_note(self._notes, "failure", failure_note(PeerLostError(message)))
        self._end(FastcommError(f"rank {self.rank} has aborted this communicator"))

    def close(self) -> None:
        """Ends the communicator on this rank."""
        if self.life.is_forked():
            return
        if self.life.failure is None:
            with contextlib.suppress(RuntimeError):
                number = self.number - bool(self._works)
                leave_closing(self._notes, self.rank, self.epoch, number)
        self._end(FastcommError(has_closed(self.rank)))

    def tell_of_end(self, has_raised: bool) -> None:
        if self.life.refusal() is None:
            leave_last_words(self._notes, self.rank, has_raised)

    def _end(self, failure: FastcommError) -> None:
        self._fail(failure)
        self._wakeups.put(None)
        self.watchdog.stop()
        self._exchange.close()

    def post(self, work: GroupWork) -> None:
        """Hands the work to the thread, or refuses it. Raises nothing itself."""
        with self._lock:
            interruption = self._unheard()
            if interruption is None:
                self._append(work)
            else:  # it belongs to the abandoned round, not to the next one
                work.refuse(interruption.error)

    def _append(self, work: GroupWork) -> None:
        """Under the lock."""
        if self.life.failure is not None:
            work.refuse(self.life.failure)
            return
        try:
            self._works.append(work)  # this call is what posts it
        finally:
            self._wakeups.put(work)

    def holds(self, work: GroupWork) -> bool:
        """Whether the work is posted and not resolved."""
        return work in self._works

    def heard(self, error: FastcommError, n_abandoned: int) -> FastcommError:
        """Notes that the caller learns of `error`, which may be another rank's abandonment. Returns
        a copy of it, to be raised: others hold it, and a traceback would hold the model.

        n_abandoned: when the work was made that the error has ended.
        """
        interruption = self._unheard()
        if interruption is not None and error is interruption.error:
            self.n_abandoned = interruption.number
            tell_of_abandonment(self.communicator)
        if n_abandoned != self.n_abandoned:
            return told(self.communicator, error)
        copy: FastcommError = again(error)
        return copy

    def _unheard(self) -> Interruption | None:
        """The interruption that the caller does not know of yet, or None. What the caller calls
        once it knows belongs to the next round.
        """
        interruption = self._interruption
        is_heard = interruption is None or interruption.number <= self.n_abandoned
        return None if is_heard else interruption

    def look_at_clock(self) -> None:
        """Checks the deadline in place of the watchdog, which may be waiting for a store that is
        out of reach. Raises nothing itself.

        Also repeats what a signal handler's exception may have cut short.
        """
        failure, works = self.life.failure, self._works
        if failure is not None and time.monotonic() - self._failed_at > INTERRUPTED_S:
            self._fail(failure)
        if works and self._current is None:
            self._wakeups.put(works[0])
        oldest = self._oldest_unfinished()
        if oldest is not None and oldest[1] > self._timeout_s + VERDICT_S:
            number, _, what = oldest
            message = (
                f"waited {self._timeout_s:g} s; rank {self.rank} waits for collective number "
                f"{number}, {what}"
            )
            self._fail(
                TimeoutError(f"{message}; the store the ranks met at does not answer either")
            )

    def _resolve(self, works: list[GroupWork], error: FastcommError | None) -> None:
        """Under the lock."""
        for work in works:
            work.resolve(error)
        self._works = [work for work in self._works if not work.is_completed()]

    # -- the thread's side -------------------------------------------------------------------------

    def _carry_out_oldest(self) -> None:
        """Carries out the oldest work there is."""
        with self._lock:
            if self._trouble is not None or not self._works:
                return
            work = self._own_abandonment() or self._works[0]
            self._resolve_before(work)
            self._current, self._since = work, time.monotonic()
        error: FastcommError | None = None
        works = [work]
        try:
            works += self._perform(work)
        except MismatchError as mismatch:
            error = mismatch
        # torch raises nothing more specific; a PeerLostError from shared memory is one, too
        except RuntimeError as trouble:
            self._trouble = time.monotonic(), trouble
            return  # the watchdog finds out why, and ends the communicator
        except Exception as defect:
            self.watchdog.give_up(
                self, FastcommError(f"rank {self.rank} failed in {work.call}: {defect!r}")
            )
            return
        with self._lock:
            self._current = None
            self.number += len(works) - 1
            self._resolve(works, error)

    def _own_abandonment(self) -> GroupWork | None:
        """This rank's abandonment, if it is posted. Works before it are not begun any more. Under
        the lock.
        """
        return next((work for work in self._works if work.call is ABANDON), None)

    def _resolve_before(self, work: GroupWork) -> None:
        """Under the lock."""
        older = self._works[: self._works.index(work)]
        if older:
            self._resolve(older, AbandonedError(own_abandonment(self.rank)))

    def _perform(self, work: GroupWork) -> list[GroupWork]:
        """Returns the works that have been reduced together with it. Raises MismatchError when the
        ranks call different collectives.
        """
        waiting, flats = self._joinable_with(work)
        behind = [one.call for one in waiting]
        calls, payloads, n_joined = self._announce(work.call, work.payload, behind)
        if ABANDON in calls:
            self._meet_anew(calls)
            return []
        joined, wanted = waiting[:n_joined], self._wanted(calls)
        move = self._move_of(work, wanted)
        if wanted is not None and wanted.op == SKIP:
            work.note_skipped()
        elif move is not None:
            began_ns = time.monotonic_ns() if self.n_timekeepers > 0 else 0
            factors = factors_of(calls)
            if joined:
                self._exchange.all_reduce_together(flats[: 1 + n_joined], work.call.op)
            else:
                move(payloads) if factors is None else move(payloads, factors)
            if began_ns:
                for one in (work, *joined):
                    one.note_times(began_ns, time.monotonic_ns())
        return joined

    def _move_of(self, work: GroupWork, wanted: Call | None) -> Move | None:
        """What moves the data of a work, and of a shadow as the others want it. None where there is
        none, or a failure has ended the work.
        """
        if wanted is None or work.call != WITHOUT_DATA:
            return work.move
        work.has_followed = True
        return self.buckets[wanted.label].move_of_shadow(wanted.op)

    def _joinable_with(self, work: GroupWork) -> tuple[list[GroupWork], list[Tensor]]:
        """The works behind this one that can be reduced together with it, and the tensors of all:
        now, as a failure may make works forget theirs at any time.
        """
        with self._lock:
            behind = [] if work.plain is None else work.joinable(self._works)
            return behind, [one.plain for one in (work, *behind) if one.plain is not None]

    def _wanted(self, calls: Sequence[Call]) -> Call | None:
        """What the ranks with data call; None if no rank has any. Raises MismatchError if they call
        different collectives, or one that shadows cannot take part in.
        """
        wanted = with_votes([call for call in calls if call != WITHOUT_DATA])
        if not wanted:
            return None
        has_shadows = len(wanted) < len(calls)
        is_alike = all(call == wanted[0] for call in wanted)
        if not is_alike or (has_shadows and not wanted[0].admits_shadows):
            raise MismatchError(mismatch(self.number, calls))
        return wanted[0]

    def _announce(
        self, call: Call, payload: Tensor | None = None, behind: Sequence[Call] = ()
    ) -> tuple[list[Call], Tensor | None, int]:
        """Numbers the call, and announces it: see Exchange.announce."""
        self.number += 1
        self._announced = self._announced[1], self.number
        return self._exchange.announce(call, payload, behind)

    def _meet_anew(self, calls: list[Call]) -> None:
        """Some ranks have abandoned the round. Announces ABANDON, too, until all ranks do so under
        one number.
        """
        with self._lock:
            self._n_met += 1
            own = self._own_abandonment()
            meeting = self._current = own or GroupWork(self, ABANDON, None)
            if own is None:
                abandoning = [rank for rank, call in enumerate(calls) if call == ABANDON]
                error = AbandonedError(abandonment(abandoning))
                self._interruption = Interruption(self._n_met, error, meeting)
                self._resolve(list(self._works), error)
            else:
                self._resolve_before(own)
        while any(call != ABANDON for call in calls):
            calls, *_ = self._announce(ABANDON)
        with self._lock:
            if own is not None:
                self.n_abandoned = self._n_met
            self._resolve([meeting], None)

    # -- what the watchdog sees; see fastcomm.comm.watchdog.Watched --------------------------------

    def _oldest_unfinished(self) -> tuple[int, float, str] | None:
        with self._lock:
            work = self._current
            age_s = time.monotonic() - max(self._since, self._exchange.moved_at)
            return None if work is None else (self.number, age_s, str(work.call))

    def _asynchronous_error(self) -> FastcommError | None:
        """A broken connection does not tell who broke it. Ranks that have not answered a while
        later count as lost.
        """
        if self._trouble is None:
            return None
        since, trouble = self._trouble
        # the store may be gone, too, which the watchdog will find
        with contextlib.suppress(RuntimeError):
            if self._notes.read("question") is None:
                leave_note(self._notes, "question", "where are you?")
        if time.monotonic() - since < EXPLAIN_S:
            return None
        if isinstance(trouble, FastcommError):
            return trouble
        silent = [
            rank for rank in range(self.world_size) if rank != self.rank and self._is_silent(rank)
        ]
        what = "a connection between the ranks broke"
        if silent:
            names = ", ".join(f"rank {rank} (pid {self.pids[rank]})" for rank in silent)
            what = f"{names} died or cannot be reached"
        return PeerLostError(
            f"{what}; rank {self.rank} was at collective number {self.number}: {trouble}", silent
        )

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank has not said lately where it stands. Ranks are never more than one
        announcement apart.
        """
        with contextlib.suppress(RuntimeError):
            position = self._notes.read(f"position/{self.epoch}/{rank}")
            return position is None or int(json.loads(position)[0]) < self._announced[0]
        return False

    def _fail(self, error: FastcommError) -> None:
        """Ends the communicator: all unfinished works end with its failure. May be called again."""
        with self._lock:
            if self.life.failure is None:
                self._failed_at = time.monotonic()
                self.life.end(error)
            error = self.life.failure or error
            is_under_way = bool(self._unfinished())
        if is_under_way:
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
        if self._interruption is not None and not self._interruption.meeting.is_completed():
            works.append(self._interruption.meeting)
        return works

    def _has_graphs(self) -> bool:
        return False

    def _interrupt(self, error: FastcommError, epoch: int, n_kept: int) -> None:
        """Not needed: ranks announce that they abandon a round."""

    def _enter_thread(self) -> None:
        """Not needed: nothing here belongs to a thread."""


class _Watchdog(Watchdog):
    """Does not compare calls: the announcements find ranks that call different collectives, which
    does not end the communicator.
    """

    def _compare(self, comm: Any, number: int, what: str) -> None:
        pass


def _carry_out_all(
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
            alive._carry_out_oldest()
            del work, alive
