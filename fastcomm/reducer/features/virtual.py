"""Virtual ranks: a training whose steps have the same bits on any number of ranks.

A step is the work of a fixed number of virtual ranks, each with a microbatch, whatever number of
ranks carries them. The gradient of one microbatch is a leaf. A leaf begins without gradients, with
the buffers that the step began with, and with generators seeded by its step and virtual rank. So
nothing that came before it on this rank changes it.

Leaves are added by one binary tree over all virtual ranks, and the sum is divided once, by their
number. A rank carries the leaves below one node of that tree, and adds them as they come. The
backward of its last leaf reduces the sums, each bucket as soon as it is full: to add the sums of
two ranks is the last node.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fastcomm.comm.collective import HALVES, largest_half
from fastcomm.comm.objects import naming
from fastcomm.errors import AbandonedError, FastcommError
from fastcomm.reducer import validation
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.features.elastic import Elastic, elastic
from fastcomm.reducer.features.progress import Stateful
from fastcomm.reducer.features.virtual_loader import VirtualLoader
from fastcomm.reducer.owners import reducers_on
from fastcomm.reducer.round import Round, State

if TYPE_CHECKING:
    from fastcomm.comm.transport import Transport
    from fastcomm.reducer.bucket import Bucket
    from fastcomm.reducer.core import Core

_log = logging.getLogger("fastcomm.virtual")
_VIRTUAL = validation.CollectiveCall("virtual()", "steps", "cannot make its steps")
Leaf = list[Tensor | None]


def ranges(virtual_ranks: range, world_size: int) -> list[range]:
    """The virtual ranks of each rank: those below one node of the tree, so that the ranks' sums are
    added by what the tree has above these nodes. Empty for ranks where it has too few leaves.
    """
    if world_size == 1:
        return [virtual_ranks]
    if len(virtual_ranks) < world_size:
        return [range(0)] * world_size
    n_left, middle = largest_half(world_size), largest_half(len(virtual_ranks))
    left, right = virtual_ranks[:middle], virtual_ranks[middle:]
    return ranges(left, n_left) + ranges(right, world_size - n_left)


class PartialSums:
    """Adds leaves that come in order, by the tree. Holds a sum for each subtree that is complete
    without a complete sibling: at most one more than log2 of the number of leaves.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Leaf]] = []  # how many leaves, and their sum

    def push(self, leaf: Leaf) -> None:
        """Adds the next leaf. It is this object's from here on."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            leaf, size = _added(self._sums.pop()[1], leaf), 2 * size
        self._sums.append((size, leaf))

    def total(self, last: Leaf | None = None) -> Leaf:
        """The sum of all; none may be pushed any more. last: the last leaf, where it was not
        pushed, as it is not to be written to.
        """
        right = self._sums.pop()[1] if last is None else last
        while self._sums:
            right = _added(self._sums.pop()[1], right)
        return right


@torch.no_grad()
def _added(left: Leaf, right: Leaf) -> Leaf:
    """Adds in place, to what is left. What is missing changes nothing, as -0.0 would."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Buffers:
    """The buffers of a model. Every leaf begins with those that the step began with. After it those
    that a leaf has changed are the mean over the leaves, or those of the first; integers are always
    those of the first.
    """

    def __init__(self, model: object, rule: str) -> None:
        assert isinstance(model, nn.Module)  # for the type checker
        self._model = model
        self._start = [buffer.clone() for buffer in model.buffers()]
        self._means = [rule == "mean" and one.is_floating_point() for one in self._start]
        self._has_changed = [False] * len(self._start)
        self._first: list[Tensor] = []
        self._sums = PartialSums()

    @torch.no_grad()
    def reset(self) -> None:
        for buffer, value in zip(self._model.buffers(), self._start, strict=True):
            buffer.copy_(value)

    def note_leaf(self) -> None:
        now = list(self._model.buffers())
        for i, value in enumerate(self._start):
            self._has_changed[i] |= not torch.equal(now[i], value)
        self._first = self._first or [buffer.clone() for buffer in now]
        self._sums.push(
            [
                buffer.to(torch.promote_types(buffer.dtype, torch.float32), copy=True)
                if is_mean
                else None
                for buffer, is_mean in zip(now, self._means, strict=True)
            ]
        )

    @torch.no_grad()
    def settle(self, core: Core, virtual_ranks: int) -> None:
        """Collective."""
        if not self._start:
            return
        has_changed = torch.tensor(self._has_changed, dtype=torch.uint8, device=core.comm.device)
        core.comm.all_reduce(has_changed, "max")
        self.reset()
        of_first = []
        slots = zip(self._model.buffers(), self._first, self._sums.total(), strict=True)
        for (buffer, first, mean), differs in zip(slots, has_changed.tolist(), strict=True):
            if differs and mean is not None:
                mean = mean.contiguous()
                core.comm.all_reduce(mean)
                buffer.copy_(mean.div_(virtual_ranks))
            elif differs:
                buffer.copy_(first)
                of_first.append(buffer)
        if of_first:
            validation.broadcast(core.comm, of_first, 0)


