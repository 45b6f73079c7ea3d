"""Whole steps: as without a reducer, captured in CUDA graphs, and without synchronising behind the
user's back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fastcomm
from tests.gpu import (
    DEVICE,
    MANY_BUCKETS,
    STEPS,
    assert_same_gradients,
    assert_same_parameters,
    closes,
    eventually,
    inputs,
    loss_of,
    mlp,
    new_communicator,
    train,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)


@pytest.mark.parametrize(
    "options",
    [{}, MANY_BUCKETS, {**MANY_BUCKETS, "streams": 2}],
    ids=["one bucket", "many buckets", "two streams"],
)
def test_a_reducer_of_one_rank_changes_nothing(comm, options):
    model, plain = mlp(), mlp()
    fastcomm.Reducer(comm, **options).attach(model)
    train(model, STEPS)
    train(plain, STEPS)
    assert_same_parameters(model, plain)


def capture_step(model: nn.Module, x: Tensor) -> torch.cuda.CUDAGraph:
    """A whole step, after the warm-up every capture asks for. The model has made STEPS steps
    then.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize(
    "options",
    [{}, *({**MANY_BUCKETS, "wire_dtype": wire} for wire in (torch.bfloat16, torch.int8))],
    ids=["views", "bfloat16 wire", "int8 wire"],
)
def test_a_captured_training_step_gives_the_parameters_of_eager_ones(comm, options):
    captured, eager = mlp(), mlp()
    fastcomm.Reducer(comm, **options).attach(captured)
    fastcomm.Reducer(comm, **options).attach(eager)
    graph = capture_step(captured, inputs())
    for _ in range(STEPS):
        graph.replay()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        loss_of(eager, inputs()).backward()
        optimizer.step()
    assert_same_parameters(captured, eager)


def test_a_captured_step_reduces_what_the_replay_has_computed(comm):
    x = inputs()
    model = mlp()
    fastcomm.Reducer(comm).attach(model)
    graph = capture_step(model, x)
    plain = copy.deepcopy(model)
    x.copy_(torch.randn_like(x))
    graph.replay()
    plain.zero_grad()
    loss_of(plain, x).backward()
    assert_same_gradients(model, plain)


def test_close_refuses_while_a_graph_lives_and_works_after(tmp_path):
    comm = new_communicator(tmp_path)
    model = mlp()
    fastcomm.Reducer(comm).attach(model)
    graph = capture_step(model, inputs())
    graph.replay()
    with pytest.raises(fastcomm.FastcommError, match="graph"):
        comm.close()
    torch.cuda.synchronize()
    del graph
    assert eventually(lambda: closes(comm))
    with pytest.raises(fastcomm.FastcommError, match="closed"):
        comm.all_reduce(torch.ones(1, device=DEVICE))


@pytest.fixture
def no_synchronisation() -> Iterator[Callable[[], None]]:
    """Called, it makes every synchronisation of torch's with the device an error until the test
    ends.
    """
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [{}, {**MANY_BUCKETS, "wire_dtype": torch.float16}],
    ids=["one bucket", "many buckets"],
)
def test_a_step_does_not_synchronise(comm, no_synchronisation, options):
    model, x = mlp(), inputs()
    fastcomm.Reducer(comm, **options).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    no_synchronisation()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"wire_dtype": torch.bfloat16}], ids=["a pass of its own", "on the way"]
)
def test_norm_and_clipping_are_torchs_without_synchronising(comm, no_synchronisation, options):
    model, x = mlp(), inputs()
    reducer = fastcomm.Reducer(comm, **MANY_BUCKETS, **options).attach(model)
    loss_of(model, x).backward()
    plain = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    no_synchronisation()
    norm = reducer.grad_norm()
    clipped = reducer.clip_grad_norm_(1e-3)
    torch.cuda.set_sync_debug_mode("default")
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=0)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-9)
