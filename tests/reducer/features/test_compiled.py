"""Reducer.compile(): a compiled model whose buckets are launched between pieces of its backward."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

import fastcomm
from fastcomm import FastcommError
from fastcomm.reducer.features.compiled import Backend
from fastcomm.reducer.features.graph_split import full_at
from tests.support.models import (
    SMALL_BUCKETS,
    Transformer,
    attached,
    backward,
    convnet,
    image_backward,
    mlp,
    text_backward,
)
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("shm")]


class Pieces:
    """A backend of torch.compile, by way of AOTAutograd, that notes when the backward of each
    graph it has compiled begins.
    """

    def __init__(self):
        self.begun = []
        self.n_compiled = 0
        self._backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def __call__(self, graph, inputs):
        self.n_compiled += 1
        return self._backend(graph, inputs)

    def _forward(self, graph, inputs):
        return make_boxed_func(graph.forward)

    def _backward(self, graph, inputs):
        def run(*args):
            self.begun.append(time.monotonic_ns())
            return graph.forward(*args)

        return make_boxed_func(run)

    def n_launched(self, reducer):
        """How many buckets had been launched when each of the last step's pieces began."""
        begun, self.begun = self.begun, []
        buckets = reducer.timeline().steps()[-1].buckets
        return [sum(bucket.launched < ns for bucket in buckets) for ns in begun]


@contextlib.contextmanager
def fresh_compiler():
    """torch keeps what it compiles, by the code that was compiled."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def compiled(comm, model, caps=None, **options):
    """The reducer, the backend, and the model compiled for both."""
    reducer = fastcomm.Reducer(comm, **(caps or SMALL_BUCKETS)).attach(model)
    reducer.timeline()
    pieces = Pieces()
    return reducer, pieces, reducer.compile(model, backend=pieces, **options)


def assert_as_eager(comm, make, run, options, n_launched, compile_options=None):
    """Two steps leave the bits that an eager model's do, and as many buckets are launched when the
    pieces of the backward begin.
    """
    with fresh_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("error", r"compile\(\): a graph could not be cut")
        model, eager = make(), make()
        fastcomm.Reducer(comm, **options).attach(eager)
        reducer, pieces, forward = compiled(comm, model, options, **(compile_options or {}))
        for step in range(2):
            run(eager, comm.rank, step)
            run(forward, comm.rank, step)
            launched = pieces.n_launched(reducer)
            assert launched == n_launched, launched
            for (name, one), other in zip(
                model.named_parameters(), eager.parameters(), strict=True
            ):
                assert (one.grad is None) == (other.grad is None), name
                assert one.grad is None or torch.equal(one.grad, other.grad), name
                one.grad = other.grad = None


@on_ranks(2)
def test_buckets_are_launched_between_the_pieces_of_the_backward(comm):
    assert_as_eager(comm, mlp, backward, SMALL_BUCKETS, [0, 1, 2])


@on_ranks(1)
def test_a_graph_is_not_cut_for_one_bucket_or_without_overlap(comm):
    assert_as_eager(comm, mlp, backward, {"bucket_cap_mb": 25}, [0])
    assert_as_eager(comm, mlp, backward, {**SMALL_BUCKETS, "overlap": False}, [0])


@on_ranks(1)
def test_a_conv_net_in_one_graph_with_any_batch_is_cut(comm):
    options = {"fullgraph": True, "dynamic": True}
    assert_as_eager(comm, convnet, image_backward, SMALL_BUCKETS, [0, 1, 2], options)


@on_ranks(1)
def test_a_transformer_with_tied_embeddings_is_cut_where_buckets_are_full(comm):
    # a layer's norms, registered last and so in its first bucket, are used before the rest of it
    assert_as_eager(comm, Transformer, text_backward, SMALL_BUCKETS, [0, 1, 8, 9, 16])


class Variant(nn.Module):
    """The MLP of models.py, run in another way."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


class Checkpointed(Variant):
    def forward(self, x):
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Breaking(Variant):
    def forward(self, x):
        x = self.body[0](x)
        torch._dynamo.graph_break()
        return self.body[1:](x)


