"""Steps that all ranks drop together: reducer.skip_step(), skip_step_on() and skip_nonfinite."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

import fastcomm
from fastcomm import AbandonedError, FastcommError
from fastcomm.reducer.features import skip
from fastcomm.reducer.features.skip import Skipping
from tests.support.bodies import finish_together
from tests.support.models import SMALL_BUCKETS, attached, backward, batch, gradients, loss_of, mlp
from tests.support.ranks import on_ranks
from tests.support.skips import INF, NAN, Trainee, logged, spoil
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]
only_shm = pytest.mark.transports("shm")


# a NaN, or a vote


@pytest.mark.parametrize("value", [NAN, INF])
@on_ranks(2, 3)
def test_a_nonfinite_gradient_of_one_rank_makes_all_ranks_skip(comm, buckets, value):
    trainee = Trainee(comm, **buckets)
    with logged() as lines:
        changed = [
            trainee.train(i, (lambda model: spoil(model, value)) if i in (1, 4) else None)
            for i in range(6)
        ]
    assert changed == [True, False, True, True, False, True]
    assert trainee.reducer.n_skipped == 2
    said = "all ranks skip a step: gradients not finite on rank 1: 2.weight"
    assert [line.partition(" (1 elements)")[0] for line in lines] == [said] * 2 * (comm.rank == 0)
    trainee.reducer.check_in_sync(trainee.optimizer)


@pytest.mark.parametrize("vote", ["before", "instead"])
@pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "plain"])
@on_ranks(2, 3)
def test_a_vote_of_one_rank_makes_all_ranks_skip(comm, buckets, vote, hooked):
    trainee = Trainee(comm, skip_nonfinite=comm.backend == "nccl", **buckets)
    for parameter in trainee.model.parameters() if hooked else ():
        # It finds gradients that nobody has taken; no bucket is launched before backward ends.
        parameter.register_post_accumulate_grad_hook(_look)
    with logged() as lines:
        changed = [trainee.train(i, vote=vote if i in (1, 2) else None, rank=0) for i in range(4)]
    assert changed == [True, False, False, True]
    assert lines == ["all ranks skip a step: rank 0 called skip_step()"] * 2 * (comm.rank == 0)
    trainee.reducer.check_in_sync(trainee.optimizer)


def _look(parameter):
    """A hook that changes nothing."""


@only_shm
@on_ranks(2)
def test_all_ranks_may_vote_and_a_second_call_is_harmless(comm):
    trainee = Trainee(comm)
    for _ in range(2):
        trainee.reducer.skip_step()
        trainee.reducer.skip_step()
        assert trainee.reducer.skipped
        with logged() as lines:
            trainee.optimizer.step()
        assert [line.count("called") for line in lines] == [2] * (comm.rank == 0)
    assert trainee.train(0)
    assert trainee.reducer.n_skipped == 2
    trainee.reducer.skip_step()
    trainee.reducer.detach()
    trainee.reducer.attach(trainee.model)
    assert trainee.train(1)


@only_shm
@on_ranks(2)
def test_a_rank_may_leave_the_iteration_once_it_has_taken_its_part(comm):
    trainee = Trainee(comm)
    for i in range(4):
        if comm.rank and i % 2:
            trainee.reducer.skip_step()
            trainee.reducer.synchronize()
            continue
        assert trainee.train(i) == (i % 2 == 0)
    trainee.reducer.check_in_sync(trainee.optimizer)


@only_shm
@on_ranks(2)
def test_a_vote_goes_with_any_weight(comm, buckets):
    """Also from a rank that has not come to set_weight(), or counts nothing."""
    trainee = Trainee(comm, **buckets)
    for i, weight in enumerate((3, None, 0, 2)):
        if weight is not None or comm.rank == 0:
            trainee.reducer.set_weight(weight or comm.rank)
        is_vote = weight in (None, 0)
        assert trainee.train(i, vote="instead" if is_vote else None) != is_vote


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(3)
def test_ranks_without_data_follow_those_that_skip(comm, buckets):
    """Also where the vote is the first rank's, by which the others are judged."""
    trainee = Trainee(comm, optimizer=torch.optim.SGD, **buckets)
    with logged() as lines, trainee.reducer.join():
        for i in range((5, 4, 1)[comm.rank]):
            if i == 3:
                assert not trainee.train(i, rank=0, vote="instead")
            else:
                assert trainee.train(i, spoil if i == 1 else None) == (i != 1)
    heard = "another rank votes for it" if comm.backend != "nccl" else "not finite on another rank"
    why = "called skip_step()" if comm.rank == 0 else heard
    assert (len(lines), comm.rank < 2 and why in lines[1]) == ((2, True), (2, True), (0, False))[
        comm.rank
    ]
    trainee.reducer.check_in_sync()


