"""One row of the matrix: a feature of autograd or of nn.Module, and its outcome under a reducer.

Either gradients come out reduced, as the replicas of a Training say, or every rank gets a clear
error, and training goes on after the remedy. A row is a function of a Case, marked `@reduced` or
`@error`; no other outcome can be written down.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcomm
from tests.support.bodies import finish_together
from tests.support.models import are_close, backward, mean_of

Body = Callable[["Case"], None]
Make = Callable[[], nn.Module]
Run = Callable[[nn.Module, int, int], object]  # of a model, a rank and the number of the step

ROWS: dict[str, Row] = {}

_HEARD = r"rank [\d, ]+ abandoned"
_TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.complex64: (1e-5, 1e-6),
    torch.bfloat16: (2**-6, 2**-8),
    torch.float16: (2**-9, 2**-11),
}


@dataclass(frozen=True)
class Row:
    """A feature, in a user's words, and its outcome.

    match     for errors: what the message says on every rank
    instead   for errors: what a user does instead, or to mend it
    raises    for errors: the type; another than FastcommError where torch, or attach(), refuses
    is_whole  False: the row leaves the communicator unusable, and runs in processes of its own
    is_slow   the row compiles: two worlds do for it
    needs     whether this release of torch has the feature
    """

    body: Body
    feature: str
    match: str = ""
    instead: str = ""
    raises: type[Exception] = fastcomm.FastcommError
    is_whole: bool = True
    is_slow: bool = False
    needs: bool = True

    @property
    def name(self) -> str:
        return self.body.__name__

    @property
    def theme(self) -> str:
        """The module the row stands in."""
        return self.body.__module__

    @property
    def is_reduced(self) -> bool:
        return not self.match


def reduced(feature: str, **options: Any) -> Callable[[Body], Body]:
    """Marks a row whose gradients are the mean over ranks of what replicas get."""
    return lambda body: _add(Row(body, feature, **options))


def error(feature: str, *, match: str, instead: str, **options: Any) -> Callable[[Body], Body]:
    """Marks a row that every rank refuses; where, it says by `case.refused()`."""
    return lambda body: _add(Row(body, feature, match, instead, **options))


def trains(feature: str, make: Make, **options: Any) -> Callable[[Run], Body]:
    """Marks the run of a row that is reduced, and does no more than to train a model by it."""

    def add(run: Run) -> Body:
        def body(case: Case) -> None:
            case.train(make, run, **options)

        functools.update_wrapper(body, run)
        return reduced(feature)(body)

    return add


def train_row(
    theme: str, name: str, feature: str, make: Make, run: Run = backward, **options: Any
) -> None:
    """Adds a row that is reduced, and does no more than to train a model. theme: its module."""

    def body(case: Case) -> None:
        case.train(make, run, **options)

    body.__name__, body.__module__ = name, theme
    reduced(feature)(body)


def _add(row: Row) -> Body:
    if row.name in ROWS:
        raise ValueError(f"there are two rows named {row.name}")
    ROWS[row.name] = row
    return row.body


@dataclass(frozen=True)
class Ran:
    """How a row ended on one rank: digests of what it has compared, to be equal on all ranks, and
    whether it has only heard of the error, which is not to be so on all ranks."""

    digests: list[str]
    has_heard: bool


def run_row(comm: Any, name: str) -> Ran:
    """A body for `ranks`: runs a row."""
    case = Case(comm, ROWS[name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of features on their way out
            case.row.body(case)
        case.check_outcome()
        if case.row.is_whole:
            comm.barrier()  # what a row has left under way is found here, not in the next one
    except BaseException:
        comm.abort()  # the ranks will be replaced; the others need not wait for this one
        raise
    finally:
        case.close()
    return Ran(case.digests, case.has_heard)


class Case:
    """A row as one rank runs it. Notes what was compared and refused: no row ends without."""

    def __init__(self, comm: Any, row: Row) -> None:
        self.comm = comm
        self.row = row
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.digests: list[str] = []
        self.trainings: list[Training] = []
        self.n_refused = 0
        self.has_heard = False

    def train(self, make: Make, run: Run, steps: int = 2, **options: Any) -> Training:
        """Trains for some steps, each of them compared with the oracle; options as Training's."""
        training = Training(self, make, **options)
        for _ in range(steps):
            training.step(run)
        if not self.row.is_reduced:
            finish_together(self.comm)  # rank 0 has computed the oracle: the others are ahead of it
        return training

    @contextlib.contextmanager
    def refused(
        self,
        raises: type[Exception] | None = None,
        match: str = "",
        *,
        may_hear: bool = False,
    ) -> Iterator[None]:
        """What is inside raises, on this rank, what the row (or the arguments) says.

        may_hear: all ranks are to raise it, but some may hear of another's before they get there.
        """
        match = match or self.row.match
        accepted = f"{match}|{_HEARD}" if may_hear else match
        with pytest.raises(raises or self.row.raises, match=accepted) as caught:
            yield
        self.n_refused += 1
        self.has_heard = re.search(match, str(caught.value)) is None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """For runs: no_sync() of every reducer of the model. A replica has none."""
        stack = contextlib.ExitStack()
        for reducer in self._reducers_of(model):
            stack.enter_context(reducer.no_sync())
        return stack

    def reduce(self, model: nn.Module) -> None:
        """For runs: reduce() of every reducer of the model. A replica has none."""
        for reducer in self._reducers_of(model):
            reducer.reduce()

    def check_outcome(self) -> None:
        if self.row.is_reduced:
            assert self.digests, "the row has compared nothing"
            assert not self.n_refused, "a row that is reduced refuses nothing"
        else:
            assert self.n_refused, "the row has refused nothing"

    def same(self, *tensors: Tensor | None) -> None:
        """These tensors are to be bitwise equal on all ranks: digests are compared in the end."""
        sha = hashlib.sha256()
        for tensor in tensors:
            sha.update(b"none" if tensor is None else _bits(tensor).numpy())
        self.digests.append(sha.hexdigest()[:16])

    def close(self) -> None:
        for training in self.trainings:
            for reducer in training.reducers:
                reducer.detach()

    def _reducers_of(self, model: nn.Module) -> list[fastcomm.Reducer]:
        mine = [training for training in self.trainings if training.model is model]
        return [reducer for training in mine for reducer in training.reducers]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Training:
    """A model under a reducer and, in rank 0 alone, a replica for every rank: the oracle.

    Rank 0 compares its model with the oracle. The others need not: what they compute must be
    bitwise the same as on rank 0, and whoever started the ranks compares the digests.

    make: makes the model, the same on every call and every rank.
    parts: which modules of the model get a reducer each; by default the model itself.
    oracle: what gives the expected gradients on a replica, where it is not the mean of the runs.
    optimizer: makes one of parameters.
    """

    def __init__(
        self,
        case: Case,
        make: Make,
        *,
        parts: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: [model],
        oracle: Run | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        **options: Any,
    ) -> None:
        self.case = case
        self.model = make()
        self.replicas = [make() for _ in range(case.world_size)] if case.rank == 0 else []
        self.n_steps = 0
        self._parts = parts
        self._oracle = oracle
        self._make_optimizer = optimizer
        self.renew_optimizers()
        self.reducers: list[fastcomm.Reducer] = []
        case.trainings.append(self)
        for part in parts(self.model):
            self.reducers.append(fastcomm.Reducer(case.comm, **options).attach(part))

    @property
    def reducer(self) -> fastcomm.Reducer:
        return self.reducers[0]

    def step(self, run: Run) -> None:
        """Trains for one step by `run`; compares gradients, and parameters after the optimizer."""
        self.zero_grad()
        self.backward(run)
        self.update()

    def zero_grad(self) -> None:
        for model in (self.model, *self.replicas):
            model.zero_grad()

    def backward(self, run: Run) -> None:
        """Runs, and compares the gradients with the mean of what the replicas get."""
        run(self.model, self.case.rank, self.n_steps)
        self.expect(run)
        for name, mine, theirs in self._pairs():
            _assert_close(f"the gradient of {name}", mine.grad, theirs.grad)
        self.case.same(*(p.grad for p in self._attached(self.model)))

    def expect(self, run: Run) -> None:
        """The oracle: gives every replica the gradients that the model should have after `run`."""
        run = self._oracle or run
        for rank, replica in enumerate(self.replicas):
            run(replica, rank, self.n_steps)
        for column in zip(*map(self._attached, self.replicas), strict=True):
            mean = mean_of([p.grad for p in column])
            for p in column:
                p.grad = None if mean is None else mean.clone()

    def update(self) -> None:
        """The optimizers' step, compared."""
        self.optimizer.step()
        for optimizer in self.replica_optimizers:
            optimizer.step()
        self.n_steps += 1
        self.assert_parameters()
        with torch.no_grad():  # roundings are not to add up over the steps
            for replica in self.replicas:
                torch._foreach_copy_(self._attached(replica), self._attached(self.model))

    def assert_parameters(self) -> None:
        """The parameters are those of the replicas, and the same on all ranks."""
        for name, mine, theirs in self._pairs():
            _assert_close(f"parameter {name}", mine, theirs)
        self.case.same(*self._attached(self.model))

    def change(self, how: Callable[[nn.Module], object]) -> None:
        """Does the same to the model and its replicas, and leaves the optimizers what they are."""
        for model in (self.model, *self.replicas):
            how(model)

    def renew_optimizers(self) -> None:
        """New ones, of the parameters the models have now."""
        self.optimizer = self._make_optimizer(self.model.parameters())
        self.replica_optimizers = [self._make_optimizer(r.parameters()) for r in self.replicas]

    def refresh(self) -> None:
        """The remedy after a change of the model's parameters."""
        self.renew_optimizers()
        for reducer in self.reducers:
            reducer.refresh()

    def _attached(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that have a reducer."""
        return list(nn.ModuleList(self._parts(model)).parameters())

    def _pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """On rank 0, every such parameter with its name and its counterpart in a replica."""
        if not self.replicas:
            return []
        names = {p: name for name, p in self.model.named_parameters()}
        mine, theirs = self._attached(self.model), self._attached(self.replicas[0])
        return [(names[p], p, q) for p, q in zip(mine, theirs, strict=True)]


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        return torch.cat([_bits(tensor.indices()), _bits(tensor.values())])
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def _assert_close(what: str, mine: Tensor | None, wanted: Tensor | None) -> None:
    """Equal but for the roundings of a few steps, which differ with the order of additions."""
    if mine is None or wanted is None:
        assert mine is wanted, f"{what} is {mine}, expected {wanted}"
        return
    assert mine.layout == wanted.layout, f"{what} is {mine.layout}, expected {wanted.layout}"
    if mine.is_sparse:
        mine, wanted = mine.to_dense(), wanted.to_dense()
    if mine.dtype not in _TOLERANCE:  # nothing computes in it
        assert mine.dtype == wanted.dtype, f"{what} is {mine.dtype}, expected {wanted.dtype}"
        assert torch.equal(_bits(mine), _bits(wanted)), what
        return
    rtol, atol = _TOLERANCE[mine.dtype]
    if are_close(mine, wanted, rtol, atol):
        return
    name = f"{what}: {{}}".format
    torch.testing.assert_close(mine, wanted, rtol=rtol, atol=atol, msg=name)
