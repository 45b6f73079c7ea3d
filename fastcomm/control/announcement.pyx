# cython: language_level=3
"""What a rank announces of a collective: as the C core has it, as an object, and in words; and what
all ranks conclude of their announcements.
"""

from typing import NamedTuple

from torch import float8_e5m2

from fastcomm.comm.collective import (
    BUCKET_OPS, CPU_DTYPES, NO_DATA, SENT_DTYPES, SKIP,
)
from fastcomm.comm.words import Called, called

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc

# Their order is that of the C core's enums. tests/comm/test_collective.py checks that of ops.
cdef tuple KINDS = (
    None, "barrier", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single",
    "gather", "scatter", "all_to_all_single", "reduce_scatter_v", "all_gather_v", "abandon",
)
# NCCL takes the last dtype, too.
cdef tuple OP_NAMES = BUCKET_OPS, DTYPES = (*SENT_DTYPES, float8_e5m2)
cdef dict DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
cdef dict OP_CODES = {op: code for code, op in enumerate(BUCKET_OPS)}


cdef int bucket_op_code(str op) except -1:
    return OP_CODES[op]


cdef str op_of(const announcement *a):
    """None for kinds that add nothing."""
    if a.kind not in (CALL_ALL_REDUCE, CALL_REDUCE_SCATTER, CALL_REDUCE_SCATTER_V):
        return None
    return SKIP if a.presence == VOTES_TO_SKIP else OP_NAMES[a.op]


cdef str kind_of(const announcement *a):
    return NO_DATA if a.presence == HAS_NO_DATA else KINDS[a.kind]


cdef object called_by(const announcement *a):
    cdef str kind = kind_of(a)
    if a.presence == HAS_NO_DATA or a.kind in (CALL_BARRIER, CALL_ABANDON):
        return Called(kind, kind)
    return called(
        kind, a.numel, DTYPES[a.dtype], op=op_of(a), root=a.root, wire=DTYPES[a.wire],
        label=a.label, fingerprint=a.fingerprint,
    )


cdef Entry noted(FlightRecorder flight, const announcement *a, uint64_t number):
    return flight.note(
        kind_of(a), DTYPES[a.dtype] if a.numel else None, a.numel, number, op_of(a), a.root,
        a.label, a.fingerprint,
    )


cdef Call call_of(const announcement *a):
    cdef Call call = Call.__new__(Call)
    call.it = a[0]
    call._decode()
    return call


cdef int dtype_code(dtype) except -1:
    return DTYPE_CODES[dtype]


cdef size_t itemsize_of(const announcement *a) except 0:
    return DTYPES[a.dtype].itemsize


cdef class Call:
    """An announcement as an object. Calls are equal that ranks may make together if none votes."""

    def __init__(
        self, str kind, numel=0, dtype=CPU_DTYPES[0], wire=None, str op="sum", *, root=0, label=0,
        fingerprint=0, part=None, bint has_data=True,
    ):
        """part: a transport.Part, of a bucket. has_data: else the others' call counts alone."""
        self.it = announced(KINDS.index(kind), OP_CODES[op])
        self.it.numel, self.it.root, self.it.label = numel, root, label
        self.it.fingerprint = fingerprint
        self.it.dtype, self.it.wire = DTYPE_CODES[dtype], DTYPE_CODES[wire or dtype]
        self.it.presence = HAS_DATA if has_data else HAS_NO_DATA
        if part is not None:
            self.it.weight, self.it.scale, votes, _ = part
            if votes:
                self.it.presence = VOTES_TO_SKIP
        self._decode()

    cdef int _decode(self) except -1:
        self.kind = kind_of(&self.it)
        self.op = SKIP if self.it.presence == VOTES_TO_SKIP else OP_NAMES[self.it.op]
        self.dtype, self.wire = DTYPES[self.it.dtype], DTYPES[self.it.wire]
        self.numel, self.root = self.it.numel, self.it.root
        self.label, self.fingerprint = self.it.label, self.it.fingerprint
        return 0

    def packed(self):
        """As it travels between hosts."""
        return PyBytes_FromStringAndSize(<char *>&self.it, sizeof(announcement))

    @staticmethod
    def of(const unsigned char[:] packed, int world_size):
        """The call that was packed. Raises ValueError if it is none."""
        cdef bint is_whole = packed.shape[0] == sizeof(announcement)
        cdef const announcement *found = <const announcement *>&packed[0] if is_whole else NULL
        if found == NULL or not is_collective(found, world_size):
            raise ValueError(f"{bytes(packed).hex()}, which is no collective")
        return call_of(found)

    def __eq__(self, Call one not None):
        return self.it.presence == one.it.presence and is_same_call(&self.it, &one.it, True)

    def is_like(self, Call other not None):
        """Whether nothing but numel, label and fingerprint tells the calls apart."""
        cdef announcement alike = other.it
        alike.numel, alike.label = self.it.numel, self.it.label
        alike.fingerprint = self.it.fingerprint
        return self.it.presence == alike.presence and is_same_call(&self.it, &alike, True)

    @property
    def nbytes(self):
        return self.numel * self.dtype.itemsize

    @property
    def shard_key(self):
        """Equal on ranks whose shards of the call fit each other."""
        return self.kind, self.numel, self.dtype, self.wire, self.label

    def noted(self, FlightRecorder flight):
        cdef Entry entry = noted(flight, &self.it, 0)
        entry.lane = -1  # several are under way at once
        return entry

    def called(self):
        """The same for messages, a words.Called."""
        return called_by(&self.it)

    def __str__(self):
        return str(called_by(&self.it))


class Verdict(NamedTuple):
    """What all ranks conclude of their calls.

    is_agreed: they may be made together.
    wanted: the call of the first rank that has data; None if no rank has any.
    is_skipped: a rank votes to skip it.
    factors: by what each rank's tensor is multiplied before it is added; None if all count alike.
    """

    is_agreed: bool
    wanted: object
    is_skipped: bool
    factors: object


def conclude(list calls):
    """Returns the Verdict. calls: by rank."""
    cdef int i, n = len(calls)
    cdef const announcement **all = <const announcement **>malloc(n * sizeof(announcement *))
    cdef double *factors = <double *>malloc(n * sizeof(double))
    cdef verdict v
    try:
        if all == NULL or factors == NULL:
            raise MemoryError("out of memory")
        for i in range(n):
            all[i] = &(<Call>calls[i]).it
        v = decide(all, n, True, factors)
        wanted = None
        for i in range(n):
            if wanted is None and all[i] == v.wanted:
                wanted = calls[i]
        return Verdict(
            v.outcome == ALL_AGREE, wanted, v.is_skipped,
            [factors[i] for i in range(n)] if v.has_factors else None,
        )
    finally:
        free(all)
        free(factors)
