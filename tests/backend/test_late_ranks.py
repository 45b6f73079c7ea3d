"""A rank that comes late to what Gloo carries out is waited for until the group's time-out, and one
that is gone for a moment: until its process has ended, and can be named.
"""

from __future__ import annotations

import subprocess
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastcomm.comm.who import Process
from fastcomm.errors import PeerLostError
from fastcomm.torch_backend.gloo_engine import GlooEngine
from tests.support import process_groups
from tests.support.process_groups import world
from tests.support.ranks import on_ranks

ranks = process_groups.ranks  # a pool of this module's own


def _bytes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


@on_ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_group_s_timeout(comm):
    world()
    group = dist.new_group(timeout=timedelta(milliseconds=2345), backend="fastcomm")
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="2345 ?ms"):
            dist.all_reduce(_bytes(1), group=group)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


class _CompletedAtTheLastMoment:
    """A Work of Gloo's whose collective is completed after a wait for it has timed out."""

    n_waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.n_waits += 1
        if self.n_waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.n_waits > 0


def test_a_collective_that_is_completed_as_a_wait_times_out_has_not_failed():
    gloo = SimpleNamespace(rank=lambda: 0, all_reduce=lambda *_: _CompletedAtTheLastMoment())
    engine = GlooEngine(gloo, [], [0])
    assert engine.call("all_reduce", [_bytes(1)]).wait(timedelta(seconds=9))


# As Gloo says it; the path is that of its sources where torch was built.
BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.fixture
def running():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_whose_connection_broke_is_given_the_time_to_end(running):
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, running.pid)], [0, 1])
    threading.Timer(0.05, running.kill).start()
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {running.pid}\) died"):
        engine.raise_if_lost("gather", RuntimeError(BROKEN))


def test_a_call_that_gloo_refuses_waits_for_no_process(running):
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, running.pid)], [0, 1])
    with mock.patch("time.sleep", side_effect=AssertionError):
        engine.raise_if_lost(
            "gather", RuntimeError("ProcessGroupGloo::gather: unsupported device type")
        )
