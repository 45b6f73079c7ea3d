"""Reducer.virtual(): the steps of a training have the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError, VirtualLoader
from fastcomm.reducer.features.virtual import PartialSums, ranges
from tests.support.bodies import communicator, leave, note, wait_for_note
from tests.support.models import Transformer, convnet, mlp, seed
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]
only_shm = pytest.mark.transports("shm")


def images(n):
    return torch.utils.data.TensorDataset(torch.randn(n, 3, 12, 12), torch.randint(0, 4, (n,)))


def rows(n, width=8):
    return torch.utils.data.TensorDataset(torch.randn(n, width), torch.randint(0, 4, (n,)))


class Sentences(torch.utils.data.Dataset):
    """Draws words at random, also from Python's generator."""

    def __len__(self):
        return 80

    def __getitem__(self, i):
        words = torch.randint(0, 31, (9,))
        words[0] = random.randrange(31)
        return words[:-1], words[1:]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, 2, dropout=0.2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 2, 4))[0][:, -1])


class Branches(nn.Module):
    """Which parameters it uses depends on the data."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        return self.branches[int(x.sum() * 10) % 3](x)


def spectral():
    seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
    return nn.Sequential(layer, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def transformer():
    model = Transformer()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TRAININGS = {
    "mlp": (mlp, rows, adamw, {}),
    "batch_norm": (convnet, images, momentum, {}),
    "batch_norm_first": (convnet, images, momentum, {"buffers": "first"}),
    "transformer": (transformer, lambda _: Sentences(), adamw, {}),
    "lstm": (Recurrent, rows, adamw, {}),
    "branches": (Branches, rows, momentum, {}),
    "spectral_norm": (spectral, rows, momentum, {}),
    "bfloat16": (lambda: mlp().bfloat16(), rows, momentum, {}),
}


def digest(tensors):
    raw = hashlib.sha1()
    for tensor in tensors:
        raw.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return raw.hexdigest()


def train(comm, name, virtual_ranks, *, until=6, resume=None, at=None, **options):
    """Trains, from a checkpoint if there is one. Returns digests by step, and a checkpoint.

    until: how many steps, or tells of a reducer and a number of steps whether these are enough.
    at: called with the step, the microbatch and the moment where a rank may be lost.
    """
    make, data, optimize, its_options = TRAININGS[name]
    seed(1)
    dataset = data(10 * virtual_ranks)
    model = make().to(comm.device)
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = optimize(model.parameters())
    loader = VirtualLoader(dataset, virtual_ranks=virtual_ranks, batch_size=3, seed=4)
    if resume is not None:
        for one, state in zip((model, optimizer, loader), resume, strict=True):
            one.load_state_dict(state)
    if at is not None:
        options["state"] = [optimizer]
        now = [0, 0]
        next(model.parameters()).register_hook(lambda _: at(reducer, *now, "in backward"))
    seed(100 + comm.rank)  # no random state of before counts
    digests = {}
    is_enough = until if callable(until) else lambda _, n_steps: n_steps == until
    is_over = False
    while not is_over:
        for step in reducer.virtual(loader, **its_options, **options):
            for i, (x, y) in enumerate(step):
                outputs = model(
                    x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
                )
                if at is not None:
                    now[:] = step.number, i
                    at(reducer, *now, "before backward")
                functional.cross_entropy(outputs.flatten(0, -2).float(), y.flatten()).backward()
            norm = reducer.clip_grad_norm_(0.5)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            noise = torch.randn(2)  # the user's own, between two steps
            if at is not None:
                at(reducer, step.number, 0, "before step")
            optimizer.step()
            if not reducer.skipped:
                tensors = [norm, noise, *gradients, *model.state_dict().values()]
                digests[step.number] = digest(tensors)
            is_over = is_enough(reducer, loader.step)
            if is_over:
                break
    checkpoint = [one.state_dict() for one in (model, optimizer, loader)]
    reducer.detach()
    return digests, checkpoint


def by_rank(comm, *cases):
    """A case is a name, a number of virtual ranks and, perhaps, one of steps."""
    return [train(comm, name, n, until=(*until, 6)[0])[0] for name, n, *until in cases]


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


# ---- ranks are lost, and others come -------------------------------------------------------------


def _train_through(place, n_ranks, name, virtual_ranks, losses):
    """A loss is a process, and the step from which on it is killed, at which microbatch of its own
    and which moment. For each loss a process comes in its place. Ends two steps after the last one
    has come.
    """
    number, ends_at = place.rank, []
    if number >= n_ranks:
        wait_for_note(place, f"lost {number - n_ranks}")
    while number >= n_ranks:
        number = losses[number - n_ranks][0]
    own = dataclasses.replace(place, rank=number, world_size=n_ranks)

    def at(reducer, step, *where):
        for i, (process, first, *lost_at) in enumerate(losses):
            if process == place.rank and step >= first and lost_at == list(where):
                note(place, **{f"lost {i}": os.getpid()})
                leave(place, reducer.comm, "killed")

    def is_enough(reducer, n_steps):
        pids = {str(one.pid) for one in reducer.comm.processes}
        lost = [Path(place.directory, f"lost {i}") for i in range(len(losses))]
        have_come = len(pids) == n_ranks and all(
            one.exists() and one.read_text() not in pids for one in lost
        )
        if have_come and not ends_at:
            ends_at.append(n_steps + 2)
        time.sleep(0.01)  # for those that come
        return n_steps in ends_at

    comm = communicator(own, timeout=timedelta(seconds=60))
    return train(comm, name, virtual_ranks, at=at, until=is_enough)[0]


LOSSES = [
    ("batch_norm", [(1, 2, 0, "before backward"), (0, 7, 0, "in backward")]),
    ("mlp", [(2, 1, 1, "in backward"), (3, 4, 0, "before step")]),
]


@only_shm
@pytest.mark.parametrize("name, losses", LOSSES, ids=["batch_norm", "mlp"])
def test_a_training_through_losses_has_the_bits_of_an_undisturbed_one(ranks, name, losses):
    n = 3 + len(losses)
    outcomes = fresh_ranks(n, _train_through, 3, name, 4, losses, transport="shm")
    ends = values_of(outcomes, *(process for process, *_ in losses))
    n_steps = max(map(max, ends))
    (expected,) = ranks(1, by_rank, (name, 4, n_steps + 1))
    for digests in ends:
        assert max(digests) == n_steps
        assert digests == {step: expected[0][step] for step in digests}


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
    for step in reducer.virtual(loader):
        for x, y in step:
            functional.cross_entropy(model(x), y).backward()
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
        n_rounds.append(reducer.n_rounds)
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
    with pytest.raises(AbandonedError, match="step 0 of virtual.. was abandoned on this rank"):
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
