"""Modules and parameters"""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.matrix.row import Training, error, reduced, train_row, trains
from tests.support.models import (
    Heads,
    Transformer,
    backward,
    batch,
    convnet,
    image_backward,
    loss_of,
    mlp,
    seed,
    text_backward,
)

row = functools.partial(train_row, __name__)


def layers(*modules):
    """Makes a model of modules of 8 features that ends in 4, always the same."""

    def make():
        seed(0)
        return nn.Sequential(*(module() for module in modules), nn.Linear(8, 4))

    return make


# Parameters that a backward does not reach


@trains("parameters that no rank uses: their gradient stays None", Heads)
def unused(model, rank, i):
    loss_of(model, rank, i, 0).backward()


@trains("parameters that some ranks do not use: they count as zero there", Heads)
def unused_on_a_rank(model, rank, i):
    loss_of(model, rank, i, *range(1 + rank % 2)).backward()


@trains(
    "branches that change with the rank and the step (mixture of experts)",
    lambda: Heads(4),
    steps=4,
)
def experts(model, rank, i):
    loss_of(model, rank, i, (rank + i * i) % 3).backward()


def _partly_frozen():
    model = mlp()
    model[2].requires_grad_(False)
    return model


row("frozen", "parameters frozen before attach()", _partly_frozen)

# Layers

row(
    "batch_norm",
    "batch norm (statistics stay this rank's own: `reducer.sync_buffers()`)",
    convnet,
    image_backward,
)
row("tied_weights", "tied weights", Transformer, text_backward)


@reduced("`weight_norm`, `spectral_norm`, `orthogonal` and pruning before attach()")
def parametrised(case):
    for how in (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ):
        case.train(layers(lambda how=how: how(nn.Linear(8, 8))), backward, steps=1)


class Adapter(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.1))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def _fake_quantised():
    model = mlp()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


class _Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        seed(0)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.sliced = nn.Parameter(torch.randn(8, 8)[:, ::2])

    def forward(self, x):
        return x @ self.sliced * self.scalar + self.empty.sum()


row("adapters", "LoRA adapters added before attach()", layers(lambda: Adapter(nn.Linear(8, 8))))
row(
    "fake_quantised",
    "quantisation-aware training (`prepare_qat`; its observers stay this rank's own)",
    _fake_quantised,
)
row(
    "channels_last",
    "channels-last weights",
    lambda: convnet().to(memory_format=torch.channels_last),
    image_backward,
)
row("odd_shapes", "parameters without dimensions, without elements, with gaps in memory", _Shapes)


@trains(
    "dropout (a different seed on each rank: `torch.manual_seed(1 + comm.rank)` after `attach()`)",
    layers(lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.5)),
)
def dropout(model, rank, i):
    seed(100 * i + rank)
    backward(model, rank, i)


# Copies


@reduced("an average of the weights in a copy (`AveragedModel`, EMA by deepcopy)")
def averaged(case):
    training = Training(case, mlp)
    average = torch.optim.swa_utils.AveragedModel(training.model)
    for _ in range(2):
        training.step(backward)
        average.update_parameters(training.model)
        case.same(*average.parameters())


@reduced("a deepcopy of an attached model: its gradients are its own, the model's are reduced")
def deep_copy(case):
    training = case.train(mlp, backward)
    replica = copy.deepcopy(training.model)
    backward(replica, case.rank, 5)
    mine, alone = replica[0].weight.grad, copy.deepcopy(replica)
    alone.zero_grad()
    backward(alone, case.rank, 5)
    assert torch.equal(mine, alone[0].weight.grad)
    training.step(backward)


# What attach() refuses, and what it does not


