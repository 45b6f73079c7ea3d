"""Reducer.join(): how it ends where something goes wrong, and what it refuses."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fastcomm
from fastcomm import FastcommError, MismatchError, PeerLostError
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.transports import EVERY_TRANSPORT
from tests.support.uneven import ANNOUNCING, LR, data_of, loss_of, small

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]
only_shm = pytest.mark.transports("shm")


@pytest.mark.transports(*ANNOUNCING)
@pytest.mark.parametrize("what", ["all_reduce", "sync_buffers", "check_in_sync", "barrier"])
def test_other_collectives_beside_a_rank_without_data(ranks, transport, what):
    message = r"no data left \(join\).*: enter join\(\) on every rank"
    ranks.raises(2, MismatchError, call_beside_a_shadow, what, match=message)


@pytest.mark.transports("nccl")
@pytest.mark.parametrize("what", ["all_reduce", "barrier"])
def test_other_collectives_over_nccl_are_refused_at_once(ranks, transport, what):
    message = "reduce gradients alone|rank 0 .*aborted its communicator"
    ranks.raises(2, FastcommError, call_beside_a_shadow, what, match=message)


@pytest.mark.transports("nccl")
def test_one_backward_over_nccl_is_of_one_reducer(ranks, transport):
    message = "one backward inside join|rank 0 .*aborted its communicator"
    ranks.raises(2, FastcommError, reduce_for_two, match=message)


def reduce_for_two(comm):
    models = [small(0), small(1)]
    reducers = [fastcomm.Reducer(comm).attach(model) for model in models]
    for i in reducers[0].join(range(1 - comm.rank)):
        loss_of(models[1], models[0](data_of(0, i)).repeat(1, 2)).backward()


def call_beside_a_shadow(comm, what):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    reducer = fastcomm.Reducer(comm).attach(model)
    with reducer.join():
        for _ in range(1 - comm.rank):
            if what == "all_reduce":
                comm.all_reduce(torch.ones(1), "mean")
            elif what == "barrier":
                comm.barrier()
            else:
                getattr(reducer, what)()


def test_an_exception_that_leaves_the_block_ends_it_on_all_ranks(ranks, transport):
    for is_loop in (False, True):
        ranks.raises(3, (ValueError, PeerLostError), fail_in_join, is_loop)


def fail_in_join(comm, is_loop):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)
    batches = range(4 * comm.rank)
    with contextlib.nullcontext() if is_loop else reducer.join():
        for i in reducer.join(batches) if is_loop else batches:
            if comm.rank == 2 and i == 5:
                raise ValueError("a bad batch")
            loss_of(model, data_of(comm.rank, i)).backward()


def test_data_that_ends_inside_an_accumulation(ranks, transport):
    ranks.raises(
        2,
        FastcommError,
        end_in_no_sync,
        match=r"rank 0: the data has ended inside no_sync|rank 0 .*aborted its communicator",
    )


def end_in_no_sync(comm):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)
    for i in reducer.join(range(3 + comm.rank)):
        with reducer.no_sync() if i % 2 == 0 else contextlib.nullcontext():
            loss_of(model, data_of(comm.rank, i)).backward()


@only_shm
@on_ranks(2)
def test_gradients_that_zero_grad_has_dropped_are_not_lost(comm):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)
    with reducer.join():
        with reducer.no_sync():
            loss_of(model, data_of(comm.rank, 0)).backward()
        model.zero_grad()
    reducer.check_in_sync()


@only_shm
def test_what_ends_a_loop_that_was_left_is_not_lost(ranks, transport):
    ranks.raises(2, MismatchError, break_beside_an_all_reduce, match="no data left")


def break_beside_an_all_reduce(comm):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)
    for _ in reducer.join(range(3)):
        if comm.rank:
            break
        comm.all_reduce(torch.ones(1))
    reducer.synchronize()


@only_shm
@on_ranks(1)
def test_a_loop_may_be_left_in_any_way(comm):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)

    def returned():
        for _ in reducer.join(range(3)):
            with contextlib.nullcontext():
                return

    returned()
    for _ in passed_on(enumerate(reducer.join(range(3)))):
        break
    for _, i in zip(range(2), reducer.join(range(3)), strict=False):
        assert i < 2

    def joined():
        with reducer.join():
            yield

    generator = joined()
    next(generator)
    generator.close()
    with contextlib.suppress(SystemExit), reducer.join():
        sys.exit()
    reducer.check_in_sync()


@only_shm
@pytest.mark.parametrize("how", ["behind a generator", "in an inner loop"])
def test_a_loop_that_an_exception_ends_is_not_waited_for(ranks, transport, how):
    ranks.raises(1, FastcommError, fail_in_a_loop, how, match="has aborted this communicator")


def fail_in_a_loop(comm, how):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)

    with contextlib.suppress(ZeroDivisionError):
        if how == "behind a generator":
            for i in passed_on(reducer.join(range(3))):
                1 // i
        else:
            for i in reducer.join(range(3)):
                for _ in (1 // j for j in range(i, -1, -1)):
                    pass
    reducer.check_in_sync()


def test_an_iterator_that_is_dropped_early_ends_all_ranks_with_a_reason(ranks, transport):
    message = (
        r"rank 1 has aborted this communicator: the iterator of join\(batches\) was dropped before "
        r"its end|rank 1 .*aborted its communicator"
    )
    ranks.raises(2, FastcommError, drop_an_iterator, match=message)


def drop_an_iterator(comm):
    model = small()
    reducer = fastcomm.Reducer(comm).attach(model)
    draw_until(0, reducer.join([3, 2, 0, 1][comm.rank :]), model)
    loss_of(model, data_of(0, 0)).backward()


def draw_until(last, batches, model):
    iterator = iter(batches)
    while (i := next(iterator, None)) is not None:
        loss_of(model, data_of(0, i)).backward()
        if i == last:
            break


def log_of_an_iterator_that_is_dropped(place):
    model, logged = small(), []
    reducer = fastcomm.Reducer(communicator(place)).attach(model)
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fastcomm").addHandler(handler)
    draw_until(0, reducer.join([1, 0, 2]), model)
    return logged


@only_shm
def test_an_iterator_that_is_dropped_early_is_logged(transport):
    [[message]] = values_of(fresh_ranks(1, log_of_an_iterator_that_is_dropped))
    assert "rank 0 has aborted this communicator: the iterator" in message


DROPPED_AT_EXIT = """
import torch, fastcomm
model = torch.nn.Linear(2, 2)
iterator = iter(fastcomm.Reducer(fastcomm.init(world_size=1)).attach(model).join(range(3)))
next(iterator)
"""


def test_an_iterator_that_is_dropped_with_the_interpreter_says_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DROPPED_AT_EXIT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "the iterator of join(batches) was dropped" in done.stderr
    assert "Traceback" not in done.stderr


def passed_on(batches):
    yield from batches


# What is refused, before any rank is involved


@only_shm
@pytest.mark.parametrize(
    "options, why",
    [
        ({"op": "sum"}, 'op="sum"'),
        ({"hook": (None, allreduce_hook)}, "a hook, which reduces"),
        ({"bucket_cap_mb": "auto"}, "while the ranks still measure"),
    ],
    ids=["op", "hook", "auto"],
)
@on_ranks(2)
def test_reducers_that_cannot_join(comm, options, why):
    model = small().float()
    reducer = fastcomm.Reducer(comm, **options).attach(model)
    with pytest.raises(ValueError, match=why):
        reducer.join()


@only_shm
@on_ranks(2)
def test_another_reducer_of_the_communicator_that_cannot_join_is_told_from_this_one(comm):
    critic, actor = small(), small()
    of_critic = fastcomm.Reducer(comm, op="max").attach(critic)
    reducer = fastcomm.Reducer(comm).attach(actor)
    with pytest.raises(ValueError, match=r'the one of parameter 2\.bias.*detach\(\).*op="max"'):
        reducer.join()
    of_critic.detach()
    _leave_in_a_circle(comm)
    with reducer.join():
        loss_of(actor, data_of(comm.rank, 0)).backward()


def _leave_in_a_circle(comm):
    """A model that is gone when the garbage collector has run."""
    model = small()
    model.itself = [model]
    fastcomm.Reducer(comm, op="max").attach(model)


@pytest.mark.transports("group")
@on_ranks(2)
def test_error_feedback_cannot_join(comm):
    model = small().float()
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=True).attach(model)
    with pytest.raises(ValueError, match="error_feedback=True"):
        reducer.join()


@only_shm
@on_ranks(2)
def test_a_sharded_optimizer_cannot_join(comm):
    model = small().float()
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=LR)
    with pytest.raises(ValueError, match="a ShardedOptimizer"):
        reducer.join([])
    optimizer.step()


@only_shm
@on_ranks(2)
def test_ranks_that_step_by_themselves_cannot_join(comm):
    model = small().float()
    reducer = fastcomm.Reducer(comm).attach(model)
    why = "a LocalSGD, whose ranks meet after the same number"
    with fastcomm.LocalSGD(reducer, every=2), pytest.raises(ValueError, match=why):
        reducer.join()


@only_shm
@on_ranks(1)
def test_arguments(comm):
    reducer = fastcomm.Reducer(comm)
    with pytest.raises(ValueError, match="has no model"):
        reducer.join()
    model = small()
    reducer.attach(model)
    with pytest.raises(ValueError, match='strategy must be "wait" or "stop"'):
        reducer.join(strategy="all")
    with pytest.raises(TypeError, match="state takes optimizers"):
        reducer.join(state=[reducer])
    with pytest.raises(ValueError, match=r"join\(batches\) is a loop"), reducer.join([1]):
        pass
    with pytest.raises(ValueError, match=r"join\(\) without batches is a block"):
        iter(reducer.join()).__next__()
