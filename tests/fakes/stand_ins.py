"""Builds the stand-ins for the CUDA driver and for NCCL, and the kernels as host code, so that the
GPU path runs where there is no GPU.

Tests hand `environment(stand_ins())` to their ranks, whose tensors then lie in host memory. What
tests order from a library, and what it tells them, goes through `loaded` and the functions
stand_in_*: see the headers and the beginning of cuda.c and nccl.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
_SOURCES = Path(__file__).resolve().parent
_KERNELS = _ROOT / "kernels"
_FAMILIES = ("flatten", "unflatten", "blocks")  # of kernels
_BUILT = _ROOT / "build" / "tests"
_SHARED = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
_C = (
    os.environ.get("CC", "gcc"),
    "-std=gnu11",
    "-ftree-vectorize",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    f"-I{_KERNELS}",
    *_SHARED,
)
_AS_NCCL = "-Wl,-soname,libnccl.so.2"  # what a process that has loaded it finds under NCCL's name
_CXX = (
    os.environ.get("CXX", "g++"),
    "-x",
    "c++",
    "-std=c++17",
    "-DFASTCOMM_HOST",
    f"-I{_KERNELS}",
    f"-I{_ROOT}/tests/kernels",  # host_shim.h
    *_SHARED,
    "-O0",  # the functions are many and all inlined: optimising them takes longer than it saves
)


@dataclass(frozen=True)
class StandIns:
    """Paths of shared libraries: the CUDA driver, NCCL, an NCCL from before 2.18, and the kernels
    as host code.
    """

    cuda: str
    nccl: str
    old_nccl: str
    kernels: str


@functools.cache
def stand_ins() -> StandIns:
    """Compiles those that have changed since they were last compiled, side by side."""
    compiling: dict[str, tuple[str | Path, ...]] = {
        "cuda": (*_C, *_sources("cuda")),
        "nccl": (*_C, _AS_NCCL, *_sources("nccl")),
        "old_nccl": (*_C, "-DTOO_OLD", *_sources("nccl")),
        "kernels": kernels_command(),
    }
    with ThreadPoolExecutor() as threads:
        paths = threads.map(lambda name: compiled(f"lib{name}.so", *compiling[name]), compiling)
        return StandIns(**dict(zip(compiling, paths, strict=True)))


def host_kernels_compiler() -> tuple[str | Path, ...]:
    """Compiles a source that includes the kernels' as plain C++."""
    return _CXX


def kernels_command() -> tuple[str | Path, ...]:
    """Compiles the kernels as plain C++."""
    return (*_CXX, *(_KERNELS / f"cuda/{family}.cu" for family in _FAMILIES))


def environment(libraries: StandIns) -> dict[str, str]:
    """The variables that make fastcomm load them."""
    return {
        "FASTCOMM_CUDA_LIBRARY": libraries.cuda,
        "FASTCOMM_NCCL_LIBRARY": libraries.nccl,
        "FASTCOMM_STAND_IN_KERNELS": libraries.kernels,
        "FASTCOMM_KERNELS": _no_fatbins(),
        "CUDA_VISIBLE_DEVICES": "",  # else torch's own NCCL would be a second one
    }


@functools.cache
def _no_fatbins() -> str:
    """A folder with what the stand-in for the driver is given to load: it looks kernels up in its
    own library, so that tests need no nvcc.
    """
    folder = _BUILT / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for family in _FAMILIES:
        mine = folder / f"{family}.{os.getpid()}"
        mine.write_bytes(b"for the stand-in")
        mine.rename(folder / f"{family}.fatbin")  # at once: others may be reading it
    return str(folder)


def nccl_without(*functions: str) -> str:
    """The path of a stand-in for NCCL that lacks these functions, as an older release does."""
    name = "nccl-without-" + "-".join(functions)
    return compiled(
        f"lib{name}.so",
        *_C,
        "-O0",  # one test's: to compile takes longer than to run
        *(f"-D{function}=without_{function}" for function in functions),
        *_sources("nccl"),
    )


def loaded(name: str) -> ctypes.CDLL:
    """In a rank: the stand-in for "cuda" or "nccl" that it works with."""
    return ctypes.CDLL(os.environ[f"FASTCOMM_{name.upper()}_LIBRARY"])


def log_of(library: ctypes.CDLL) -> list[str]:
    """The calls a stand-in has noted, the oldest first."""
    return _lines(library.stand_in_log)


