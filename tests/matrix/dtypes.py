"""Data types and mixed precision"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.matrix.row import Training, reduced, train_row
from tests.support.models import backward, batch, loss_of, mlp, seed


class _Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        seed(0)
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return self.head(x.float())


def _halved(dtype):
    def run(model, rank, i):
        x, y = batch(rank, i)
        F.mse_loss(model(x.to(dtype)).float(), y).backward()

    return run


row = functools.partial(train_row, __name__)

row("mixed_dtypes", "parameters of float32, float64 and bfloat16 in one model", _Mixed)
row(
    "bfloat16_parameters",
    "parameters of bfloat16",
    lambda: mlp().bfloat16(),
    _halved(torch.bfloat16),
)
row("float16_parameters", "parameters of float16", lambda: mlp().half(), _halved(torch.float16))


@reduced(
    "parameters of bfloat16 with gradients of float32 (`p.grad_dtype`)",
    needs=hasattr(nn.Parameter, "grad_dtype"),
)
def grad_dtype(case):
    def make():
        model = mlp().bfloat16()
        for p in model.parameters():
            p.grad_dtype = torch.float32
        return model

    training = case.train(make, _halved(torch.bfloat16))
    assert {p.grad.dtype for p in training.model.parameters()} == {torch.float32}


@reduced("`torch.autocast`")
def autocast(case):
    def run(model, rank, i):
        with torch.autocast(case.comm.device.type, torch.bfloat16):
            loss = loss_of(model, rank, i)
        loss.backward()

    case.train(mlp, run)


@reduced("`GradScaler`: an infinity on one rank makes all ranks skip the step")
def grad_scaler(case):
    training = Training(case, mlp)
    scaler = torch.amp.GradScaler(case.comm.device.type, init_scale=1024.0)
    for i in range(3):
        training.zero_grad()
        loss = loss_of(training.model, case.rank, i)
        scaler.scale(loss * float("inf") if i == 1 and case.rank == 0 else loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024 if i == 0 else 512)
        if i != 1:  # the replicas leave out the step that is skipped
            training.n_steps = i
            training.expect(backward)
            for optimizer in training.replica_optimizers:
                optimizer.step()
        training.assert_parameters()


@reduced("`grad_norm()` of float16 gradients above 65504, float16's largest number")
def large_norm(case):
    def make():
        return nn.ParameterList([torch.ones(10000, dtype=torch.float16)])

    def run(model, rank, i):
        (model[0] * (1000.0 + rank)).float().sum().backward()

    training = Training(case, make)
    training.backward(run)
    gradient = training.model[0].grad.double()
    norm = pytest.approx(float(gradient.norm()), rel=1e-3)
    assert float(training.reducer.grad_norm()) == norm
    assert float(training.reducer.clip_grad_norm_(1.0)) == norm
    assert int(training.reducer.nonfinite_count()) == 0
    case.same(training.model[0].grad)
    clipped = training.model[0].grad.double()
    torch.testing.assert_close(clipped, gradient / gradient.norm(), rtol=1e-2, atol=0)
