"""What all transports share about collectives: the tables of ops and dtypes, the labels of buckets,
what a rank without a gradient contributes, and the checks made before any peer is involved.

What else lists ops or dtypes takes them from here; what cannot, as the C core, is compared with the
tables by tests/comm/test_collective.py. Knows no transport. Raises only ValueError and TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# ---- ops -----------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """A row of the table of ops."""

    name: str
    of_torch: str  # the member of torch.distributed.ReduceOp; in lower case, a second name
    nccl: int  # ncclRedOp_t
    combine: Callable[..., Tensor]  # two ranks' elements, without what a mean does at the end
    # What a rank contributes for a parameter without a gradient, and with one. The reduction over
    # all ranks is the former only if no rank has a gradient.
    used_values: tuple[float, float] = (0.0, 1.0)
    is_linear: bool = False  # so that complex numbers may be reduced, part by part


# In the order of enum shm_op. Over NCCL a mean is a scaled sum: ncclAvg would turn NVLink SHARP
# off.
REDUCTIONS = (
    Reduction("sum", "SUM", 0, torch.add, is_linear=True),
    Reduction("mean", "AVG", 0, torch.add, is_linear=True),
    Reduction("min", "MIN", 3, torch.minimum, (0.0, -1.0)),
    Reduction("max", "MAX", 2, torch.maximum),
    Reduction("prod", "PRODUCT", 1, torch.mul, (1.0, 0.0)),
)
OPS = tuple(one.name for one in REDUCTIONS)
LINEAR_OPS = tuple(one.name for one in REDUCTIONS if one.is_linear)
Op: TypeAlias = str | ReduceOp.RedOpType  # which canonical_op takes
# Of buckets alone, where ranks have weights: gradients are of losses that are means over a rank's
# data, or sums over it. Both divide by the sum of the weights.
WEIGHTED_OPS = {"mean": "weighted mean", "sum": "weighted sum"}
BUCKET_OPS = (*OPS, *WEIGHTED_OPS.values())
SKIP = "skip"  # what messages call the op of a rank that votes to drop the round
_ALIASES = {one.of_torch.lower(): one.name for one in REDUCTIONS}

# ---- dtypes --------------------------------------------------------------------------------------


class Dtype(NamedTuple):
    """A row of the table of dtypes."""

    dtype: torch.dtype
    nccl: int  # ncclDataType_t
    is_on_cpu: bool = True  # the CPU transports reduce it


# Those of the CPU in the order of enum shm_dtype. Which ones NCCL reduces depends on its version.
DTYPES = (
    Dtype(torch.float32, 7),
    Dtype(torch.float64, 8),
    Dtype(torch.float16, 6),
    Dtype(torch.bfloat16, 9),
    Dtype(torch.int32, 2),
    Dtype(torch.int64, 4),
    Dtype(torch.uint8, 1),
    Dtype(torch.float8_e4m3fn, 10, is_on_cpu=False),
    Dtype(torch.float8_e5m2, 11, is_on_cpu=False),
)
CPU_DTYPES = tuple(one.dtype for one in DTYPES if one.is_on_cpu)
FLOATS = tuple(dtype for dtype in CPU_DTYPES if dtype.is_floating_point)
HALVES = tuple(dtype for dtype in FLOATS if dtype.itemsize == 2)  # added in float32

# In which gradients may travel over every transport, and those of 8 bits in which they travel with
# a scale for each block: see group/wire.pyx, and nccl/bucket.pyx for int8.
WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_DTYPES = (torch.int8, torch.float8_e4m3fn)
SENT_DTYPES = (*CPU_DTYPES, *BLOCK_DTYPES)  # what else may travel between hosts

BUCKETS_PER_REDUCER = 65536
# The kinds that go to one rank, or come from one: their root.
ROOTED = frozenset(("broadcast", "gather", "scatter"))
NO_DATA = "no data left (join)"  # the kind that a rank without data calls


def canonical_op(op: Op) -> str:
    """Returns the op's name as fastcomm spells it; torch.distributed's "avg" and "product", and its
    ReduceOp.SUM and the like, are accepted. Raises ValueError for any other name or op, TypeError
    for anything else.
    """
    if isinstance(op, ReduceOp.RedOpType):
        op = op.name.lower()
    if not isinstance(op, str):
        raise TypeError(f"op must be one of {', '.join(OPS)}, as a string; got {op!r}")
    name = _ALIASES.get(op, op)
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    return name


def as_pairs(tensor: Tensor, op: str = "sum") -> Tensor:
    """A complex tensor as one of real numbers, real and imaginary parts side by side, on the same
    memory; a view of another tensor as it is. op: what it is reduced by. Raises TypeError for ops
    that do not treat both parts alike, ValueError for a conjugated view.
    """
    if not tensor.is_complex():
        return tensor
    if op not in LINEAR_OPS:
        raise TypeError(complex_refusal(f"a {name_of(tensor.dtype)} tensor", op))
    if tensor.is_conj():
        raise ValueError("the tensor is a conjugated view: pass tensor.resolve_conj()")
    return torch.view_as_real(tensor.detach())


def complex_refusal(what: str, op: str) -> str:
    """The message for an op that complex numbers are not reduced by."""
    return f"op {op} of {what} is not possible: complex numbers are reduced by sum or mean"


def real_numel(tensor: Tensor) -> int:
    """How many real numbers a tensor holds: two for each complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def name_of(dtype: torch.dtype) -> str:
    """The dtype as messages spell it: "float32"."""
    return str(dtype).removeprefix("torch.")


