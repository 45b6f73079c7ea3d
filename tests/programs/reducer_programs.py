"""Runs a ReducerProgram on one rank of several, and compares gradients, parameters and buffers with
the oracle's after every reduction and every operation."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastcomm
from fastcomm import FastcommError
from tests.programs.data import (
    Backward,
    Clip,
    Collective,
    Fail,
    Freeze,
    Grow,
    Layer,
    Leave,
    Look,
    Model,
    Other,
    Reattach,
    Rebuild,
    Reduce,
    ReducerProgram,
    Route,
    Step,
    SyncBuffers,
    Touch,
    Vote,
    Weigh,
    ZeroGrad,
)
from tests.programs.members import Members, members_of
from tests.programs.modules import Act, OutOfLuck, ProgramModel, fail, stages, touch_gradient
from tests.programs.oracle import LEARNING_RATE, Oracle
from tests.support.bodies import finish_together
from tests.support.skips import logged

# A few roundings of each, relative to the largest number that goes into a sum.
_EPSILON = {"float64": 1e-12, "float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}
# Ranks multiply float32 numbers in an order of their own, in which a product may fall below the
# normal ones.
_LOST_IN_PRODUCTS = 1e-36
_LOST_IN_SQUARES = torch.finfo(torch.float32).tiny ** 0.5  # of each element, as in torch's norms
HEARD_WITHIN_S = 20.0


def run_reducer_program(comm: Any, program: ReducerProgram) -> list[dict[str, int] | None]:
    """Returns, by operation, check sums of what must be equal on all ranks; None once this rank has
    left."""
    with members_of(comm, program.operations) as members:
        return _perform_all(members, program)


def _perform_all(members: Members, program: ReducerProgram) -> list[dict[str, int] | None]:
    models = [program.model] if program.second is None else [program.model, program.second]
    runs = [_Run(members.comm, program, model) for model in models]
    sums: list[dict[str, int] | None] = []
    operations = (*program.operations, *_finale(program))
    for number, operation in enumerate(operations):
        if isinstance(operation, Leave):
            members.part()
        if operation == Leave(members.comm.rank):
            break
        is_others = isinstance(operation, Other)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*do not obey the gradient layout contract")
                one = operation.operation if is_others else operation
                if isinstance(one, Rebuild | Leave):
                    _meet_anew(members, runs, one, number)
                else:
                    runs[is_others].perform(one, number)
            if isinstance(one, Fail) and one.is_synced:
                for run in runs:
                    run.drop_abandoned()
            for run in runs:
                run.compare()
        except Exception as error:
            raise AssertionError(f"operation {number}, {operation}: {error}") from error
        sums.append({f"{i}.{k}": v for i, run in enumerate(runs) for k, v in run.check_sums()})
    for run in runs:
        run.reducer.detach()
    return sums + [None] * (len(operations) - len(sums))


def _meet_anew(members: Members, runs: list[_Run], operation: Rebuild | Leave, number: int) -> None:
    if isinstance(operation, Leave):
        routes = (Route(),) * members.comm.world_size
        members.rebuild_without_one(lambda: runs[0].train(routes, number))
        for run in runs:
            run.oracle.lose(operation.rank)
    else:
        members.rebuild()
    for run in runs:
        run.follow(members.comm)


def _finale(program: ReducerProgram) -> list[object]:
    """To see that the ranks are still in step."""
    n = program.world_size - sum(isinstance(one, Leave) for one in program.operations)
    finale = [ZeroGrad(), Backward((Route(),) * n), Step()]
    return finale if program.second is None else [*map(Other, finale), *finale]


class _Run:
    """A model of the program, its reducer, its optimizer and its oracle."""

    def __init__(self, comm: Any, program: ReducerProgram, model: Model) -> None:
        self.comm, self.program = comm, program
        # Other values on every rank, for attach() to make equal.
        self.model = ProgramModel(model, comm.rank)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=LEARNING_RATE, momentum=program.momentum
        )
        self.oracle = Oracle(program, model)
        self.replica = self.oracle.replicas[comm.rank]
        is_exact = all(layer.dtype == "float64" for layer in model.layers)
        self.epsilon = _EPSILON["float64" if is_exact else "float32"]
        wire = program.options.wire
        self.wire_epsilon = (comm.world_size + 2) * _EPSILON[wire] if wire else self.epsilon
        self._make_reducer()
        self._attach()

    def _make_reducer(self) -> None:
        options = self.program.options
        self.n_skipped = 0
        self.reducer = fastcomm.Reducer(
            self.comm,
            bucket_cap_mb=options.cap,
            op=options.op,
            wire_dtype=getattr(torch, options.wire) if options.wire else None,
            streams=options.streams,
            overlap=options.overlap,
            skip_nonfinite=options.skips_nonfinite,
        )

    def _attach(self) -> None:
        is_named = self.program.options.is_named
        self.reducer.attach(self.model.named_parameters() if is_named else self.model)
        self.oracle.attach()

    # -- operations --------------------------------------------------------------------------------

    def perform(self, operation: Any, number: int) -> None:
        _PERFORM[type(operation)](self, operation, number)

    def backward(self, operation: Backward, number: int) -> None:
        for rank, touch in enumerate(operation.touches):
            if touch is not None:
                self._touch(rank, touch, number, is_set=False)
        expected = self.oracle.backwards(operation, number)
        context = contextlib.nullcontext() if operation.is_synced else self.reducer.no_sync()
        with context:
            for _ in stages(self.model, operation, self.comm.rank, number):
                next(expected)
                if operation.is_synced:
                    self._reduce_oracle()

    def _touch(self, rank: int, touch: Touch, number: int, is_set: bool) -> None:
        seed = 1000 * number + 10 * rank + touch.parameter
        if rank == self.comm.rank:
            touch_gradient(self.model, touch, seed, is_set)
        replica = self.oracle.replicas[rank]
        before = {name: parameter.grad for name, parameter in replica.named_parameters()}
        name = touch_gradient(replica, touch, seed, is_set)
        after = replica.get_parameter(name).grad
        if after is not None:
            self.oracle.note_write(rank, name, is_new=after is not before[name])

    def _reduce_oracle(self, weights: Sequence[float] | None = None) -> None:
        """What this gives the ranks must have got; the replicas go on from what they have, so that
        roundings do not add up."""
        scales = self.oracle.reduce(weights)
        self._compare_gradients(scales)
        mine = dict(self.model.named_parameters())
        for replica in self.oracle.replicas:
            for name, parameter in replica.named_parameters():
                if name in scales:
                    parameter.grad.copy_(mine[name].grad)

    def fail(self, operation: Fail, number: int) -> None:
        if not operation.is_synced:
            self._fail_alone(operation, number)
            return
        rank = self.comm.rank
        finish_together(self.comm)
        is_failing = bool(operation.failing >> rank & 1)
        skipping = operation.failing if operation.at is None else 0
        for _ in self.oracle.backwards(operation, number, skipping):
            pass
        if skipping >> rank & 1:
            self.comm.abandon()
        else:
            fail_at = operation.at if is_failing else None
            loss = self.model.loss(rank, 10 * number, operation.routes[rank], fail_at)
            self._hear(loss.backward, is_failing)

    def drop_abandoned(self) -> None:
        """All reducers of the communicator have dropped the step."""
        self._drop_step(by_vote=False)

    def _drop_step(self, *, by_vote: bool) -> None:
        named = self.model.named_parameters()
        left = [n for n, p in named if n in self.oracle.attached and p.grad is not None]
        assert not left, f"gradients of a step that all skip: {left}"
        self.oracle.drop_gradients(by_vote=by_vote)

    def _fail_alone(self, operation: Fail, number: int) -> None:
        with self.reducer.no_sync():
            self._fail_in(self.model, self.comm.rank, operation, number)
        for rank, replica in enumerate(self.oracle.replicas):
            self._fail_in(replica, rank, operation, number)

    def _fail_in(self, model: ProgramModel, rank: int, operation: Fail, number: int) -> None:
        is_failing = bool(operation.failing >> rank & 1)
        fail_at = (operation.at or 0) if is_failing else None
        loss = model.loss(rank, 10 * number, operation.routes[rank], fail_at)
        try:
            loss.backward()
        except OutOfLuck:
            if not is_failing:
                raise
        else:
            assert not is_failing, "backward swallowed an exception"

    def _hear(self, backward: Callable[[], None], is_failing: bool) -> None:
        """Runs a backward that fails on this rank or on another one. Over NCCL the others may hear
        of it later."""
        deadline = time.monotonic() + HEARD_WITHIN_S
        try:
            backward()
            while self.comm.backend == "nccl" and time.monotonic() < deadline:
                self.comm.check()
                os.sched_yield()
        except FastcommError as error:  # also where ranks fail at the same time
            if "abandoned" not in str(error):
                raise
        except OutOfLuck:
            if not is_failing:
                raise
        else:
            raise AssertionError("this rank has not heard that the step failed on another one")

    def weigh(self, operation: Weigh, number: int) -> None:
        self.zero_grad(ZeroGrad(), number)
        self.reducer.set_weight(operation.weights[self.comm.rank])
        self.train(operation.routes, number)
        self._reduce_oracle(operation.weights)

    def vote(self, operation: Vote, number: int) -> None:
        if self.oracle.has_unstepped():  # then it comes too late
            self.zero_grad(ZeroGrad(), number)
        for rank, replica in enumerate(self.oracle.replicas):
            with contextlib.suppress(OutOfLuck):
                self._vote_in(replica, rank, operation, number, lambda: None)
        rank = self.comm.rank
        with logged() as lines:
            with self.reducer.skip_step_on(OutOfLuck):
                self._vote_in(self.model, rank, operation, number, self.reducer.skip_step)
            if operation.how == "instead":
                self.reducer.synchronize()
            else:
                self._drop_gradients_of_strangers()
                self.optimizer.step()
        voters = re.findall(r"rank (\d) (?:called|met)", " ".join(lines))
        expected = [str(r) for r in range(self.comm.world_size) if operation.voters >> r & 1]
        assert (len(lines), voters) == ((1, expected) if rank == 0 else (0, [])), lines
        self._drop_step(by_vote=True)
        self.n_skipped += 1

    def _vote_in(
        self,
        model: ProgramModel,
        rank: int,
        operation: Vote,
        number: int,
        vote: Callable[[], None],
    ) -> None:
        how = operation.how if operation.voters >> rank & 1 else ""
        if how in ("before", "instead"):
            vote()
        if how == "instead":
            return
        at = operation.at if how in ("inside", "raises") else None
        act: Act = fail if how == "raises" else lambda _: vote()
        model.loss(rank, 10 * number, operation.routes[rank], at, act).backward()

    def reduce(self, operation: Reduce, number: int) -> None:
        for rank, touches in enumerate(operation.touches):
            for touch in touches:
                self._touch(rank, touch, number, is_set=True)
        self._drop_gradients_of_strangers()
        self.reducer.reduce()
        for fresh in self.oracle.fresh:
            fresh |= self.oracle.attached
        self._reduce_oracle()

    def zero_grad(self, operation: ZeroGrad, number: int) -> None:
        self.model.zero_grad(set_to_none=operation.to_none)
        self.oracle.zero_grad(operation.to_none)

    def step(self, operation: Step, number: int) -> None:
        self._drop_gradients_of_strangers()
        self._step()
        if self.oracle.has_drifted():  # with gradients of no_sync(): ranks compare what came of it
            self.reducer.refresh()
            self.oracle.attach()

    def _drop_gradients_of_strangers(self) -> None:
        """Of frozen parameters: steps, and reduce(), refuse what no reduction has made."""
        for name in self.oracle.drop_gradients_of_strangers():
            self.model.get_parameter(name).grad = None

    def _step(self) -> None:
        self.optimizer.step()
        self.oracle.step()

    def clip(self, operation: Clip, number: int) -> None:
        norm = self.reducer.clip_grad_norm_(operation.max_norm)
        self._assert_norm(norm)
        for replica in self.oracle.replicas:
            named = replica.named_parameters()
            clipped = [p for name, p in named if name in self.oracle.attached]
            torch.nn.utils.clip_grad_norm_(clipped, operation.max_norm)

    def look(self, operation: Look, number: int) -> None:
        self._assert_norm(self.reducer.grad_norm())
        assert self.reducer.nonfinite_count().item() == 0
        self.reducer.synchronize()

    def _assert_norm(self, norm: Tensor) -> None:
        gradients = self.oracle.reduced_gradients(self.comm.rank)
        expected = sum(one.double().square().sum().item() for one in gradients) ** 0.5
        if not math.isfinite(expected):  # as products may become
            assert not norm.isfinite().item(), f"norm {norm}, expected {expected}"
            return
        difference = abs(norm.item() - expected)
        n = sum(one.numel() for one in gradients)
        tolerance = self.epsilon * expected + _LOST_IN_PRODUCTS + _LOST_IN_SQUARES * n**0.5
        assert difference <= tolerance, f"norm {norm}, expected {expected}"

    def collective(self, operation: Collective, number: int) -> None:
        """Whatever the round before has left under way, the numbers are those of this call."""
        n, shape = self.comm.world_size, (operation.numel,)
        of_ranks = [
            torch.full(shape, float(number + rank), dtype=torch.float64) for rank in range(n)
        ]
        tensor, expected = of_ranks[self.comm.rank].to(self.comm.device), sum(of_ranks)
        if operation.kind == "all_reduce":
            self.comm.all_reduce(tensor)
        elif operation.kind == "broadcast":
            self.comm.broadcast(tensor, operation.src)
            expected = of_ranks[operation.src]
        else:
            whole = tensor.new_empty(n * operation.numel)
            self.comm.all_gather_single(whole, tensor)
            tensor, expected = whole, torch.cat(of_ranks)
        assert torch.equal(tensor.cpu(), expected), f"{tensor}, expected {expected}"

    def freeze(self, operation: Freeze, number: int) -> None:
        for model in (self.model, *self.oracle.replicas):
            parameters = [p for name, p in model.named_parameters() if name != "gain"]
            for i in {index % max(len(parameters), 1) for index in operation.parameters}:
                parameters[i].requires_grad = not parameters[i].requires_grad
        self.reducer.refresh()
        self.oracle.attach()

    def grow(self, operation: Grow, number: int) -> None:
        layer = Layer("heads", bias=number % 2 == 0)
        self.model.grow(layer, self.comm.rank)
        self.optimizer.add_param_group({"params": [*self.model.layers[-1].parameters()]})
        self.oracle.grow(layer)
        if self.program.options.is_named:  # the reducer knows no more than what it was given
            self.reducer.detach()
            self._attach_again(number)
        else:
            self.reducer.refresh()
            self.oracle.attach()

    def reattach(self, operation: Reattach, number: int) -> None:
        self.reducer.detach()
        self.oracle.skipped = False
        if operation.alone:
            self.train((Route(),) * self.comm.world_size, number)
            self._step()
            self.zero_grad(ZeroGrad(), number)
        if operation.renew:
            self._make_reducer()
        self._attach_again(number)

    def _attach_again(self, number: int) -> None:
        """What detach() has left in .grad is the user's: no step may use it before a reduction."""
        self._attach()
        if number % 2:
            self.reduce(Reduce(((),) * self.comm.world_size), number)
        else:
            self.zero_grad(ZeroGrad(), number)

    def train(self, routes: tuple[Route, ...], number: int) -> None:
        """A backward, without what comes of it."""
        step = Backward(routes)
        for _ in self.oracle.backwards(step, number):
            pass
        for _ in stages(self.model, step, self.comm.rank, number):
            pass

    def follow(self, comm: Any) -> None:
        """The ranks have met anew."""
        self.comm, self.replica = comm, self.oracle.replicas[comm.rank]
        self.reducer.refresh()
        fastcomm.catch_up(self.reducer, self.optimizer)
        assert self.reducer.comm is comm
        self._drop_step(by_vote=False)
        self.oracle.attach()

    def sync_buffers(self, operation: SyncBuffers, number: int) -> None:
        self.reducer.sync_buffers(operation.src)
        if self.oracle.copies_buffers:
            self.oracle.sync_buffers(operation.src)

    # -- comparing ---------------------------------------------------------------------------------

    def compare(self) -> None:
        said = self.reducer.skipped, self.reducer.n_skipped
        expected = self.oracle.skipped, self.n_skipped
        assert said == expected, f"skipped and n_skipped are {said}, expected {expected}"
        self._compare_gradients({})
        for kind in ("parameters", "buffers"):
            ours, theirs = (getattr(m, f"named_{kind}")() for m in (self.model, self.replica))
            for (name, mine), (_, expected) in zip(ours, theirs, strict=True):
                _assert_close(name, mine.detach(), expected.detach(), self.epsilon)

    def _compare_gradients(self, scales: dict[str, float]) -> None:
        """scales: of what has just been reduced."""
        for (name, mine), (_, expected) in zip(
            self.model.named_parameters(), self.replica.named_parameters(), strict=True
        ):
            if mine.grad is None or expected.grad is None:
                assert mine.grad is expected.grad, (
                    f"the gradient of {name} is {mine.grad}, expected {expected.grad}"
                )
            else:
                epsilon = self.wire_epsilon if name in scales else self.epsilon
                scale = scales.get(name, 0.0)
                _assert_close(f"the gradient of {name}", mine.grad, expected.grad, epsilon, scale)

    def check_sums(self) -> Iterator[tuple[str, int]]:
        """Of what the oracle has equal on all ranks."""
        agreed = self.oracle.agreed()
        for name, parameter in self.model.named_parameters():
            for what, tensor in ((name, parameter), (f"grad of {name}", parameter.grad)):
                if what in agreed and tensor is not None:
                    values = tensor.detach().cpu().contiguous().numpy()
                    yield what, zlib.crc32(values.tobytes())