def calls_with_lock() -> list[str]:
    """In a rank: the functions of the driver's and of NCCL's that were called by a thread that held
    the interpreter's lock, but for one that only reads memory.
    """
    libraries = loaded("cuda"), loaded("nccl")
    names = [name for one in libraries for name in _lines(one.stand_in_calls_with_lock)]
    return [name for name in names if name != "ncclCommGetAsyncError"]


def wait_for_call(function: str) -> None:
    """In a rank: waits until some thread has begun a call of the driver's or of NCCL's."""
    library = loaded("nccl" if function.startswith("nccl") else "cuda")
    while not any(line.startswith(function) for line in log_of(library)):
        time.sleep(0.001)


def races_of(cuda: ctypes.CDLL) -> list[str]:
    """Reads and writes that nothing has ordered since the last look, and forgets all accesses: see
    cuda_order.h.
    """
    races = _lines(cuda.stand_in_races)
    cuda.stand_in_forget_accesses()
    return races


@contextlib.contextmanager
def refusing_races() -> Iterator[None]:
    """In a rank: raises AssertionError if the block has left its streams without order. Where it
    raises an error of its own, that is what matters.
    """
    has_returned = False
    try:
        yield
        has_returned = True
    finally:
        races = _races_here()
        assert not (has_returned and races), "\n".join(["nothing orders the streams:", *races])


def _races_here() -> list[str]:
    """Those in this process, which may not have loaded a stand-in."""
    with contextlib.suppress(KeyError, OSError):
        cuda = ctypes.CDLL(os.environ["FASTCOMM_CUDA_LIBRARY"], os.RTLD_NOLOAD)
        return races_of(cuda) if hasattr(cuda, "stand_in_races") else []
    return []


def _lines(text_of: Any) -> list[str]:
    text = ctypes.create_string_buffer(text_of(None, ctypes.c_size_t(0)) + 1)
    text_of(text, ctypes.c_size_t(len(text)))
    return text.value.decode().splitlines()


@contextlib.contextmanager
def failing(function: str, code: int, after: int = 0) -> Iterator[None]:
    """In a rank: lets a call of the driver's or of NCCL's fail, all but the first `after` times."""
    library = loaded("nccl" if function.startswith("nccl") else "cuda")
    if library.stand_in_fail(function.encode(), code, after) != 0:
        raise ValueError(f"{library} has no function {function}")
    try:
        yield
    finally:
        library.stand_in_fail(function.encode(), 0, 0)


@contextlib.contextmanager
def hanging(function: str) -> Iterator[None]:
    """In a rank: lets calls of a function of NCCL's wait until they are aborted."""
    assert loaded("nccl").stand_in_hang(function.encode()) == 0
    try:
        yield
    finally:
        loaded("nccl").stand_in_hang(None)


def assert_all_ended() -> None:
    """In a rank: NCCL's communicators are gone. The watchdog's thread may still be at it when the
    error is raised.
    """
    deadline = time.monotonic() + 60
    while loaded("nccl").stand_in_live_comms() > 0:
        assert time.monotonic() < deadline, (
            f"{loaded('nccl').stand_in_live_comms()} communicators of NCCL's are alive"
        )
        time.sleep(0.01)


def compiled(name: str, *command: str | Path) -> str:
    """The path of what the command makes of its sources; made only where it, or one of the
    repository's C files, is new.

    Processes that want the same at the same time wait for the one that makes it.
    """
    path = _BUILT / _digest(*command) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            compiler = subprocess.run(
                [*command, "-o", unfinished, "-pthread", "-ldl", "-lm"],
                stderr=subprocess.PIPE,
                text=True,
            )
            if compiler.returncode != 0:
                raise RuntimeError(f"cannot compile {name}:\n{compiler.stderr}")
            unfinished.rename(path)
    return str(path)


def _digest(*command: str | Path) -> str:
    digest = hashlib.sha256("\0".join(map(str, command)).encode())
    for folder in (_KERNELS, _ROOT / "tests"):
        for source in sorted(folder.rglob("*")):
            if source.suffix in (".c", ".h", ".cpp", ".cu", ".cuh"):
                digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _sources(name: str) -> list[Path]:
    return [_SOURCES / "stand_in.c", *sorted(_SOURCES.glob(f"{name}*.c"))]
