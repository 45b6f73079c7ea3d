"""Scripts that end while a communicator is open: the interpreter ends, with the script's exit code,
whatever runs last.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastcomm import FastcommError
from fastcomm.launching.bootstrap import process_has_ended
from tests.contract import new_ranks
from tests.support import process_groups
from tests.support.bodies import communicator
from tests.support.ranks import fresh_ranks
from tests.support.transports import EVERY_TRANSPORT

EXIT_CODE = 7
_of_script = []  # a script's variables, which live until the interpreter ends


class _Global:
    def __init__(self, call):
        self._call = call

    def __del__(self):
        self._call()


def _noting(path, call):
    """A call that writes what it has raised. It must find its names once modules are emptied."""
    file, refusals = path.open("w"), FastcommError

    def noting(*_):
        try:
            call()
            file.write("done")
        except refusals as error:
            file.write(str(error))
        file.flush()

    return noting


def _end_the_script(all_reduce, send, path, how):
    call = _noting(path, all_reduce)
    if how == "__del__":
        _of_script.append(_Global(call))
    elif how == "atexit":
        atexit.register(call)
    elif how == "pending" and path.name == "0":
        _of_script.append([all_reduce(async_op=True) for _ in range(3)])
    elif how == "message":
        _of_script.append(send())
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(EXIT_CODE)


def _end_with_a_communicator(place, folder, how):
    comm = communicator(place)
    tensor = torch.ones(50_000)
    reduce = functools.partial(comm.all_reduce, tensor)
    reduce()
    while how == "pending" and place.rank == 1 and not process_has_ended(comm.processes[0].pid):
        time.sleep(0.01)
    send = functools.partial(comm.send, tensor, 1 - place.rank, async_op=True)  # nobody receives
    _end_the_script(reduce, send, folder / str(place.rank), how)


def _end_with_the_backend(place, folder, how):
    process_groups.start(place)
    tensor = torch.ones(50_000)
    reduce = functools.partial(dist.all_reduce, tensor)
    reduce()
    _end_the_script(reduce, None, folder / str(place.rank), how)


def _assert_ended(outcomes, folder: Path, how: str) -> None:
    assert [outcome.exitcode for outcome in outcomes] == [EXIT_CODE] * len(outcomes), outcomes
    if how == "__del__":
        assert "its process comes to its end" in (folder / "0").read_text()
    if how == "atexit":
        assert (folder / "0").read_text() == "done"


CASES = [
    (transport, how)
    for transport in EVERY_TRANSPORT
    for how in ("__del__", "atexit", "pending", "message")
    # NCCL's stand-in carries a collective out in the call
    if (transport, how) != ("nccl", "pending")
]


@pytest.mark.parametrize("transport, how", CASES, indirect=["transport"])
def test_a_script_ends_with_its_own_exit_code(transport, how, tmp_path):
    outcomes = new_ranks(transport, 2, _end_with_a_communicator, tmp_path, how)
    _assert_ended(outcomes, tmp_path, how)


@pytest.mark.parametrize("how", ["__del__", "pending"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_script_over_the_backend_ends_with_its_own_exit_code(tmp_path, hosts, how):
    env = [{"FASTCOMM_HOST_ID": str(rank % hosts)} for rank in range(2)]
    outcomes = fresh_ranks(2, _end_with_the_backend, tmp_path, how, env=env)
    _assert_ended(outcomes, tmp_path, how)
