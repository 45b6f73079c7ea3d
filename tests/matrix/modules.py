"""Modules and parameters"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.matrix.row import Training, error, reduced
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


def layers(*modules):
    """Makes a model of modules of 8 features that ends in 4, always the same."""

    def make():
        seed(0)
        return nn.Sequential(*(module() for module in modules), nn.Linear(8, 4))

    return make


# Parameters that a backward does not reach


@reduced("parameters that no rank uses: their gradient stays None")
def unused(case):
    case.train(Heads, lambda model, rank, i: loss_of(model, rank, i, 0).backward())


@reduced("parameters that some ranks do not use: they count as zero there")
def unused_on_a_rank(case):
    def run(model, rank, i):
        loss_of(model, rank, i, *range(1 + rank % 2)).backward()

    case.train(Heads, run)


@reduced("branches that change with the rank and the step (mixture of experts)")
def experts(case):
    case.train(
        lambda: Heads(4),
        lambda model, rank, i: loss_of(model, rank, i, (rank + i * i) % 3).backward(),
        steps=4,
    )


@reduced("parameters frozen before attach()")
def frozen(case):
    def make():
        model = mlp()
        model[2].requires_grad_(False)
        return model

    case.train(make, backward)


# Layers


@reduced("batch norm (statistics stay this rank's own: `reducer.sync_buffers()`)")
def batch_norm(case):
    case.train(convnet, image_backward)


@reduced("tied weights")
def tied_weights(case):
    case.train(Transformer, text_backward)


@reduced("an LSTM")
def lstm(case):
    def make():
        seed(0)
        return nn.LSTM(8, 4, num_layers=2, batch_first=True)

    def run(model, rank, i):
        output, _ = model(batch(rank, i)[0][None])
        output.square().sum().backward()

    case.train(make, run)


@reduced("`weight_norm` before attach()")
def weight_norm(case):
    case.train(layers(lambda: parametrizations.weight_norm(nn.Linear(8, 8))), backward)


@reduced("`spectral_norm` before attach()")
def spectral_norm(case):
    case.train(layers(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))), backward)


@reduced("an orthogonal parametrization before attach()")
def orthogonal(case):
    case.train(layers(lambda: parametrizations.orthogonal(nn.Linear(8, 8))), backward)


class Adapter(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.1))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@reduced("LoRA adapters added before attach()")
def adapters(case):
    case.train(layers(lambda: Adapter(nn.Linear(8, 8))), backward)


@reduced("pruning (`torch.nn.utils.prune`) before attach()")
def pruned(case):
    case.train(layers(lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)), backward)


def _fake_quantised():
    model = mlp()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


@reduced("quantisation-aware training (`prepare_qat`; its observers stay this rank's own)")
def fake_quantised(case):
    case.train(_fake_quantised, backward)


@reduced("channels-last weights")
def channels_last(case):
    case.train(lambda: convnet().to(memory_format=torch.channels_last), image_backward)


class _Tagged(nn.Parameter):
    """A subclass of Parameter, as frameworks have them."""


@reduced("subclasses of `nn.Parameter`")
def parameter_subclass(case):
    def make():
        model = mlp()
        model[2].weight = _Tagged(model[2].weight.detach())
        return model

    case.train(make, backward)


class _Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        seed(0)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.sliced = nn.Parameter(torch.randn(8, 8)[:, ::2])

    def forward(self, x):
        return x @ self.sliced * self.scalar + self.empty.sum()


@reduced("parameters without dimensions, without elements, with gaps in memory")
def odd_shapes(case):
    case.train(_Shapes, backward)


@reduced(
    "dropout (each rank by a seed of its own: `torch.manual_seed(1 + comm.rank)` after `attach()`)"
)
def dropout(case):
    def run(model, rank, i):
        seed(100 * i + rank)
        backward(model, rank, i)

    case.train(layers(lambda: nn.Linear(8, 8), lambda: nn.Dropout(0.5)), run)


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


def _with(**parameters):
    model = mlp()
    for name, make in parameters.items():
        setattr(model, name, make())
    return model


def _refuse_to_attach(case, make):
    with case.refused():
        Training(case, make)
    case.trainings.clear()
    case.train(mlp, backward)


@error(
    "a sparse parameter",
    match=r"table.*(sparse|strided)",
    instead="keep it dense",
    raises=ValueError,
)
def sparse_parameter(case):
    _refuse_to_attach(case, lambda: _with(table=lambda: nn.Parameter(torch.eye(3).to_sparse())))


@error(
    "a parameter that is a negated view",
    match=r"tilt.*neg",
    instead="`resolve_neg()` it",
    raises=ValueError,
)
def negated_parameter(case):
    tilt = torch._neg_view(torch.ones(3))
    _refuse_to_attach(case, lambda: _with(tilt=lambda: nn.Parameter(tilt)))


@error(
    "a frozen parameter that is a conjugate view",
    match=r"phase.*conj",
    instead="`resolve_conj()` it",
    raises=ValueError,
)
def conjugate_parameter(case):
    def make():
        phase = torch.ones(3, dtype=torch.complex64).conj()
        return _with(phase=lambda: nn.Parameter(phase, requires_grad=False))

    _refuse_to_attach(case, make)


@error(
    "an expanded parameter",
    match=r"scale.*(expand|overlap)",
    instead="`contiguous()` it",
    raises=ValueError,
)
def expanded_parameter(case):
    _refuse_to_attach(case, lambda: _with(scale=lambda: nn.Parameter(torch.ones(1).expand(4))))


@error(
    "a parameter of float8 to be trained",
    match=r"coarse.*float8",
    instead="train it in another dtype, or freeze it",
    raises=ValueError,
)
def float8_parameter(case):
    coarse = torch.ones(4).to(torch.float8_e4m3fn)
    _refuse_to_attach(case, lambda: _with(coarse=lambda: nn.Parameter(coarse)))


@reduced("complex parameters (as pairs)")
def complex_parameter(case):
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            seed(0)
            self.linear = nn.Linear(8, 4)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x):
            return (self.linear(x) * self.phase).abs()

    case.train(Phases, backward)


@error(
    "`nn.Embedding(max_norm=...)`, `nn.EmbeddingBag(max_norm=...)`",
    match=r"module words is an Embedding with max_norm",
    instead="renormalise all rows after each step",
    raises=ValueError,
)
def renormalised_embedding(case):
    _refuse_to_attach(case, lambda: _with(words=lambda: nn.Embedding(4, 8, max_norm=1.0)))


@error(
    "a lazy module that has not run yet",
    match=r"lazy\.weight is not initialised",
    instead="run the model once before attach()",
    raises=ValueError,
)
def lazy_parameter(case):
    _refuse_to_attach(case, lambda: _with(lazy=lambda: nn.LazyLinear(4)))


@error(
    "a parameter on another device than the communicator",
    match=r"far.*meta",
    instead="move the model first",
    raises=ValueError,
)
def meta_parameter(case):
    _refuse_to_attach(case, lambda: _with(far=lambda: nn.Parameter(torch.ones(3, device="meta"))))


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
        coarse = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        packed = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        return _with(coarse=lambda: coarse, packed=lambda: packed)

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


@error(
    "a sparse buffer",
    match=r"graph.*(sparse|strided)",
    instead="keep it out of the module, or dense",
    raises=ValueError,
)
def sparse_buffer(case):
    def make():
        model = mlp()
        model.register_buffer("graph", torch.eye(3).to_sparse())
        return model

    _refuse_to_attach(case, make)


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