# ---- buckets -------------------------------------------------------------------------------------


def bucket_label(reducer: int, bucket: int) -> int:
    """The number by which ranks tell buckets apart. Never 0, which means no bucket."""
    return reducer * BUCKETS_PER_REDUCER + bucket + 1


def used_values(op: str) -> tuple[float, float]:
    """Returns the values of the used mask for an absent and a present gradient. op: also one of
    WEIGHTED_OPS.
    """
    return _USED_VALUES.get(op, (0.0, 1.0))


# A weight may be a small part of all: even in float16 its product with 2**14 is not 0.
_USED_VALUES = {one.name: one.used_values for one in REDUCTIONS} | dict.fromkeys(
    WEIGHTED_OPS.values(), (0.0, 2.0**14)
)


def largest_half(n: int) -> int:
    """Where the tree over n > 1 inputs of a reduction parts: the largest power of two below n."""
    return 1 << (n - 1).bit_length() - 1


def addends_of_mean(tensor: Tensor, n: int) -> Tensor:
    """Integers as int64 rows whose sums over n ranks are exact, for `mean_of_addends`.

    int64 gives a row of quotients by n and a row of remainders, because the sum of n elements may
    overflow. Other integers give one row. Returns a new tensor of shape (rows, *tensor.shape).
    """
    if tensor.dtype != torch.int64:
        return tensor.to(torch.int64, copy=True).unsqueeze(0)
    quotients = torch.div(tensor, n, rounding_mode="trunc")
    return torch.stack([quotients, tensor - quotients * n])


def mean_of_addends(sums: Tensor, n: int) -> Tensor:
    """The mean of integers over n ranks, truncated towards zero. sums: of the ranks'
    `addends_of_mean`.
    """
    carried = torch.div(sums[-1], n, rounding_mode="trunc")
    if len(sums) == 1:
        return carried
    mean, rest = sums[0] + carried, sums[1] - carried * n
    # If the rest has the other sign, the exact mean lies nearer to zero.
    sign = mean.sign()
    return mean - torch.where(sign * rest < 0, sign, 0)


# ---- fingerprints, which the ranks compare -------------------------------------------------------

_CHECKSUMS = 1 << 32


def fingerprint_of(n: int, checksum: int) -> int:
    """Packs both into one number. Of a bucket: how many steps this rank's optimizers have made, and
    the record: of which parameters were stepped, how gradients were clipped, and what came of it.
    Of tensors that are reduced as one: how many there are, and a checksum of their sizes.
    """
    return (checksum & 0x7FFFFFFF) * _CHECKSUMS + n % _CHECKSUMS


def with_checksum(fingerprint: int, checksum: int) -> int:
    """The fingerprint, with a checksum of what a bucket's parameters have become added to it."""
    both = fingerprint // _CHECKSUMS + checksum
    return (both & 0x7FFFFFFF) * _CHECKSUMS + fingerprint % _CHECKSUMS


