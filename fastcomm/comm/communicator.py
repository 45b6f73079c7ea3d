"""Communicator and Work: the collectives that users hold. What a transport owes a reducer beside
them is in transport.py.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fastcomm.comm.collective import Op
from fastcomm.errors import FastcommError

C = TypeVar("C", bound="Communicator")
_LONGEST_WAIT = timedelta(seconds=30)  # for ranks that live and do not come to a rebuild()


class ProcessBound:
    """The base of what belongs to one process, and can be neither copied nor pickled."""

    __slots__ = ()  # so that a compiled class can have it for a base
    instead = ""  # what to do, behind "keep it out of what you copy or save"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError. Called by copy, pickle and torch.save()."""
        raise TypeError(
            f"a {type(self).__name__} belongs to this process, and can be neither copied nor "
            f"pickled: keep it out of what you copy or save{self.instead}"
        )


class Work(ProcessBound, abc.ABC):
    """A collective that has been launched. Its tensors must not be touched until `wait` returns."""

    instead = ", and call its wait() first"

    @abc.abstractmethod
    def wait(self) -> None:
        """Blocks until the result is in place (on CUDA: until the current stream is ordered after
        it). Raises FastcommError.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Whether the result is in place, or never will be: `wait` knows. Moves the collective
        forward if that takes no waiting.
        """


