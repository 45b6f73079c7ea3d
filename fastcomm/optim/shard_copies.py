"""ShardCopies: while elastic() runs, each rank keeps a copy of another rank's shards, so that the
ranks can go on when one is lost.

After every step each rank packs its shards, parameters and state, and sends a copy to another rank,
on another host if possible. A step counts, on all ranks, once all have their copies; until then
each keeps those of the step before, so that all can go back to it. When the ranks have met anew,
they put together the last step that counted.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.comm.objects import called_by, gather_objects, on_host, tellable
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.launching.bootstrap import host_identity
from fastcomm.optim.checkpoints import State, empty_like, is_cut
from fastcomm.reducer.layout import in_memory_order, strides_of

_CALL = "elastic()"
_ALIGNMENT = 16  # bytes
_VALUES = ""  # the key of the parameter's own elements, beside those of its state


class Kept(NamedTuple):
    """What this rank has of one parameter: its elements [begin, end), and their state.

    number: the parameter's, among those of the optimizer.
    """

    number: int
    begin: int
    end: int
    parameter: Parameter
    state: State


@tellable
class KeptTensor(NamedTuple):
    """A tensor in a copy.

    is_cut: whether it is cut between ranks as the parameter is.
    is_on_host: whether it lies on the CPU, as torch's step counts do for parameters anywhere.
    """

    key: str
    dtype: torch.dtype
    shape: list[int]
    is_cut: bool
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        """With padding."""
        numel = torch.Size(self.shape).numel()
        return -(-numel * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@tellable
class Contents(NamedTuple):
    """What a copy has of one parameter. plain: the values in its state that are not tensors."""

    number: int
    begin: int
    end: int
    tensors: list[KeptTensor]
    plain: dict[str, Any]

    @staticmethod
    def of(kept: Kept) -> Contents:
        tensors = [
            KeptTensor(
                *(key, value.dtype, list(value.shape), is_cut(key, value, kept.parameter)),
                value.is_cpu,
            )
            for key, value in _tensors_of(kept)
        ]
        plain = {k: value for k, value in kept.state.items() if not isinstance(value, Tensor)}
        return Contents(kept.number, kept.begin, kept.end, tensors, plain)


def _tensors_of(kept: Kept) -> list[tuple[str, Tensor]]:
    tensors = [pair for pair in kept.state.items() if isinstance(pair[1], Tensor)]
    return [(_VALUES, kept.parameter.detach()), *tensors]


@tellable
class Moment(NamedTuple):
    """Identifies copies that all ranks have made together. Later ones are greater.

    meeting: the number of the communicator's. number: of the copies, among those made there.
    n_ranks: how many ranks the communicator has.
    """

    meeting: int
    number: int
    n_ranks: int


class _Copy:
    """One rank's shards at one moment, packed."""

    def __init__(self, contents: list[Contents], comm: Transport) -> None:
        self.contents = contents
        sizes = [tensor.nbytes for one in contents for tensor in one.tensors]
        self._offsets = list(accumulate(sizes, initial=0))
        self.data = comm.empty(self._offsets[-1], dtype=torch.uint8)
        self._targets: list[Tensor] = []  # where pack() writes

    def pack(self, kept: Sequence[Kept]) -> None:
        tensors = [(one.parameter, value) for one in kept for _, value in _tensors_of(one)]
        if not self._targets:
            self._targets = [
                _lay_out(segment, tensor, parameter)
                for (_, tensor, segment), (parameter, _) in zip(
                    self.segments(), tensors, strict=True
                )
            ]
        if tensors:
            torch._foreach_copy_(self._targets, [value for _, value in tensors])

    def segments(self) -> list[tuple[Contents, KeptTensor, Tensor]]:
        """Each tensor's elements: of one that is cut, in the order of the parameter's memory."""
        tensors = [(one, tensor) for one in self.contents for tensor in one.tensors]
        found = []
        for (one, tensor), begin in zip(tensors, self._offsets, strict=False):
            nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
            found.append((one, tensor, self.data[begin : begin + nbytes].view(tensor.dtype)))
        return found


def _lay_out(segment: Tensor, tensor: KeptTensor, parameter: Parameter) -> Tensor:
    """A view on the segment, of the shape of what is packed there."""
    if not tensor.is_cut:
        return segment.view(tensor.shape)
    return segment.as_strided(parameter.size(), strides_of(parameter))


@tellable
class Told(NamedTuple):
    """What a rank tells the others of its copies.

    counted: the moment of the last step that counts; None: no step has counted.
    contents: of each copy, by moment and rank at that moment.
    has_state: whether this rank's pieces have state.
    """

    counted: Moment | None
    contents: dict[tuple[Moment, int], list[Contents]]
    has_state: bool


