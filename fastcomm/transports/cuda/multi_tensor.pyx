# cython: language_level=3
"""MultiTensor: moves many tensors to one flat buffer and back, in one launch. Owns the table of
tiles and the loaded kernels.

The kernels are those of kernels/cuda/. nvcc compiles them when the package is built; where it has
not, or the driver does not take its output, CuPy compiles them at first use.
"""

import os
import zlib
from pathlib import Path

import numpy
import torch

from fastcomm.errors import InitError

from libc.stdlib cimport calloc, free

from fastcomm.transports.cuda.driver cimport (
    CUDA_SUCCESS, CUcontext, CUfunction, CUmodule, check, driver,
)


NAMES = {  # in the names of kernels
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}
# Which dtypes gradients of each dtype can travel in.
WIRE_DTYPES = {
    torch.float32: (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    torch.float16: (
        torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    ),
    torch.bfloat16: (
        torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    ),
    torch.float64: (torch.float64, torch.float32, torch.float16, torch.bfloat16),
}
TILE = numpy.dtype([("offset", "u8"), ("start", "u4"), ("tensor", "u2"), ("numel", "u2")])


cdef class MultiTensor:
    """n tensors and their offsets in a flat buffer: tensor i begins at element offsets[i]. Prepared
    once, launched often.

    numels, offsets: n integers each. dtype: of the tensors. flat_dtype: of the flat buffer; see
    WIRE_DTYPES for the supported pairs.
    longer: one with the same tensors at the same offsets, and more behind them: its tables of tiles
        do for both.
    device: a fastcomm.transports.cuda.driver.Device. One launch moves up to 4000 tensors; more take
    a launch per 4000. Raises TypeError for a pair of dtypes without a kernel, InitError if there
    are no kernels for the device.
    """

    def __cinit__(
        self, list numels, list offsets, dtype, flat_dtype, Device device,
        MultiTensor longer=None,
    ):
        if flat_dtype not in WIRE_DTYPES.get(dtype, ()):
            raise TypeError(f"{dtype} gradients cannot travel as {flat_dtype}: no kernel for this "
                            "pair")
        self.device, self.dtype, self.flat_dtype = device, dtype, flat_dtype
        self.numels, self.offsets = numels, offsets
        cdef size_t n = len(numels)
        self.n_parts = (n + MT_LARGE - 1) // MT_LARGE
        self.parts = <Part *>calloc(max(self.n_parts, 1), sizeof(Part))
        # A launch copies as many addresses as its kernel has room for, whatever the number of
        # tensors.
        self.addresses = <void **>calloc(self.n_parts * MT_LARGE + 1, sizeof(void *))
        if self.parts == NULL or self.addresses == NULL:
            raise MemoryError("out of memory")
        self.tables = []
        with device.selected():
            for i in range(self.n_parts):
                table = None if longer is None else longer.tables[i]
                self._make_part(i, i * MT_LARGE, min(n, (i + 1) * MT_LARGE), table)
        self._make_stats()

    def __dealloc__(self):
        free(self.parts)
        free(self.addresses)

    def _make_part(self, size_t i, size_t first, size_t end, table):
        numels = self.numels[first:end]
        if table is None:
            tiles = tiles_of(numels, self.offsets[first:end])
            table = torch.from_numpy(tiles.view(numpy.uint8)).to(self.device.device)
        self.tables.append(table)
        cdef Part *part = &self.parts[i]
        part.first = first
        part.tiles = <const void *><size_t>table.data_ptr()
        part.n_tiles = sum([(numel + MT_TILE - 1) // MT_TILE for numel in numels])
        capacity = MT_SMALL if <int>(end - first) <= MT_SMALL else MT_LARGE
        grad, wire = NAMES[self.dtype], NAMES[self.flat_dtype]
        names = (f"flatten_{grad}_{wire}", f"unflatten_{wire}_{grad}", f"norm_{grad}")
        for which, name in enumerate(names):  # by Pass
            part.kernels[<int>which] = kernel_for(
                self.device, part.n_tiles, f"{name}_{capacity}"
            )

    def _make_stats(self):
        cdef size_t i
        n_blocks = [
            max(self.parts[i].kernels[<int>UNFLATTEN].n_blocks,
                self.parts[i].kernels[<int>NORM].n_blocks)
            for i in range(self.n_parts)
        ]
        n_rows = 1 + max(n_blocks, default=0)
        self.stats = torch.zeros(
            self.n_parts, n_rows, 2, dtype=torch.float64, device=self.device.device
        )
        self.tickets = torch.zeros(self.n_parts, dtype=torch.int32, device=self.device.device)
        for i in range(self.n_parts):
            self.parts[i].stats = <void *><size_t>self.stats[i].data_ptr()
            self.parts[i].ticket = <void *><size_t>self.tickets[i].data_ptr()

    cdef int flatten_on(
        self, CUstream stream, void *flat, double scale, const void *divisor
    ) except -1 nogil:
        """Launches flat = tensors * scale. The tensors' addresses are in `addresses`. divisor: of
        the scale, on the device, in float64; see flatten.cu. NULL: none.
        """
        return self._launch(FLATTEN, stream, <const void **>&flat, &scale, &divisor, False)

    cdef int unflatten_on(
        self, CUstream stream, const void *flat, double scale, bint with_stats
    ) except -1 nogil:
        """Launches tensors = flat * scale, and the statistics of the result into `stats`."""
        return self._launch(UNFLATTEN, stream, &flat, &scale, NULL, with_stats)

    cdef int norm_on(self, CUstream stream) except -1 nogil:
        """Launches the pass that reads the tensors and leaves what it finds in `stats`."""
        return self._launch(NORM, stream, NULL, NULL, NULL, True)

    cdef int _launch(
        self, Pass which, CUstream stream, const void **flat, double *scale,
        const void **divisor, bint with_stats
    ) except -1 nogil:
        """One launch for each part. Parameters in the kernels' order: the tensors and their tiles;
        for all but NORM, the flat buffer and the scale; for FLATTEN, the scale's divisor, for the
        others the statistics.
        """
        cdef void *parameters[7]
        cdef void *no_stats = NULL
        cdef Part *part
        cdef Kernel *kernel
        cdef size_t i, n
        cdef int code = CUDA_SUCCESS
        cdef CUcontext before = self.device.enter()
        for i in range(self.n_parts):
            part = &self.parts[i]
            kernel = &part.kernels[<int>which]
            if kernel.n_blocks == 0 or code != CUDA_SUCCESS:  # 0: tensors without elements
                continue
            parameters[0] = &self.addresses[part.first]
            parameters[1], parameters[2], n = &part.tiles, &part.n_tiles, 3
            if which != NORM:
                parameters[3], parameters[4], n = <void *>flat, scale, 5
            if which == FLATTEN:
                parameters[n] = <void *>divisor
            else:
                parameters[n] = &part.stats if with_stats else &no_stats
                parameters[n + 1] = &part.ticket
            code = driver.launch(kernel.function, kernel.n_blocks, 1, 1, 32 * MT_WARPS, 1, 1, 0,
                                 stream, parameters, NULL)
        self.device.leave(before)
        return check(code, b"cuLaunchKernel")

    # -- the same from Python, on the current stream --

    def flatten(self, list tensors, flat, double scale=1.0, divisor=None):
        """flat[offsets[i] ...] = tensors[i] * scale, cast. The tensors are contiguous and have
        numels[i] elements. divisor: of the scale, one float64 on the device.
        """
        cdef const void *by = NULL
        if divisor is not None:
            by = <const void *><size_t>divisor.data_ptr()
        self._point_at(tensors)
        cdef void *data = <void *><size_t>flat.data_ptr()
        cdef CUstream current = self.device.current_stream()
        with nogil:
            self.flatten_on(current, data, scale, by)

    def unflatten(self, flat, list tensors, double scale=1.0, *, bint with_stats=False):
        """tensors[i] = flat[offsets[i] ...] * scale, cast. with_stats: leaves the sum of squares
        and the count of non-finite values in `square_sum` and `n_nonfinite`.
        """
        self._point_at(tensors)
        cdef void *data = <void *><size_t>flat.data_ptr()
        cdef CUstream current = self.device.current_stream()
        with nogil:
            self.unflatten_on(current, data, scale, with_stats)

    def norm(self, list tensors):
        """Reads the tensors once; leaves the sum of squares and the count of non-finite values in
        `square_sum` and `n_nonfinite`.
        """
        self._point_at(tensors)
        cdef CUstream current = self.device.current_stream()
        with nogil:
            self.norm_on(current)

    @property
    def square_sum(self):
        """Sum of squares of what the last pass with statistics wrote or read: a float64 scalar on
        the device. No synchronisation.
        """
        return self.stats[:, 0, 0].sum()

    @property
    def n_nonfinite(self):
        """How many of these elements were infinite or NaN: an int64 scalar on the device. No
        synchronisation.
        """
        return self.stats.view(torch.int64)[:, 0, 1].sum()

    def _point_at(self, list tensors):
        for i, tensor in enumerate(tensors):
            self.addresses[i] = <void *><size_t>tensor.data_ptr()


def tiles_of(numels, offsets):
    """The table of tiles of up to 4000 tensors: a structured array as struct mt_tile of
    kernels/cuda/multi_tensor.h.
    """
    numels = numpy.asarray(numels, dtype=numpy.uint64)
    offsets = numpy.asarray(offsets, dtype=numpy.uint64)
    counts = ((numels + MT_TILE - 1) // MT_TILE).astype(numpy.int64)
    tiles = numpy.zeros(counts.sum(), dtype=TILE)
    tensor = numpy.repeat(numpy.arange(len(counts)), counts)
    start = numpy.arange(len(tiles)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    tiles["tensor"], tiles["start"] = tensor, start
    done = start.astype(numpy.uint64) * MT_TILE
    tiles["offset"] = offsets[tensor] + done
    tiles["numel"] = numpy.minimum(numels[tensor] - done, MT_TILE)
    return tiles


# ---- the kernels ---------------------------------------------------------------------------------

cdef dict FAMILIES = {  # by how a kernel's name begins, its file in kernels/cuda/
    "flatten": "flatten", "unflatten": "unflatten", "norm": "unflatten",
    "encode": "blocks", "add": "blocks", "decode": "blocks",
}
cdef dict _kernels = {}  # (device index, name) -> CUfunction as an integer
cdef dict _finders = {}  # (device index, family) -> a function from names to these integers


def kernel(Device device, str name):
    """The address of a kernel, which is loaded at first use. Raises InitError, which says what is
    missing.
    """
    address = _kernels.get((device.index, name))
    if address is None:
        family = FAMILIES[name.partition("_")[0]]
        find = _finders.get((device.index, family))
        if find is None:
            find = _finders[device.index, family] = _load(device, family)
        address = _kernels[device.index, name] = find(name)
    return address


cdef Kernel kernel_for(Device device, size_t n_tiles, str name) except *:
    """Takes as many blocks as run at the same time, so that all warps have the same number of
    tiles, or one less. The device is selected.
    """
    cdef Kernel found
    cdef int resident = 0
    found.function = <CUfunction><size_t>kernel(device, name)
    with nogil:
        check(driver.resident_blocks(&resident, found.function, 32 * MT_WARPS, 0),
              b"cuOccupancyMaxActiveBlocksPerMultiprocessor")
    found.n_blocks = min((n_tiles + MT_WARPS - 1) // MT_WARPS,
                         device.n_multiprocessors * max(resident, 1))
    return found


def _load(Device device, family):
    binary = kernel_file(f"{family}.fatbin")
    problem = "this fastcomm was built without nvcc"
    if binary is not None:
        try:
            return Module(device, binary.read_bytes()).function
        except InitError as error:
            problem = str(error)
    try:
        module = _compile(family)
    except Exception as error:  # CuPy raises errors of many kinds
        raise InitError(f"no kernels for this device: {problem}; and CuPy cannot compile them: "
                        f"{type(error).__name__}: {error}") from error
    return lambda name: module.get_function(name).kernel.ptr


def kernel_file(name):
    """The path of a file of kernels/cuda/: in the folder that FASTCOMM_KERNELS names, inside the
    installed package, or beside the package in the source tree. None if it is in none of them.
    """
    package = Path(__file__).resolve().parent.parent.parent
    folders = [package / "kernels" / "cuda", package.parent / "kernels" / "cuda"]
    if "FASTCOMM_KERNELS" in os.environ:
        folders.insert(0, Path(os.environ["FASTCOMM_KERNELS"]))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    return None


cdef class Module:
    """Kernels that nvcc has compiled, loaded on one device. Never unloaded: torch keeps the context
    to the end, too.
    """

    cdef CUmodule handle

    def __cinit__(self, Device device, const unsigned char[::1] image):
        cdef int code = CUDA_SUCCESS
        with device.selected():
            with nogil:  # may wait for the device
                code = driver.load_module(&self.handle, &image[0])
        if code != CUDA_SUCCESS:
            raise InitError(f"the driver does not take the kernels nvcc has made (error {code})")

    def function(self, str name):
        cdef CUfunction function = NULL
        cdef bytes encoded = name.encode()
        cdef const char *raw = encoded
        with nogil:  # may load it, and wait for the device
            check(driver.get_function(&function, self.handle, raw), b"cuModuleGetFunction")
        return <size_t>function


def _compile(family):
    import cupy

    source = kernel_file(f"{family}.cu")
    if source is None:
        raise FileNotFoundError(f"kernels/cuda/{family}.cu is not part of this installation")
    # CuPy finds what it has on disk by the source and the options, not by what the source includes:
    # without a checksum of the headers among the options, old kernels would outlive an upgrade.
    headers = b"".join(header.read_bytes() for header in sorted(source.parent.glob("*.*h")))
    checksum = f"-DFASTCOMM_HEADERS={zlib.crc32(headers):#x}"
    options = ("-std=c++17", f"-I{source.parent}", checksum)
    return cupy.RawModule(code=source.read_text(), options=options)
