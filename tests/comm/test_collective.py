"""The tables of ops and dtypes are what the C core, the kernels for GPUs, and the stand-in for NCCL
number and name. The tests' lists of collectives are the interface's. Reads sources only; that
results are right is tested elsewhere.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
from torch.distributed import ReduceOp

from fastcomm.comm.collective import (
    BUCKET_OPS,
    CPU_DTYPES,
    DTYPES,
    FLOATS,
    OPS,
    REDUCTIONS,
    canonical_op,
    name_of,
)
from fastcomm.comm.communicator import Communicator
from fastcomm.transports.cuda.multi_tensor import NAMES, WIRE_DTYPES
from tests.support.collective_checks import CALLS, CHECKS

ROOT = Path(__file__).resolve().parent.parent.parent
REDUCE_H = (ROOT / "kernels/shm/reduce.h").read_text()
CUDA_H = (ROOT / "kernels/cuda/multi_tensor.cuh").read_text()
STAND_IN = ROOT / "tests/fakes"


def enumerators(text: str, first: str) -> list[str]:
    """Of the enum that begins with `first`, whose numbers are 0, 1, 2, ..."""
    found = re.search(rf"enum \w*\s*{{\s*({first}\b[^}}]*)}}", text)
    assert found is not None, f"no enum begins with {first}"
    without_comments = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    assert "=" not in without_comments
    return [name for name in re.split(r"[\s,]+", without_comments) if name]


def test_every_collective_is_called_and_checked() -> None:
    methods = inspect.getmembers(Communicator, inspect.isfunction)
    found = {name for name, one in methods if "async_op" in inspect.signature(one).parameters}
    assert CALLS.keys() == CHECKS.keys() == found - {"barrier", "send", "recv"}


def test_the_core_numbers_ops_as_the_table() -> None:
    names = [f"SHM_{op.upper().replace(' ', '_')}" for op in BUCKET_OPS]
    assert enumerators(REDUCE_H, "SHM_SUM") == [*names, "SHM_OPS"]
    assert f"SHM_PLAIN_OPS = {names[len(OPS)]} " in REDUCE_H


def test_the_core_numbers_dtypes_as_the_table() -> None:
    names = [f"SHM_{name_of(dtype).upper()}" for dtype in CPU_DTYPES]
    assert enumerators(REDUCE_H, "SHM_FLOAT32") == [*names, "SHM_DTYPES"]


def test_the_core_knows_how_long_elements_are() -> None:
    text = (ROOT / "kernels/shm/reduce.c").read_text()
    sizes = dict(re.findall(r"\[SHM_(\w+)\] = (\d+),", text))
    assert sizes == {name_of(dtype).upper(): str(dtype.itemsize) for dtype in CPU_DTYPES}


def test_every_kernel_of_the_core_is_in_its_place() -> None:
    for name in ("reduce.c", "reduce_16bit.c"):
        text = (ROOT / "kernels/shm" / name).read_text()
        kernels = re.findall(r"\[SHM_([A-Z]+)\] = \w+##_(\w+)", text)
        assert sorted(kernels) == sorted((op.upper(), op) for op in OPS), name


def test_every_op_has_the_names_that_torch_gives_it() -> None:
    for one in REDUCTIONS:
        assert canonical_op(one.name) == one.name
        assert canonical_op(one.of_torch.lower()) == one.name
        assert canonical_op(getattr(ReduceOp, one.of_torch)) == one.name


def test_the_used_mask_that_an_op_reduces_says_whether_a_rank_has_a_gradient() -> None:
    for one in REDUCTIONS:
        absent, present = map(torch.tensor, one.used_values)
        for values in ((absent, absent), (absent, present), (present, absent), (present, present)):
            is_absent = bool(one.combine(*values) == absent)
            assert is_absent == all(value is absent for value in values), one.name


def test_the_stand_in_for_nccl_numbers_ops_as_the_table() -> None:
    names = enumerators((STAND_IN / "nccl_reduce.h").read_text(), "SUM")
    for one in REDUCTIONS:  # a mean is a sum there
        assert names[one.nccl] == ("sum" if one.name == "mean" else one.name).upper()


def test_the_stand_in_for_nccl_numbers_dtypes_as_the_table() -> None:
    text = (STAND_IN / "nccl_reduce.c").read_text()
    known = re.findall(r"\{(\d), reduce_(\w+)\}", text)
    for one in DTYPES:
        name = name_of(one.dtype).removeprefix("float8_").removesuffix("fn")
        assert known[one.nccl] == (str(one.dtype.itemsize), name)


def test_the_kernels_for_gpus_are_those_of_the_pairs_of_dtypes() -> None:
    pairs = re.findall(r"X\((\w+), (\w+), N\)", CUDA_H)
    assert sorted(pairs) == sorted(
        (NAMES[grad], NAMES[wire]) for grad, wires in WIRE_DTYPES.items() for wire in wires
    )
    assert set(WIRE_DTYPES) == set(FLOATS)
    assert set(NAMES) == {one.dtype for one in DTYPES if one.dtype.is_floating_point}
