"""Reducer.virtual(): the steps of a training have the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError, VirtualLoader
from fastcomm.reducer.features.virtual import PartialSums, ranges
from tests.programs.virtual import (
    TRAININGS,
    Program,
    Sentences,
    by_rank,
    check,
    digest,
    images,
    momentum,
    rows,
    train,
)
from tests.support.models import convnet, mlp, seed
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]
only_shm = pytest.mark.transports("shm")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@only_shm
def test_every_training_has_the_bits_of_one_rank_on_two_and_on_three(ranks):
    cases = [(name, 3 + 3 * (i % 2)) for i, name in enumerate(TRAININGS)] + [("mlp", 8)]
    (expected,) = ranks(1, by_rank, *cases)
    assert [len(digests) for digests in expected] == [6] * len(cases)
    assert ranks(2, by_rank, *cases) == [expected] * 2
    del cases[-2], expected[-2]  # with 16 bits
    assert ranks(3, by_rank, *cases) == [expected] * 3


def test_over_every_transport(ranks):
    cases = [("batch_norm", 4), ("branches", 5)]
    (expected,) = ranks(1, by_rank, *cases)
    assert ranks(2, by_rank, *cases) == [expected] * 2


@pytest.mark.transports("shm", "group")
def test_four_ranks(ranks):
    cases = [("batch_norm", 4), ("branches", 7)]
    (expected,) = ranks(1, by_rank, *cases)
    assert ranks(4, by_rank, *cases) == [expected] * 4


@pytest.mark.thorough
@only_shm
def test_over_two_hosts_with_two_ranks_each(ranks):
    cases = [("batch_norm", 4), ("branches", 7)]
    env = [{"FASTCOMM_HOST_ID": f"host {rank // 2}"} for rank in range(4)]
    outcomes = fresh_ranks(4, by_rank, *cases, env=env, pass_comm=True, transport="hierarchical")
    assert values_of(outcomes) == ranks(1, by_rank, *cases) * 4


@pytest.mark.transports("hierarchical")
@on_ranks(4)
def test_hosts_whose_ranks_are_below_no_node_of_the_tree_are_refused(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)  # even and odd ranks are on two hosts
    with pytest.raises(FastcommError, match="takes 1 or 2 ranks over hierarchical"):
        next(reducer.virtual(VirtualLoader(rows(9), virtual_ranks=4, batch_size=2)))


@only_shm
@on_ranks(3)
def test_numbers_of_ranks_that_would_have_other_bits_are_refused(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(FastcommError, match="cannot share 2 virtual ranks out among 3 ranks"):
        next(reducer.virtual(VirtualLoader(rows(9), virtual_ranks=2, batch_size=2)))
    model = mlp().bfloat16()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(FastcommError, match="where gradients have 16 bits, as that of 4.bias"):
        next(reducer.virtual(VirtualLoader(rows(9), virtual_ranks=3, batch_size=2)))


def _first_half(comm):
    return train(comm, "batch_norm", 4, until=3)


def _second_half(comm, checkpoint):
    return train(comm, "batch_norm", 4, resume=checkpoint)[0]


@only_shm
def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks):
    (expected,) = ranks(1, by_rank, ("batch_norm", 4))
    (first, checkpoint), _ = ranks(2, _first_half)
    assert ranks(1, _second_half, checkpoint) == [{step: expected[0][step] for step in range(3, 6)}]
    assert first == {step: expected[0][step] for step in range(3)}


@only_shm
def test_microbatches_are_the_same_with_workers_and_from_any_step_on():
    loaders = [
        VirtualLoader(Sentences(), virtual_ranks=4, batch_size=5, num_workers=n) for n in (0, 1)
    ]
    expected, *_ = loaded = [
        [x.tolist() for x, _ in loader.microbatches(range(1, 3))] for loader in loaders
    ]
    assert loaded[1] == expected
    assert len(expected) == 2 * len(loaders[0]) == 8
    assert len({str(one) for one in expected}) == 8
    loaders[0].step = 1
    assert [x.tolist() for x, _ in loaders[0].microbatches(range(2, 3))] == expected[3::2]
    loaders[0].step = 4
    assert loaders[0].epoch == 1
    assert next(loaders[0].microbatches(range(1, 2)))[0].tolist() != expected[0]


@pytest.mark.transports("shm", "group")
@pytest.mark.parametrize("seed", range(3))
def test_a_training_through_losses_has_the_bits_of_an_undisturbed_one(transport, seed):
    check(Program.generated(seed, transport))


def _with_a_skipped_step(comm):
    seed(1)
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = momentum(model.parameters())
    loader = VirtualLoader(rows(60), virtual_ranks=4, batch_size=3, shuffle=False)
    skipped = []
    for step in reducer.virtual(loader):
        for i, (x, y) in enumerate(step):
            loss = functional.cross_entropy(model(x), y)
            if step.number == 2 and i == 1 and comm.rank == comm.world_size - 1:
                reducer.skip_step()
            loss.backward()
        optimizer.step()
        skipped.append(reducer.skipped)
    return skipped, digest(model.parameters())


@only_shm
def test_a_step_that_one_microbatch_votes_to_skip_is_dropped_at_any_number_of_ranks(ranks):
    (expected,) = ranks(1, _with_a_skipped_step)
    assert expected[0] == [False, False, True, False, False]
    assert ranks(2, _with_a_skipped_step) == [expected, expected]


@only_shm
@on_ranks(2)
def test_an_exception_in_a_microbatch_abandons_the_step_on_all_ranks_and_it_begins_again(comm):
    seed(1)
    model, data = convnet(), images(24)
    buffers = [buffer.clone() for buffer in model.buffers()]
    reducer = fastcomm.Reducer(comm).attach(model)
    loader = VirtualLoader(data, virtual_ranks=4, batch_size=3)
    kind = ZeroDivisionError if comm.rank else AbandonedError
    with pytest.raises(kind):
        for step in reducer.virtual(loader):
            for x, y in step:
                functional.cross_entropy(model(x), y).backward()
                if comm.rank:
                    raise ZeroDivisionError
    assert all(p.grad is None for p in model.parameters())
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)
    assert loader.step == 0
    is_lost = True
    for step in reducer.virtual(loader):
        try:
            for x, y in step:
                functional.cross_entropy(model(x), y).backward()
                if comm.rank and is_lost:
                    raise ZeroDivisionError
        except (ZeroDivisionError, AbandonedError):
            is_lost = False
            if comm.rank:
                comm.abandon()
    assert loader.step == 2
    reducer.check_in_sync()


class Buffered(nn.Module):
    """Has a mask, a table that a mean would round, and a mean of 16 bits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mask", torch.arange(8) % 2 == 0)
        self.register_buffer("table", torch.full((8,), 0.1))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0).bfloat16(), 0.1)
        return self.layer(x * self.mask + self.table)


