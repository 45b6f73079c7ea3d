"""What buckets have in common: a flat buffer, and gradients that come to it."""

from fastcomm.comm.flat_buffers cimport FlatBuffer


cdef class GatheringBucket:
    cdef object flat
    cdef list views, slots  # a GradientSlot for each view
    cdef FlatBuffer known

    cdef int hold(self, flat, list views) except -1
    cdef list gather_gradients(self, list parameters)

    # for the transport to say
    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1
    cdef int note_copied(self, gradient) except -1
