"""A model in training that skips steps, and what is logged of it."""

from __future__ import annotations

import contextlib
import logging

import torch

import fastcomm
from tests.support.models import loss_of, mlp

INF, NAN = float("inf"), float("nan")


class Trainee:
    """A model in training, which tells what a step has changed, and what was logged."""

    def __init__(self, comm, model=None, optimizer=torch.optim.AdamW, **options):
        self.comm, self.model = comm, mlp() if model is None else model
        options = {"skip_nonfinite": True, **options}
        self.reducer = fastcomm.Reducer(comm, **options).attach(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)

    def train(self, i, poison=None, rank=1, vote=None):
        """A step of an ordinary loop. poison: spoils the loss of the rank. Returns whether
        anything has changed.
        """
        before = self.snapshot()
        if self.comm.rank == rank and vote is not None:
            self.reducer.skip_step()
        if vote != "instead" or self.comm.rank != rank:
            loss = loss_of(self.model, self.comm.rank, i)
            if poison is not None and self.comm.rank == rank:
                loss = loss + poison(self.model)
            loss.backward()
        self.reducer.clip_grad_norm_(1.0)
        self.optimizer.step()
        has_changed = self.snapshot() != before
        assert has_changed != self.reducer.skipped
        self.optimizer.zero_grad()
        return has_changed

    def snapshot(self):
        """The bits of all parameters and of the optimizer's state."""
        state = [
            value
            for _, state in sorted(self.optimizer.state_dict()["state"].items())
            for value in state.values()
        ]
        tensors = [*self.model.parameters(), *state]
        return [t.detach().cpu().numpy().tobytes() if torch.is_tensor(t) else t for t in tensors]


@contextlib.contextmanager
def logged():
    """The messages that this rank logs in the block."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fastcomm").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("fastcomm").removeHandler(handler)


def spoil(model, value=NAN):
    """Makes one element of the gradient of one parameter not finite."""
    return model[2].weight[3, 5] * value
