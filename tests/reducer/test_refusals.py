"""Arguments, models and gradients that a reducer refuses: by name, with what to do, and before any
rank waits for another.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fastcomm
from fastcomm import FastcommError, MismatchError
from tests.support.models import assert_gradients, attached, backward, mean_gradients, mlp
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]

BAD_INPUT = (FastcommError, ValueError, TypeError)


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("op", "median", "op must be one of"),
        ("bucket_cap_mb", -1, "bucket.*positive"),
        ("bucket_cap_mb", 0, "bucket.*positive"),
        ("wire_dtype", torch.int32, "wire_dtype"),
        ("wire_dtype", torch.complex64, "wire_dtype"),
        ("wire_dtype", "bfloat16", "wire_dtype"),
        ("error_feedback", True, "error_feedback=True keeps what a wire_dtype.*got None"),
    ],
)
@on_ranks(2)
def test_bad_options_are_refused_when_the_reducer_is_made(comm, option, value, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fastcomm.Reducer(comm, **{option: value})


@on_ranks(2)
def test_error_feedback_is_refused_where_there_is_nothing_to_feed_back(comm):
    with pytest.raises(ValueError, match=r"wire_dtype of 8 or 16 bits.*got torch.float32"):
        fastcomm.Reducer(comm, wire_dtype=torch.float32, error_feedback=True)
    if not comm.feeds_back_errors:
        with pytest.raises(ValueError, match=f"over {comm.backend}, error_feedback=True is not"):
            fastcomm.Reducer(comm, wire_dtype=torch.bfloat16, error_feedback=True)


@on_ranks(2)
def test_wires_that_a_transport_has_no_use_for_are_refused(comm):
    if comm.backend == "shm":
        with pytest.raises(ValueError, match=r"over shm, wire_dtype must.*torch.int8$"):
            fastcomm.Reducer(comm, wire_dtype=torch.int8)
    elif comm.backend == "nccl":
        with pytest.raises(ValueError, match=r"over nccl, error_feedback=True is not possible"):
            fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=True)
    else:
        with pytest.raises(ValueError, match=rf"over {comm.backend}, wire_dtype.*float8_e5m2$"):
            fastcomm.Reducer(comm, wire_dtype=torch.float8_e5m2)


@on_ranks(2)
def test_a_reducer_is_made_of_a_communicator(comm):
    words = r"expected a communicator \(fastcomm.init\(\)\); got Sequential: "
    with pytest.raises(TypeError, match=words + r"Reducer\(comm\)\.attach\(model\)"):
        fastcomm.Reducer(mlp())
    with pytest.raises(TypeError, match=r"expected a communicator.*; got object$"):
        fastcomm.Reducer(object())
    left_out = comm.split(color=None)
    with pytest.raises(TypeError, match="split.. leaves this rank out"):
        fastcomm.Reducer(left_out)


@on_ranks(2)
def test_attach_refuses_what_is_not_a_model(comm):
    model = mlp()
    for wrong, name in (
        (42, "int"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "SGD"),
        (mlp, "function"),
    ):
        with pytest.raises(TypeError, match=f"expected a module or named parameters; got {name}"):
            fastcomm.Reducer(comm).attach(wrong)
    with pytest.raises(BAD_INPUT, match="named_parameters"):
        fastcomm.Reducer(comm).attach(mlp().parameters())


@on_ranks(2)
def test_attach_refuses_a_model_that_ddp_reduces_already(comm):
    # its constructor wants a process group
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match=r"attach\(ddp\.module\): .* reduces gradients itself"):
        fastcomm.Reducer(comm).attach(ddp)


@on_ranks(2)
def test_attach_refuses_a_second_model(comm):
    model, reducer, _ = attached(comm)
    with pytest.raises(BAD_INPUT, match="detach"):
        reducer.attach(mlp())


@pytest.mark.parametrize(
    "method", ["grad_norm", "refresh", "sync_buffers", "synchronize", "reduce", "check_in_sync"]
)
@on_ranks(2)
def test_methods_before_attach_say_that_attach_is_missing(comm, method):
    with pytest.raises(BAD_INPUT, match="attach"):
        getattr(fastcomm.Reducer(comm), method)()


@on_ranks(2)
def test_blocks_before_attach_say_that_attach_is_missing(comm):
    reducer = fastcomm.Reducer(comm)
    for block in (reducer.no_sync, lambda: reducer.skip_step_on(ValueError)):
        with pytest.raises(BAD_INPUT, match="attach"), block():
            pass


@on_ranks(2)
def test_attach_refuses_a_parameter_that_is_given_twice(comm):
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(BAD_INPUT, match="twice"):
        fastcomm.Reducer(comm).attach([("a", weight), ("b", weight)])


# Inside a backward


@pytest.mark.parametrize("method", ["detach", "refresh"])
@on_ranks(2)
def test_a_backward_goes_on_though_a_hook_in_it_wants_another_plan(comm, method):
    model, reducer, _ = attached(comm)
    expected = mean_gradients(model, comm.world_size, backward)
    heard = []

    def try_it(_):
        with pytest.raises(FastcommError, match=rf"{method}\(\) was called inside backward"):
            getattr(reducer, method)()
        heard.append(method)

    handle = model[0].weight.register_hook(try_it)
    backward(model, comm.rank)
    assert heard == [method]
    assert_gradients(model, expected)
    handle.remove()
    getattr(reducer, method)()


# Optimizers that hold what is not in the model


@on_ranks(2)
def test_an_optimizer_of_replaced_parameters_is_told_to_be_replaced(comm):
    model, reducer, optimizer = attached(comm)
    backward(model, comm.rank)
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(FastcommError, match=r"refresh\(\) on every rank.*a new optimizer"):
        backward(model, comm.rank)
    model.zero_grad()
    reducer.refresh()
    backward(model, comm.rank)
    with pytest.raises(FastcommError, match=r"0\.weight is not in the model any more: make a new"):
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_an_optimizer_may_hold_replaced_parameters_beside_those_in_their_place(comm):
    model, reducer, optimizer = attached(comm)
    model[4] = nn.Linear(16, 4)
    reducer.refresh()
    optimizer.add_param_group({"params": list(model[4].parameters())})
    before = model[4].weight.detach().clone()
    backward(model, comm.rank)
    optimizer.step()
    assert not torch.equal(model[4].weight, before)
    reducer.check_in_sync()


@on_ranks(2)
def test_a_synchronised_batch_norm_without_a_process_group_is_refused_by_name(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    refused = pytest.raises(ValueError, match="module 1 is a SyncBatchNorm")
    with mock.patch.object(dist, "is_initialized", lambda: False), refused:
        fastcomm.Reducer(comm).attach(model)
    with mock.patch.object(dist, "is_initialized", lambda: True):
        fastcomm.Reducer(comm).attach(model).detach()


def _with_frozen(tensor):
    model = mlp()
    model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    return model


def _two(first, second):
    return TwoTensor(torch.full((3,), float(first)), torch.full((3,), float(second)))


@on_ranks(2)
def test_frozen_weights_and_buffers_that_wrap_tensors_are_copied_and_compared(comm):
    model = _with_frozen(TwoTensor(_two(comm.rank, 2), _two(3, comm.rank)))
    model.register_buffer("scale", _two(comm.rank, comm.rank))
    reducer = fastcomm.Reducer(comm).attach(model)
    inner = (model.odd.a.a, model.odd.a.b, model.odd.b.a, model.odd.b.b, model.scale.a)
    assert [one.tolist() for one in inner] == [[value] * 3 for value in (0.0, 2.0, 3.0, 0.0, 0.0)]
    model.scale.b.fill_(comm.rank)
    reducer.sync_buffers(src=1)
    assert model.scale.b.tolist() == [1.0] * 3
    model.odd.b.b.fill_(comm.rank)
    with pytest.raises(MismatchError, match=r"parameter odd\.b\.b is not the same"):
        reducer.check_in_sync()
    reducer.detach()
    if comm.rank == 1:
        model.odd = nn.Parameter(_two(0, 0), requires_grad=False)
    with pytest.raises(MismatchError, match=r"rank 0 has parameter odd\.a\.a, which rank 1 lacks"):
        reducer.attach(model)


class Opaque(torch.Tensor):
    """Wraps something, and does not tell what."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Opaque()
        raise NotImplementedError(f"{function} of an Opaque")


ODD = {
    "a Opaque without memory": Opaque,
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "on meta, and has no values": lambda: TwoTensor(*[torch.ones(3, device="meta")] * 2),
}


@pytest.mark.parametrize("words", ODD)
@on_ranks(2)
def test_what_a_reducer_cannot_copy_may_be_left_out_as_it_says(comm, words):
    expected = mean_gradients(mlp(), comm.world_size, backward)
    model = _with_frozen(ODD[words]())
    advice = r"attach the trained parameters alone: attach\(\[\(n, p\) for n, p in"
    with pytest.raises(ValueError, match=rf"parameter odd.* is .*{words}.*{advice}"):
        fastcomm.Reducer(comm).attach(model)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    reducer = fastcomm.Reducer(comm).attach(trained)
    backward(model, comm.rank)
    assert_gradients(nn.Sequential(*model), expected)
    reducer.check_in_sync()
