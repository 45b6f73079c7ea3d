"""What messages say of collectives: how they call one, who waits for which and how long, what is
wrong where ranks call different ones, and what to do about it.

Knows no transport. What is wrong is a code, on the error, by which advice is chosen; nobody reads
the sentences again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fastcomm.comm import forms
from fastcomm.comm.collective import BUCKETS_PER_REDUCER, NO_DATA, ROOTED, name_of, unpacked
from fastcomm.errors import MismatchError

OTHERS_GRADIENT = "lies in that of another one: clone gradients before you exchange them"
OTHER_THREAD = (
    "another thread is inside this communicator: give each thread its own, or let them take turns"
)
MOST_ASKED = 3  # ranks whose whereabouts one message shows

# ---- a collective --------------------------------------------------------------------------------

CALLED = str, str, forms.NUMBER, forms.NUMBER  # the form of a Called


class Called(NamedTuple):
    """A collective that a rank calls, in words and as what these are about.

    words: without the steps of a bucket. label: of a bucket; else 0. fingerprint: see
    collective.fingerprint_of.
    """

    kind: str
    words: str
    label: int = 0
    fingerprint: int = 0

    def __str__(self) -> str:
        record, _ = unpacked(self.fingerprint)
        return self.without_record() + (f" (record {record:08x})" if self.label and record else "")

    def without_record(self) -> str:
        """In words, where nobody compares records."""
        if not (self.label and self.fingerprint):
            return self.words
        _, n_steps = unpacked(self.fingerprint)
        return f"{self.words} after {n_steps} step{'s' if n_steps != 1 else ''}"


def called(
    kind: str,
    numel: int,
    dtype: torch.dtype,
    *,
    op: str | None = None,
    root: int = 0,
    wire: torch.dtype | None = None,
    label: int = 0,
    fingerprint: int = 0,
) -> Called:
    """op: for the kinds that have one. root: of the kinds that are ROOTED."""
    words = f"{kind} of {numel} {name_of(dtype)} elements"
    if kind in ROOTED:
        words += f" {'to' if kind == 'gather' else 'from'} rank {root}"
    if op is not None:
        words += f", op {op}"
    if wire is not None and wire != dtype:
        words += f", wire {name_of(wire)}"
    if label:
        reducer, bucket = divmod(label, BUCKETS_PER_REDUCER)
        words += f" (bucket {bucket - 1} of reducer {reducer})"
    elif fingerprint:
        checksum, n_tensors = unpacked(fingerprint)
        words += f" in {n_tensors} tensor{'s' if n_tensors != 1 else ''}"
        words += f" (sizes {checksum:08x})"
    return Called(kind, words, label, fingerprint)


# ---- who waits -----------------------------------------------------------------------------------


def waited(seconds: float) -> str:
    """How long a rank has waited in vain."""
    return f"waited {seconds:g} s"


def waits(rank: int, number: int, what: object) -> str:
    return f"rank {rank} waits for collective number {number}, {what}"


# ---- ranks that take part no more ----------------------------------------------------------------

# What PeerLostError says of a rank that waits for no other any more, behind its process.
CLOSED = "closed its communicator (has its data ended earlier?)"
DROPPED = (
    "dropped its communicator without close() (has its script raised, or its data ended earlier? "
    "see what it has printed)"
)
ABORTED = "aborted its communicator"
# The same of one whose process has ended.
ENDED = "ended without close() (has its data ended earlier? see what it has printed)"
RAISED = "ended by an exception, which it has printed"
DIED = "died"
KILLED = "died, by a signal or os._exit()"
UNREACHABLE = "died or cannot be reached"
DIED_MEETING = "died while the ranks met"
GONE = "has ended"  # while the others meet


def has_aborted(rank: int) -> str:
    """What a rank's own calls end with once it has aborted its communicator."""
    return f"rank {rank} has aborted this communicator"


def has_closed(rank: int) -> str:
    """What a rank's own calls end with once it has closed its communicator."""
    return (
        f"rank {rank} has closed this communicator: make a new one, or detach() its reducers to "
        "train on alone"
    )


def has_ended(rank: int) -> str:
    """What a rank's own calls end with once its script has come to its end."""
    return (
        f"rank {rank} takes part in no collective any more, as its process comes to its end: call "
        "it before that, or in a handler of atexit that is registered after fastcomm.init()"
    )


# ---- ranks that call different collectives -------------------------------------------------------

