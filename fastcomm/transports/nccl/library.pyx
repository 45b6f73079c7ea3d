# cython: language_level=3
"""Opens libnccl at run time: finds it and its symbols, checks its version, and turns its status
codes into exceptions. Makes no communicators.

One process should have one copy of NCCL: two do not know of each other's launches and can deadlock,
and each takes device memory. So torch's copy comes before any other, and a second one is an error.
"""

import importlib.util
import os
from pathlib import Path

import torch  # first of all: its CUDA builds bring NCCL with them

from fastcomm.comm import collective
from fastcomm.errors import InitError, NcclError, PeerLostError

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <dlfcn.h>
    static const char *fastcomm_file_of(void *symbol) {
        Dl_info info;
        return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
    }
    """
    const char *fastcomm_file_of(void *symbol) nogil
    int RTLD_NOLOAD


OLDEST = 21800  # the first with ncclCommSplit and all of the configuration's first fields
cdef void *library = NULL
cdef int version = 0
cdef str path = ""


def load():
    """Opens libnccl and returns (version, path): (22907, "/.../libnccl.so.2") for 2.29.7. Needs no
    GPU.

    Looks in this order: FASTCOMM_NCCL_LIBRARY; the copy that is loaded already, as torch's is;
    NVIDIA's wheel; the system's. Raises InitError if there is none, if it is older than 2.18, or if
    a second copy is in the process.
    """
    global library, version, path
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        raise InitError("NCCL_COMM_BLOCKING=0 makes NCCL start a thread for every collective, and "
                        "fastcomm fail: unset it")
    if library == NULL:
        handle = _open()
        _find_symbols(handle)
        path = os.path.realpath(fastcomm_file_of(<void *>nccl.get_version).decode())
        with nogil:
            check(nccl.get_version(&version), b"ncclGetVersion")
        if version < OLDEST:
            raise InitError(f"NCCL {version_text(version)} in {path} is too old: fastcomm needs "
                            "2.18 or newer")
        _find_newer_symbols(handle)
        _register_windows_only()
        library = handle
    copies = loaded_copies()
    refuse_second_copy([copy for copy in copies if copy == path or not _is_idle(copy)], path)
    return version, path


cdef _register_windows_only():
    """Keeps NCCL from registering memory that is no symmetric window: see memory.pyx. It reads
    this when the process makes its first communicator.
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if not 22700 <= version < 22800:  # which have no windows without it
        os.environ.setdefault("NCCL_LOCAL_REGISTER", "0")


def _is_idle(copy):
    """Whether this copy is torch's own, and torch has no GPU to launch anything on."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return False
    return copy.startswith((os.path.dirname(torch.__file__), *_wheel_folders()))


cdef void *_open() except NULL:
    explicit = os.environ.get("FASTCOMM_NCCL_LIBRARY")
    wheel = nccl_wheel()
    if explicit:
        candidates = [(explicit, 0)]
    else:  # the bare name first: it finds torch's loaded copy, a path would map a second one
        found = [(wheel, 0)] if wheel else []
        candidates = [("libnccl.so.2", RTLD_NOLOAD), *found, ("libnccl.so.2", 0)]
    cdef void *handle = NULL
    for name, flags in candidates:
        handle = dlopen(name.encode(), RTLD_NOW | RTLD_LOCAL | <int>flags)
        if handle != NULL:
            return handle
    raise InitError(f"no NCCL library: {dlerror().decode()}. CUDA builds of torch bring one")


def nccl_wheel():
    """The library in NVIDIA's wheel, or None. The CUDA 12 and 13 wheels own the same file, so there
    is one place to look.
    """
    for folder in _wheel_folders():
        candidate = Path(folder) / "lib" / "libnccl.so.2"
        if candidate.is_file():
            return str(candidate)
    return None


def _wheel_folders():
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    return list((spec and spec.submodule_search_locations) or ())


def loaded_copies():
    """The files of all NCCL libraries that this process has mapped."""
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].rstrip() for line in maps if "/libnccl.so" in line}
    return sorted(files)


def refuse_second_copy(copies, ours):
    """Raises InitError when NCCL is in the process more than once."""
    if len(copies) > 1:
        raise InitError(
            f"two copies of NCCL are in this process, {' and '.join(copies)}; fastcomm would use "
            f"{ours}. They do not know of each other's "
            "launches and can deadlock: unset FASTCOMM_NCCL_LIBRARY, or put the one you want "
            "under the whole process with LD_PRELOAD"
        )


def version_text(number):
    """2.29.7 for 22907."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


