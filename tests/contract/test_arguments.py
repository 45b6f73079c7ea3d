"""Bad arguments. Rank 0 calls what is wrong, the others nothing: it must not wait for them, nor
disturb them.
"""

from __future__ import annotations

import pytest
import torch
from torch.masked import masked_tensor

from tests.support.ranks import on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


def refused(comm, error, words, call):
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            call()
    check_all_reduce(comm, 10)


def columns():
    return torch.zeros(6, 4)[:, :2]


@over(2)
@on_ranks()
def test_the_ops_of_torch_distributed_are_accepted_and_no_others(comm):
    ops = torch.distributed.ReduceOp
    for op, result in ((ops.SUM, 3), (ops.AVG, 1.5), (ops.MIN, 1), (ops.MAX, 2), (ops.PRODUCT, 2)):
        tensor = torch.full((4,), 1.0 + comm.rank)
        comm.all_reduce(tensor, op)
        assert tensor.tolist() == [result] * 4
    words = "one of sum, mean, min, max, prod"
    for error, wrong in ((ValueError, ops.BAND), (ValueError, "median"), (TypeError, 3)):
        for call in (
            lambda op=wrong: comm.all_reduce(torch.ones(4), op),
            lambda op=wrong: comm.reduce_scatter_single(torch.ones(2), torch.ones(4), op),
        ):
            refused(comm, error, words, call)


def wrapper():
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(4), torch.ones(4))


def fake():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(4))


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


# What no collective takes: the error, what it says, and how one is made.
WRONG = {
    "list": (TypeError, "list", lambda: [1.0, 2.0]),
    "None": (TypeError, "NoneType", lambda: None),
    "not contiguous": (ValueError, "contiguous", columns),
    "meta": (ValueError, "CPU|meta", lambda: torch.zeros(4, device="meta")),
    "sparse": (ValueError, "CPU|sparse", lambda: torch.zeros(6, 4).to_sparse()),
    "sparse rows": (ValueError, "CPU|sparse", lambda: torch.zeros(6, 4).to_sparse_csr()),
    "negated": (ValueError, "resolve_neg", lambda: torch._neg_view(torch.ones(4))),
    "wrapper": (ValueError, "a TwoTensor, which wraps others", wrapper),
    "fake": (ValueError, "a FakeTensor without memory", fake),
    "zeros of torch": (ValueError, "without memory", lambda: torch._efficientzerotensor((4,))),
    "a slice of them": (ValueError, "without memory", lambda: torch._efficientzerotensor((8,))[4:]),
    "freed": (ValueError, "without memory", freed),
    "masked": (
        ValueError,
        "a MaskedTensor without memory",
        lambda: masked_tensor(torch.ones(4), torch.ones(4) > 0),
    ),
    "int16": (TypeError, "int16", lambda: torch.zeros(4, dtype=torch.int16)),
    "bool": (TypeError, "bool", lambda: torch.zeros(4, dtype=torch.bool)),
    "int8": (TypeError, "int8", lambda: torch.zeros(4, dtype=torch.int8)),
}


def calls_with(comm, tensor):
    return (
        lambda: comm.all_reduce(tensor),
        lambda: comm.all_reduce_coalesced([torch.ones(4), tensor]),
        lambda: comm.broadcast(tensor),
        lambda: comm.all_gather_single(torch.ones(8), tensor),
        lambda: comm.all_gather_single(tensor, torch.ones(2)),
        lambda: comm.reduce_scatter_single(torch.ones(2), tensor),
        lambda: comm.reduce_scatter_single(tensor, torch.ones(8)),
        lambda: comm.gather(torch.ones(8), tensor),
        lambda: comm.scatter(tensor, torch.ones(8)),
        lambda: comm.all_to_all_single(tensor, torch.ones(4)),
        lambda: comm.send(tensor, 1),
        lambda: comm.recv(tensor, 1),
    )


