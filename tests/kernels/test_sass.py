"""ci/sass.py finds in cuobjdump's output what a kernel must not be like. On machines with nvcc and
cuobjdump it also judges the kernels that are built here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HEAD = "\nFatbin elf code:\n================\narch = sm_90\ncode version = [1,8]\n\n"
LINES = {
    "load": "        /*0a00*/           LDG.E.128 R20, desc[UR6][R40.64] ;  /* 0x00 */",
    "guarded load": "        /*0a10*/      @!P1 LDG.E.128 R12, desc[UR6][R40.64] ;  /* 0x00 */",
    "convert": "        /*0a20*/  F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R7, R8, R9, RZ ; /* */",
    "store": "        /*0a30*/           STG.E desc[UR6][R44.64], R20 ;      /* 0x00 */",
    "spill": "        /*0a40*/           STL [R1], R20 ;                     /* 0x00 */",
}
GOOD = ("load", "guarded load", "load", "guarded load", "convert", "store")


@pytest.fixture(scope="module")
def sass():
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        yield importlib.import_module("sass")
    finally:
        sys.path.remove(str(ROOT / "ci"))


def _problems(sass, code=GOOD, registers=64, stack=0):
    code = "\n".join(LINES[name] for name in code)
    listing = f"{HEAD}\t\tFunction : flatten_f32_e4m3_504\n\t.headerflags\n{code}\n"
    resources = (
        f"{HEAD} Function flatten_f32_e4m3_504:\n"
        f"  REG:{registers} STACK:{stack} SHARED:0 LOCAL:0 CONSTANT[0]:4136 TEXTURE:0\n"
    )
    (kernel,) = sass.kernels_of(listing, resources)
    return list(kernel.problems())


def test_a_good_kernel_has_no_problems(sass):
    assert _problems(sass) == []


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"code": (*GOOD, "spill")}, "spills"),
        ({"stack": 8}, "spills"),
        ({"registers": 88}, "2 blocks fit, not 3"),
        ({"code": ("load", "load", "store", "load", "load", "convert")}, "2 loads in flight"),
        ({"code": ("load",) * 4}, "without F2FP.SATFINITE.E4M3"),
    ],
    ids=["spill", "stack", "registers", "loads", "conversion"],
)
def test_each_problem_of_a_kernel_is_named(sass, changes, problem):
    (found,) = _problems(sass, **changes)
    assert problem in found


def test_the_kernels_built_here_are_good(sass):
    fatbins = [ROOT / "kernels" / "cuda" / f"{family}.fatbin" for family in sass.FAMILIES]
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None or not all(fatbin.is_file() for fatbin in fatbins):
        pytest.skip("needs nvcc, for the kernels, and cuobjdump")
    for fatbin in fatbins:
        kernels = sass.read(cuobjdump, fatbin)
        assert kernels and not [(k.name, *k.problems()) for k in kernels if list(k.problems())]
