"""Models, batches and expected gradients, the same on every rank for the same arguments."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastcomm

# Nearly every parameter of the models here in its own bucket.
SMALL_BUCKETS = {"bucket_cap_mb": 0.0002}

# Relative and absolute: a few roundings of each type.
_TOLERANCE = {
    torch.float64: (1e-13, 1e-15),
    torch.float32: (1e-6, 1e-7),
    torch.bfloat16: (2**-7, 1e-3),
}


def seed(number: int) -> None:
    """As torch.manual_seed(), which goes round every kind of accelerator there might be, and takes
    longer over it than these models take to make.
    """
    if torch.get_default_device().type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def mlp() -> nn.Sequential:
    seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def convnet() -> nn.Sequential:
    """Takes images of 3 x 12 x 12."""
    seed(0)
    body = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(256, 4))


class Transformer(nn.Module):
    """A small language model with tied embeddings. Takes token numbers below 32, in sequences of at
    most 16.
    """

    def __init__(self) -> None:
        super().__init__()
        seed(0)
        self.embedding = nn.Embedding(32, 32)
        self.position = nn.Parameter(torch.randn(16, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(
            self.blocks(self.embedding(tokens) + self.position[:length], mask=mask, is_causal=True)
        )


class Heads(nn.Module):
    """A trunk and heads of which a forward uses only those it is told to."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        seed(0)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(heads))

    def forward(self, x: Tensor, *used: int) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.heads[head](hidden) for head in used]).sum(0)


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of 4 x 8 and targets of 4 x 4, others for every rank and step."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    return _here(
        torch.randn(4, 8, generator=generator, device="cpu"),
        torch.randn(4, 4, generator=generator, device="cpu"),
    )


def _here(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Moved to where the ranks of this test have their tensors; made on the CPU, so that they are
    the same everywhere.
    """
    return tuple(tensor.to(torch.get_default_device()) for tensor in tensors)


def loss_of(model: nn.Module, rank: int, step: int = 0, *extra: int) -> Tensor:
    x, y = batch(rank, step)
    return F.mse_loss(model(x, *extra), y)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    loss_of(model, rank, step).backward()


def image_backward(model: nn.Module, rank: int, step: int = 0) -> None:
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    images = torch.randn(4, 3, 12, 12, generator=generator, device="cpu")
    images, classes = _here(images, torch.randint(4, (4,), generator=generator, device="cpu"))
    F.cross_entropy(model(images), classes).backward()


def text_backward(model: nn.Module, rank: int, step: int = 0) -> None:
    (tokens,) = _here(
        torch.randint(
            32,
            (4, 17),
            generator=torch.Generator("cpu").manual_seed(1000 * step + rank),
            device="cpu",
        )
    )
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(
    model: nn.Module, run: Callable[[nn.Module, int, int], None], rank: int, steps: int
) -> None:
    """Steps of SGD with momentum on what run(model, rank, step) leaves in .grad."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        run(model, rank, step)
        optimizer.step()


def assert_same_parameters(model: nn.Module, other: nn.Module) -> None:
    """They have the same bits."""
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def replica_of(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """As copy.deepcopy(), which spends most of its time on dictionaries of hooks that are empty."""
    memo = {} if memo is None else memo
    if id(model) in memo:
        return memo[id(model)]
    if hasattr(model, "__deepcopy__") or type(model).__setstate__ is not nn.Module.__setstate__:
        return copy.deepcopy(model, memo)
    replica = memo[id(model)] = type(model).__new__(type(model))
    for name, value in vars(model).items():
        if name == "_modules":
            parts = {key: part for key, part in value.items() if part is not None}
            mine: Any = {**value, **{key: replica_of(part, memo) for key, part in parts.items()}}
        elif type(value) in (dict, OrderedDict) and not value:
            mine = type(value)()
        else:
            mine = copy.deepcopy(value, memo)
        vars(replica)[name] = mine
    return replica


def mean_gradients(
    model: nn.Module, world_size: int, run: Callable[[nn.Module, int], None]
) -> list[Tensor | None]:
    """The mean over ranks, by parameter, of the gradients `run(model, rank)` gives on a copy of the
    model in this process alone.

    A rank that has no gradient of a parameter counts as zero; where no rank has one, the mean is
    None.
    """
    by_rank = []
    for rank in range(world_size):
        replica = replica_of(model)
        run(replica, rank)
        by_rank.append(gradients(replica))
    return [mean_of(column) for column in zip(*by_rank, strict=True)]


def assert_gradients(model: nn.Module, expected: Sequence[Tensor | None]) -> None:
    """Compares values, to a few roundings, and dtypes; and which gradients are None."""
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        if parameter.grad is None or wanted is None:
            assert parameter.grad is wanted, (
                f"{name}: the gradient is {parameter.grad}, expected {wanted}"
            )
            continue
        rtol, atol = _TOLERANCE[parameter.dtype]
        if are_close(parameter.grad, wanted, rtol, atol):
            continue
        torch.testing.assert_close(
            parameter.grad,
            wanted,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def are_close(tensor: Tensor, wanted: Tensor, rtol: float, atol: float) -> bool:
    """At a tenth of the cost of torch.testing.assert_close(), which says what is not."""
    alike = tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
    return alike and torch.allclose(tensor, wanted, rtol=rtol, atol=atol)


def attached(
    comm: Any, model: nn.Module | None = None, **options: Any
) -> tuple[Any, fastcomm.Reducer, torch.optim.Optimizer]:
    """A model (mlp(), if none is given) with a reducer, and an optimizer of it."""
    model = mlp() if model is None else model
    reducer = fastcomm.Reducer(comm, **options).attach(model)
    return model, reducer, torch.optim.SGD(model.parameters(), lr=0.1)


def check_gradients(
    comm: Any, model: nn.Module, run: Callable[[nn.Module, int], None], **options: Any
) -> fastcomm.Reducer:
    """Compares what `run(model, rank)` gives under a reducer with the mean over ranks, in two
    steps; returns the reducer.
    """
    expected = mean_gradients(model, comm.world_size, run)
    reducer = fastcomm.Reducer(comm, **options).attach(model)
    for _ in range(2):
        model.zero_grad()
        run(model, comm.rank)
        assert_gradients(model, expected)
    return reducer


def check_backward(comm: Any, model: nn.Module) -> None:
    """A backward of an attached model without gradients gives the mean over ranks."""
    model.zero_grad()
    expected = mean_gradients(model, comm.world_size, backward)
    backward(model, comm.rank)
    assert_gradients(model, expected)


def mean_of(column: Sequence[Tensor | None]) -> Tensor | None:
    """The mean over ranks of one parameter's gradients. None counts as zero; if all are None, so is
    the mean.
    """
    present = [gradient for gradient in column if gradient is not None]
    if not present:
        return None
    dtype = present[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    first, *others = (gradient.to(wide) for gradient in present)
    return (sum(others, first) / len(column)).to(dtype)  # 0 + a sparse tensor would not do


class Fail(torch.autograd.Function):
    """The identity, whose backward raises RuntimeError("out of luck") if `fails`."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise RuntimeError("out of luck")
        return gradient, None