@pytest.mark.parametrize("kind", WRONG)
@over(2)
@on_ranks()
def test_what_no_collective_takes_is_refused_by_all_of_them(comm, kind):
    error, words, make = WRONG[kind]
    for call in calls_with(comm, make()):
        refused(comm, error, words, call)


@pytest.mark.parametrize("name", ["grad", "vmap", "functionalize"])
@over(2)
@on_ranks()
def test_tensors_that_torch_func_traces_are_refused(comm, name):
    def traced(tensor):
        for call in calls_with(comm, tensor) if comm.rank == 0 else ():
            with pytest.raises(ValueError, match="torch.func .*: call collectives outside of"):
                call()
        return tensor.sum()

    transform = torch.vmap if name == "vmap" else getattr(torch.func, name)
    transform(traced)(torch.ones(3, 4) if name == "vmap" else torch.ones(4))
    check_all_reduce(comm, 10)


@over(2)
@on_ranks()
def test_what_pairs_cannot_stand_for_is_refused(comm):
    waves, part = torch.ones(4, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)
    for op in ("min", "max", "prod"):
        words = f"op {op} of a complex64 tensor is not possible"
        refused(comm, TypeError, words, lambda op=op: comm.all_reduce(waves, op))
        refused(comm, TypeError, words, lambda op=op: comm.reduce_scatter_single(part, waves, op))
    refused(comm, ValueError, "resolve_conj", lambda: comm.all_reduce(waves.conj()))
    refused(comm, ValueError, "contiguous", lambda: comm.broadcast(waves[::2]))
    refused(comm, TypeError, "complex64", lambda: comm.empty(4, dtype=torch.complex64))
    # three of them are six numbers, which two ranks could share
    refused(
        comm,
        ValueError,
        "3 elements, not a multiple",
        lambda: comm.reduce_scatter_single(part, torch.ones(3, dtype=torch.complex64)),
    )


@over(2)
@on_ranks()
def test_empty_makes_no_tensor_of_another_dtype_or_of_less_than_nothing(comm):
    refused(comm, TypeError, "int16", lambda: comm.empty(4, dtype=torch.int16))
    refused(comm, ValueError, "-1", lambda: comm.empty(-1, dtype=torch.float32))


@over(2)
@on_ranks()
def test_outputs_that_do_not_fit_are_refused(comm):
    gather, reduce, zeros = comm.all_gather_single, comm.reduce_scatter_single, torch.zeros
    for error, words, call in (
        (ValueError, "8 elements.*has 7", lambda: gather(zeros(7), zeros(4))),
        (ValueError, "2 elements.*has 4", lambda: reduce(zeros(4), zeros(4))),
        (ValueError, "multiple of 2", lambda: reduce(zeros(2), zeros(5))),
        (TypeError, "float64.*float32", lambda: gather(zeros(8).double(), zeros(4))),
        (TypeError, "float64.*float32", lambda: reduce(zeros(2).double(), zeros(4))),
    ):
        refused(comm, error, words, call)


@over(2)
@on_ranks()
def test_what_only_one_rank_passes_is_refused_from_others_and_asked_of_it(comm):
    four, eight = torch.zeros(4), torch.zeros(8)
    for error, words, call in (
        (ValueError, "0 to 1.*-1", lambda: comm.broadcast(four, src=-1)),
        (ValueError, "0 to 1.*2", lambda: comm.broadcast(four, src=2)),
        (ValueError, "dst must be a rank.*got 2", lambda: comm.gather(None, four, 2)),
        (ValueError, "src must be a rank.*got -1", lambda: comm.scatter(four, None, -1)),
        (ValueError, "out is for rank 1 alone", lambda: comm.gather(eight, four, 1)),
        (ValueError, "inp is for rank 1 alone", lambda: comm.scatter(four, eight, 1)),
        (TypeError, "out must be a tensor on rank 0", lambda: comm.gather(None, four)),
        (TypeError, "inp must be a tensor on rank 0", lambda: comm.scatter(four, None)),
        (ValueError, "out must have 8.* has 4", lambda: comm.gather(four.clone(), four)),
        (ValueError, "inp must have 8.* has 4", lambda: comm.scatter(four, four.clone())),
        (TypeError, "float64.*float32", lambda: comm.gather(eight.double(), four)),
        (TypeError, "float64.*float32", lambda: comm.scatter(four, eight.double())),
    ):
        refused(comm, error, words, call)