class Communicator(ProcessBound, abc.ABC):
    """Collectives between `world_size` ranks. All ranks call the same ones in the same order; one
    thread at a time per communicator. Made by fastcomm.init(); a context manager, which closes it,
    or aborts it where an exception other than sys.exit(0) ends the block.

    rank: of this process, from 0 to world_size - 1.
    world_size: how many ranks there are.
    local_rank: this rank's number among those of its host.
    timeout: how long a collective waits for other ranks.
    device: where tensors have to be: torch.device("cpu"), or this rank's CUDA device.
    backend: "shm", "nccl", "group" or "hierarchical". To choose what to do, ask for what follows.
    wire_dtypes: what Reducer(wire_dtype=...) may be here.
    feeds_back_errors: whether Reducer(error_feedback=True) is possible.
    progresses_itself: whether a collective with async_op=True moves also while nobody is inside a
        call.

    Every collective raises MismatchError, PeerLostError or TimeoutError on every rank when it
    cannot be completed, FastcommError after close(), and ValueError or TypeError for a bad argument
    before any peer is involved. Over NCCL an error may be raised by a later call: the host does not
    wait for the device. With async_op=True a collective returns a Work at once, and else None:
    leave the tensors alone until work.wait() has returned, which then raises what has gone wrong.
    Another collective on the same memory would touch it: wait first. For autograd a collective is
    a write to the tensors that it changes: a backward that needs what they held raises torch's
    error.

    A copy of what holds a communicator, such as a model, holds the same one; pickling it raises
    TypeError.
    """

    __slots__ = ()
    instead = ", and call fastcomm.init() where you load it"
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    wire_dtypes: tuple[torch.dtype, ...]
    feeds_back_errors: bool
    progresses_itself: bool
    timeout: timedelta
    # For rebuild(), split(), send() and recv(): a fastcomm.launching.membership.Fixed
    membership: Any = None

    def __copy__(self: C) -> C:
        return self

    def __deepcopy__(self: C, memo: dict[int, Any]) -> C:
        return self

    @property
    @abc.abstractmethod
    def failure(self) -> FastcommError | None:
        """Why it cannot be used any more, as far as this rank knows by now, or None. Asks no
        peer.
        """

    @abc.abstractmethod
    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A flat tensor of `numel` elements on `device`, uninitialised, in memory that this
        transport can reach without a copy: shared memory, or memory of NCCL. It lives as long as
        the tensor. Asks no peer. Raises ValueError for a negative numel, TypeError for a dtype that
        is not reduced, MemoryError.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Work | None:
        """Reduces `tensor` over all ranks, in place. The result has the same bits on every rank.

        tensor: contiguous, on `device`, of any shape; numel and dtype are the same on every rank.
        op: "sum", "mean", "min", "max", "prod", or the same of torch.distributed.ReduceOp. Of
            complex tensors, which all collectives take as pairs of real numbers, sum or mean.

        On the CPU 16-bit floats are added in float32 and rounded once.
        """

    @abc.abstractmethod
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduces many tensors over all ranks, in place, in one collective. For small tensors this
        is faster than an all_reduce of each.

        tensors: each as in all_reduce; of one dtype, and without common memory. The ranks compare
            how many there are, and a checksum of their numbers of elements: different lists of as
            many tensors and elements go unnoticed with a chance of 1 in 2**31. Over NCCL nobody
            compares them, as in all_reduce.

        Results are those of an all_reduce of each: bit for bit over shared memory and "group"; over
        other transports the order of addition may differ.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Work | None:
        """Copies rank `src`'s `tensor` into every other rank's: contiguous, on `device`, of the
        same numel and dtype on every rank.
        """

    @abc.abstractmethod
    def all_gather_single(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work | None:
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel()
        elements. Both are contiguous and of one dtype; inp has the same numel on every rank.
        """

    @abc.abstractmethod
    def reduce_scatter_single(
        self, out: Tensor, inp: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts, in `out`
        of inp.numel() / world_size elements. Both are contiguous and of one dtype. op: as
        all_reduce. Raises ValueError where inp cannot be cut into equal parts.
        """

    @abc.abstractmethod
    def gather(
        self, out: Tensor | None, inp: Tensor, dst: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Concatenates every rank's `inp`, by rank, into `out` of rank `dst`, of world_size *
        inp.numel() elements; out is None on the others. inp and out are as in all_gather_single.
        """

    @abc.abstractmethod
    def scatter(
        self, out: Tensor, inp: Tensor | None, src: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Cuts rank `src`'s `inp`, of world_size * out.numel() elements, into equal parts; rank r
        gets the r-th, in `out`. inp is None on the others. out has the same numel and dtype on
        every rank.
        """

    @abc.abstractmethod
    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Cuts `inp` into a part for each rank, and concatenates in `out` the parts that this rank
        gets, by the rank they come from. Both are contiguous, of one dtype, and share no memory.

        in_splits, out_splits: how many rows (of dimension 0) the part for each rank has, and the
            part that comes from each. None: equal parts. If any rank passes one, every rank does:
            the ranks compare them first, for which this call waits, with async_op, too, and over
            NCCL for the device.

        Raises ValueError where the splits do not fit the tensors, or equal parts are impossible;
        MismatchError where those of two ranks do not fit each other.
        """

    @abc.abstractmethod
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns when every rank has called it; with async_op, `wait` of the Work does."""

    def send(self, tensor: Tensor, dst: int, *, async_op: bool = False) -> Work | None:
        """Passes `tensor` to rank `dst`, which receives it by recv(). The other ranks take no part,
        and collectives do not wait for it.

        tensor: as in broadcast; of the same numel and dtype in the recv(), else MismatchError on
            both ranks.

        What one rank sends to another arrives in the order it was sent in. It returns when the
        other rank has it, or sooner. So two ranks that send to each other at once need async_op for
        one of them; over NCCL the device waits likewise. A message that fails ends what its rank
        sends to that other one, but MismatchError does so over NCCL alone; TimeoutError where there
        is no recv().
        """
        channels = self.membership.channels_of(self)
        work: Work | None = channels.move(self, tensor, self.rank, dst, async_op=async_op)
        return work

    def recv(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """Receives what rank `src` sends to this one, in `tensor`. See send."""
        channels = self.membership.channels_of(self)
        work: Work | None = channels.move(self, tensor, src, self.rank, async_op=async_op)
        return work

    @abc.abstractmethod
    def abandon(self, *, in_any_case: bool = False) -> None:
        """This rank cannot go on with what the ranks were doing: ends all collectives under way, on
        every rank.

        On the others the next collective they wait for, or over NCCL the next call, raises
        AbandonedError, naming this rank. From then on all ranks stand at the same place and the
        communicator is as good as new: over shared memory when this returns, over NCCL when the
        ranks have met anew, at their next collective. A work posted before ends alike on all ranks
        that have posted it: well, or with AbandonedError.

        On every rank all reducers of the communicator drop the step: gradients are None, and a
        set_weight() or skip_step() whose reduction has not come is forgotten.

        One handler may call it after any exception: unless in_any_case, it does nothing where the
        step is abandoned already. The exception that is being handled tells so, or one that it was
        raised from or while handling it: by which this rank has heard of the newest abandonment, or
        which came out of a backward whose round the reducer has abandoned by itself.

        Inside a backward it raises AbandonedError when it is done, as what the backward would go on
        to make is of no use; but not where a hook handles an exception of its own.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends the use of this communicator at once, on this rank and, by PeerLostError, on the
        others. For errors that this rank cannot go on from; see abandon() for one step.
        """

    def rebuild(self, *, timeout: timedelta | None = None) -> Communicator:
        """Brings together anew the remaining ranks, after PeerLostError or TimeoutError, and
        processes that wait in init() to take the place of lost ones. Returns their communicator;
        this one is closed. Every remaining rank calls it, then refresh() of each reducer, and
        catch_up(). Reducer.elastic() does all of this.

        Ranks are numbered anew, in the order in which they were started. It ends as soon as every
        rank has come or is known to be lost.

        timeout: how long to wait for ranks that live and do not come. The others go on without
            these; one that comes later joins the next rebuild(). None: 30 s, or init()'s timeout if
            that is less.

        Raises FastcommError for ranks that have met in a torch.distributed group, or by split();
        InitError where the store they have met at is gone with its host; TimeoutError where ranks
        are lost again and again meanwhile.
        """
        rebuilt: Communicator = self.membership.rebuild(
            self, min(self.timeout, _LONGEST_WAIT) if timeout is None else timeout
        )
        return rebuilt

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Splits the ranks into parts, each with a communicator of its own, as MPI_Comm_split does.
        Collective; this communicator stays as it is, and each is closed by itself.

        color: of the part that this rank belongs to. None: to none, and it gets None.
        key: ranks of a part are numbered in the order of their keys; those with equal ones, in the
            order that they have here.

        A part uses shared memory where its ranks share a host, also where this communicator goes
        across hosts. Raises TypeError, on every rank, for what is no integer; InitError, on the
        ranks of the part, where they cannot be brought together.
        """
        part: Communicator | None = self.membership.split(self, color, key)
        return part

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the use of this communicator on this rank; peers that still wait for it get
        PeerLostError. May be called twice.
        """

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or (isinstance(value, SystemExit) and not value.code):
            self.close()
        else:
            self.abort()
