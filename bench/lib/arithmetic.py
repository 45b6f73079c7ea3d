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

KERNELS = Path(__file__).resolve().parent.parent.parent / "kernels"
OPTIONS = ("-shared", "-fPIC", "-std=gnu11", "-O3", "-ffp-contract=off")  # as in setup.py


@functools.cache
def core() -> ctypes.CDLL:
    """The part of the C core that reduces, compiled here: the package exports none of it."""
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        sources = map(str, KERNELS.glob("shm/reduce*.c"))
        compiler = os.environ.get("CC", "gcc")
        command = [compiler, *OPTIONS, f"-I{KERNELS}", *sources, "-o", library.name]
        subprocess.run(command, check=True)
        return ctypes.CDLL(library.name)


def reduction_of(shards: list[Tensor], op: str) -> Callable[[], bool]:
    """A call that reduces flat tensors of one dtype and numel, and writes the result into every one
    of them, in one pass. It returns whether the result has an infinity or a NaN; of one tensor that
    is not known, and the answer True.
    """
    dtype, numel, n = CPU_DTYPES.index(shards[0].dtype), shards[0].numel(), len(shards)
    pointers = (ctypes.c_void_p * n)(*[shard.data_ptr() for shard in shards])
    size = ctypes.c_size_t(numel)
    reduce = core().shm_reduce
    reduce.restype = ctypes.c_bool

    def call(_: list[Tensor] = shards) -> bool:  # keeps them alive
        found: bool = reduce(dtype, OPS.index(op), size, pointers, n, pointers, n)
        return found

    return call