def _buffers_of(comm):
    seed(1)
    model = Buffered()
    reducer = fastcomm.Reducer(comm).attach(model)
    for step in reducer.virtual(VirtualLoader(rows(24), virtual_ranks=6, batch_size=2)):
        for x, _ in step:
            model(x).sum().backward()
    return [buffer.tolist() for buffer in model.buffers()]


@only_shm
def test_buffers_of_every_kind_are_equal_and_those_that_nobody_changes_stay(ranks):
    (expected,) = ranks(1, _buffers_of)
    assert expected[1] == [torch.tensor(0.1).item()] * 8
    assert any(expected[2])
    assert ranks(3, _buffers_of) == [expected] * 3


@only_shm
@on_ranks(1)
def test_gradients_that_share_memory_are_added_once_each(comm):
    a, b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    model = nn.ParameterList([a, b])
    reducer = fastcomm.Reducer(comm).attach(model)
    for step in reducer.virtual(VirtualLoader(rows(8), virtual_ranks=4, batch_size=2)):
        for _ in step:
            a.grad = b.grad = torch.ones(6)
    assert a.grad.tolist() == b.grad.tolist() == [1.0] * 6


def _two_losses(comm):
    """Returns a digest, and how many rounds had ended after each step's last backward."""
    seed(1)
    model, n_rounds = mlp(), []
    reducer = fastcomm.Reducer(comm).attach(model)
    for step in reducer.virtual(VirtualLoader(rows(36), virtual_ranks=4, batch_size=3)):
        for x, y in step:
            with reducer.no_sync():
                model(x).square().mean().backward()
            functional.cross_entropy(model(x), y).backward()
            n_ended = reducer.n_rounds
        n_rounds.append(n_ended)
    return digest(p.grad for p in model.parameters()), n_rounds