# MismatchError.differs. BACKWARDS are calls, too, of which the message has the advice already.
CALLS, BACKWARDS, STEPS, RECORDS = "calls", "backwards", "steps", "records"
BEGINNINGS = {
    CALLS: "the ranks call different collectives",
    STEPS: "the ranks have made different numbers of optimizer steps",
    RECORDS: "the ranks have not stepped alike, as checksums of their steps (record) show",
}
IN_JOIN = (
    ". Inside join() ranks whose data has ended take part in reductions of gradients "
    "alone: enter join() on every rank, and make other collectives before or after it"
)
FEWER_BACKWARDS = (
    ". Some ranks reduce gradients, and others are past their last backward: if their data has "
    "ended earlier, loop by reducer.join(), or give all ranks as many batches; and run a backward "
    "inside no_sync() on all ranks or on none"
)
FEWER_STEPS = (
    ". Some ranks are in backward(), and others in the step() of a ShardedOptimizer, which every "
    "rank must call as often"
)
SEVERAL_REDUCERS = (
    ". Ranks have come to the reducers of this communicator in different orders, as one loss of "
    "several models does where ranks use different parameters: give these models one reducer, "
    "attach(torch.nn.ModuleList([...])). Or the ranks have attached their models in different "
    "orders"
)
OTHER_SIZES = (
    ". all_reduce_coalesced() takes tensors of the same sizes, in the same order, on every rank: "
    "sizes is a checksum of [t.numel() for t in tensors]: compare that list"
)
_FIRST_OF_OBJECTS = called("all_gather_single", 1, torch.int64)  # of gather_objects()
_CALL_ALIKE = (
    f". A rank at {_FIRST_OF_OBJECTS} may be in attach(), refresh(), check_in_sync(), "
    "load_state_dict() or another call that compares the ranks, which every rank must make"
)
_BACKWARDS_ALIKE = (
    ". Run a backward inside no_sync() on all ranks or on none, and likewise call set_weight()"
)
_STEPS_ALIKE = (
    ". If the ranks have made different numbers of steps, one has left out a step, or made one "
    "alone, and their parameters differ: call refresh() on every rank, which copies rank 0's"
)


def difference(calls: Sequence[Called]) -> str:
    """What differs in the ranks' calls, of which no two need be equal."""
    if len({call.words for call in calls}) > 1:
        return CALLS
    return STEPS if len({call.without_record() for call in calls}) > 1 else RECORDS


def in_words(calls: Mapping[int, Called]) -> str:
    """What the ranks call, by rank, without records unless nothing else differs."""
    needs_records = difference(list(calls.values())) == RECORDS
    return "; ".join(
        f"rank {rank}: {call if needs_records else call.without_record()}"
        for rank, call in calls.items()
    )


def mismatch(number: int, calls: Mapping[int, Called]) -> MismatchError:
    """The error when ranks call different collectives. calls: by rank."""
    each = list(calls.values())
    beginning = differs = difference(each)
    kinds = {call.kind for call in each}
    n_buckets = sum(call.label > 0 for call in each)
    advice = ""
    if NO_DATA in kinds:
        advice = IN_JOIN
    elif 0 < n_buckets < len(each):
        advice = FEWER_STEPS if "all_gather_v" in kinds else FEWER_BACKWARDS
        differs = BACKWARDS
    elif len({call.label // BUCKETS_PER_REDUCER for call in each if call.label}) > 1:
        advice = SEVERAL_REDUCERS
    elif all(call.fingerprint and not call.label for call in each):
        advice = OTHER_SIZES
    if _FIRST_OF_OBJECTS in each:
        advice += _CALL_ALIKE
    error = MismatchError(
        f"{BEGINNINGS[beginning]} (number {number} on this communicator): {in_words(calls)}{advice}"
    )
    error.differs = differs
    return error


def advice_on_bucket(differs: str) -> str:
    """What to do about the mismatch of a bucket, where its message, or what the round adds, does
    not say so.
    """
    advice = {BACKWARDS: "", RECORDS: "", STEPS: _STEPS_ALIKE}
    return advice.get(differs, _BACKWARDS_ALIKE + _STEPS_ALIKE)


def abandonment(ranks: Iterable[int]) -> str:
    """The message that the other ranks get when `ranks` abandon a round."""
    return (
        f"rank {', '.join(map(str, ranks))} abandoned what was under way (an exception ended its "
        "backward?): skip this step"
    )


def own_abandonment(rank: int) -> str:
    """The message that the works of the abandoning rank end with."""
    return f"rank {rank} abandoned the collectives under way"
