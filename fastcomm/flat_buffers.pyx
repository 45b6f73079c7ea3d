# cython: language_level=3
"""Where the flat buffers of all buckets of this process lie, so that a gradient can be recognised
that lies in one: its contents change at times of their own.

By address: a view of a flat buffer may have a storage of its own.
"""

cdef Range *first = NULL


cdef class FlatBuffer:
    """Makes the memory of the tensor `flat` known, as long as this object lives. The bucket that
    owns the tensor holds it.
    """

    def __cinit__(self, flat):
        global first
        self.range = Range(<char *><size_t>flat.data_ptr(), flat.nbytes, first)
        first = &self.range

    def __dealloc__(self):
        global first
        cdef Range **link = &first
        while link[0] != NULL and link[0] != &self.range:
            link = &link[0].next
        if link[0] != NULL:
            link[0] = self.range.next


cdef bint is_in_a_flat_buffer(const void *address) noexcept:
    cdef Range *candidate = first
    while candidate != NULL:
        if <size_t>(<char *>address - candidate.base) < candidate.nbytes:
            return True
        candidate = candidate.next
    return False


def inside(list tensors):
    """Which of the tensors, by index, lie in a flat buffer."""
    return [
        i for i, tensor in enumerate(tensors)
        if is_in_a_flat_buffer(<void *><size_t>tensor.data_ptr())
    ]
