"""What only a GPU can show. One rank, whose reduced gradients must be the plain model's; and
several ranks on one card, against a single process in float64 on the CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fastcomm

DEVICE = torch.device("cuda", 0)
STEPS = 5


def new_communicator(folder: Any) -> Any:
    return fastcomm.init(
        "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device=DEVICE
    )


def closes(comm: Any) -> bool:
    """Whether no graph is in the way any more."""
    gc.collect()
    try:
        comm.close()
    except fastcomm.FastcommError:
        return False
    return True


def mlp() -> nn.Sequential:
    """Wider than models.mlp, so that several buckets and tiles are at work."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    ).to(DEVICE)


def inputs() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


MANY_BUCKETS = {"bucket_cap_mb": 0.1}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad,
            other.grad,
            rtol=1e-5,
            atol=1e-7,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def eventually(is_so: Callable[[], bool], seconds: float = 5.0) -> bool:
    """The driver destroys graphs on a thread of the driver's."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def ids(value: object) -> str:
    return str(value).removeprefix("torch.")


def train(model: nn.Module, steps: int, *, in_step: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, inputs()).backward()
        in_step()
        optimizer.step()
