# cython: language_level=3
"""GatheringBucket: the base of buckets that take gradients from where autograd has put them, by
their addresses. Says which gradients are missing, which are in place already, and which torch has
to copy; how the others are moved, and when, is the transport's. CopiedGradients is for transports
that only copy.
"""

from fastcomm.comm.collective import is_readable, without_memory
from fastcomm.comm.words import OTHERS_GRADIENT
from fastcomm.errors import FastcommError

from fastcomm.comm.flat_buffers cimport FlatBuffer, is_in_a_flat_buffer
from fastcomm.comm.gradient_slot cimport GradientSlot


cdef class GatheringBucket:
    """A flat buffer and the slots of the gradients in it. Call hold() first."""

    cdef int hold(self, flat, list views) except -1:
        """views: on the memory of `flat`, one for each gradient."""
        self.flat, self.views, self.known = flat, views, FlatBuffer(flat)
        self.slots = [GradientSlot(view) for view in views]
        return 0

    cdef list gather_gradients(self, list parameters):
        """The loop of BoundBucket.gather: calls move() for each gradient that is to be moved."""
        cdef list left = []
        cdef GradientSlot slot
        cdef char *source = NULL
        cdef Py_ssize_t i
        cdef bint is_fit, is_at_home
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
                    is_at_home = source == slot.address
                    if not is_at_home and is_in_a_flat_buffer(source):
                        raise FastcommError(OTHERS_GRADIENT)
                    if not is_fit:
                        if not is_readable(gradient):
                            raise FastcommError(without_memory(gradient))
                        view.copy_(gradient.clone() if is_at_home else gradient)
                        self.note_copied(gradient)
                    elif not is_at_home:  # at home: the user's own tensor on our memory
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
        self.hold(flat, views)

    def gather(self, list parameters):
        """See BoundBucket.gather."""
        return self.gather_gradients(parameters)

    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1:
        self.views[i].copy_(gradient)
        return 0