@only_shm
@on_ranks(2)
def test_a_nan_in_an_early_micro_batch_drops_the_whole_step(comm):
    trainee = Trainee(comm)
    before = trainee.snapshot()
    for i in range(3):
        poison = spoil(trainee.model) if comm.rank and i == 0 else 0
        with trainee.reducer.no_sync() if i < 2 else contextlib.nullcontext():
            (loss_of(trainee.model, comm.rank, i) + poison).backward()
    assert gradients(trainee.model) == [None] * 6
    trainee.optimizer.step()
    assert trainee.snapshot() == before


@only_shm
@on_ranks(2)
def test_a_vote_comes_too_late_once_gradients_are_reduced(comm):
    trainee = Trainee(comm)
    backward(trainee.model, comm.rank)
    with pytest.raises(FastcommError, match=f"too late on rank {comm.rank}.*zero_grad"):
        trainee.reducer.skip_step()
    trainee.optimizer.step()
    trainee.reducer.skip_step()  # for the next one
    trainee.optimizer.zero_grad()
    assert not trainee.train(1)
    assert trainee.train(2)


@only_shm
@on_ranks(2)
def test_gradients_that_no_optimizer_has_make_no_vote_late(comm):
    model, reducer, _ = attached(comm)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for i in range(3):
        if i == 2 and comm.rank == 1:
            reducer.skip_step()
        backward(model, comm.rank, i)
        if i < 2:
            with pytest.raises(FastcommError, match=f"too late on rank {comm.rank}"):
                reducer.skip_step()
        optimizer.step()
        optimizer.zero_grad()  # which leaves the gradients of the other layer
    assert reducer.n_skipped == 1


@pytest.mark.transports("shm", "nccl")
@on_ranks(2)
def test_a_gradient_without_elements_is_finite(comm):
    model = mlp()
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    reducer = fastcomm.Reducer(comm, skip_nonfinite=True).attach(model)
    (loss_of(model, comm.rank) + model.none.sum()).backward()
    assert not reducer.skipped


@pytest.mark.transports("nccl")
@on_ranks(2)
def test_over_nccl_a_vote_needs_somebody_who_looks(comm):
    for options, why in (
        ({}, "skip_nonfinite=True"),
        ({"op": "max", "skip_nonfinite": True}, "op max may lose"),
    ):
        model, reducer, _ = attached(comm, **options)
        with pytest.raises(FastcommError, match=why):
            reducer.skip_step()
        with pytest.raises(FastcommError, match=why):
            reducer.skip_step_on(MemoryError)
        reducer.detach()


@only_shm
@on_ranks(2)
def test_a_sum_that_overflows_is_nobodys_fault(comm):
    trainee = Trainee(comm, op="sum")
    with logged() as lines:
        (trainee.model[0].weight[0, 0] * 3e38).backward()
    assert trainee.reducer.skipped
    found = "1 elements of the reduced gradients are not finite, though no rank's own are"
    assert lines == [f"all ranks skip a step: {found}"] * (comm.rank == 0)


@pytest.mark.transports("shm", "nccl", "group")
@on_ranks(2)
def test_what_is_too_large_for_the_wire_is_skipped(comm):
    trainee = Trainee(comm, wire_dtype=torch.float16)
    assert not trainee.train(0, lambda model: spoil(model, 1e6))
    assert trainee.train(1)


@only_shm
@on_ranks(2)
def test_a_log_entry_names_few_parameters_and_every_rank(comm):
    trainee = Trainee(comm)
    with logged() as lines:
        (loss_of(trainee.model, comm.rank) * NAN).backward()
    if comm.rank == 0:
        named = r"\S+ \(\d+ elements\), \S+ \(\d+ elements\), \S+ \(\d+ elements\) and 3 more"
        assert re.search(
            f"on rank 0: {named} parameters; .* on rank 1: {named} parameters$", *lines
        )


@only_shm
def test_ranks_do_not_talk_twice_about_a_round(ranks, transport):
    """Where a signal handler raises when they have, the others have gone on."""
    ranks.raises(1, FastcommError, _interrupt_the_talk, match="has aborted this communicator")


def _interrupt_the_talk(comm):
    trainee = Trainee(comm)

    def interrupted(*_):
        patch.undo()
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(skip, "gather_objects", interrupted)
        trainee.train(0, spoil, rank=0)
    comm.barrier()


# exceptions


