# cython: language_level=3
"""GradientSlot: where one tensor, a gradient or a parameter, lies in its flat buffer, and how. Says
of another tensor where that lies now, and whether its elements are in the same order.

Where a tensor lies is asked here alone, and by address: `.data =`, `set_()` and `share_memory_()`
leave a tensor what it is, and move it elsewhere, and with it all that share its storage.

That is asked in every step for every parameter. One call of C answers, by the functions that torch
offers in DLPack's exchange protocol; a torch before 2.11 has none, and is asked in Python.
"""

import torch
from torch.nn import Parameter

from fastcomm.comm.collective import lacks_memory

from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy


ctypedef int (*Describe)(void *tensor, DLTensor *out) noexcept

# struct DLPackExchangeAPI of dlpack.h.
cdef struct ExchangeTable:
    uint32_t major, minor
    void *previous
    void *allocate
    void *from_tensor
    void *to_tensor
    Describe describe  # may be NULL
    void *current_stream


cdef object Tensor = torch.Tensor
# found once: the look-up is a tenth of the call
cdef object is_neg = Tensor.is_neg, is_zero_tensor = Tensor._is_zerotensor
# Heaps and mappings of most processes lie above; what lies at an offset from NULL, below.
cdef size_t HIGH = <size_t>1 << 40
cdef Describe describe = NULL  # NULL: ask in Python


def use_exchange_table(bint use=True):
    """Lets slots ask in C, where torch has the table; those made while it was off go on asking in
    Python. Returns whether they ask in C. For tests.
    """
    global describe
    cdef ExchangeTable *table
    # Not Tensor.__dlpack_c_exchange_api__: other libraries put tables of their own there.
    table_of_torch = getattr(torch._C, "_dlpack_exchange_api", None) if use else None
    describe = NULL
    if table_of_torch is not None:
        table = <ExchangeTable *>PyCapsule_GetPointer(table_of_torch(), b"dlpack_exchange_api")
        if table.major == 1:
            describe = table.describe
    return describe != NULL


use_exchange_table()


cdef bint is_described(tensor, DLTensor *found) noexcept:
    """Describes a Tensor or Parameter, for as long as that keeps its shape. False where this torch
    has no table, or no description of the tensor. What a negated or conjugated view lies on is
    described as any other.
    """
    if describe == NULL:
        return False
    if describe(<void *>tensor, found) == 0:
        return True
    PyErr_Clear()
    return False


cdef class GradientSlot:
    """The slot of the gradient `view`, a tensor on the memory of a flat buffer that outlives this
    object.
    """

    def __cinit__(self, view):
        cdef size_t nbytes
        cdef int64_t *strides
        self.address = <char *><size_t>view.data_ptr()
        self.dtype, self.shape, self.strides = view.dtype, tuple(view.shape), view.stride()
        self.is_complex = self.dtype.is_complex
        if not is_described(view, &self.geometry):
            self.geometry.ndim = -1
            return
        nbytes = self.geometry.ndim * sizeof(int64_t)
        # + 1: a scalar has none of them, and malloc(0) may return NULL
        self.shape_and_strides = <int64_t *>malloc(2 * nbytes + 1)
        if self.shape_and_strides == NULL:
            raise MemoryError("out of memory")
        # the view's own go when somebody assigns to its `.data`
        memcpy(self.shape_and_strides, self.geometry.shape, nbytes)
        strides = self.shape_and_strides + self.geometry.ndim
        memcpy(strides, self.geometry.strides, nbytes)
        self.geometry.shape, self.geometry.strides = self.shape_and_strides, strides

    def __dealloc__(self):
        free(self.shape_and_strides)

    cdef bint fits(self, gradient, char **address) except -1:
        """Whether the gradient has the slot's dtype, shape and strides, and its memory their
        values; `address` is where it lies.
        """
        cdef DLTensor found
        cdef bint is_alike
        # of which DLPack knows nothing
        cdef bint is_changed = is_neg(gradient) or (self.is_complex and gradient.is_conj())
        # a subclass may have methods of its own
        if self._describes(gradient, &found):
            address[0] = <char *>found.data + found.byte_offset
            is_alike = _lies_alike(&self.geometry, &found)
        else:
            address[0] = <char *><size_t>gradient.data_ptr()
            is_alike = (
                gradient.dtype is self.dtype
                and gradient.shape == self.shape
                and _are_strides_of(self, gradient.stride())
            )
        return is_alike and not is_changed and not is_without_memory(gradient, address[0])

    cdef bint still_holds(self, view) except -1:
        """As holds(), in a fraction of the time, of a tensor that was made on this slot: nobody can
        have made it a negated view of the same memory.
        """
        cdef DLTensor found
        if not self._describes(view, &found):
            return self.holds(view)
        return (
            <char *>found.data + found.byte_offset == self.address or self.address == NULL
        ) and _lies_alike(&self.geometry, &found)

    cpdef bint holds(self, tensor) except -1:
        """Whether the tensor lies in this slot now, as what was made on it did at first."""
        cdef char *address = NULL
        cdef bint is_fit
        try:
            is_fit = self.fits(tensor, &address)
        except RuntimeError:  # it has no address
            return False
        return is_fit and (address == self.address or not tensor.numel())

    cdef bint _describes(self, tensor, DLTensor *found) except -1:
        """Fills in `found` if torch can be asked in C. Other classes may have methods of their own.
        """
        is_known = type(tensor) is Tensor or type(tensor) is Parameter
        return is_known and self.geometry.ndim >= 0 and is_described(tensor, found)


cdef bint is_without_memory(tensor, const void *address) except -1:
    """As collective.lacks_memory(), of a tensor that lies at this address. Freed ones only at NULL.
    """
    if <size_t>address >= HIGH or (address != NULL and not is_zero_tensor(tensor)):
        return False
    return lacks_memory(tensor)


cdef bint _are_strides_of(GradientSlot slot, tuple strides) except -1:
    return strides == slot.strides or all([
        one == other or n == 1 for one, other, n in zip(slot.strides, strides, slot.shape)
    ])


cdef bint _lies_alike(const DLTensor *one, const DLTensor *other) noexcept:
    """Strides of dimensions of size 1 do not count."""
    cdef int i
    if one.ndim != other.ndim or memcmp(&one.dtype, &other.dtype, sizeof(DLDataType)) != 0:
        return False
    for i in range(one.ndim):
        if one.shape[i] != other.shape[i]:
            return False
        if one.strides[i] != other.strides[i] and one.shape[i] != 1:
            return False
    return True
