"""The fork server does not start CUDA: no rank that it forks afterwards could use a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.fakes.stand_ins import driver_without_a_gpu

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch never starts CUDA: needs one built for it"
)


def _starts_of_cuda(tmp_path, code):
    """How often a process that does this starts CUDA, and its standard error."""
    starts = tmp_path / "starts"
    starts.touch()
    paths = [str(driver_without_a_gpu().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport os; os._exit(0)"],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "FASTCOMM_STARTS_OF_CUDA": str(starts),
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    return starts.stat().st_size, done.stderr


def _is_in_bad_fork(comm):
    return torch.cuda._is_in_bad_fork()


def test_the_fork_server_does_not_start_cuda(tmp_path):
    starts, errors = _starts_of_cuda(tmp_path, "import tests.support.preload")
    assert starts == 0, errors
    assert "AssertionError" not in errors


def test_the_fork_server_refuses_to_serve_once_cuda_was_started(tmp_path):
    code = "import torch; torch.cuda.is_available(); import tests.support.preload"
    starts, errors = _starts_of_cuda(tmp_path, code)
    assert starts > 0
    assert "has started CUDA: ranks could not use a GPU" in errors


def test_a_rank_may_start_cuda(ranks):
    assert ranks(2, _is_in_bad_fork) == [False, False]
