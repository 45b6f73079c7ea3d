# cython: language_level=3
"""Descriptors: what a rank posts to the ring, as the C core's numbers and in words."""

from fastcomm.comm.collective import BUCKET_OPS, CPU_DTYPES, OPS, SHADOW, canonical_op
from fastcomm.comm.words import Called, called

# Their order is that of the core's enums. tests/comm/test_collective.py checks that of ops.
cdef dict BUCKET_OP_CODES = {op: code for code, op in enumerate(BUCKET_OPS)}
cdef tuple OP_NAMES = BUCKET_OPS, DTYPES = CPU_DTYPES
cdef dict OP_CODES = {op: BUCKET_OP_CODES[op] for op in OPS}
cdef tuple KIND_NAMES = (
    "nothing", "barrier", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single",
    "gather", "scatter", "all_to_all_single", "reduce_scatter_v", "all_gather_v", "abandon", SHADOW,
)


cdef shm_descriptor descriptor(int kind, int op) noexcept:
    cdef shm_descriptor d
    d.kind, d.op, d.dtype, d.root, d.numel, d.where = kind, op, 0, 0, 0, SHM_PRIVATE
    d.label = d.step = 0
    d.weight = d.scale = 0
    return d


cdef object called_by(shm_descriptor d):
    name = KIND_NAMES[d.kind]
    if d.kind in (SHM_BARRIER, SHM_ABANDON, SHM_SHADOW):
        return Called(name, name)
    return called(
        name, d.numel, DTYPES[d.dtype],
        op=OP_NAMES[d.op] if _reduces(&d) else None, root=d.root, label=d.label, step=d.step,
    )


cdef Entry noted(FlightRecorder flight, const shm_descriptor *d, uint32_t seq):
    return flight.note(
        <str>KIND_NAMES[d.kind], DTYPES[d.dtype] if d.numel else None, d.numel, seq,
        <str>OP_NAMES[d.op] if _reduces(d) else None, d.root, d.label, d.step,
    )


cdef inline bint _reduces(const shm_descriptor *d) noexcept:
    return d.kind in (SHM_ALL_REDUCE, SHM_REDUCE_SCATTER, SHM_REDUCE_SCATTER_V)


cdef int op_code(op) except -1:
    code = OP_CODES.get(op) if type(op) is str else None
    return OP_CODES[canonical_op(op)] if code is None else code


cdef int bucket_op_code(str op) except -1:
    return BUCKET_OP_CODES[op]