class Unlucky(Trainee):
    def train(self, i, *caught, error=None, where="backward"):
        with self.reducer.skip_step_on(*caught) if caught else contextlib.nullcontext():
            if error is not None and where == "forward":
                _raise(error)
            x, _ = batch(self.comm.rank, i)
            hidden = self.model[:2](x)
            if error is not None and where == "reduction":
                self.reducer.core.find(Skipping).inspect = lambda *_: _raise(error)
            elif error is not None:
                hidden.register_hook(lambda _: _raise(error))
            self.model[2:](hidden).square().mean().backward()
        vars(self.reducer.core.find(Skipping) or self).pop("inspect", None)
        if error is not None and where != "forward" and caught:  # it has taken its part
            assert self.reducer.skipped and self.reducer.core.round is None
        self.optimizer.step()
        self.optimizer.zero_grad()


def _raise(words):
    raise MemoryError(words)  # not one that a frame holds, which would hold the frame


@pytest.mark.parametrize("where", ["forward", "backward", "reduction"])
@on_ranks(2, 3)
def test_an_exception_of_one_rank_makes_all_ranks_skip(comm, where):
    """Where it comes out of backward, buckets are under way by then."""
    trainee = Unlucky(comm, **({} if where == "reduction" else SMALL_BUCKETS))
    for i in range(4):
        before = trainee.snapshot()
        error = "no\nmore" if comm.rank == 1 and i in (1, 2) else None
        with logged() as lines:
            trainee.train(i, MemoryError, KeyError, error=error, where=where)
        assert (trainee.snapshot() == before) == trainee.reducer.skipped == (i in (1, 2))
        told = "all ranks skip a step: rank 1 met MemoryError: no"
        assert lines == [told] * trainee.reducer.skipped * (comm.rank == 0)
    trainee.reducer.check_in_sync(trainee.optimizer)


@on_ranks(2)
def test_other_exceptions_abandon_the_round_as_always(comm):
    trainee = Unlucky(comm)
    for i, caught in enumerate(((KeyError,), (), (AbandonedError, FastcommError))):
        finish_together(comm)
        error = "none" if comm.rank == 1 else None
        with pytest.raises(AbandonedError if error is None else MemoryError):
            trainee.train(i, *caught, error=error)
        assert gradients(trainee.model) == [None] * 6
        trainee.optimizer.zero_grad()
    trainee.train(3)
    assert not trainee.reducer.skipped
    trainee.reducer.check_in_sync(trainee.optimizer)


@only_shm
@on_ranks(2)
def test_an_exception_that_is_caught_inside_the_block_abandons_the_round(comm):
    trainee = Unlucky(comm)
    hears = pytest.raises(AbandonedError) if comm.rank == 0 else contextlib.nullcontext()
    with hears, trainee.reducer.skip_step_on(MemoryError), contextlib.suppress(MemoryError):
        trainee.train(0, error="none" if comm.rank else None)
    trainee.optimizer.zero_grad()
    trainee.train(1)
    assert not trainee.reducer.skipped


@only_shm
@on_ranks(1)
def test_skip_step_on_needs_exceptions(comm):
    with pytest.raises(TypeError, match="types of exceptions"):
        Trainee(comm).reducer.skip_step_on()


@only_shm
@on_ranks(2)
def test_gradients_made_by_hand_are_skipped(comm):
    trainee = Trainee(comm)
    for i, poison in enumerate((1.0, NAN, 2.0)):
        for parameter in trainee.model.parameters():
            parameter.grad = torch.full_like(parameter, poison if comm.rank else 1.0)
        trainee.reducer.reduce()
        assert trainee.reducer.skipped == (i == 1) == (gradients(trainee.model) == [None] * 6)


@pytest.mark.transports("shm")
@on_ranks(2)
def test_a_vote_over_gradients_of_another_models_loss_is_told_of_zero_grad(comm):
    """As in a GAN, whose generator's loss leaves gradients in the discriminator."""
    generator, discriminator = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    reducers = [fastcomm.Reducer(comm).attach(one) for one in (generator, discriminator)]
    discriminator(generator(torch.ones(2, 4))).sum().backward()
    if comm.rank == 0:
        with pytest.raises(FastcommError, match=r"a GAN's generator\), call zero_grad\(\) first"):
            reducers[1].skip_step()
    discriminator.zero_grad()
    if comm.rank == 0:
        reducers[1].skip_step()
    discriminator(torch.ones(2, 4)).sum().backward()
    assert reducers[1].skipped


@only_shm
@on_ranks(2)
def test_a_vote_inside_a_backward_counts(comm, buckets):
    trainee = Trainee(comm, **buckets)
    votes = [trainee.reducer.skip_step] if comm.rank else []
    trainee.model[0].weight.register_hook(lambda _: votes.pop()() if votes else None)
    assert not trainee.train(0)
    assert trainee.train(1)
