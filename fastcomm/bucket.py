"""One bucket: a flat buffer, the gradients that are views of it, how many of them are ready, its launch and its completion."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.communicator import BoundBucket, BucketWork, Communicator
from fastcomm.errors import FastcommError
from fastcomm.hook_bucket import HookedBucket, HookedPlace
from fastcomm.layout import BucketLayout


class Bucket:
    """Gradients that are reduced together. Between two rounds every gradient that exists may be a view of `flat`, or the user's own."""

    def __init__(
        self,
        label: int,
        layout: BucketLayout,
        parameters: list[Parameter],
        names: list[str],
        comm: Communicator,
        wire_dtype: torch.dtype | None,
        lane: int,
        hooked: HookedPlace | None,
    ) -> None:
        own = [parameters[slot.index] for slot in layout.slots]
        # The hooks on the parameters keep the reducer and its buckets alive; Python could not collect a circle through them.
        self._references = [weakref.ref(parameter) for parameter in own]
        self.names = [names[slot.index] for slot in layout.slots]
        self.indices = [slot.index for slot in layout.slots]
        self.dtype = own[0].dtype
        numel = layout.numel + len(own)  # behind the gradients the ranks tell each other which of them they have
        if wire_dtype is None or wire_dtype == self.dtype:
            self.flat = comm.empty(numel, dtype=self.dtype).zero_()
        else:  # the gradients keep their dtype; what travels is a copy in the other one
            self.flat = torch.zeros(numel, dtype=self.dtype, device=comm.device)
        offsets = [slot.offset for slot in layout.slots]
        self.views = [_view(self.flat, offset, p) for offset, p in zip(offsets, own, strict=True)]
        self._bound: BoundBucket
        if hooked is None:
            self._bound = comm.bind_bucket(self.flat, self.views, offsets, wire_dtype=wire_dtype, label=label, lane=lane)
        else:
            self._bound = HookedBucket(comm, hooked, self.flat, self.views)
        self.note_stream = self._bound.note_stream
        self._has_streams = comm.has_streams
        self._work: BucketWork | None = None
        # Gradients of parameters that got none in this backward, kept in case no other rank has got one either.
        self._untouched: dict[int, Tensor | None] = {}
        # The hooks hold `ready` itself. By slot: has this backward produced the gradient; has one under no_sync, since the last reduction.
        self.ready = [False] * len(layout.slots)
        self.unsynced = [False] * len(layout.slots)
        self.n_pending = len(layout.slots)

    @property
    def parameters(self) -> list[Parameter | None]:
        """By slot. None stands for a parameter that is gone, with its model."""
        return [reference() for reference in self._references]

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    def launch(self, op: str) -> None:
        """Moves the gradients into the flat buffer, of which they are views from here on, and starts its reduction."""
        taking_part = self.parameters
        if self.n_pending:
            taking_part = [p if self.ready[i] or self.unsynced[i] else None for i, p in enumerate(taking_part)]
        missing = self._gather(taking_part)
        for i in missing:
            self._fill_missing(i)
        self._work = self._bound.launch(op, missing)

    def _gather(self, taking_part: list[Parameter | None]) -> list[int]:
        try:
            return self._bound.gather(taking_part)
        except RuntimeError as error:
            for name, parameter in zip(self.names, self.parameters, strict=True):
                if parameter is not None and parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise FastcommError(f"the gradient of parameter {name} is sparse, which cannot be reduced: use sparse=False") from error
            raise

    def _fill_missing(self, i: int) -> None:
        """A parameter without a new gradient takes part with the one it has, or with zeros."""
        parameter = self._references[i]()
        gradient = None if parameter is None else parameter.grad
        self._untouched[i] = None if gradient is None else gradient.clone() if gradient is self.views[i] else gradient
        if gradient is None:
            self.views[i].zero_()
        elif gradient is not self.views[i]:
            self.views[i].copy_(gradient)

    def finish(self) -> None:
        """Waits for the reduction. Raises FastcommError, naming the parameters."""
        if self._work is None:
            raise RuntimeError("finish() before launch()")
        try:
            self._work.wait()
        except FastcommError as error:
            raise type(error)(f"{error}; the bucket holds the gradients of {self.names[0]} ... {self.names[-1]}") from error

    def settle_missing(self) -> None:
        """Gives the parameters that had no gradient here the mean if some rank had one, and what they had before if none had."""
        if self._work is None or not self._untouched:
            return
        is_present = self._work.present()
        for i, before in self._untouched.items():
            parameter = self._references[i]()
            if parameter is None:
                continue
            if is_present[i]:
                parameter.grad = self.views[i]
            elif before is not None and parameter.grad is self.views[i]:
                self.views[i].copy_(before)

    def square_sum(self) -> Tensor | None:
        """Of all gradients, as a float64 scalar on the device, without a launch for each. None where the transport does not count, or a
        gradient is not in the flat buffer."""
        return self._bound.square_sum() if self._holds_all() else None

    def n_nonfinite(self) -> Tensor | None:
        """How many elements the last round has left infinite or NaN, as an int64 scalar; None as above."""
        return self._bound.n_nonfinite() if self._holds_all() else None

    def _holds_all(self) -> bool:
        return self._has_streams and all(p is None or p.grad is view for p, view in zip(self.parameters, self.views, strict=True))

    def scale_(self, factor: Tensor) -> None:
        """Multiplies all gradients, which must lie in the flat buffer, by a scalar on the device."""
        self.flat[: -len(self.views)].mul_(factor)

    def reset(self) -> None:
        """Makes the bucket ready for the next backward."""
        self._work = None
        self._untouched.clear()
        n = len(self.views)
        self.ready[:] = [False] * n
        self.unsynced[:] = [False] * n
        self.n_pending = n

    def drop_gradients(self) -> None:
        """Leaves the parameters without gradients."""
        for parameter in self.parameters:
            if parameter is not None:
                parameter.grad = None

    def release(self) -> None:
        """Gives the parameters gradients of their own, so that the flat buffer can go."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter is not None and parameter.grad is view:
                parameter.grad = view.clone()


def _view(flat: Tensor, offset: int, parameter: Parameter) -> Tensor:
    """A tensor on flat's memory with the layout autograd gives to the parameter's gradient: its strides where it is dense."""
    strides = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    # set_ and not a slice: as an autograd view the gradient would refuse detach_(), which users and optimizers call.
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), offset, parameter.size(), strides)
