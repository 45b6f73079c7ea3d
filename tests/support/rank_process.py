"""The process of a rank: answers the calls that come through its pipe until that closes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.connection
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastcomm.launching import launchers
from tests.fakes.stand_ins import refusing_races
from tests.support import delays
from tests.support.bodies import Place, communicator, stand_at
from tests.support.outcomes import described

Environment = Mapping[str, "str | None"]

# Of a launcher that has started the tests: no rank of theirs is to read them.
LAUNCHER_VARIABLES = {
    *("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NODELIST", "SLURM_STEP_NODELIST"),
    "SLURM_TASK_PID",
    *(name for launcher in launchers.LAUNCHERS for name in launcher[1:] if name),
}
_PR_SET_PDEATHSIG = 1


def serve(
    pipe: multiprocessing.connection.Connection,
    place: Place,
    env: Environment,
    pass_comm: bool,
    lasts: bool,
) -> None:
    """The life of a rank: answers calls until the pipe closes. With `pass_comm`, bodies get a
    communicator over the place's transport, else the place. lasts: all bodies get the same one.
    """
    stand_at(place)
    _settle(place, env)
    comm = None
    for work in _incoming(pipe):
        has_raised = False
        try:
            body, args = pickle.loads(work)
            if pass_comm and comm is None:
                comm = communicator(place)
            with refusing_races():
                value = carry_out(body, place if comm is None else comm, *args)
            answer = pickle.dumps(("returned", value))
            del value
        except SystemExit:
            raise
        except BaseException as error:  # pytest.fail's exception is not an Exception
            has_raised = True
            answer = pickle.dumps(("raised", described(error)))
        left = _left_behind(comm, lasts)
        if left is not None and not has_raised:
            answer = pickle.dumps(("raised", described(left)))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
    if comm is not None:
        comm.close()


def carry_out(body: Callable[..., Any], *args: Any) -> Any:
    """Runs a body; see delays."""
    return body(*args)


def _left_behind(comm: Any, lasts: bool) -> AssertionError | None:
    """An error if the body leaves reducers in circles that nobody can collect: the next body's
    join() would take them in; or a communicator that the next body cannot use. What can be
    collected is, as it would hold on to shared memory.
    """
    if comm is None:
        gc.collect()
        return None
    from fastcomm.reducer.autograd import free_failed_backwards
    from fastcomm.reducer.owners import reducers_on

    free_failed_backwards()
    _let_torch_forget_models()
    gc.collect()
    if lasts and comm.failure is not None:
        return AssertionError(f"this test has ended the communicator of the next: {comm.failure}")
    reducers = reducers_on(comm.standing)
    return AssertionError(f"these outlive their test: {reducers}") if reducers else None


def _let_torch_forget_models() -> None:
    """Torch 2.7 keeps every model whose state it has saved."""
    saving = sys.modules.get("torch.distributed.checkpoint.state_dict")
    names = getattr(saving, "_get_fqns", None)
    if hasattr(names, "cache_clear"):
        names.cache_clear()


def _settle(place: Place, env: Environment) -> None:
    import torch

    os.setsid()
    # A rank whose parent, the fork server, is gone has nobody left to answer to.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stacks = os.open(stacks_path(place), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    delays.install(place.rank)
    gc.collect()
    gc.freeze()


def _incoming(pipe: multiprocessing.connection.Connection) -> Iterator[bytes]:
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, OSError):
            return


def stacks_path(place: Place) -> str:
    """Where the rank writes the stacks of its threads when it is asked to, by SIGUSR1."""
    return f"{place.directory}/stacks-{place.rank}"