class Virtual(RoundExtension):
    """The loop of Reducer.virtual()."""

    def __init__(
        self,
        core: Core,
        reduce: Callable[[], None],
        loader: VirtualLoader,
        buffers: str,
        state: Iterable[Stateful] | None,
    ) -> None:
        """reduce: Reducer.reduce."""
        if buffers not in ("mean", "first"):
            raise ValueError(f'buffers must be "mean" or "first"; got {buffers!r}')
        self._core, self._reduce, self._loader, self._rule = core, reduce, loader, buffers
        self._elastic = None if state is None else elastic(core, [*state, loader])
        if state is not None and len(reducers_on(core.comm.standing)) > 1:
            raise FastcommError(
                "virtual() with a state takes the only reducer of its communicator: detach() the "
                "others first"
            )
        # This rank's virtual ranks and their microbatches; None: the ranks have to share out.
        self._shared: tuple[range, Iterator[Any]] | None = None
        self._is_in_step = False  # the microbatches of a step are under way, on this rank
        self._is_last = False  # of them, this is the last one
        self._outcome: State | None = None  # how the step's round has ended
        self._is_through = False  # the step is, on this rank
        self._sums: list[PartialSums] = []  # of the leaves before the last one, by bucket

    def features(self) -> Mapping[Feature, str]:
        return {Feature.VIRTUAL: "virtual()"}

    def use(self, comm: Transport) -> None:
        self._shared = None

    def forget(self) -> None:
        self._outcome, self._shared = State.ABANDONED, None

    def before_round(self, round: Round) -> None:
        is_due = self._is_in_step and self._is_last and self._outcome is None
        if not is_due or round.op != "mean":
            raise FastcommError(
                "a step of virtual() reduces once, in the backward of its last microbatch, and all "
                "microbatches count alike: make one backward for each microbatch, others before it "
                "in no_sync(), and no set_weight()"
            )
        round.before_launch = self._add_last
        if not self._divides_in_round:
            round.op = "sum"

    def after_round(self, round: Round) -> None:
        self._outcome = round.state
        if round.state is State.SETTLED:
            for bucket in self._core.buckets:
                bucket.gradients.watch()  # until they are divided

    def before_norm(self) -> None:
        self._refuse_inside("a norm")

    def before_step(self, optimizer: Optimizer) -> None:
        self._refuse_inside(f"{type(optimizer).__name__}.step()")

    def _refuse_inside(self, what: str) -> None:
        if self._is_in_step:
            raise FastcommError(
                f"{what} inside the loop over a step of virtual(), where gradients are not "
                "complete: call it after the loop"
            )

    @property
    def _divides_in_round(self) -> bool:
        """Whether a mean over the ranks is rounded where that over the leaves is."""
        comm, dtypes = self._core.comm, {bucket.dtype for bucket in self._core.buckets}
        is_one_each = comm.world_size == self._loader.virtual_ranks
        return is_one_each and comm.adds_by_tree and dtypes.isdisjoint(HALVES)

    def _add_last(self, number: int) -> None:
        """The gradients in a bucket, those of the last leaf, become the sums over this rank's."""
        bucket = self._core.buckets[number]
        totals = self._sums[number].total(_leaf_of(bucket))
        for parameter, total in zip(bucket.parameters, totals, strict=True):
            if parameter is not None:
                parameter.grad = total

    def steps(self) -> Iterator[VirtualStep]:
        core = self._core
        check(Feature.VIRTUAL, core.features())
        if core.find(Elastic):
            raise FastcommError(
                "virtual() was called inside elastic(): leave elastic() out, and give virtual() "
                "the state that is to survive, as state=[optimizer]"
            )
        with self._elastic.installed() if self._elastic else contextlib.nullcontext():
            core.install(self)
            try:
                yield from self._steps()
            finally:
                core.remove(self)

    def _steps(self) -> Iterator[VirtualStep]:
        loader, survivors = self._loader, self._elastic
        end = (loader.epoch + 1) * len(loader)
        while True:
            goes_on: bool | None = loader.step < end
            if survivors is not None:
                goes_on = survivors.vote(loader.step < end)
            if goes_on is None:  # the ranks have met again
                continue
            if not goes_on:
                return
            try:
                self._shared = self._shared or self._share_out()
            except FastcommError as error:
                if survivors is None or not self._survives(error):
                    raise
                survivors.end_step()
                continue
            step = VirtualStep(loader.step, self._leaves(loader.step, *self._shared))
            self._outcome, self._is_through = None, False
            try:
                yield step
            finally:
                is_told = self._outcome is State.ABANDONED  # of it: all ranks begin it again
                step.close()
            if not self._is_through and not is_told:
                self._abandon(None)
                raise FastcommError(
                    f"step {step.number} of virtual() has microbatches left: go through all of "
                    "them, on every rank (skip_step() drops a step)"
                )
            if survivors is not None:
                survivors.end_step()

    def _survives(self, error: FastcommError) -> bool:
        """Whether the loop goes on after an error between two rounds."""
        if self._elastic is None or not self._elastic.survives(error):
            return False
        self._elastic.survived = error
        return True

    def _share_out(self) -> tuple[range, Iterator[Any]]:
        """Collective. Raises, on every rank, where the bits would differ."""
        core, loader = self._core, self._loader
        with validation.agreeing(core.comm, _VIRTUAL) as described:
            _refuse_model(core.model())
            _refuse_ranks(core, loader.virtual_ranks)
            described |= {**loader.state_dict(), "buffers": self._rule}
            own = ranges(range(loader.virtual_ranks), core.comm.world_size)[core.comm.rank]
            batches = loader.microbatches(own)
        return own, batches

    def _leaves(
        self, number: int, own: range, batches: Iterator[Any]
    ) -> Generator[Any, None, None]:
        """The microbatches of this rank in one step. The backward of the last one reduces."""
        core, loader = self._core, self._loader
        before = core.reduces_backwards, core.overlap
        buffers: Buffers | None = None
        self._is_in_step = True
        # several streams may make gradients; at the end of a backward they have come together
        core.overlap = core.overlap and not (core.comm.has_streams and len(own) > 1)
        try:
            parameters = [p for bucket in core.buckets for p in bucket.parameters if p is not None]
            buffers = Buffers(core.model(), self._rule)
            self._sums = [PartialSums() for _ in core.buckets]
            for v in own:
                core.reduces_backwards = self._is_last = v == own[-1]
                batch = next(batches)
                for parameter in parameters:
                    parameter.grad = None
                buffers.reset()
                loader.seed_leaf(number, v, core.comm.device)
                yield batch
                if self._outcome is State.ABANDONED:
                    break
                if not self._is_last:
                    self._push_leaf()
                buffers.note_leaf()
            self._end_step(buffers)
        except BaseException as error:  # GeneratorExit, where the user's code has raised
            is_survived = isinstance(error, FastcommError) and self._survives(error)
            if is_survived:
                core.drop_step()
            else:
                self._abandon(error)
            if buffers is not None:
                buffers.reset()
            if not is_survived:
                raise
        finally:
            core.reduces_backwards, core.overlap = before
            self._is_in_step = False
        self._is_through = True
        if self._outcome is State.ABANDONED:
            return
        loader.seed_leaf(number, loader.virtual_ranks, core.comm.device)
        loader.step = number + 1
        if core.comm.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            gradients, values = _checksum([p.grad for p in parameters]), _checksum(parameters)
            _log.debug("step %d: gradients %08x, parameters %08x", number, gradients, values)

    def _end_step(self, buffers: Buffers) -> None:
        """Collective. Ends the round, which the last backward has ended already if it has made a
        gradient, and leaves gradients and buffers as they are after the step.
        """
        if self._outcome is None:
            self._reduce()
        if self._outcome is State.ABANDONED:
            raise AbandonedError("a step of virtual() was abandoned on this rank")
        if self._outcome is State.SKIPPED:
            buffers.reset()
            return
        self._divide()
        with naming("virtual()"):
            buffers.settle(self._core, self._loader.virtual_ranks)

    def _push_leaf(self) -> None:
        """The gradients there are have not been reduced: those of a leaf that is not the last."""
        seen: set[int] = set()
        for bucket, sums in zip(self._core.buckets, self._sums, strict=True):
            leaf = _leaf_of(bucket)
            for i, gradient in enumerate(leaf):
                if gradient is not None:
                    address = gradient.untyped_storage().data_ptr()
                    if address in seen:  # and sums are made in place
                        leaf[i] = gradient.clone()
                    seen.add(address)
            sums.push(leaf)

    def _abandon(self, error: BaseException | None) -> None:
        """The step has ended in the middle, on this rank: the others are not to wait for it."""
        if self._outcome is not State.ABANDONED:
            self._is_in_step, self._is_last, self._outcome = True, True, None
            with contextlib.suppress(FastcommError):
                self._core.open().abandon(error)
            self._is_in_step = False
        self._core.drop_step()

    @torch.no_grad()
    def _divide(self) -> None:
        """Norms are to be those of any number of ranks, and not what this reduction has counted."""
        is_divided = self._divides_in_round
        for bucket in self._core.buckets:
            missing = [i for i, gradient in enumerate(_leaf_of(bucket)) if gradient is None]
            changed = bucket.gradients.first_changed(missing)
            if changed >= 0:
                raise FastcommError(
                    f"the gradient of parameter {bucket.names[changed]} was changed inside the "
                    "loop over a step of virtual(), after it was reduced: change it after the loop"
                )
            if is_divided:
                increment_version([bucket.flat])
            else:
                bucket.flat[: bucket.numel].div_(self._loader.virtual_ranks)
            bucket.gradients.note_round(missing)  # ends watch()