class Shared(Variant):
    """Uses its middle layer, of the second bucket, first and last."""

    def forward(self, x):
        x = self.body[2](torch.cat((x, x), dim=1))
        return self.body(x[:, :8]) + self.body[4](x)


class Arguments(nn.Module):
    """Uses parameters as named arguments, in a list, and by a method of what was computed."""

    def __init__(self):
        super().__init__()
        for i in range(4):
            setattr(self, f"weight{i}", nn.Parameter(torch.eye(8) + 0.1 * i))

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(x, weight=self.weight0))
        x = x.matmul(self.weight1).tanh()
        return torch.einsum("bi,ij,jk->bk", [x, self.weight2, self.weight3])[:, :4]


def _frozen():
    model = mlp()
    model[2].requires_grad_(False)
    return model


def _nested():
    model = mlp()
    model[2] = torch.compile(model[2], backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "n_launched"),
    [
        (Checkpointed, [0, 1, 2]),
        (Breaking, [0, 1, 2]),
        (Shared, [0, 1]),
        (_frozen, [0, 1]),
        (_nested, [0, 1, 2]),
    ],
)
@on_ranks(1)
def test_models_of_all_kinds_are_cut(comm, make, n_launched):
    assert_as_eager(comm, make, backward, SMALL_BUCKETS, n_launched)


@on_ranks(1)
def test_parameters_are_seen_in_whatever_way_they_are_used(comm):
    each_its_own = {"bucket_cap_mb": 0.0001}
    assert_as_eager(comm, Arguments, backward, each_its_own, [0, 2, 3])


@on_ranks(1)
def test_what_runs_without_gradients_is_not_cut(comm):
    with fresh_compiler():
        model = mlp()
        _, pieces, forward = compiled(comm, model)
        x = torch.randn(4, 8)
        with torch.no_grad():
            assert torch.equal(forward(x), model(x))
        assert pieces.n_compiled == 1


@on_ranks(1)
def test_a_model_compiled_and_run_before_attach_is_cut_afterwards(comm):
    with fresh_compiler():
        model, reducer, pieces = mlp(), fastcomm.Reducer(comm, **SMALL_BUCKETS), Pieces()
        forward = reducer.compile(model, backend=pieces)
        backward(forward, comm.rank)
        assert len(pieces.begun) == 1
        pieces.begun.clear()
        reducer.attach(forward).timeline()
        backward(forward, comm.rank)
        assert pieces.n_launched(reducer) == [0, 1, 2]
        reducer.detach()
        backward(forward, comm.rank)
        assert pieces.n_compiled == 1 + 3


@on_ranks(1)
def test_graphs_follow_a_refresh_and_are_compiled_again_only_for_other_buckets(comm):
    with fresh_compiler():
        model = _frozen()
        reducer, pieces, forward = compiled(comm, model)
        backward(forward, comm.rank)
        assert pieces.n_launched(reducer) == [0, 1]
        reducer.refresh()
        backward(forward, comm.rank)
        assert pieces.n_compiled == 2 or torch.__version__ < "2.8"  # which compiles for new hooks
        pieces.begun.clear()
        model.requires_grad_(True)
        reducer.refresh()
        backward(forward, comm.rank)
        assert pieces.n_launched(reducer) == [0, 1, 2]


@on_ranks(1)
def test_a_compiled_model_is_not_kept_alive(comm):
    with fresh_compiler():
        reducer, _, forward = compiled(comm, mlp())
        backward(forward, comm.rank)
        model = weakref.ref(forward._orig_mod)
        del forward, reducer
        gc.collect()
        assert model() is None


@on_ranks(1)
def test_modes_and_options_go_to_the_backend_of_each_piece(comm):
    def backend(graph, inputs, *, mode=None, options=None):
        seen.append((mode, options))
        return graph.forward

    options = {"key": 1}
    if torch.__version__ >= "2.8":  # which takes this one itself
        options["guard_filter_fn"] = lambda guards: [True] * len(guards)
    for named, expected in (
        ({}, (None, None)),
        ({"mode": "reduce-overhead"}, ("reduce-overhead", None)),
        ({"options": options}, (None, {"key": 1})),
    ):
        with fresh_compiler():
            seen, model = [], mlp()
            reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
            backward(reducer.compile(model, backend=backend, **named), comm.rank)
            assert seen == [expected] * 3, seen
            reducer.detach()