def _with(**parts):
    model = mlp()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def _untrained(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def _with_sparse_buffer():
    model = mlp()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def _refused(name, feature, match, instead, make):
    """A row of a model that attach() refuses."""

    def body(case):
        with case.refused():
            Training(case, make)
        case.trainings.clear()
        case.train(mlp, backward)

    body.__name__ = name
    error(feature, match=match, instead=instead, raises=ValueError)(body)


_refused(
    "sparse_parameter",
    "a sparse parameter",
    r"table.*(sparse|strided)",
    "keep it dense",
    lambda: _with(table=nn.Parameter(torch.eye(3).to_sparse())),
)
_refused(
    "negated_parameter",
    "a parameter that is a negated view",
    r"tilt.*neg",
    "`resolve_neg()` it",
    lambda: _with(tilt=nn.Parameter(torch._neg_view(torch.ones(3)))),
)
_refused(
    "conjugate_parameter",
    "a frozen parameter that is a conjugate view",
    r"phase.*conj",
    "`resolve_conj()` it",
    lambda: _with(phase=_untrained(torch.ones(3, dtype=torch.complex64).conj())),
)
_refused(
    "expanded_parameter",
    "an expanded parameter",
    r"scale.*(expand|overlap)",
    "`contiguous()` it",
    lambda: _with(scale=nn.Parameter(torch.ones(1).expand(4))),
)
_refused(
    "float8_parameter",
    "a parameter of float8 to be trained",
    r"coarse.*float8",
    "train it in another dtype, or freeze it",
    lambda: _with(coarse=nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))),
)
_refused(
    "renormalised_embedding",
    "`nn.Embedding(max_norm=...)`, `nn.EmbeddingBag(max_norm=...)`",
    r"module words is an Embedding with max_norm",
    "renormalise all rows after each step",
    lambda: _with(words=nn.Embedding(4, 8, max_norm=1.0)),
)
_refused(
    "lazy_parameter",
    "a lazy module that has not run yet",
    r"lazy\.weight is not initialised",
    "run the model once before attach()",
    lambda: _with(lazy=nn.LazyLinear(4)),
)
_refused(
    "meta_parameter",
    "a parameter on another device than the communicator",
    r"far.*meta",
    "move the model first",
    lambda: _with(far=nn.Parameter(torch.ones(3, device="meta"))),
)
_refused(
    "sparse_buffer",
    "a sparse buffer",
    r"graph.*(sparse|strided)",
    "keep it out of the module, or dense",
    _with_sparse_buffer,
)


class _Phases(nn.Module):
    def __init__(self):
        super().__init__()
        seed(0)
        self.linear = nn.Linear(8, 4)
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x) * self.phase).abs()


row("complex_parameter", "complex parameters (as pairs)", _Phases)


@error(
    "a model whose parameters have a reducer already",
    match=r"0\.weight.*detach",
    instead="`detach()`",
    raises=ValueError,
)
def attached_twice(case):
    training = Training(case, mlp)
    with case.refused():
        Training(case, lambda: training.model)
    case.trainings.pop()
    training.step(backward)


@reduced("frozen parameters of float8 or integers (quantised bases)")
def quantised_base(case):
    def make():
        coarse, packed = torch.ones(4).to(torch.float8_e4m3fn), torch.arange(4, dtype=torch.uint8)
        return _with(coarse=_untrained(coarse), packed=_untrained(packed))

    case.train(make, backward)


@reduced("buffers that are expanded, conjugate or negated views")
def odd_buffers(case):
    def make():
        model = mlp()
        model.register_buffer("expanded", torch.ones(1).expand(4))
        model.register_buffer("conjugate", torch.full((3,), 1 + 2j).conj())
        model.register_buffer("negated", torch._neg_view(torch.ones(3)))
        return model

    training = case.train(make, backward)
    buffers = dict(training.model.named_buffers())
    assert buffers["expanded"].tolist() == [1.0] * 4
    assert buffers["conjugate"].tolist() == [1 - 2j] * 3
    assert buffers["negated"].tolist() == [-1.0] * 3


@reduced("attach() inside `torch.inference_mode()`")
def attached_in_inference_mode(case):
    made = [mlp() for _ in range(1 + case.world_size)]
    with torch.inference_mode():
        training = Training(case, made.pop)
    for _ in range(2):
        training.step(backward)


def _words(sparse):
    seed(0)
    return nn.Sequential(nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 4))


def _read(model, rank, i):
    F.mse_loss(model(torch.arange(4) + rank + i), batch(rank, i)[1]).backward()


@reduced("`nn.Embedding(sparse=True)`, `nn.EmbeddingBag(sparse=True)`: gradients stay sparse")
def sparse_gradients(case):
    training = case.train(lambda: _words(sparse=True), _read)
    assert training.model[0].weight.grad.is_sparse


@error(
    "a gradient that is sparse only since attach()",
    match=r"(?s)0\.weight.*sparse",
    instead="`refresh()`, or name it in `Reducer(sparse_parameters=...)`",
)
def sparse_since_attach(case):
    training = Training(case, lambda: _words(sparse=False))
    training.change(lambda model: setattr(model[0], "sparse", True))
    with case.refused():
        _read(training.model, case.rank, 0)
    training.assert_parameters()
    training.refresh()
    training.step(_read)
    training.step(_read)