cdef int _find_symbols(void *handle) except -1:
    _find(<void **>&nccl.get_version, handle, b"ncclGetVersion")
    _find(<void **>&nccl.get_unique_id, handle, b"ncclGetUniqueId")
    _find(<void **>&nccl.error_string, handle, b"ncclGetErrorString")
    _find(<void **>&nccl.last_error, handle, b"ncclGetLastError")
    _find(<void **>&nccl.finalize, handle, b"ncclCommFinalize")
    _find(<void **>&nccl.destroy, handle, b"ncclCommDestroy")
    _find(<void **>&nccl.abort, handle, b"ncclCommAbort")
    _find(<void **>&nccl.async_error, handle, b"ncclCommGetAsyncError")
    _find(<void **>&nccl.all_reduce, handle, b"ncclAllReduce")
    _find(<void **>&nccl.broadcast, handle, b"ncclBroadcast")
    _find(<void **>&nccl.reduce, handle, b"ncclReduce")
    _find(<void **>&nccl.all_gather, handle, b"ncclAllGather")
    _find(<void **>&nccl.reduce_scatter, handle, b"ncclReduceScatter")
    _find(<void **>&nccl.send, handle, b"ncclSend")
    _find(<void **>&nccl.recv, handle, b"ncclRecv")
    _find(<void **>&nccl.group_start, handle, b"ncclGroupStart")
    _find(<void **>&nccl.group_end, handle, b"ncclGroupEnd")
    return 0


cdef int _find_newer_symbols(void *handle) except -1:
    """Only once the version is known to have the first two; the others may be missing."""
    _find(<void **>&nccl.init_rank, handle, b"ncclCommInitRankConfig")
    _find(<void **>&nccl.split, handle, b"ncclCommSplit")
    (<void **>&nccl.mem_alloc)[0] = dlsym(handle, b"ncclMemAlloc")
    (<void **>&nccl.mem_free)[0] = dlsym(handle, b"ncclMemFree")
    (<void **>&nccl.revoke)[0] = dlsym(handle, b"ncclCommRevoke")
    (<void **>&nccl.register_window)[0] = dlsym(handle, b"ncclCommWindowRegister")
    (<void **>&nccl.deregister_window)[0] = dlsym(handle, b"ncclCommWindowDeregister")
    return 0


cdef int _find(void **symbol, void *handle, const char *name) except -1:
    symbol[0] = dlsym(handle, name)
    if symbol[0] == NULL:
        raise InitError(f"this NCCL library has no {name.decode()}: it is no NCCL, or older than "
                        "2.18")
    return 0


def refuse_different_versions(list libraries):
    """libraries: what `load` has found on each rank. Raises InitError, on every rank, when the
    versions differ: they would not understand each other.
    """
    if len({number for number, _ in libraries}) > 1:
        found = "; ".join(
            f"rank {rank}: {version_text(number)} in {place}"
            for rank, (number, place) in enumerate(libraries)
        )
        raise InitError(f"the ranks have different versions of NCCL: {found}")


cdef int check(int code, const char *call) except -1 nogil:
    if code == ncclSuccess:
        return 0
    with gil:
        raise error_of(code, call)


cdef object error_of(int code, const char *call):
    """For a status code: PeerLostError if NCCL has lost a rank, else NcclError. Needs no
    communicator: the library keeps its last error for the whole process.
    """
    kind = PeerLostError if code == ncclRemoteError else NcclError
    text = nccl.error_string(code).decode()
    detail = nccl.last_error(NULL).decode(errors="replace").strip()
    return kind(f"{call.decode()} failed with code {code}, "
                f"{text}{': ' if detail else ''}{detail} (NCCL {version_text(version)})")


def unique_id():
    """A new ncclUniqueId for a communicator, as 256 hexadecimal digits. One rank makes it, and the
    others get it from that rank.
    """
    cdef ncclUniqueId identifier
    load()
    with nogil:
        check(nccl.get_unique_id(&identifier), b"ncclGetUniqueId")
    return identifier.internal[:128].hex()


# ---- NCCL's numbers for torch's dtypes and ops ---------------------------------------------------

DTYPES = {one.dtype: one.nccl for one in collective.DTYPES}
FIRST_WITH_FP8 = 22400
OPS = {one.name: one.nccl for one in collective.REDUCTIONS}


cdef int dtype_number(dtype) except -1:
    """Raises TypeError for what this NCCL cannot reduce."""
    number = DTYPES.get(dtype)
    if number is None:
        collective.refuse_dtype(dtype, DTYPES)
    if number >= DTYPES[torch.float8_e4m3fn] and version < FIRST_WITH_FP8:
        raise TypeError(f"{dtype} needs NCCL 2.24 or newer; this is {version_text(version)}")
    return number


cdef int op_number(str op) except -1:
    return OPS[op]