class Backwards(nn.Module):
    """Registers last what runs first."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(16, 4), nn.Linear(8, 16)

    def forward(self, x):
        return self.last(self.first(x).tanh())


class OneOperation(Variant):
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "name"), [(Backwards, "first.weight"), (OneOperation, r"body\.0\.weight")]
)
@on_ranks(1)
def test_a_graph_that_cannot_be_cut_is_warned_of(comm, make, name):
    with fresh_compiler():
        _, pieces, forward = compiled(comm, make())
        with pytest.warns(UserWarning, match=f"could not be cut.*{name} is used first"):
            backward(forward, comm.rank)
        assert len(pieces.begun) == 1


@on_ranks(1)
def test_a_sparse_embedding_is_compiled_and_no_graph_is_cut_for_it(comm):
    model = nn.Sequential(nn.EmbeddingBag(100, 8, mode="sum", sparse=True), nn.Linear(8, 1))
    with fresh_compiler():
        # one bucket of dense gradients, and that of the sparse ones, launched at the end anyway
        _, pieces, forward = compiled(comm, model, {"bucket_cap_mb": 1})
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            forward(torch.randint(100, (4, 3))).sum().backward()
        assert len(pieces.begun) == 1
    assert model[0].weight.grad.is_sparse
    assert not [one for one in warned if "could not be cut" in str(one.message)]


@on_ranks(1)
def test_what_cannot_be_compiled_is_refused(comm):
    model, reducer, _ = attached(comm)
    with pytest.raises(TypeError, match="expected a module; got function"):
        reducer.compile(lambda x: model(x))
    with pytest.raises(ValueError, match="Sequential is compiled as one graph already"):
        in_place = mlp()
        in_place.compile(backend="eager")
        reducer.compile(in_place)
    with pytest.raises(ValueError, match="OptimizedModule is compiled as one graph already"):
        reducer.compile(torch.compile(model, backend="eager"))
    with pytest.raises(ValueError, match="mode or options"):
        reducer.compile(model, mode="default", options={"shape_padding": True})
    with pytest.raises(RuntimeError, match="Unexpected optimization option nonsense"):
        reducer.compile(model, options={"nonsense": True})
    stranger = reducer.compile(mlp(), backend="eager")
    with pytest.raises(ValueError, match="no parameter that this reducer reduces"):
        backward(stranger, comm.rank)


@on_ranks(1)
def test_a_torch_that_cannot_cut_is_an_error_with_advice(comm):
    model, reducer, _ = attached(comm, **SMALL_BUCKETS)
    with pytest.MonkeyPatch.context() as changed:
        changed.delattr("fastcomm.reducer.features.graph_split")
        changed.setitem(sys.modules, "fastcomm.reducer.features.graph_split", None)
        with pytest.raises(FastcommError, match="does not work with torch .* one by one"):
            reducer.compile(model)
    cut = "torch._dynamo.backends.distributed.DDPOptimizer.compile_fn"
    with (
        fresh_compiler(),
        mock.patch(cut, side_effect=NotImplementedError("a higher-order op")),
        pytest.raises(BackendCompilerFailed, match="cannot cut this graph.* one by one"),
    ):
        backward(reducer.compile(model, backend="eager"), comm.rank)
    # an older torch with inline_inbuilt_nn_modules off
    graph = torch.fx.symbolic_trace(model)
    with pytest.raises(FastcommError, match="inline_inbuilt_nn_modules is off"):
        Backend(weakref.ref(reducer.core), lambda graph, inputs: graph)(graph, [])


def test_buckets_end_where_their_parameters_are_first_used_and_in_order():
    assert full_at([]) == []
    assert full_at([(0, 9)]) == []
    assert full_at([(0, 9), (0, 7), (1, 8), (1, 4), (2, 1)]) == [7, 4]
    assert full_at([(0, 3), (1, 8), (2, 5), (3, 1), (4, 0)]) == [3, 1]
    assert full_at([(2, 6), (5, 2)]) == [6]
