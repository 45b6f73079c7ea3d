"""reduction_of: the arithmetic of an all-reduce over shared memory, without its flags."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fastcomm.comm.collective import CPU_DTYPES, OPS

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "kernels"
OPTIONS = ("-shared", "-fPIC", "-std=gnu11", "-O3", "-ffp-contract=off")  # as in setup.py
# A pointer: setup.py hides the function.
EXPORTED = '#include "shm/reduce.h"\ntypeof(shm_reduce) *const exported_reduce = shm_reduce;'


@functools.cache
def core() -> ctypes.CDLL:
    """The part of the C core that reduces: the package exports none of it."""
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        parts = [str(built(one)) for one in KERNELS.glob("shm/reduce*.c")]
        compiler = os.environ.get("CC", "gcc")
        command = [compiler, *OPTIONS, f"-I{KERNELS}", *parts, "-x", "c", "-", "-o", library.name]
        subprocess.run(command, input=EXPORTED.encode(), check=True)
        return ctypes.CDLL(library.name)


def built(source: Path) -> Path:
    """What setup.py has compiled of it since it changed, if anything: it takes half a minute."""
    changed = max(one.stat().st_mtime for one in (source, *KERNELS.glob("shm/*.h")))
    found = ROOT.glob(f"build/temp*/kernels/shm/{source.stem}.o")
    return next((one for one in found if one.stat().st_mtime > changed), source)


def reduction_of(shards: list[Tensor], op: str) -> Callable[[], bool]:
    """A call that reduces flat tensors of one dtype and numel, and writes the result into every one
    of them, in one pass. It returns whether the result has an infinity or a NaN; of one tensor that
    is not known, and the answer True.
    """
    dtype, numel, n = CPU_DTYPES.index(shards[0].dtype), shards[0].numel(), len(shards)
    pointers = (ctypes.c_void_p * n)(*[shard.data_ptr() for shard in shards])
    size = ctypes.c_size_t(numel)
    reduce = ctypes.CFUNCTYPE(ctypes.c_bool).in_dll(core(), "exported_reduce")

    def call(_: list[Tensor] = shards) -> bool:  # keeps them alive
        found: bool = reduce(dtype, OPS.index(op), size, pointers, n, pointers, n)
        return found

    return call