@only_shm
def test_backwards_in_no_sync_add_to_their_microbatch(ranks):
    (expected,) = ranks(1, _two_losses)
    assert ranks(2, _two_losses) == [expected] * 2
    assert expected[1] == [1, 2, 3]


@only_shm
@on_ranks(1)
def test_a_step_reduces_in_its_last_backward_and_is_gone_through_once(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    loader = VirtualLoader(rows(8), virtual_ranks=4, batch_size=2)
    for step in reducer.virtual(loader):
        for i, (x, _) in enumerate(step):
            model(x).sum().backward()
            assert reducer.n_rounds == i // 3
        with pytest.raises(FastcommError, match="was gone through already"):
            list(step)
        with pytest.raises(FastcommError, match="make one backward for each microbatch"):
            model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(FastcommError, match="make one backward for each microbatch"):
        for step in reducer.virtual(loader):
            for x, _ in step:
                model(x).sum().backward()
                model(x).sum().backward()
    optimizer = momentum(model.parameters())
    with pytest.raises(FastcommError, match="SGD.step.. inside the loop over a step"):
        for step in reducer.virtual(loader):
            for x, _ in step:
                model(x).sum().backward()
                optimizer.step()
    with pytest.raises(FastcommError, match="a norm inside the loop over a step"):
        for step in reducer.virtual(loader):
            for i, (x, _) in enumerate(step):
                model(x).sum().backward()
                if i == 3:
                    reducer.grad_norm()
    with pytest.raises(FastcommError, match="4.bias was changed inside the loop"):
        for step in reducer.virtual(loader):
            for i, (x, _) in enumerate(step):
                model(x).sum().backward()
                if i == 3:
                    with reducer.no_sync():
                        model(x).sum().backward()
    with pytest.raises(FastcommError, match="skip_step.. came too late"):
        for step in reducer.virtual(loader):
            for i, (x, _) in enumerate(step):
                model(x).sum().backward()
                if i == 3:
                    reducer.skip_step()
    with pytest.raises(FastcommError, match="and virtual.. adds it to others"):
        for step in reducer.virtual(loader):
            for x, _ in step:
                model(x).square().sum().backward(create_graph=True)
    assert loader.step == 1
    model.zero_grad()
    reducer.set_weight(2)
    with pytest.raises(FastcommError, match="and no set_weight"):
        for step in reducer.virtual(loader):
            for _ in step:
                pass


@only_shm
@on_ranks(1)
def test_a_failed_backward_that_the_program_goes_on_from_ends_the_step(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(AbandonedError, match="a step of virtual.. was abandoned on this rank"):
        for step in reducer.virtual(VirtualLoader(rows(8), virtual_ranks=2, batch_size=2)):
            for x, _ in step:
                with contextlib.suppress(ZeroDivisionError):
                    model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@only_shm
@on_ranks(1)
def test_microbatches_that_are_left_are_an_error_at_the_next_step(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    loader = VirtualLoader(rows(40), virtual_ranks=4, batch_size=2)
    with pytest.raises(FastcommError, match="step 0 of virtual.. has microbatches left"):
        for step in reducer.virtual(loader):
            for x, _ in step:
                model(x).sum().backward()
                break


@only_shm
@on_ranks(2)
def test_ranks_whose_steps_would_differ_are_told_so(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(MismatchError, match="seed is 0 on rank 0 and 1 on rank 1"):
        next(reducer.virtual(VirtualLoader(rows(9), virtual_ranks=2, batch_size=2, seed=comm.rank)))
    loader = VirtualLoader(rows(9), virtual_ranks=2, batch_size=2)
    torch.set_num_threads(1 + comm.rank)
    try:
        with pytest.raises(MismatchError, match="threads is 1 on rank 0 and 2 on rank 1"):
            next(reducer.virtual(loader))
    finally:
        torch.set_num_threads(1)
    if comm.rank:
        model.append(nn.SyncBatchNorm(4))
    with pytest.raises((FastcommError, ValueError), match="module 5 is a SyncBatchNorm"):
        next(reducer.virtual(loader))


@only_shm
@on_ranks(1)
def test_a_checkpoint_of_other_threads_kernels_or_virtual_ranks_is_refused_by_name(comm):
    loader = VirtualLoader(rows(9), virtual_ranks=2, batch_size=2)
    state = loader.state_dict()
    for name in ("threads", "kernels", "virtual_ranks"):
        with pytest.raises(ValueError, match=f"the checkpoint has {name}"):
            loader.load_state_dict({**state, name: state[name] + 1})


@only_shm
@pytest.mark.thorough
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there are no other kernels"
)
def test_the_fingerprint_tells_kernels_apart():
    told = [
        subprocess.check_output(
            [
                sys.executable,
                "-c",
                "from fastcomm.reducer.features.virtual_loader import fingerprint_of_kernels\n"
                "print(fingerprint_of_kernels())",
            ],
            env={**os.environ, **variables},
        )
        for variables in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    ]
    assert told[0] != told[1]


@only_shm
@on_ranks(1)
def test_what_depends_on_the_number_of_ranks_is_refused(comm):
    loader = VirtualLoader(rows(9), virtual_ranks=2, batch_size=2)
    normed = nn.Sequential(nn.Linear(8, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="module 1 is a SyncBatchNorm"):
        next(fastcomm.Reducer(comm).attach(normed).virtual(loader))
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="needs a module"):
        next(fastcomm.Reducer(comm).attach([("weight", weight)]).virtual(loader))
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(ValueError, match='buffers must be "mean" or "first"'):
        reducer.virtual(loader, buffers="last")
    other = fastcomm.Reducer(comm).attach(nn.Linear(2, 2))
    with pytest.raises(FastcommError, match="takes the only reducer of its communicator"):
        reducer.virtual(loader, state=[])
    other.detach()
    with pytest.raises(FastcommError, match="was called inside elastic..: leave elastic.. out"):
        for _ in reducer.elastic([0]):
            next(reducer.virtual(loader))
    for step in reducer.virtual(loader):
        with pytest.raises(ValueError, match="set_weight.. cannot be combined with virtual"):
            reducer.set_weight(2)
        for _ in step:
            pass
    with pytest.raises(ValueError, match="9 samples make no step of 5 microbatches"):
        VirtualLoader(rows(9), virtual_ranks=5, batch_size=2)
    with pytest.raises(TypeError, match="not an IterableDataset"):
        VirtualLoader(Stream(), virtual_ranks=1, batch_size=1)


@only_shm
@on_ranks(1)
def test_each_step_can_be_logged(comm):
    class Kept(logging.Handler):
        lines: list[str] = []

        def emit(self, record):
            self.lines.append(record.getMessage())

    handler, log = Kept(), logging.getLogger("fastcomm.virtual")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        train(comm, "mlp", 3, until=2)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert [line.partition(":")[0] for line in handler.lines] == ["step 0", "step 1"]
    assert len(set(handler.lines[0].split())) > 5


def _by_definition(values):
    """The sum by the tree, over a power of two of them; others part there."""
    if len(values) == 1:
        return values[0]
    middle = 1
    while 2 * middle < len(values):
        middle *= 2
    return _by_definition(values[:middle]) + _by_definition(values[middle:])


def test_partial_sums_are_those_of_the_tree_and_few():
    generator = torch.Generator().manual_seed(3)
    for n in range(1, 66):
        values = list(torch.randn(n, 7, generator=generator))
        expected = _by_definition(values)
        for world_size in range(1, min(n, 9) + 1):
            owned = ranges(range(n), world_size)
            if not all(owned):
                continue
            assert [v for own in owned for v in own] == list(range(n))
            totals = []
            for own in owned:
                sums = PartialSums()
                for v in own[:-1]:
                    sums.push([values[v].clone(), None])
                    assert len(sums._sums) <= len(own).bit_length()
                totals.append(sums.total([values[own[-1]], None]))
            assert torch.equal(_by_definition([total[0] for total in totals]), expected)
            assert [total[1] for total in totals] == [None] * world_size
