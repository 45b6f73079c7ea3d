"""ci/sass.py finds in cuobjdump's output what a kernel must not be like. On machines with nvcc and
cuobjdump it also judges the kernels that are built here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def sass():
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        yield importlib.import_module("sass")
    finally:
        sys.path.remove(str(ROOT / "ci"))


def test_the_kernels_built_here_are_good(sass):
    fatbins = [ROOT / "kernels" / "cuda" / f"{family}.fatbin" for family in sass.FAMILIES]
    cuobjdump = sass.find_cuobjdump()
    if cuobjdump is None or not all(fatbin.is_file() for fatbin in fatbins):
        pytest.skip("needs nvcc, for the kernels, and cuobjdump")
    for fatbin in fatbins:
        kernels = sass.read(cuobjdump, fatbin)
        assert kernels and not [(k.name, *k.problems()) for k in kernels if list(k.problems())]
