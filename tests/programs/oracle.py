"""What a reducer program should do, in one process: a replica of the model for each rank, whose
gradients are combined where the ranks would reduce them.

The rules of a reduction: every rank takes part with all that .grad holds, or zeros. A parameter
counts as present on a rank if this backward, or one since the last reduction, gave it a gradient
that is still there, whether it was attached then or not; so it does if the user has put another
tensor there, or has written to one that was stepped since it was reduced. Where no rank has it,
every rank keeps what it had; else all get the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.programs.data import Layer, Model, ReducerProgram
from tests.programs.modules import ProgramModel, stages

LEARNING_RATE = 0.05
_COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
}


class Oracle:
    """replicas: the models as they should be, by rank."""

    def __init__(self, program: ReducerProgram, model: Model) -> None:
        self.op = program.options.op
        self.copies_buffers = not program.options.is_named
        self.replicas = [ProgramModel(model, rank) for rank in range(program.world_size)]
        self.optimizers = [
            torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE, momentum=program.momentum)
            for replica in self.replicas
        ]
        # By rank: the parameters that have got a gradient since their last reduction; those whose
        # gradient was reduced, and not stepped since.
        self.fresh: list[set[str]] = [set() for _ in self.replicas]
        self.reduced: list[set[str]] = [set() for _ in self.replicas]
        for rank in range(len(self.replicas)):
            self._watch(rank, self.replicas[rank].named_parameters())
        self.attached: set[str] = set()
        # The ranks have dropped the last reduction: until the next one, optimizers step nothing.
        self.skipped = False

    def _watch(self, rank: int, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, parameter in named:
            note = functools.partial(self._note, self.fresh[rank], name)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)
            else:  # torch refuses hooks on what needs no gradient now
                parameter.requires_grad = True
                parameter.register_post_accumulate_grad_hook(note)
                parameter.requires_grad = False

    def _note(self, fresh: set[str], name: str, parameter: Tensor) -> None:
        fresh.add(name)

    def lose(self, rank: int) -> None:
        for by_rank in (self.replicas, self.optimizers, self.fresh, self.reduced):
            del by_rank[rank]

    def note_write(self, rank: int, name: str, is_new: bool) -> None:
        """The user has written to a gradient, or has put another tensor in its place."""
        if is_new or name not in self.reduced[rank] & self.attached:
            self.fresh[rank].add(name)

    def step(self) -> None:
        if self.skipped:
            return
        for optimizer, reduced in zip(self.optimizers, self.reduced, strict=True):
            optimizer.step()
            reduced -= self.attached

    def drop_gradients_of_strangers(self) -> set[str]:
        """Drops gradients of parameters that no bucket has, and which some rank has made by itself.
        Returns the names.
        """
        names = set().union(*self.fresh) - self.attached
        for replica, fresh, reduced in zip(self.replicas, self.fresh, self.reduced, strict=True):
            for name in names:
                replica.get_parameter(name).grad = None
            fresh -= names
            reduced -= names
        return names

    def has_drifted(self) -> bool:
        """Whether steps have made parameters that the reducer has differ between the ranks."""
        first, *others = (dict(replica.named_parameters()) for replica in self.replicas)
        return any(
            not torch.equal(first[name], other[name]) for name in self.attached for other in others
        )

    def zero_grad(self, to_none: bool) -> None:
        for rank, replica in enumerate(self.replicas):
            replica.zero_grad(set_to_none=to_none)
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None:
                    self.note_write(rank, name, is_new=False)

    def attach(self) -> None:
        named = self.replicas[0].named_parameters()
        self.attached = {name for name, parameter in named if parameter.requires_grad}
        for replica in self.replicas[1:]:
            _copy_all(replica.parameters(), self.replicas[0].parameters())
        if self.copies_buffers:
            self.sync_buffers(0)
        self.skipped = False

    def sync_buffers(self, src: int) -> None:
        for replica in self.replicas:
            _copy_all(replica.buffers(), self.replicas[src].buffers())

    def _forget(self) -> None:
        for fresh in self.fresh:
            fresh -= self.attached

    def grow(self, layer: Layer) -> None:
        for rank, replica in enumerate(self.replicas):
            replica.grow(layer, rank)
            added = replica.layers[-1].named_parameters()
            prefix = f"layers.{len(replica.layers) - 1}."
            self._watch(rank, [(prefix + name, parameter) for name, parameter in added])
            self.optimizers[rank].add_param_group({"params": [*replica.layers[-1].parameters()]})

    def backwards(self, operation: Any, number: int, skipping: int = 0) -> Iterator[None]:
        """Runs the operation's backwards on the replicas, but for the ranks that are bits of
        `skipping`; yields after each, before it is reduced."""
        running = [
            stages(replica, operation, rank, number)
            for rank, replica in enumerate(self.replicas)
            if not skipping >> rank & 1
        ]
        yield from (None for _ in zip(*running, strict=True))

    def reduce(self, weights: Sequence[float] | None = None) -> dict[str, float]:
        """Returns, by parameter that some rank has, the largest magnitude that went into it.
        weights: of the ranks' gradients, of which there are none from before this backward.
        """
        scales = {}
        if weights is not None:
            self._leave_out({rank for rank, weight in enumerate(weights) if not weight})
        by_rank = [dict(replica.named_parameters()) for replica in self.replicas]
        for name in self.attached:
            column = [named[name] for named in by_rank]
            if not any(
                name in fresh and parameter.grad is not None
                for fresh, parameter in zip(self.fresh, column, strict=True)
            ):
                continue
            values = [torch.zeros_like(p) if p.grad is None else p.grad for p in column]
            if weights is None:
                result = functools.reduce(_COMBINE[self.op], values).detach()
                result = result / len(values) if self.op == "mean" else result
            else:
                products = [value * weight for value, weight in zip(values, weights, strict=True)]
                result = sum(products).detach() / sum(weights)
            for parameter, reduced in zip(column, self.reduced, strict=True):
                parameter.grad = result.clone()
                reduced.add(name)
            numbers = torch.stack([*values, result]).detach().abs()
            numbers = numbers[numbers.isfinite()]
            scales[name] = numbers.max().item() if numbers.numel() else 0.0
        self._forget()
        self.skipped = False
        return scales

    def _leave_out(self, ranks: set[int]) -> None:
        for rank in ranks:
            for name, parameter in self.replicas[rank].named_parameters():
                if name in self.attached:
                    parameter.grad = None
            self.fresh[rank] -= self.attached

    def has_unstepped(self) -> bool:
        """Whether a rank has a gradient that was reduced, and that nobody has stepped."""
        return any(
            replica.get_parameter(name).grad is not None
            for replica, reduced in zip(self.replicas, self.reduced, strict=True)
            for name in reduced & self.attached
        )

    def drop_gradients(self, *, by_vote: bool) -> None:
        self.skipped = by_vote
        for replica in self.replicas:
            for name, parameter in replica.named_parameters():
                if name in self.attached:
                    parameter.grad = None
        self._forget()
        for reduced in self.reduced:
            reduced -= self.attached

    def reduced_gradients(self, rank: int) -> list[Tensor]:
        """The gradients a Reducer looks at, of one replica."""
        named = self.replicas[rank].named_parameters()
        return [p.grad for name, p in named if name in self.attached and p.grad is not None]

    def agreed(self) -> set[str]:
        """The parameters whose values, and those ("grad of ...") whose gradients, are equal to the
        bit on all replicas, as they then must be on all ranks."""
        found = set()
        columns = zip(*(replica.named_parameters() for replica in self.replicas), strict=True)
        for column in columns:
            name, parameters = column[0][0], [parameter for _, parameter in column]
            if all(torch.equal(parameters[0], one) for one in parameters[1:]):
                found.add(name)
            gradients = [parameter.grad for parameter in parameters]
            if all(
                one is not None and gradients[0] is not None and torch.equal(gradients[0], one)
                for one in gradients
            ):
                found.add(f"grad of {name}")
        return found


def _copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
