"""torch.compile"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.matrix.row import Training, error, reduced
from tests.support.models import batch, seed

slow_reduced = functools.partial(reduced, is_slow=True)
slow_error = functools.partial(error, is_slow=True)


def _tiny():
    seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))


def _step(model, x, y):
    F.mse_loss(model(x), y).backward()


def _with(step):
    def run(model, rank, i):
        x, y = batch(rank, i)
        device = torch.get_default_device()
        torch.set_default_device(None)  # as most programs have it; the compiler traces the mode
        try:
            step(model, x, y)
        finally:
            torch.set_default_device(device)

    return run


_backward = _with(_step)


@contextlib.contextmanager
def _fresh_compiler(**config):
    """What rows compile is theirs alone."""
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(**config):
            yield
    finally:
        torch._dynamo.reset()


def _compiled(**options):
    return lambda: torch.compile(_tiny(), **{"backend": "eager", **options})


@slow_reduced("`torch.compile(model)` by way of AOTAutograd, fullgraph")
def compiled_by_aot_autograd(case):
    with _fresh_compiler():
        case.train(_compiled(backend="aot_eager", fullgraph=True), _backward)


@slow_reduced("`model.compile()` after attach()")
def compiled_after_attach(case):
    with _fresh_compiler():
        training = case.train(_tiny, _backward)
        training.model.compile(backend="eager")
        for _ in range(2):
            training.step(_backward)


@slow_reduced("layers compiled one by one (backward and communication still overlap)")
def compiled_layers(case):
    def make():
        model = _tiny()
        for layer in model:
            layer.compile(backend="eager")
        return model

    with _fresh_compiler():
        case.train(make, _backward, bucket_cap_mb=0.0001)


@slow_reduced("`reducer.compile(model)` (backward and communication overlap)")
def compiled_in_pieces(case):
    with _fresh_compiler():
        training = Training(case, _tiny, bucket_cap_mb=0.0001)
        forward = training.reducer.compile(training.model, backend="aot_eager", fullgraph=True)

        def run(model, *args):
            _backward(forward if model is training.model else model, *args)

        for _ in range(2):
            training.step(run)


@slow_reduced("a compiled function that holds model, loss and backward")
def compiled_step(case):
    with _fresh_compiler():
        case.train(_tiny, _with(torch.compile(_step, backend="eager")))


@slow_error(
    "a compiled function with `backward` traced into the graph (`trace_autograd_ops`)",
    match=r"(weight|bias).*reduce\(\)",
    instead="leave `trace_autograd_ops` off, or `reducer.reduce()` before the step",
    needs=hasattr(torch._dynamo.config, "trace_autograd_ops"),
)
def traced_backward(case):
    with _fresh_compiler(trace_autograd_ops=True):
        run = _with(torch.compile(_step, backend="eager", fullgraph=True))
        training = Training(case, _tiny)
        for _ in range(2):
            training.zero_grad()
            with case.refused():
                run(training.model, case.rank, training.n_steps)
                training.optimizer.step()
            training.assert_parameters()
        training.step(lambda *args: (run(*args), case.reduce(args[0])))
    training.step(_backward)


COMPILED_AUTOGRAD = {"match": r"(?i)compiled.autograd|reduce\(\)", "instead": "leave it off"}


def _refuse_compiled_autograd(case, run, enable=contextlib.nullcontext, **config):
    training = Training(case, _tiny)
    for _ in range(2):
        training.zero_grad()
        with case.refused(), _fresh_compiler(**config), enable():
            run(training.model, case.rank, training.n_steps)
            training.optimizer.step()
        training.assert_parameters()
    for _ in range(2):
        training.step(_backward)


@slow_error("compiled autograd (`torch._dynamo.config.compiled_autograd`)", **COMPILED_AUTOGRAD)
def compiled_autograd(case):
    def run(*args):  # compiled with the option on
        _with(torch.compile(_step, backend="eager"))(*args)

    _refuse_compiled_autograd(case, run, compiled_autograd=True)


@slow_error(
    "compiled autograd with your compiler (`compiled_autograd._enable`)",
    **COMPILED_AUTOGRAD,
)
def compiled_autograd_enabled(case):
    def enable():
        return torch._dynamo.compiled_autograd._enable(lambda graph: graph)

    _refuse_compiled_autograd(case, _backward, enable)
