# cython: language_level=3
"""reduce_shards: the arithmetic of an all-reduce over shared memory, without its flags."""

from fastcomm.comm.collective import CPU_DTYPES, OPS, canonical_op, refuse_dtype

from fastcomm.transports.shm.core cimport SHM_MAX_RANKS

# Includes the sources themselves: this extension and ring may be built at the same time, and both
# would write their object files.
cdef extern from "shm/reduce_16bit.c":
    pass

cdef extern from "shm/reduce.c":
    bint shm_reduce(int dtype, int op, size_t numel, const void *const *inputs, int n_inputs,
                    void *const *outputs, int n_outputs) nogil


def reduce_shards(list buffers, str op="sum"):
    """Reduces n flat tensors of equal numel and dtype element by element and writes the result into
    every one of them.

    One pass that reads n and writes n tensors, in this process alone: the arithmetic of all_reduce
    without its flags. The benchmarks use it as the streaming bound of the machine. Returns whether
    an element of the result is infinite or NaN; of one tensor that is not known, and the answer
    True. Raises ValueError or TypeError for tensors that do not fit together.
    """
    cdef const void *inputs[SHM_MAX_RANKS]
    cdef bint has_nonfinite
    cdef int code = OPS.index(canonical_op(op)), n = len(buffers)
    if not 1 <= n <= SHM_MAX_RANKS:
        raise ValueError(f"expected 1 to {SHM_MAX_RANKS} tensors; got {n}")
    first = buffers[0]
    if first.dtype not in CPU_DTYPES:
        refuse_dtype(first.dtype, CPU_DTYPES)
    for i, buffer in enumerate(buffers):
        is_alike = buffer.dtype is first.dtype and buffer.numel() == first.numel()
        if not (is_alike and buffer.is_cpu and buffer.is_contiguous()):
            raise ValueError("the tensors must be contiguous, on the CPU, and of one dtype and "
                             "numel")
        inputs[i] = <const void *><size_t>buffer.data_ptr()
    cdef int dtype = CPU_DTYPES.index(first.dtype)
    cdef size_t numel = first.numel()
    with nogil:
        has_nonfinite = shm_reduce(
            dtype, code, numel, inputs, n, <void *const *>inputs, n
        )
    return has_nonfinite
