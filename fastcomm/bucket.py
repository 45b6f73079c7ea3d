"""One bucket: a flat buffer, the gradients that are views of it, how many of them are ready, its launch and its completion."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.communicator import BucketWork, Communicator
from fastcomm.errors import FastcommError
from fastcomm.layout import BucketLayout

# Flags that a rank launches a bucket with; after the reduction every rank sees the or of all ranks' flags.
MISSING = 1  # a parameter of this bucket got no gradient on some rank
ABANDONED = 2  # some rank's backward ended with an exception: the gradients are of no use


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
    ) -> None:
        self.label = label
        self.parameters = [parameters[slot.index] for slot in layout.slots]
        self.names = [names[slot.index] for slot in layout.slots]
        self.indices = [slot.index for slot in layout.slots]
        self.dtype = self.parameters[0].dtype
        self.nbytes = layout.numel * self.dtype.itemsize
        if wire_dtype is None or not self.dtype.is_floating_point or wire_dtype == self.dtype:
            self.flat = comm.empty(layout.numel, dtype=self.dtype).zero_()
            self._wire = self.flat
        else:  # the gradients keep their dtype; what travels is a copy in the other one
            self.flat = torch.zeros(layout.numel, dtype=self.dtype, device=comm.device)
            self._wire = comm.empty(layout.numel, dtype=wire_dtype).zero_()
        self._offsets = [slot.offset for slot in layout.slots]
        self.views = [_view(self.flat, offset, p) for offset, p in zip(self._offsets, self.parameters, strict=True)]
        self._comm = comm
        self._work: BucketWork | None = None
        # Gradients of parameters that got none in this backward, kept in case no other rank has got one either.
        self._untouched: dict[int, Tensor | None] = {}
        # By slot: has this backward produced the gradient; has one under no_sync, since the last reduction.
        self.ready = [False] * len(layout.slots)
        self.unsynced = [False] * len(layout.slots)
        self.n_pending = len(layout.slots)

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    def launch(self, op: str) -> None:
        """Moves the gradients into the flat buffer and starts its reduction. From here on they are views of it."""
        gradients: list[Tensor] = []
        offsets: list[int] = []
        views = self.views
        flags = 0
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if not self.ready[i] and not self.unsynced[i] or gradient is None:
                self._fill_missing(i, gradient)
                flags = MISSING
                continue
            if gradient is views[i]:
                continue
            if gradient.dtype is self.dtype and gradient.stride() == views[i].stride() and self._wire is self.flat:
                gradients.append(gradient)
                offsets.append(self._offsets[i])
            else:
                views[i].copy_(gradient)
            parameter.grad = views[i]
        if self._wire is not self.flat:
            self._wire.copy_(self.flat)
        self._work = self._comm.launch_bucket(self._wire, gradients, offsets, op=op, label=self.label, flags=flags)

    def _fill_missing(self, i: int, gradient: Tensor | None) -> None:
        """A parameter without a new gradient takes part with the one it has, or with zeros."""
        self._untouched[i] = None if gradient is None else gradient.clone() if gradient is self.views[i] else gradient
        if gradient is None:
            self.views[i].zero_()
        elif gradient is not self.views[i]:
            self.views[i].copy_(gradient)

    def launch_abandoned(self, op: str) -> None:
        """Launches the bucket only because the other ranks expect it. Its contents are garbage afterwards."""
        self._work = self._comm.launch_bucket(self._wire, [], [], op=op, label=self.label, flags=ABANDONED)

    def finish(self) -> int:
        """Waits for the reduction. Returns the or of all ranks' flags. Raises FastcommError, naming the parameters."""
        if self._work is None:
            raise RuntimeError("finish() before launch()")
        try:
            self._work.wait()
        except FastcommError as error:
            raise type(error)(f"{error}; the bucket holds the gradients of {self.names[0]} ... {self.names[-1]}") from error
        if self._wire is not self.flat:
            self.flat.copy_(self._wire)
        return self._work.flags

    def settle_missing(self, is_present: list[int]) -> None:
        """Gives the parameters that had no gradient here the mean if some rank had one, and what they had before if none had.

        is_present: by parameter index, whether any rank has produced a gradient.
        """
        for i, before in self._untouched.items():
            if is_present[self.indices[i]]:
                self.parameters[i].grad = self.views[i]
            elif before is not None and self.parameters[i].grad is self.views[i]:
                self.views[i].copy_(before)

    def missing(self) -> list[int]:
        """Indices of the parameters that took part without a gradient of their own."""
        return [self.indices[i] for i in self._untouched]

    def reset(self) -> None:
        """Makes the bucket ready for the next backward."""
        self._work = None
        self._untouched.clear()
        n = len(self.parameters)
        self.ready[:] = [False] * n
        self.unsynced[:] = [False] * n
        self.n_pending = n

    def release(self) -> None:
        """Gives the parameters gradients of their own, so that the flat buffer can go."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()


def _view(flat: Tensor, offset: int, parameter: Parameter) -> Tensor:
    """A tensor on flat's memory with the layout autograd gives to the parameter's gradient: its strides where it is dense."""
    strides = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    # set_ and not a slice: as an autograd view the gradient would refuse detach_(), which users and optimizers call.
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), offset, parameter.size(), strides)
