"""Models that change after attach()"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from tests.matrix.modules import Adapter
from tests.matrix.row import error, reduced
from tests.support.bodies import finish_together
from tests.support.models import backward, batch, mlp, seed

REFRESH = "`reducer.refresh()` on every rank, and an optimizer that has the new parameters"


def refused_until_refresh(case, training, run=backward):
    """Backward refuses what is not reduced, as often as one tries; refresh() mends it."""
    for _ in range(2):
        finish_together(case.comm)
        training.zero_grad()
        # Over NCCL, a rank may hear of another's refusal before it comes to its own.
        with case.refused(may_hear=case.comm.backend == "nccl"):
            run(training.model, case.rank, training.n_steps)
    training.assert_parameters()
    training.refresh()
    for _ in range(2):
        training.step(run)


def _two_parts():
    seed(0)
    return nn.Sequential(OrderedDict(trunk=nn.Linear(8, 8), act=nn.Tanh(), head=nn.Linear(8, 4)))


def _new_head(model):
    seed(1)
    model.head = nn.Linear(8, 4)


# Freezing


def _freeze(model):
    model[2].requires_grad_(False)


def _unfreeze(model):
    model[2].requires_grad_(True)


def _partly_frozen():
    model = mlp()
    _freeze(model)
    return model


@reduced("freezing without refresh(): what is frozen stays as it is, the others are reduced")
def freezing(case):
    training = case.train(mlp, backward)
    training.change(_freeze)
    before = training.model[2].weight.detach().clone()
    for _ in range(2):
        training.step(backward)
    assert torch.equal(training.model[2].weight, before)


UNFROZEN = {
    "match": r"(?s)2\.(weight|bias).*refresh",
    "instead": "`reducer.refresh()` on every rank",
}


@error("unfreezing without refresh()", **UNFROZEN)
def unfreezing_without_refresh(case):
    training = case.train(_partly_frozen, backward)
    training.change(_unfreeze)
    refused_until_refresh(case, training)


@error("unfreezing without refresh(), backward reaching only what was unfrozen", **UNFROZEN)
def unfreezing_all_that_is_reached(case):
    def run(model, rank, i):
        with torch.no_grad():
            hidden = model[1](model[0](batch(rank, i)[0]))
        model[2](hidden).square().sum().backward()

    training = case.train(_partly_frozen, backward)
    training.change(_unfreeze)
    refused_until_refresh(case, training, run)


# New parameters


NEW_HEAD = {"match": r"(?s)head\.(weight|bias).*refresh", "instead": REFRESH}


@error("a head replaced without refresh()", **NEW_HEAD)
def replaced_head(case):
    training = case.train(_two_parts, backward)
    training.change(_new_head)
    refused_until_refresh(case, training)


@error(
    "a module added without refresh()",
    match=r"(?s)extra\.(weight|bias).*refresh",
    instead=REFRESH,
)
def added_module(case):
    def add(model):
        seed(1)
        model.extra = nn.Linear(4, 4)

    training = case.train(_two_parts, backward)
    training.change(add)
    refused_until_refresh(case, training)


@error(
    "LoRA adapters added without refresh()",
    match=r"(?s)trunk\.(down|up).*refresh",
    instead=REFRESH,
)
def added_adapters(case):
    training = case.train(_two_parts, backward)
    training.change(lambda model: setattr(model, "trunk", Adapter(model.trunk)))
    refused_until_refresh(case, training)


@reduced("`spectral_norm` applied without refresh(): it keeps the parameter")
def added_spectral_norm(case):
    def add(model):
        seed(1)
        parametrizations.spectral_norm(model.trunk)

    training = case.train(_two_parts, backward)
    training.change(add)
    for _ in range(2):
        training.step(backward)


@reduced("pruning applied without refresh(): it keeps the parameter")
def added_pruning(case):
    training = case.train(_two_parts, backward)
    training.change(lambda model: prune.l1_unstructured(model.trunk, "weight", 0.5))
    training.step(backward)
    training.change(lambda model: prune.remove(model.trunk, "weight"))
    training.step(backward)


@reduced("a module removed without refresh(): its parameters count as unused")
def removed_module(case):
    training = case.train(mlp, backward)
    training.change(lambda model: model.__delitem__(slice(2, 4)))
    for _ in range(2):
        training.step(backward)


# Parameters that become something else


@error(
    "`model.double()` without refresh()",
    match=r"(?s)\w+\.(weight|bias).*refresh",
    instead=REFRESH,
)
def converted(case):
    def run(model, rank, i):
        x, y = batch(rank, i)
        F.mse_loss(model(x.to(model.head.weight.dtype)), y.to(model.head.weight.dtype)).backward()

    training = case.train(_two_parts, run)
    training.change(lambda model: model.double())
    refused_until_refresh(case, training, run)


def _resized(n):
    def resize(model):
        seed(1)
        for p, shape in (
            (model[0].weight, (n, 8)),
            (model[0].bias, (n,)),
            (model[2].weight, (16, n)),
        ):
            p.data, p.grad = torch.randn(shape) / 4, None

    return resize


RESIZED = {"match": r"(?s)(0|2)\.(weight|bias).*(shape|size|elements).*refresh", "instead": REFRESH}


@error("`p.data` made smaller without refresh()", **RESIZED)
def shrunk(case):
    training = case.train(mlp, backward)
    training.change(_resized(8))
    refused_until_refresh(case, training)


# Loading


@reduced("`load_state_dict`")
def loading(case):
    training = case.train(mlp, backward)
    state = {name: tensor / 2 for name, tensor in mlp().state_dict().items()}
    training.change(lambda model: model.load_state_dict(state))
    for _ in range(2):
        training.step(backward)


@error(
    "`load_state_dict(assign=True)` without refresh()",
    match=r"(?s)\w+\.(weight|bias).*refresh",
    instead=REFRESH,
)
def loading_by_assignment(case):
    training = case.train(mlp, backward)
    training.change(lambda model: model.load_state_dict(mlp().state_dict(), assign=True))
    refused_until_refresh(case, training)


def _swap(model):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(16, 8)))


@error(
    "`torch.utils.swap_tensors` of an attached parameter",
    match="swap|weakref",
    instead="`detach()`, swap, `attach()`",
    raises=RuntimeError,
)
def swapped(case):
    training = case.train(mlp, backward)
    with case.refused():
        _swap(training.model)
    for _ in range(2):
        training.step(backward)


@reduced("`torch.utils.swap_tensors` between detach() and attach()")
def swapped_with_detach(case):
    training = case.train(mlp, backward)
    training.reducer.detach()
    training.change(_swap)
    training.reducer.attach(training.model)
    training.renew_optimizers()
    for _ in range(2):
        training.step(backward)
