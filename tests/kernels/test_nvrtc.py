"""The CUDA kernels as CuPy compiles them: by NVRTC, with what multi_tensor asks CuPy for, but
without a CuPy and without a GPU. Needs a libnvrtc: the package nvidia-cuda-nvrtc has one, and so
does a torch for CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastcomm.transports.cuda import multi_tensor
from fastcomm.transports.cuda.multi_tensor import NAMES, WIRE_DTYPES

CAPACITIES = (504, 4000)  # MT_SMALL and MT_LARGE of kernels/cuda/multi_tensor.h
PAIRS = [(NAMES[grad], NAMES[wire]) for grad, wires in WIRE_DTYPES.items() for wire in wires]
FOR_PAIRS = {
    "flatten": [f"flatten_{grad}_{wire}" for grad, wire in PAIRS],
    "unflatten": [f"unflatten_{wire}_{grad}" for grad, wire in PAIRS]
    + [f"norm_{NAMES[grad]}" for grad in WIRE_DTYPES],
}
KERNELS = {
    family: {f"{name}_{capacity}" for name in names for capacity in CAPACITIES}
    for family, names in FOR_PAIRS.items()
} | {"blocks": {"encode_blocks", "add_blocks", "decode_blocks"}}


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    wheels = sorted(path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*"))
    for library in (*wheels, Path("libnvrtc.so.13"), Path("libnvrtc.so.12")):
        try:
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # where it lies, NVRTC does not find it
            return ctypes.CDLL(str(library))
        except OSError:
            continue
    pytest.skip("needs a libnvrtc: pip install nvidia-cuda-nvrtc")


def architectures_of(nvrtc: ctypes.CDLL) -> list[int]:
    n = ctypes.c_int()
    assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(n)) == 0
    architectures = (ctypes.c_int * n.value)()
    assert nvrtc.nvrtcGetSupportedArchs(architectures) == 0
    return list(architectures)


def text_of(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    """what: "PTX" or "ProgramLog"."""
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()


def compile_ptx(nvrtc: ctypes.CDLL, code: str, options: Sequence[str]) -> str:
    program = ctypes.c_void_p()
    source = code.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"", 0, None, None) == 0
    texts = [option.encode() for option in options]
    failed = nvrtc.nvrtcCompileProgram(program, len(texts), (ctypes.c_char_p * len(texts))(*texts))
    assert not failed, text_of(nvrtc, program, "ProgramLog")
    ptx = text_of(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("architecture", [80, 100])
def test_nvrtc_compiles_every_kernel_that_cupy_is_asked_for(
    nvrtc, monkeypatch, family, architecture
):
    if architecture not in architectures_of(nvrtc):
        pytest.skip(f"this libnvrtc knows no compute_{architecture}")
    # Optimised, it would take four times as long.
    more = (f"--gpu-architecture=compute_{architecture}", "--device-debug")
    cupy = SimpleNamespace(
        RawModule=lambda code, options: compile_ptx(nvrtc, code, [*options, *more])
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    ptx = multi_tensor._compile(family)
    assert set(re.findall(r"\.entry (\w+)", ptx)) == KERNELS[family]
