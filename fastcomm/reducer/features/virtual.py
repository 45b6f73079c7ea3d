"""Virtual ranks: a training whose steps have the same bits on any number of ranks.

A step is the work of a fixed number of virtual ranks, each with a microbatch, whatever number of
ranks carries them. The gradient of one microbatch is a leaf. A leaf begins without gradients, with
the buffers that the step began with, and with generators seeded by its step and virtual rank. So
nothing that came before it on this rank changes it.

Leaves are added by one binary tree over all virtual ranks, and the sum is divided once, by their
number. A rank carries the leaves below one node of that tree, and adds them as they come. Then the
ranks reduce: to add the sums of two ranks is the last node.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastcomm.comm.collective import HALVES, largest_half
from fastcomm.comm.objects import gather_objects, naming
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer import validation
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.features.virtual_loader import VirtualLoader
from fastcomm.reducer.round import Round

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

_log = logging.getLogger("fastcomm.virtual")
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

    def total(self) -> Leaf:
        """The sum of all; none may be pushed any more."""
        _, right = self._sums.pop()
        while self._sums:
            right = _added(self._sums.pop()[1], right)
        return right


@torch.no_grad()
def _added(left: Leaf, right: Leaf) -> Leaf:
    """Adds in place. What is missing changes nothing, as -0.0 would."""
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
        self, core: Core, reduce: Callable[[], None], loader: VirtualLoader, buffers: str
    ) -> None:
        """reduce: Reducer.reduce."""
        if buffers not in ("mean", "first"):
            raise ValueError(f'buffers must be "mean" or "first"; got {buffers!r}')
        self._core, self._reduce, self._loader, self._rule = core, reduce, loader, buffers
        self._is_reducing = False

    def features(self) -> Mapping[Feature, str]:
        return {Feature.VIRTUAL: "virtual()"}

    def before_round(self, round: Round) -> None:
        """The sum over the leaves is divided once, when all is added."""
        if not self._is_reducing or round.op != "mean":
            raise FastcommError(
                "a step of virtual() reduces once, after its last microbatch, and all microbatches "
                "count alike: make all backwards in the loop over a step, without set_weight()"
            )
        round.op = "sum"

    def steps(self) -> Iterator[VirtualStep]:
        core, loader = self._core, self._loader
        check(Feature.VIRTUAL, core.features())
        _refuse_model(core.model())
        _refuse_ranks(core, loader.virtual_ranks)
        own = ranges(range(loader.virtual_ranks), core.comm.world_size)[core.comm.rank]
        self._compare()
        batches = loader.microbatches(own)
        core.install(self)
        try:
            for _ in range(len(loader) - loader.step % len(loader)):
                step = VirtualStep(loader.step, self._leaves(loader.step, own, batches))
                try:
                    yield step
                finally:
                    step.close()
                if loader.step == step.number:
                    raise FastcommError(
                        f"step {step.number} of virtual() has microbatches left: go through all of "
                        "them, on every rank (skip_step() drops a step)"
                    )
        finally:
            core.remove(self)

    def _compare(self) -> None:
        """Collective. Raises MismatchError, on every rank, where the bits would differ."""
        own = {**self._loader.state_dict(), "buffers": self._rule}
        everyones = gather_objects(self._core.comm, own, "virtual()")
        for name in own:
            values = [one[name] for one in everyones]
            if any(value != values[0] for value in values):
                raise MismatchError(
                    f"virtual() differs between ranks: {name} is "
                    f"{', '.join(f'{value} on rank {r}' for r, value in enumerate(values))}"
                )

    def _leaves(
        self, number: int, own: range, batches: Iterator[Any]
    ) -> Generator[Any, None, None]:
        """The microbatches of this rank in one step; then reduces."""
        core, loader = self._core, self._loader
        parameters = [p for bucket in core.buckets for p in bucket.parameters if p is not None]
        buffers, sums = Buffers(core.model(), self._rule), PartialSums()
        before, core.reduces_backwards = core.reduces_backwards, False
        try:
            for v in own:
                batch = next(batches)
                for parameter in parameters:
                    parameter.grad = None
                buffers.reset()
                loader.seed_leaf(number, v, core.comm.device)
                yield batch
                sums.push(_leaf_of(parameters))
                buffers.note_leaf()
            for parameter, gradient in zip(parameters, sums.total(), strict=True):
                parameter.grad = gradient
        except BaseException as error:  # GeneratorExit, where the user's code has raised
            buffers.reset()
            self._abandon(error)
            raise
        finally:
            core.reduces_backwards = before
        try:
            self._is_reducing = True
            self._reduce()
            self._divide()
        except BaseException:
            buffers.reset()
            core.drop_step()  # no rank is to step with an undivided sum
            raise
        finally:
            self._is_reducing = False
        with naming("virtual()"):
            if core.skipped:
                buffers.reset()
            else:
                buffers.settle(core, loader.virtual_ranks)
        loader.seed_leaf(number, loader.virtual_ranks, core.comm.device)
        loader.step = number + 1
        if core.comm.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            gradients, values = _checksum([p.grad for p in parameters]), _checksum(parameters)
            _log.debug("step %d: gradients %08x, parameters %08x", number, gradients, values)

    def _abandon(self, error: BaseException) -> None:
        """The step has ended in the middle, on this rank: the others are not to wait for it."""
        self._is_reducing = True
        with contextlib.suppress(FastcommError):
            self._core.open().abandon(error)
        self._is_reducing = False
        self._core.drop_step()

    @torch.no_grad()
    def _divide(self) -> None:
        """Writes to the gradients, so that no norm that the reduction has counted holds."""
        for bucket in self._core.buckets:
            bucket.flat[: bucket.numel].div_(self._loader.virtual_ranks)


def _leaf_of(parameters: Sequence[Parameter]) -> Leaf:
    """The gradients, each in memory of its own: sums are made in place."""
    leaf: Leaf = []
    seen: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            address = gradient.untyped_storage().data_ptr()
            gradient = gradient.clone() if address in seen else gradient
            seen.add(address)
        leaf.append(gradient)
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
