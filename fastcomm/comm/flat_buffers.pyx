# cython: language_level=3
"""Keeps the addresses of all flat buffers of this process, to recognise a gradient that lies in
one: the rounds of that bucket change its contents.

Compares addresses, because a view of a flat buffer may have a storage of its own.
"""

from torch import Tensor


cdef Range *first = NULL
cdef object data_ptr = Tensor.data_ptr  # found once, as it is asked for in every step


cdef class FlatBuffer:
    """Registers the memory of the tensor `flat` for as long as this object lives. The bucket that
    owns the tensor holds this object.
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
    """The indices of the tensors that lie in a flat buffer."""
    cdef list found = []
    cdef const void *address
    for i, tensor in enumerate(tensors):
        try:
            address = <void *><size_t>data_ptr(tensor)
        except RuntimeError:  # it is sparse, or one of torch.func's
            continue
        if is_in_a_flat_buffer(address):
            found.append(i)
    return found
