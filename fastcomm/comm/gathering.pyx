# cython: language_level=3
"""GatheringBucket: the base of buckets that take gradients from where autograd has put them, by
their addresses. Says which gradients are missing, which are in place already, and which torch has
to copy; how the others are moved, and when, is the transport's. CopiedGradients is for transports
that only copy. UsedMask: by which the ranks tell each other what is missing.
"""

import torch

from fastcomm.comm.collective import is_readable, used_values, without_memory
from fastcomm.comm.words import OTHERS_GRADIENT
from fastcomm.errors import FastcommError

from fastcomm.comm.flat_buffers cimport FlatBuffer, is_in_a_flat_buffer
from fastcomm.comm.gradient_slot cimport GradientSlot

cdef int MAX_KNOWN = 16


cdef class UsedMask:
    """The last elements of a bucket, one for each gradient, which say whether some rank has it."""

    def __cinit__(self, elements, dtype, int divisor):
        """dtype: of the gradients. divisor: what a mean is divided by as they are gathered."""
        self.elements, self.dtype, self.divisor, self.known = elements, dtype, divisor, {}

    cdef object own(self, str op, tuple missing):
        """The values that this rank contributes."""
        own = self.known.get((op, missing))
        if own is None:
            if missing:
                self.own(op, ())  # so that it is there when a graph is captured
            if len(self.known) > MAX_KNOWN:  # a new pattern in every step
                self.known = {key: known for key, known in self.known.items() if not key[1]}
            absent, present = used_values(op)
            values = [present * (self.divisor if op == "mean" else 1)] * self.elements.numel()
            for i in missing:
                values[i] = absent
            host = torch.tensor(
                values, dtype=self.dtype, device="cpu", pin_memory=self.elements.is_cuda
            )
            own = self.known[op, missing] = host.to(self.elements.device, non_blocking=True)
        return own

    cpdef fill(self, str op, list missing):
        """Writes what this rank contributes."""
        self.elements.copy_(self.own(op, tuple(missing)))

    cpdef list present(self, op):
        """Whether some rank has a gradient, by view. Waits for the device."""
        absent, _ = used_values(op)
        return (self.elements.float() != absent).tolist()


cdef class GatheringBucket:
    """A flat buffer and the slots of the gradients in it. Call set_up() first."""

    cdef int set_up(self, flat, list views, wire, int divisor=1) except -1:
        """views: on the memory of `flat`, one for each gradient. wire: `flat`, or what the used
        mask lies in. divisor: see UsedMask.
        """
        self.flat, self.views, self.known = flat, views, FlatBuffer(flat)
        self.used_mask = UsedMask(wire[wire.numel() - len(views):], flat.dtype, divisor)
        self.slots = [GradientSlot(view) for view in views]
        return 0

    cdef list gather_gradients(self, list parameters):
        """The loop of BoundBucket.gather: calls move() for each gradient that is to be moved."""
        cdef list left = []
        cdef GradientSlot slot
        cdef char *source = NULL
        cdef Py_ssize_t i
        cdef bint is_fit, is_in_slot
        for i in range(len(parameters)):
            parameter, view = parameters[i], self.views[i]
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                left.append(i)
            elif gradient is not view:
                slot = self.slots[i]
                try:
                    # first: while the parameter has it, torch answers in half the time
                    is_fit = slot.fits(gradient, &source)
                    # before it is moved: torch refuses it if the parameter's data has been replaced
                    parameter.grad = view
                    is_in_slot = source == slot.address
                    if not is_in_slot and is_in_a_flat_buffer(source):
                        raise FastcommError(OTHERS_GRADIENT)
                    if not is_fit:
                        if not is_readable(gradient):
                            raise FastcommError(without_memory(gradient))
                        view.copy_(gradient.clone() if is_in_slot else gradient)
                        self.note_copied(gradient)
                    elif not is_in_slot:  # else it is the user's own tensor on our memory, or empty
                        self.move(i, gradient, source)
                except BaseException as error:
                    parameter.grad, error.slot = gradient, i
                    raise
        return left

    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1:
        """Moves the gradient at `source`, which fits its slot, now or in the launch."""
        raise NotImplementedError

    cdef int note_copied(self, gradient) except -1:
        """torch has been told to copy this gradient to its slot."""
        return 0


cdef class CopiedGradients(GatheringBucket):
    """Copies gradients to `views`, on the memory of `flat`."""

    def __init__(self, flat, list views):
        self.set_up(flat, views, flat)

    def gather(self, list parameters):
        """See BoundBucket.gather."""
        return self.gather_gradients(parameters)

    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1:
        self.views[i].copy_(gradient)
        return 0