def _leaf_of(bucket: Bucket) -> Leaf:
    """Raises FastcommError for a gradient that would lose its graph."""
    leaf = [None if parameter is None else parameter.grad for parameter in bucket.parameters]
    for name, gradient in zip(bucket.names, leaf, strict=True):
        if gradient is not None and gradient.requires_grad:
            raise FastcommError(
                f"the gradient of parameter {name} is to be differentiated (create_graph=True), "
                "and virtual() adds it to others: use torch.autograd.grad() for penalties"
            )
    return leaf


class VirtualStep:
    """One step of virtual(): goes once through this rank's microbatches, and then reduces.

    number: counted from 0, through all epochs.
    """

    def __init__(self, number: int, leaves: Generator[Any, None, None]) -> None:
        self.number, self._leaves, self._has_begun = number, leaves, False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise FastcommError(f"step {self.number} of virtual() was gone through already")
        self._has_begun = True
        return self._leaves

    def close(self) -> None:
        """Drops the step, unless all of it was gone through."""
        self._leaves.close()


def _refuse_ranks(core: Core, virtual_ranks: int) -> None:
    """Raises FastcommError where so many ranks could not have the bits of one."""
    comm, n = core.comm, core.comm.world_size
    halves = [b.names[0] for b in core.buckets if b.dtype in HALVES]
    if not all(ranges(range(virtual_ranks), n)):
        raise FastcommError(
            f"virtual() cannot share {virtual_ranks} virtual ranks out among {n} ranks: start "
            f"fewer, or take {n} times a power of two"
        )
    if n > 2 and not comm.adds_by_tree:
        raise FastcommError(
            f"virtual() takes 1 or 2 ranks over {comm.backend}, which adds those of {n} in an "
            "order of its own: use shared memory, or hosts with 1, 2, 4, 8, ... ranks each"
        )
    if n > 2 and halves:
        raise FastcommError(
            f"virtual() takes 1 or 2 ranks where gradients have 16 bits, as that of {halves[0]}, "
            f"since sums over {n} are rounded less often: keep parameters in float32, under "
            "torch.autocast"
        )


def _refuse_model(model: object) -> None:
    """Raises ValueError for a model with which the bits would depend on the number of ranks."""
    if not isinstance(model, nn.Module):
        raise ValueError("virtual() needs a module, whose buffers it resets: attach(module)")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"module {name} is a SyncBatchNorm, whose statistics depend on the number of "
                "ranks: use BatchNorm with virtual()"
            )


def _checksum(tensors: Sequence[Tensor | None]) -> int:
    checksums = validation.checksums([tensor for tensor in tensors if tensor is not None])
    return zlib.crc32(str(checksums).encode())