_PERFORM: dict[type, Callable[[_Run, Any, int], None]] = {
    Backward: _Run.backward,
    Fail: _Run.fail,
    Weigh: _Run.weigh,
    Vote: _Run.vote,
    Reduce: _Run.reduce,
    ZeroGrad: _Run.zero_grad,
    Step: _Run.step,
    Clip: _Run.clip,
    Look: _Run.look,
    Collective: _Run.collective,
    Freeze: _Run.freeze,
    Grow: _Run.grow,
    Reattach: _Run.reattach,
    SyncBuffers: _Run.sync_buffers,
}


def _assert_close(
    what: str, mine: Tensor, expected: Tensor, epsilon: float, scale: float = 0.0
) -> None:
    """scale: the largest number that went into `expected`, if that is known. What has overflown, as
    products of many rounds may, has to be infinite or NaN alike.
    """
    assert mine.dtype == expected.dtype, f"{what} is {mine.dtype}, expected {expected.dtype}"
    assert mine.shape == expected.shape, f"{what} has {mine.shape}, expected {expected.shape}"
    if torch.equal(mine, expected):
        return
    is_finite = expected.isfinite()
    assert torch.equal(mine[~is_finite].nan_to_num(), expected[~is_finite].nan_to_num()), (
        f"{what} is\n{mine}\nexpected\n{expected}"
    )
    mine, expected = mine[is_finite], expected[is_finite]
    if not expected.numel():
        return
    largest = max(scale, expected.abs().max().item())
    difference = (mine.double() - expected.double()).abs().max().item()
    assert difference <= epsilon * (largest + 1e-3), (
        f"{what} is off by {difference:.3g}:\n{mine}\nexpected\n{expected}"
    )
