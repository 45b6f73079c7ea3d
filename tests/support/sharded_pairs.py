"""A model stepped by a plain optimizer beside its copy stepped by a ShardedOptimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fastcomm
from fastcomm.comm.communicator import Communicator
from tests.support.models import assert_same_parameters, backward

STEPS = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Lion(torch.optim.Optimizer):
    """As users write their own: fastcomm knows nothing of it."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(average.mul(group["beta"]).add(p.grad).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["beta"])


class Pair:
    """A model with a plain optimizer and its copy with a sharded one, each with a reducer."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
        sharding: dict[str, Any] | None = None,
        **reducing: Any,
    ) -> None:
        self.comm = comm
        self.models = [model, copy.deepcopy(model)]
        self.reducers = [fastcomm.Reducer(comm, **reducing).attach(m) for m in self.models]
        self.plain = kind(groups(self.models[0]), **options)
        self.sharded = fastcomm.ShardedOptimizer(
            self.reducers[1], kind, groups(self.models[1]), **(sharding or {}), **options
        )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.plain, self.sharded]

    def train(self, run: Callable[[nn.Module, int, int], None] = backward, first: int = 0) -> None:
        for step in range(first, first + STEPS):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                run(model, self.comm.rank, step)
                optimizer.step()
            self.check()

    def check(self) -> None:
        """The parameters have the same bits."""
        assert_same_parameters(self.models[1], self.models[0])
        self.reducers[1].sync_buffers()  # which are each rank's own
        self.reducers[1].check_in_sync(self.sharded)
