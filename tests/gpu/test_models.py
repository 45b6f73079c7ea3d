"""Mixed precision, compiled and checkpointed models, gradients from side streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastcomm
from tests.gpu import (
    MANY_BUCKETS,
    STEPS,
    assert_same_gradients,
    assert_same_parameters,
    inputs,
    loss_of,
    mlp,
    train,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)


# Mixed precision


def amp_train(model: nn.Module, *, poison_step: int | None = None) -> list[float]:
    """Returns the scales. In the poisoned step one input is infinite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scales = []
    for step in range(STEPS):
        x = inputs()
        if step == poison_step:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("poison_step", [None, 2], ids=["finite", "one step overflows"])
def test_grad_scaler_works_as_without_a_reducer(comm, poison_step):
    model, plain = mlp(), mlp()
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model)
    assert amp_train(model, poison_step=poison_step) == amp_train(plain, poison_step=poison_step)
    assert_same_parameters(model, plain)


# Models of other kinds


def test_a_compiled_model_is_reduced(comm):
    model, plain = mlp(), mlp()
    compiled = torch.compile(model)
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(compiled)
    train(compiled, 2)
    train(plain, 2)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        # Fused kernels round otherwise.
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)


class TwoStreams(nn.Module):
    """Two branches, the second on another stream, where its backward runs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(), mlp()
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            second = self.two(x)
        first = self.one(x)
        torch.cuda.current_stream().wait_stream(self.side)
        second.record_stream(torch.cuda.current_stream())
        return first + second


@pytest.mark.parametrize("options", [{}, MANY_BUCKETS], ids=["one bucket", "many buckets"])
def test_gradients_produced_on_a_side_stream_are_reduced(comm, options):
    model, plain = TwoStreams(), TwoStreams()
    fastcomm.Reducer(comm, **options).attach(model)
    for _ in range(STEPS):
        for one in (model, plain):
            one.zero_grad()
            loss_of(one, inputs()).backward()
        assert_same_gradients(model, plain)


def test_gradients_of_a_backward_on_a_side_stream_are_reduced(comm):
    model, plain, side = mlp(), mlp(), torch.cuda.Stream()
    fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model)
    for _ in range(STEPS):
        plain.zero_grad()
        loss_of(plain, inputs()).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model.zero_grad()
            loss_of(model, inputs()).backward()
        torch.cuda.current_stream().wait_stream(side)
        assert_same_gradients(model, plain)
