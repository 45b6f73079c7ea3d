# cython: language_level=3
"""The calls of collectives into NCCL: one, or several as a group, which NCCL launches at once. Also
which calls move the shards of a flat buffer.

Shard r of a buffer is its elements from bounds[r] to bounds[r + 1]. Shards of one size are moved by
ncclReduceScatter and ncclAllGather, in place. Others, of whole parameters, by a group with a call
for each shard: ncclReduce to its owner, ncclBroadcast from it.
"""

from fastcomm.transports.nccl.library cimport nccl, ncclComm_t, ncclSuccess


cdef const char *NAMES[7]  # by Kind
NAMES[:] = [
    b"ncclAllReduce", b"ncclBroadcast", b"ncclAllGather", b"ncclReduceScatter", b"ncclReduce",
    b"ncclSend", b"ncclRecv",
]


cdef int call_all(
    const NcclCall *calls, size_t n, ncclComm_t comm, void *stream, const char **failed
) noexcept nogil:
    """Makes the calls, several as one group, which it always ends. Returns NCCL's code: the
    first that is not success. failed: the name of the function that returned it.
    """
    cdef int code, end
    cdef size_t i
    if n == 1:
        failed[0] = NAMES[<int>calls.kind]
        return _call(calls, comm, stream)
    failed[0] = b"ncclGroupStart"
    code = nccl.group_start()
    if code != ncclSuccess:
        return code
    for i in range(n):
        if code == ncclSuccess:
            failed[0] = NAMES[<int>calls[i].kind]
            code = _call(&calls[i], comm, stream)
    end = nccl.group_end()
    if code == ncclSuccess:
        failed[0], code = b"ncclGroupEnd", end
    return code


cdef int _call(const NcclCall *call, ncclComm_t comm, void *stream) noexcept nogil:
    if call.kind == ALL_REDUCE:
        return nccl.all_reduce(
            call.source, call.target, call.numel, call.dtype, call.op, comm, stream
        )
    if call.kind == BROADCAST:
        return nccl.broadcast(
            call.source, call.target, call.numel, call.dtype, call.root, comm, stream
        )
    if call.kind == ALL_GATHER:
        return nccl.all_gather(call.source, call.target, call.numel, call.dtype, comm, stream)
    if call.kind == REDUCE:
        return nccl.reduce(
            call.source, call.target, call.numel, call.dtype, call.op, call.root, comm, stream
        )
    if call.kind == SEND:
        return nccl.send(call.source, call.numel, call.dtype, call.root, comm, stream)
    if call.kind == RECV:
        return nccl.recv(call.target, call.numel, call.dtype, call.root, comm, stream)
    return nccl.reduce_scatter(
        call.source, call.target, call.numel, call.dtype, call.op, comm, stream
    )


cdef size_t sends_and_receives(
    NcclCall *calls, char *source, char *target, list sent, list received, size_t itemsize,
    int dtype
) except? 0:
    """Fills in the calls that send each rank so many elements of `source`, one rank's after the
    other, and receive in `target` so many from each: two for each rank at most. Returns how many.
    """
    cdef size_t n = 0, numel
    cdef int rank
    for rank, numel in enumerate(sent):
        if numel:
            calls[n] = NcclCall(SEND, source, NULL, numel, dtype, 0, rank)
            n, source = n + 1, source + numel * itemsize
    for rank, numel in enumerate(received):
        if numel:
            calls[n] = NcclCall(RECV, NULL, target, numel, dtype, 0, rank)
            n, target = n + 1, target + numel * itemsize
    return n


cdef size_t reduce_scatter_v(
    NcclCall *calls, char *flat, size_t itemsize, int dtype, tuple bounds, int rank
) except? 0:
    """Fills in the calls that reduce each shard of `flat` into its owner's: one for each rank at
    most. Returns how many.
    """
    return _move(calls, flat, itemsize, dtype, bounds, rank, REDUCE_SCATTER, REDUCE)


cdef size_t all_gather_v(
    NcclCall *calls, char *flat, size_t itemsize, int dtype, tuple bounds, int rank
) except? 0:
    """Fills in, as reduce_scatter_v, the calls that copy each shard of `flat` from its owner to
    all.
    """
    return _move(calls, flat, itemsize, dtype, bounds, rank, ALL_GATHER, BROADCAST)


cdef size_t _move(
    NcclCall *calls, char *flat, size_t itemsize, int dtype, tuple bounds, int rank, Kind alike,
    Kind each,
) except? 0:
    cdef size_t r, n = 0, world_size = len(bounds) - 1, numel
    cdef char *whole = flat + <size_t>bounds[0] * itemsize
    cdef char *shard
    numels = {bounds[r + 1] - bounds[r] for r in range(world_size)}
    if len(numels) == 1:
        numel = numels.pop()
        shard = whole + rank * numel * itemsize
        if numel:
            calls[0] = NcclCall(alike, whole, shard, numel, dtype, 0, 0)
            if alike == ALL_GATHER:
                calls[0].source, calls[0].target = shard, whole
        return 1 if numel else 0
    for r in range(world_size):
        numel = bounds[r + 1] - bounds[r]
        shard = flat + <size_t>bounds[r] * itemsize
        if numel:
            calls[n] = NcclCall(each, shard, shard, numel, dtype, 0, r)
            n += 1
    return n
