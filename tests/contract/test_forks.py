"""Forks: the communicator stays its parent's."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time

import pytest
import torch

from fastcomm import FastcommError
from tests.contract import new_ranks
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


def _fork(place):
    comm = communicator(place)
    tensor = comm.empty(50_000, dtype=torch.float32).fill_(1)
    work = comm.all_reduce(torch.ones(5000), async_op=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, _of_what_use_is(comm, work).encode())
        del comm, work, tensor  # nor may the child take anything from its parent
        gc.collect()
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    if place.transport != "shm":
        time.sleep(1.2)  # until every rank has looked for notes that the child may have left
    work.wait()
    for _ in range(3):
        comm.all_reduce(tensor)
        check_all_reduce(comm)
    assert (tensor == 2**3).all()
    comm.barrier()
    return answer, os.getpid()


def _of_what_use_is(comm, work):
    """What a forked child hears about the communicator of its parent, one line per attempt."""
    attempts = [
        comm.barrier,
        lambda: comm.all_reduce(torch.ones(4)),
        lambda: comm.empty(4, dtype=torch.float32),
        comm.abandon,
        work.wait,
    ]
    answers = []
    for attempt in attempts:
        try:
            attempt()
            answers.append("no error")
        except FastcommError as error:
            answers.append(str(error))
    if comm.backend == "nccl":
        comm.abort()
    comm.close()
    return "\n".join(answers)


@over(2)
def test_a_forked_child_is_told_and_its_parent_goes_on(transport, world_size):
    for answer, pid in values_of(new_ranks(transport, world_size, _fork)):
        lines = answer.splitlines()
        assert len(lines) == 5
        assert all(
            "fork" in line and str(pid) in line and "fastcomm.init" in line for line in lines
        ), answer


def _drop_it_in_children(place):
    comm = communicator(place)
    for _ in range(8):  # what a group does when it is freed depends on how often it was used
        comm.all_reduce(torch.ones(5000))
        time.sleep(0.05)  # until no thread holds anything of the communicator's
        child = os.fork()
        if child == 0:
            del comm
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    comm.barrier()


@over(2)
def test_a_forked_child_may_drop_the_communicator_of_its_idle_parent(transport, world_size):
    values_of(new_ranks(transport, world_size, _drop_it_in_children))


def _use_a_data_loader(place):
    multiprocessing.current_process()._config["daemon"] = False  # or it may not have workers
    comm = communicator(place)
    totals = []
    for numbers in torch.utils.data.DataLoader(
        list(range(8)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ):
        comm.all_reduce(numbers)
        totals.append(numbers.tolist())
    comm.barrier()
    assert totals == [[0, 2, 4, 6], [8, 10, 12, 14]]


@over(2, nccl=(), hierarchical=())
def test_the_workers_of_a_data_loader_disturb_nobody(transport, world_size):
    values_of(new_ranks(transport, world_size, _use_a_data_loader))
