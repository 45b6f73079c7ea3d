"""What buckets have in common: a flat buffer, and gradients that come to it."""

from fastcomm.comm.flat_buffers cimport FlatBuffer


cdef class UsedMask:
    cdef readonly object elements
    cdef object dtype
    cdef int divisor
    cdef dict known  # by op and by what is missing, on the device, kept for reuse

    cdef object own(self, str op, tuple missing)
    cpdef fill(self, str op, list missing)
    cpdef list present(self, op)


cdef class GatheringBucket:
    cdef object flat
    cdef list views, slots  # a GradientSlot for each view
    cdef FlatBuffer known
    cdef readonly UsedMask used_mask

    cdef int set_up(self, flat, list views, wire, int divisor=*) except -1
    cdef list gather_gradients(self, list parameters)

    # for the transport to say
    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1
    cdef int note_copied(self, gradient) except -1