@over(2)
@on_ranks()
def test_parts_that_do_not_fit_are_refused(comm):
    swap, rows, same = comm.all_to_all_single, torch.zeros(4, 3), torch.zeros(4, 3)
    odd, waves = torch.zeros(5), torch.zeros(3) * 1j  # six numbers, which two ranks could share
    for error, words, call in (
        (ValueError, "multiple of 2", lambda: swap(torch.zeros(5), odd)),
        (ValueError, "3 elements, not a multiple", lambda: swap(waves.clone(), waves)),
        (TypeError, "be integers", lambda: swap(same, rows, [2, 2], [2.5, 1.5])),
        (TypeError, "be integers", lambda: swap(same, rows, [2, 2], "22")),
        (ValueError, "out must have 12", lambda: swap(torch.zeros(6), rows)),
        (ValueError, "share memory", lambda: swap(rows, rows)),
        (ValueError, "share memory", lambda: swap(rows, rows, [2, 2], [2, 2])),
        (ValueError, r"in_splits.*4 in all.*\[3, 2\]", lambda: swap(same, rows, [2, 2], [3, 2])),
        (ValueError, "out_splits must be 2 numbers", lambda: swap(same, rows, [4], [2, 2])),
        (ValueError, r"in_splits must be.*\[5, -1\]", lambda: swap(same, rows, None, [5, -1])),
        (ValueError, "out has 5 rows.*pass out_splits", lambda: swap(odd, rows, None, [2, 2])),
    ):
        refused(comm, error, words, call)


@over(2)
@on_ranks()
def test_tensors_that_cannot_go_together_are_refused(comm):
    four, whole, waves = torch.ones(4), torch.ones(10), torch.ones(4, dtype=torch.complex64)
    for error, words, tensors in (
        (TypeError, "takes a sequence of tensors; got one", four),
        (TypeError, "takes a sequence of tensors; got int", 3),
        (ValueError, "no tensors in the sequence", []),
        (TypeError, "tensor 1: .*list", [four, [1.0]]),
        (ValueError, "tensor 1: .*contiguous", [four, columns()]),
        (ValueError, "tensor 0: .*(CPU|meta)", [torch.zeros(4, device="meta"), four]),
        (ValueError, "tensor 1: .*(CPU|sparse)", [four, torch.eye(4).to_sparse()]),
        (TypeError, "tensor 1: .*bool", [four, torch.ones(4, dtype=torch.bool)]),
        (ValueError, "tensor 1: .*resolve_conj", [waves, waves.conj()]),
        (TypeError, "tensor 0 is float32, tensor 1 is float64", [four, four.double()]),
        (TypeError, "tensor 0 is float32, tensor 2 is complex64", [four, whole, waves]),
        (ValueError, "tensors 0 and 1 share memory", [four, four]),
        (ValueError, "tensors 0 and 2 share memory", [whole[4:], four, whole[:5]]),
        (ValueError, "tensors 0 and 2 share memory", [whole, four, whole[2:3]]),
    ):
        refused(comm, error, words, lambda tensors=tensors: comm.all_reduce_coalesced(tensors))
    for error, op in ((ValueError, "median"), (TypeError, 3)):
        refused(
            comm, error, f"one of sum.*{op}", lambda op=op: comm.all_reduce_coalesced([four], op)
        )
    words = "tensor 0: op max of a complex64 tensor is not possible"
    refused(comm, TypeError, words, lambda: comm.all_reduce_coalesced([waves], "max"))
    touching = [whole[:5], whole[5:], whole[5:5]]  # which share nothing
    comm.all_reduce_coalesced(touching)
    assert whole.tolist() == [comm.world_size] * 10
