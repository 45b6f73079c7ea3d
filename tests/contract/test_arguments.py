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
def test_tensors_that_are_not_contiguous_are_refused(comm):
    for call in (
        lambda: comm.all_reduce(columns()),
        lambda: comm.broadcast(columns()),
        lambda: comm.all_gather_single(torch.zeros(24), columns()),
        lambda: comm.all_gather_single(torch.zeros(48)[::2], torch.zeros(12)),
        lambda: comm.reduce_scatter_single(torch.zeros(6), columns()),
        lambda: comm.reduce_scatter_single(torch.zeros(24)[::2], torch.zeros(24)),
    ):
        refused(comm, ValueError, "contiguous", call)


@over(2)
@on_ranks()
def test_tensors_elsewhere_or_sparse_are_refused(comm):
    meta = torch.zeros(4, device="meta")
    matrix = torch.zeros(6, 4)
    sparse = matrix.to_sparse(), matrix.to_sparse_csr()
    for tensor, name in ((meta, "meta"), *((one, "sparse") for one in sparse)):
        words = name if comm.backend == "nccl" else "CPU"
        for call in (
            lambda tensor=tensor: comm.all_reduce(tensor),
            lambda tensor=tensor: comm.broadcast(tensor),
            lambda tensor=tensor: comm.all_gather_single(
                torch.zeros(48)[: 2 * tensor.numel()], tensor
            ),
        ):
            refused(comm, ValueError, words, call)


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

    return TwoTensor(torch.ones(4), torch.ones(4)), "a TwoTensor, which wraps others"


def fake():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(4)), "a FakeTensor without memory"


def zeros_of_torch():
    return torch._efficientzerotensor((4,)), "without memory"


def slice_of_such_zeros():
    return torch._efficientzerotensor((8,))[4:], "without memory"


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor, "without memory"


def masked():
    return masked_tensor(torch.ones(4), torch.ones(4) > 0), "a MaskedTensor without memory"


WITHOUT_MEMORY = [wrapper, fake, zeros_of_torch, slice_of_such_zeros, freed, masked]


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


@pytest.mark.parametrize("make", WITHOUT_MEMORY, ids=lambda make: make.__name__)
@over(2)
@on_ranks()
def test_tensors_without_memory_are_refused(comm, make):
    tensor, words = make()
    for call in calls_with(comm, tensor):
        refused(comm, ValueError, words, call)


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


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.int8], ids=str)
@over(2)
@on_ranks()
def test_other_dtypes_are_refused(comm, dtype):
    name = str(dtype).removeprefix("torch.")
    refused(comm, TypeError, name, lambda: comm.all_reduce(torch.zeros(4, dtype=dtype)))
    refused(comm, TypeError, name, lambda: comm.broadcast(torch.zeros(4, dtype=dtype)))
    refused(comm, TypeError, name, lambda: comm.empty(4, dtype=dtype))


@over(2)
@on_ranks()
def test_what_is_no_tensor_or_none_of_its_own_values_is_refused(comm):
    negated = torch._neg_view(torch.ones(4))
    refused(comm, ValueError, "resolve_neg", lambda: comm.all_reduce(negated))
    refused(comm, ValueError, "-1", lambda: comm.empty(-1, dtype=torch.float32))
    refused(comm, TypeError, "list", lambda: comm.all_reduce([1.0, 2.0]))
    refused(comm, TypeError, "NoneType", lambda: comm.broadcast(None))
    refused(comm, TypeError, "list", lambda: comm.all_gather_single([0.0] * 4, torch.zeros(2)))


@over(2)
@on_ranks()
def test_outputs_that_do_not_fit_are_refused(comm):
    four, eight = torch.zeros(4), torch.zeros(8)
    for error, words, call in (
        (
            ValueError,
            "8 elements.*has 7",
            lambda: comm.all_gather_single(torch.zeros(7), four),
        ),
        (
            ValueError,
            "2 elements.*has 4",
            lambda: comm.reduce_scatter_single(torch.zeros(4), four),
        ),
        (
            ValueError,
            "multiple of 2",
            lambda: comm.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
        ),
        (
            TypeError,
            "float64.*float32",
            lambda: comm.all_gather_single(eight.double(), four),
        ),
        (
            TypeError,
            "float64.*float32",
            lambda: comm.reduce_scatter_single(torch.zeros(2).double(), four),
        ),
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
    rows, same = torch.zeros(4, 3), torch.zeros(4, 3)
    odd = torch.zeros(5)
    for error, words, call in (
        (ValueError, "multiple of 2", lambda: comm.all_to_all_single(torch.zeros(5), odd)),
        (  # six numbers, which two ranks could share
            ValueError,
            "3 elements, not a multiple",
            lambda: comm.all_to_all_single(torch.zeros(3) * 1j, torch.zeros(3) * 1j),
        ),
        (TypeError, "be integers", lambda: comm.all_to_all_single(same, rows, [2, 2], [2.5, 1.5])),
        (TypeError, "be integers", lambda: comm.all_to_all_single(same, rows, [2, 2], "22")),
        (ValueError, "out must have 12", lambda: comm.all_to_all_single(torch.zeros(6), rows)),
        (ValueError, "share memory", lambda: comm.all_to_all_single(rows, rows)),
        (ValueError, "share memory", lambda: comm.all_to_all_single(rows, rows, [2, 2], [2, 2])),
        (
            ValueError,
            r"in_splits must be 2 numbers.*4 in all.*\[3, 2\]",
            lambda: comm.all_to_all_single(same, rows, [2, 2], [3, 2]),
        ),
        (
            ValueError,
            "out_splits must be 2 numbers",
            lambda: comm.all_to_all_single(same, rows, [4], [2, 2]),
        ),
        (
            ValueError,
            r"in_splits must be.*\[5, -1\]",
            lambda: comm.all_to_all_single(same, rows, None, [5, -1]),
        ),
        (
            ValueError,
            "out has 5 rows.*pass out_splits",
            lambda: comm.all_to_all_single(torch.zeros(5, 3), rows, None, [2, 2]),
        ),
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
