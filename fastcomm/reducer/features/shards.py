"""What a reducer has of the ShardedOptimizer that steps its model: for each bucket a BucketShard,
which is what this rank steps of it.

The parameters of a bucket lie in a flat buffer, as their gradients do, and both are cut alike: rank
r has [bounds[r], bounds[r + 1]). Keeps no parameter alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fastcomm.comm.communicator import Work
from fastcomm.comm.gradient_slot import GradientSlot
from fastcomm.comm.objects import naming
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.layout import BucketLayout, equal_shards, view_of, whole_shards


@dataclass(frozen=True)
class Sharding:
    """keeps_gradients: every rank gets all reduced gradients, in .grad, and not its shards only.
    cuts: a parameter may be cut, and have elements on several ranks.
    """

    keeps_gradients: bool
    cuts: bool

    def bounds(self, layouts: Sequence[BucketLayout], n: int) -> list[tuple[int, ...]]:
        """Cuts every bucket into shards of n ranks: their bounds."""
        if not self.cuts:
            loads = [0] * n
            return [whole_shards(layout, loads) for layout in layouts]
        return [equal_shards(layout.numel, layout.dtype.itemsize, n) for layout in layouts]


class Piece(NamedTuple):
    """A parameter's elements in a rank's shard: [begin, end), in the order of its memory.

    parameter: on the memory of these elements; what the optimizer steps. It has the whole
        parameter's shape if that is not cut, and else one dimension.
    gradient: of the same shape, on the reduced gradient.
    """

    begin: int
    end: int
    parameter: Parameter
    gradient: Tensor


class BucketShard:
    """One rank's shard of one bucket. Moves the bucket's parameters into a flat buffer.

    bounds: of all ranks' shards. label: the bucket's.
    """

    def __init__(
        self,
        comm: Transport,
        sharding: Sharding,
        bounds: tuple[int, ...],
        bucket: Bucket,
        label: int,
    ) -> None:
        self._comm, self._label = comm, label
        self._bounds, self._geometries = bounds, bucket.geometries
        self.keeps_gradients = sharding.keeps_gradients
        self.is_pending = False  # holds gradients that were neither stepped nor dropped
        self._are_stepped: list[bool] = []  # by slot: whether the next step writes to the parameter
        self._flat = comm.empty(bounds[-1], dtype=bucket.dtype).zero_()
        self._views = [self._view(i) for i in range(len(self._geometries))]
        self._slots = [GradientSlot(view) for view in self._views]
        self._elsewhere: list[int] = []  # slots of parameters that get a copy of each step
        self.pieces: list[Piece | None] = []  # by slot
        for i, (_, parameter) in enumerate(bucket.named_parameters()):
            self._take_in(i, parameter, parameter.detach())
            self.pieces.append(self._piece(i, bucket.flat, parameter.requires_grad))

    def _view(self, i: int) -> Tensor:
        return view_of(self._flat, *self._geometries[i])

    def _take_in(self, i: int, parameter: Parameter, values: Tensor) -> None:
        """Copies a parameter's values to its slot, and moves the parameter there, unless other
        processes read it where it is.
        """
        self._views[i].copy_(values)
        if not _is_shared(parameter):
            # Not the view itself: share_memory_() moves all tensors of a storage together.
            parameter.data = self._view(i)

    def _piece(self, i: int, gradients: Tensor, requires_grad: bool) -> Piece | None:
        span = self.spans(i).get(self._comm.rank)
        if span is None:
            return None
        begin, end = span
        offset, size, strides = self._geometries[i]
        if end - begin < size.numel():
            size, strides = torch.Size([end - begin]), (1,)
        parameter = view_of(self._flat, offset + begin, size, strides)
        gradient = view_of(gradients, offset + begin, size, strides)
        return Piece(begin, end, Parameter(parameter, requires_grad), gradient)

    def spans(self, i: int) -> dict[int, tuple[int, int]]:
        """By rank, which of the i-th parameter's elements lie in its shard: [begin, end). One
        without elements is rank 0's.
        """
        offset, size, _ = self._geometries[i]
        numel = size.numel()
        if not numel:
            return {0: (0, 0)}
        cuts = [min(max(bound - offset, 0), numel) for bound in self._bounds]
        spans = zip(cuts, cuts[1:], strict=False)
        return {rank: span for rank, span in enumerate(spans) if span[0] < span[1]}

    def refuse_pending(self) -> None:
        """Raises FastcommError where another round would overwrite gradients."""
        if self.is_pending:
            raise FastcommError(
                "the reduced gradients of the last backward were neither stepped nor dropped, and "
                "a ShardedOptimizer holds one set of them: to accumulate, run the earlier "
                "backwards in no_sync(), or make it with keep_gradients=True; to drop them, call "
                "its zero_grad()"
            )

    def take_round(self, bucket: Bucket) -> None:
        """A round has ended: the shard holds the reduced gradients of the parameters whose .grad is
        one of the views. Takes those, unless every rank keeps its gradients. May be called again
        after a signal handler has raised in it.
        """
        if self.keeps_gradients:
            return
        slots = list(zip(bucket.parameters, bucket.views, self.pieces, strict=True))
        if not self.is_pending:
            self._are_stepped = []
            for parameter, view, piece in slots:
                is_present = parameter is not None and parameter.grad is view
                self._are_stepped.append(is_present)
                if piece is not None:
                    piece.parameter.grad = piece.gradient if is_present else None
        self.is_pending = True
        for parameter, view, _ in slots:
            if parameter is not None and parameter.grad is view:
                parameter.grad = None

    def refuse_refresh(self, bucket: Bucket, has_state: bool) -> None:
        """Raises FastcommError for gradients that would be lost, and naming a parameter of another
        shape or dtype than its state.
        """
        if self.is_pending:
            raise FastcommError(
                "refresh() would lose the gradients that the ShardedOptimizer holds: call its "
                "step() or zero_grad() first"
            )
        for name, parameter, view in zip(bucket.names, bucket.parameters, self._views, strict=True):
            if has_state and parameter is not None and not _are_alike(parameter, view):
                raise FastcommError(
                    f"parameter {name} is {_shown(parameter)}, and was {_shown(view)} when the "
                    "ShardedOptimizer stepped it, whose state does not fit: call detach() and "
                    "attach(model), and make the optimizer anew, on every rank"
                )

    def begin_step(self, bucket: Bucket) -> None:
        """Gives the pieces their gradients, if they do not have them yet. Raises FastcommError
        naming a parameter with a gradient that no round has reduced, or of another shape or dtype
        than the piece's.
        """
        parameters = bucket.parameters
        self._elsewhere = []
        if self.keeps_gradients:
            self._are_stepped = [p is not None and p.grad is not None for p in parameters]
        for i, parameter in enumerate(parameters):
            if parameter is not None and not self._slots[i].holds(parameter):
                self._take_back(i, bucket.names[i], parameter)
        if self.keeps_gradients:
            bucket.gather_elsewhere()
        for i, (parameter, piece) in enumerate(zip(parameters, self.pieces, strict=True)):
            gradient = None if parameter is None else parameter.grad
            if self.keeps_gradients:
                if piece is not None:
                    piece.parameter.grad = None if gradient is None else piece.gradient
            elif gradient is not None:
                raise FastcommError(
                    f"the gradient of parameter {bucket.names[i]} is this rank's own: a "
                    "ShardedOptimizer steps reduced ones. Run the last backward before step() "
                    "outside no_sync(), or call reducer.reduce() on every rank"
                )
        # the optimizer writes to pieces, of which autograd knows nothing
        stepped = zip(parameters, self._are_stepped, strict=False)
        increment_version([p for p, is_stepped in stepped if p is not None and is_stepped])

    def _take_back(self, i: int, name: str, parameter: Parameter) -> None:
        """The values lie elsewhere: after parameter.data = ..., as when averaged weights are
        swapped in, or after share_memory_(), which a process that is given the model calls.
        """
        view = self._views[i]
        if not _are_alike(parameter, view):
            raise FastcommError(
                f"parameter {name} is {_shown(parameter)}, and was {_shown(view)} when its "
                "ShardedOptimizer was made: call refresh() on every rank after changing it"
            )
        # cloned, since p.data = p.data.t() leaves them on the view's own memory
        self._take_in(i, parameter, parameter.detach().clone())
        if not self._slots[i].holds(parameter):
            self._elsewhere.append(i)

    def end_step(self, bucket: Bucket) -> None:
        """Copies the new values to parameters that stay where other processes read them."""
        if self._elsewhere:
            parameters = bucket.parameters
            for i in self._elsewhere:
                parameter = parameters[i]
                if parameter is not None:
                    parameter.detach().copy_(self._views[i])

    def drop(self) -> None:
        """Leaves the pieces without gradients."""
        self.is_pending, self._are_stepped = False, []
        for piece in self.pieces:
            if piece is not None:
                piece.parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The reduced gradients in this rank's shard."""
        grads = [None if piece is None else piece.parameter.grad for piece in self.pieces]
        return [gradient for gradient in grads if gradient is not None]

    def part_of(self, flat: Tensor) -> Tensor:
        """The elements of a tensor cut alike that are in this rank's shard."""
        return flat[self._bounds[self._comm.rank] : self._bounds[self._comm.rank + 1]]

    def spread(self) -> Work:
        """Copies this rank's shard of the parameters to the other ranks, and theirs to this one."""
        self._comm.make_window(self._flat, label=self._label)
        return self._comm.all_gather_v(self._flat, self._bounds, label=self._label)

    def release(self, parameters: Sequence[Parameter | None]) -> None:
        """Gives the parameters memory outside the flat buffer, so that it can go."""
        for parameter in parameters:
            if parameter is not None and not _is_shared(parameter):
                parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)


class StepBarrier:
    """A barrier of a ShardedOptimizer's steps, which no barrier of the user's meets."""

    def __init__(self, comm: Transport) -> None:
        self._comm = comm
        self._token = comm.empty(comm.world_size, dtype=torch.float32).zero_()
        self._bounds = tuple(range(comm.world_size + 1))

    def wait(self) -> None:
        """Returns when all ranks have called it. Raises as every collective."""
        with naming("ShardedOptimizer.step()"):
            self._comm.all_gather_v(self._token, self._bounds).wait()


def _is_shared(parameter: Tensor) -> bool:
    """Whether other processes may have the parameter's memory, as torch.multiprocessing does it."""
    return parameter.is_cpu and parameter.is_shared()


def _are_alike(parameter: Tensor, view: Tensor) -> bool:
    return parameter.shape == view.shape and parameter.dtype == view.dtype


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