class ShardCopies:
    """The copies that one ShardedOptimizer keeps: its own shards' and another rank's."""

    def __init__(self) -> None:
        self._counted: Moment | None = None  # of the last step that counts, if one does
        self._has_state = False  # whether this rank's pieces have any
        self._held: dict[tuple[Moment, int], _Copy] = {}  # by moment and rank at that moment
        self._spare: list[_Copy] = []  # memory that the next copies take
        self._contents: list[list[Contents]] = []  # by rank, as of the last copies
        self._ring: list[int] = []  # each rank's copy is on the next one

    def keep(self, comm: Transport, kept: Sequence[Kept]) -> None:
        """Makes the copies of this step, which counts when this returns. Collective."""
        self._has_state = any(one.state for one in kept)
        with called_by(_CALL):
            moment = self._begin(comm, [Contents.of(one) for one in kept])
            packed = self._room(self._contents[comm.rank], comm)
            packed.pack(kept)
            self._held[moment, comm.rank] = packed
            if comm.world_size > 1:
                place = self._ring.index(comm.rank)
                src, dst = self._ring[place - 1], self._ring[(place + 1) % comm.world_size]
                copy = self._room(self._contents[src], comm)
                _pass_on(comm, packed.data, dst, copy.data, src)
                self._held[moment, src] = copy
            comm.barrier()  # all have theirs
        self._counted = moment
        self._spare = [copy for (when, _), copy in self._held.items() if when != moment]
        self._held = {key: copy for key, copy in self._held.items() if key[0] == moment}

    def _begin(self, comm: Transport, own: list[Contents]) -> Moment:
        """Agrees with the other ranks on when this is, and lets all know what the copies have,
        where that has changed.
        """
        meeting, last = comm.membership.number, self._counted
        is_first = last is None or last.meeting != meeting
        has_changed = is_first or not _are_alike(self._contents[comm.rank], own)
        number = 0 if last is None or is_first else last.number + 1
        vote = torch.tensor([has_changed, number], dtype=torch.int64, device=comm.device)
        comm.all_reduce(vote, "max")
        has_changed, number = on_host(comm, vote).tolist()
        if has_changed:
            told = gather_objects(comm, (own, host_identity()), _CALL)
            self._contents = [contents for contents, _ in told]
            self._ring = _across_hosts([host for _, host in told])
        return Moment(meeting, number, comm.world_size)

    def _room(self, contents: list[Contents], comm: Transport) -> _Copy:
        """Reuses the memory of the copy before the last, unless the contents have changed: then
        _begin() has made other lists of them.
        """
        for copy in self._spare:
            if copy.contents is contents:
                self._spare.remove(copy)
                return copy
        return _Copy(contents, comm)

    def put_together(
        self, comm: Transport, parameters: Sequence[Parameter]
    ) -> dict[Parameter, State]:
        """When the ranks have met anew: gives every rank the parameters as they were when the last
        step counted, and returns their whole states. Collective, also for ranks without copies.
        Changes nothing where nobody has any, or no step was made. Raises FastcommError, on every
        rank, where both a rank and the one that has its copy are lost.

        parameters: the optimizer's, in the order of their numbers.
        """
        contents = {key: copy.contents for key, copy in self._held.items()}
        own = Told(self._counted, contents, self._has_state)
        told: list[Told] = gather_objects(comm, own, _CALL)
        last = max((one.counted for one in told if one.counted is not None), default=None)
        if last is None:
            if any(one.has_state for one in told):
                raise FastcommError(
                    "a rank was lost before the ranks' shards had their first copies: load a "
                    "checkpoint on every rank"
                )
            return {}  # no rank has made a step: all still have what they began with
        whole: dict[Parameter, State] = {}
        for rank, holder in enumerate(_holders(last, [one.contents for one in told])):
            if holder == comm.rank:
                copy = self._held[last, rank]
            else:
                copy = _Copy(told[holder].contents[last, rank], comm)
            if copy.data.numel():
                comm.broadcast(copy.data, holder)
            _unpack(copy, parameters, whole)
        self._counted = last  # there are copies of no later step that counts
        return {parameter: state for parameter, state in whole.items() if state}


def _are_alike(one: object, other: object) -> bool:
    try:
        return one == other
    except RuntimeError:  # of tensors in a list, which have no single truth
        return False


def _across_hosts(hosts: Sequence[str]) -> list[int]:
    """The ranks in an order in which those of one host follow each other only if they must."""
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return sorted(range(len(hosts)), key=lambda rank: (places[rank], rank))


def _pass_on(comm: Transport, data: Tensor, dst: int, copy: Tensor, src: int) -> None:
    sent, received = [0] * comm.world_size, [0] * comm.world_size
    sent[dst], received[src] = data.numel(), copy.numel()
    comm.all_to_all_single(copy, data, received, sent)


def _holders(last: Moment, by_rank: Sequence[Container[tuple[Moment, int]]]) -> list[int]:
    """Who has each former rank's copy of that moment. by_rank: what each has."""
    holders = []
    for former in range(last.n_ranks):
        having = [rank for rank, keys in enumerate(by_rank) if (last, former) in keys]
        if not having:
            raise FastcommError(
                f"the shards of rank {former} are lost, and so is the rank that had a copy of "
                "them: make the ShardedOptimizer anew, and load a checkpoint, on every rank"
            )
        holders.append(having[0])
    return holders


def _add_plain(one: Contents, state: State) -> None:
    """Raises FastcommError, on every rank, where ranks that step one parameter have different
    values: such as lists of tensors, each of its own elements.
    """
    for key, value in one.plain.items():
        if not _are_alike(state.setdefault(key, value), value):
            raise FastcommError(
                f"the state {key!r} of parameter {one.number} of the ShardedOptimizer differs "
                "between the ranks that step it, and cannot be put together: make the optimizer "
                "with elementwise=False, and load a checkpoint, on every rank"
            )


@torch.no_grad()
def _unpack(copy: _Copy, parameters: Sequence[Parameter], whole: dict[Parameter, State]) -> None:
    """Adds to the whole states what a copy has, and gives the parameters its elements."""
    for one in copy.contents:
        _add_plain(one, whole.setdefault(parameters[one.number], {}))
    for one, tensor, segment in copy.segments():
        parameter = parameters[one.number]
        state = whole[parameter]
        if tensor.key == _VALUES:
            in_memory_order(parameter)[one.begin : one.end].copy_(segment)
        elif not tensor.is_cut:
            device = "cpu" if tensor.is_on_host else segment.device
            state[tensor.key] = segment.view(tensor.shape).to(device, copy=True)
        else:
            if tensor.key not in state:
                state[tensor.key] = empty_like(parameter, tensor.dtype)
            in_memory_order(state[tensor.key])[one.begin : one.end].copy_(segment)