def unpacked(fingerprint: int) -> tuple[int, int]:
    """The checksum and the number in a fingerprint."""
    return divmod(fingerprint, _CHECKSUMS)


# ---- refusals, before any peer is involved -------------------------------------------------------


def refuse_dtype(dtype: object, known: Iterable[torch.dtype], name: str = "dtype") -> NoReturn:
    raise TypeError(f"{name} must be one of {', '.join(map(name_of, known))}; got {dtype}")


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor wraps others, as a DTensor does, and has no memory of its own."""
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a dense tensor has elements but no memory that holds them: torch's zero tensors,
    wrappers, those of a FakeTensorMode or of torch.func, and those whose storage was freed. A slice
    of one has an address all the same.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    try:
        return tensor.data_ptr() == 0 or tensor.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def is_readable(tensor: Tensor) -> bool:
    """Whether torch finds the elements of a dense tensor: those of zero tensors it knows."""
    return tensor._is_zerotensor() or not lacks_memory(tensor)


def without_memory(tensor: Tensor) -> str:
    """What is wrong with a tensor that lacks memory."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return (
            "is one that torch.func (grad, vmap, ...) traces, and has no memory: call collectives "
            "outside of what it transforms"
        )
    return (
        f"is a {type(tensor).__name__} without memory for its elements (a zero tensor of torch's, "
        "one that wraps others, one from a FakeTensorMode, or one whose storage was freed): make a "
        "plain tensor of it, by clone() where it has values"
    )


def refuse_tensor(tensor: object, backend: str, device: torch.device) -> NoReturn:
    """Says what is wrong with a tensor: it must be dense, on the device, contiguous, in memory and
    neither a negated view nor a wrapper. Raises TypeError or ValueError.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"expected a torch.Tensor; got {type(tensor).__name__}: torch.tensor(number) makes one "
            "of a number"
        )
    if is_wrapper(tensor):
        raise ValueError(
            f"the tensor is a {type(tensor).__name__}, which wraps others: pass what it wraps (of "
            "a DTensor, to_local())"
        )
    if tensor.layout is not torch.strided or tensor.device != device:
        place = "the CPU" if device.type == "cpu" else device
        raise ValueError(
            f"the {backend} transport takes dense tensors on {place}; got {tensor.layout} on "
            f"{tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor must be contiguous; its shape is {tuple(tensor.shape)}, its strides are "
            f"{tensor.stride()}"
        )
    refuse_without_memory(tensor)
    raise ValueError("the tensor is a negated view of its memory: pass tensor.resolve_neg()")


def refuse_without_memory(tensor: Tensor) -> None:
    if lacks_memory(tensor):
        raise ValueError(f"the tensor {without_memory(tensor)}")


def refuse_error_feedback(backend: str) -> NoReturn:
    raise ValueError(
        f"over {backend}, error_feedback=True is not possible: only the transports group and "
        "hierarchical keep what a wire_dtype drops. Leave it out, or pass it where "
        "comm.feeds_back_errors"
    )


def check_root(name: str, root: int, world_size: int) -> None:
    """Raises ValueError. name: of the argument."""
    if not 0 <= root < world_size:
        raise ValueError(f"{name} must be a rank from 0 to {world_size - 1}; got {root}")


def check_out(name: str, out: Tensor, inp: Tensor, numel: int) -> None:
    """Checks that the result for `inp` fits into `out`. Raises TypeError or ValueError."""
    if out.dtype != inp.dtype:
        raise TypeError(f"{name}: out is {out.dtype}, inp is {inp.dtype}")
    if out.numel() != numel:
        raise ValueError(f"{name}: out must have {numel} elements; it has {out.numel()}")


def check_apart(name: str, out: Tensor, inp: Tensor) -> None:
    """Checks that two contiguous tensors share no memory. Raises ValueError."""
    first, second = out.data_ptr(), inp.data_ptr()
    if first < second + inp.nbytes and second < first + out.nbytes:
        raise ValueError(f"{name}: out and inp share memory, and must not")


def shard_of(name: str, inp: Tensor, world_size: int) -> int:
    """The number of elements of `inp` that each rank keeps. Raises ValueError."""
    if inp.numel() % world_size:
        raise ValueError(
            f"{name}: inp has {inp.numel()} elements, not a multiple of {world_size} ranks"
        )
    return inp.numel() // world_size
