"""Many tensors and one flat buffer over the stand-in: more tensors than one launch takes. And what
CuPy is asked for, by a stand-in for it.
"""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import torch

from fastcomm.transports.cuda import multi_tensor
from fastcomm.transports.cuda.multi_tensor import MultiTensor
from tests.transports.nccl import communicator, stand_in_values

N = 4001  # one more than fit into the parameters of a kernel


def _move_many(place):
    comm = communicator(place)
    tensors = [torch.full((2,), float(i)) for i in range(N)]
    offsets = [3 * i for i in range(N)]
    many = MultiTensor([2] * N, offsets, torch.float32, torch.float32, comm.cuda)
    flat = torch.full((3 * N,), -1.0)
    many.flatten(tensors, flat, 2.0)
    numbers = torch.arange(float(N))
    assert torch.equal(flat.view(N, 3)[:, :2], 2 * numbers.repeat(2, 1).t())
    assert bool((flat.view(N, 3)[:, 2] == -1).all())
    for tensor in tensors:
        tensor.zero_()
    many.unflatten(flat, tensors, 0.5, with_stats=True)
    assert torch.equal(torch.stack(tensors)[:, 0], numbers)
    squares = 2 * (numbers.double() ** 2).sum()
    assert torch.allclose(many.square_sum, squares, rtol=1e-6)
    tensors[-1][1] = float("inf")
    tensors[0][0] = float("nan")
    many.norm(tensors)
    assert many.n_nonfinite.item() == 2


def test_more_tensors_than_a_launch_takes_go_in_several():
    stand_in_values(1, _move_many)


def _share_tables(place, n):
    comm = communicator(place)
    numels, offsets = [2] * n, [2 * i for i in range(n)]
    pair = torch.float32, torch.float32, comm.cuda
    longer = MultiTensor([*numels, 5000], [*offsets, 2 * n], *pair)
    shorter = MultiTensor(numels, offsets, *pair, longer)
    tensors = [torch.full((2,), float(i)) for i in range(n)]
    flat = torch.full((2 * n + 5000,), -1.0)
    shorter.flatten(tensors, flat)
    assert torch.equal(flat[: 2 * n], torch.cat(tensors))
    assert bool((flat[2 * n :] == -1).all())
    longer.flatten([*tensors, torch.ones(5000)], flat)
    assert bool((flat[2 * n :] == 1).all())
    return [mine is its for mine, its in zip(shorter.tables, longer.tables, strict=False)]


def test_what_is_the_beginning_of_more_takes_its_tables():
    assert stand_in_values(1, _share_tables, 3) == [[True]]
    assert stand_in_values(1, _share_tables, N - 1) == [[True]]
    assert stand_in_values(1, _share_tables, N) == [[True, True]]


def test_cupy_compiles_anew_when_a_header_has_changed(monkeypatch, tmp_path):
    """It finds what it has compiled before by the source and the options alone."""
    shutil.copytree(multi_tensor.kernel_file("flatten.cu").parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("FASTCOMM_KERNELS", str(tmp_path))
    asked = []
    cupy = SimpleNamespace(RawModule=lambda code, options: asked.append((code, options)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    multi_tensor._compile("flatten")
    multi_tensor._compile("flatten")
    assert len(set(asked)) == 1
    for name in ("multi_tensor.cuh", "multi_tensor.h", "bytes.cuh", "blocks.h"):
        with open(tmp_path / name, "a") as header:
            header.write("/* newer */\n")
        multi_tensor._compile("flatten")
    assert len(set(asked)) == 5
