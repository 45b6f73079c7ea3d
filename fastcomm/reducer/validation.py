"""Checks that a model can be attached and that the ranks have the same one: compares its
description, copies one rank's tensors to the others, and compares their bits. Says why a gradient
is not what its bucket was planned for.

Every function that takes a communicator is collective, and raises the same error on every rank.
"""

from __future__ import annotations

import contextlib
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter, UninitializedParameter

from fastcomm.comm.collective import is_readable, is_wrapper, lacks_memory, without_memory
from fastcomm.comm.objects import gather_unequal, naming
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer.autograd import is_gradient_held

# ---- the model ----------------------------------------------------------------------------------

Model = nn.Module | list[tuple[str, Parameter]]


def model_of(given: nn.Module | Iterable[tuple[str, Parameter]]) -> Model:
    """A module as it is, named parameters as a list. Raises TypeError, and ValueError for a module
    that reduces by itself.
    """
    if isinstance(given, DistributedDataParallel):
        raise ValueError("attach(ddp.module): DistributedDataParallel reduces gradients itself")
    if isinstance(given, nn.Module):
        return given
    if not isinstance(given, Iterable):
        raise TypeError(
            f"attach(): expected a module or named parameters; got {type(given).__name__}"
        )
    return list(given)


def named_parameters(model: Model) -> list[tuple[str, Parameter]]:
    return list(model.named_parameters()) if isinstance(model, nn.Module) else model


def reference_to(model: Model) -> Callable[[], Model | None]:
    """A function that returns the model, or None once the module or a named parameter is gone."""
    if isinstance(model, nn.Module):
        return weakref.ref(model)
    references = [(name, weakref.ref(parameter)) for name, parameter in model]

    def recall() -> list[tuple[str, Parameter]] | None:
        recalled = [(name, reference()) for name, reference in references]
        alive = [(name, parameter) for name, parameter in recalled if parameter is not None]
        return alive if len(alive) == len(references) else None

    return recall


NamedTensors = Sequence[tuple[str, Tensor]]
NamedParameters = Sequence[tuple[str, Parameter]]

_WORDS = 2**20  # of 8 bytes, which a checksum takes at a time
_SMALL = 2**16  # bytes of a tensor that is broadcast together with others


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's gradient: the parameter's, unless the user chose another."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


# ---- what one rank checks alone -----------------------------------------------------------------


def refuse_model(
    model: Model, named: NamedParameters, comm: Transport, is_attached: Callable[[Tensor], bool]
) -> None:
    """Raises ValueError for a model that cannot be attached on this rank. is_attached: whether a
    reducer has a parameter.
    """
    _refuse_named(named, comm.device, is_attached)
    for name, buffer in named_buffers(model):
        _refuse_kept(name, buffer, comm.device)
    if comm.world_size > 1 and isinstance(model, nn.Module):
        _refuse_module(model)


def _refuse_named(
    named: NamedParameters, device: torch.device, is_attached: Callable[[Tensor], bool]
) -> None:
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError(
            "attach() takes a module or named parameters: model.named_parameters(), not "
            "model.parameters()"
        )
    if len({id(p) for _, p in named}) < len(named):
        raise ValueError("a parameter is given twice: its gradient would be reduced twice")
    for name, parameter in named:
        _refuse_parameter(name, parameter, device)
        if is_attached(parameter):
            raise ValueError(
                f"parameter {name} is attached to another reducer already: detach() that one "
                "first, or attach one reducer to all models that share it, as "
                "attach(nn.ModuleList([actor, critic]))"
            )
    if not any(p.requires_grad for _, p in named):
        raise ValueError(
            "the model has no parameter that requires a gradient: there is nothing to reduce"
        )


def _refuse_parameter(name: str, parameter: Parameter, device: torch.device) -> None:
    what = f"parameter {name}"
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{what} is not initialised: run the lazy modules once before attach()")
    if parameter.requires_grad:
        _refuse_tensor(what, parameter, device)
    else:
        for kept in unwrapped([(what, parameter)]):
            _refuse_kept(*kept, device)
    if parameter.is_neg() or parameter.is_conj():
        raise ValueError(
            f"{what} is a negated or conjugated view of its memory: clone it before attach()"
        )
    if not parameter.requires_grad:
        return
    dtype = grad_dtype(parameter)
    is_number = dtype.is_floating_point or dtype.is_complex
    if not is_number or dtype.itemsize < 2 or dtype == torch.complex32:
        raise ValueError(
            f"{what} is {dtype}; only gradients of float16, bfloat16, float32, float64, complex64 "
            "and complex128 can be reduced"
        )
    if is_gradient_held(parameter):
        raise ValueError(
            f"the gradient of parameter {name} has another name, or is a view of another tensor: "
            "the reducer will replace it. Set `.grad` to None first"
        )
    if not parameter.is_leaf:
        raise ValueError(f"{what} is the result of an operation, not a leaf: it gets no gradient")
    if distinct_elements(parameter).numel() != parameter.numel():
        raise ValueError(f"{what} is expanded: its elements share memory. Clone it before attach()")


def _refuse_kept(what: str, tensor: Tensor, device: torch.device) -> None:
    """Of what is only compared and copied: a frozen parameter, or a buffer."""
    try:
        _refuse_tensor(what, tensor, device)
    except ValueError as error:
        raise ValueError(
            f"{error}. Or see yourself that it is the same on all ranks, and attach the trained "
            "parameters alone: "
            "attach([(n, p) for n, p in model.named_parameters() if p.requires_grad])"
        ) from None


def _refuse_tensor(what: str, tensor: Tensor, device: torch.device) -> None:
    if is_wrapper(tensor):
        raise ValueError(
            f"{what} is a {type(tensor).__name__}, which wraps other tensors: a Reducer takes "
            "plain ones. torch's fully_shard() and replicate() reduce such a model, over the "
            "backend 'fastcomm'"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        raise ValueError(f"{what} is {kind}: attach() takes dense tensors")
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on meta, and has no values: model.to_empty(device=comm.device) first, and "
            "load them"
        )
    if tensor.device != device:
        raise ValueError(
            f"{what} is on {tensor.device}, but the communicator reduces on {device}: move the "
            "model to comm.device first"
        )
    if lacks_memory(tensor):
        raise ValueError(f"{what} {without_memory(tensor)}")
    if tensor.is_inference():
        raise ValueError(
            f"{what} was made in inference mode, which training cannot use: clone it outside"
        )


def _refuse_module(model: nn.Module) -> None:
    """What would make the ranks drift apart in forward, where no gradient tells."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and not dist.is_initialized():
            raise ValueError(
                f"module {name} is a SyncBatchNorm, which is a plain BatchNorm of each rank's own "
                "batch where there is no process group: make it a BatchNorm or, on GPUs, call "
                "torch.distributed.init_process_group(...) before attach()"
            )
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and module.max_norm is not None:
            raise ValueError(
                f"module {name} is an {type(module).__name__} with max_norm, whose forward changes "
                "the rows that this rank looks up: the ranks would drift apart. Make it without "
                "max_norm, and renormalise all rows after each step, on every rank: "
                "weight.data.copy_(torch.renorm(weight.data, 2, 0, max_norm))"
            )


def distinct_elements(tensor: Tensor) -> Tensor:
    """A view of an expanded tensor that contains every element in memory once."""
    if tensor.is_contiguous():
        return tensor
    for dimension, (numel, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and numel > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


# ---- what the ranks compare ---------------------------------------------------------------------


Described = list[tuple[str, dict[str, Any]]]


def signature(named: NamedParameters, tensors: NamedTensors, sparse: Collection[str]) -> Described:
    """What must be equal on all ranks of a model, in the model's order. tensors: named_tensors().
    sparse: the names of the parameters with sparse gradients.
    """
    return described(tensors) + [
        (
            f"parameter {name}",
            {
                "strides": p.stride(),
                "requires_grad": p.requires_grad,
                "gradient of dtype": str(grad_dtype(p)),
                "sparse gradients": name in sparse,
            },
        )
        for name, p in named
    ]


def described(named: NamedTensors) -> Described:
    return [(name, {"shape": tuple(t.shape), "dtype": str(t.dtype)}) for name, t in named]


class CollectiveCall(NamedTuple):
    """A call that every rank must make. makes: what differs if its options do. cannot: what a rank
    with a problem fails to do.
    """

    name: str
    makes: str
    cannot: str


ATTACH = CollectiveCall("attach() or refresh()", "reducers", "cannot attach its model")
GROUPS = "parameter groups, which every rank must give in one order"
REFRESH = CollectiveCall("refresh()", GROUPS, "cannot refresh")
CHECK_IN_SYNC = CollectiveCall(
    "check_in_sync()", "arguments of check_in_sync()", "cannot compare its model"
)


def compare(
    comm: Transport,
    problem: Exception | None,
    options: dict[str, Any],
    call: CollectiveCall,
    model: Described | None = None,
) -> None:
    """Compares the options and models of all ranks. All ranks come to the same verdict, also if one
    has a problem in place of a model.

    Raises this rank's problem, FastcommError for another's, MismatchError for what differs.
    """
    ranks = gather_unequal(comm, (_in_words(problem), options, model or []), call.name)
    if problem is not None:
        raise problem
    if ranks is None:
        return
    _, first_options, first_model = ranks[0]
    for rank, (trouble, theirs, their_model) in enumerate(ranks):
        if trouble is not None:
            raise FastcommError(f"rank {rank} {call.cannot}: {trouble}")
        name = _first_key(first_options, theirs)
        if name is not None:
            raise MismatchError(
                f"the ranks have different {call.makes}: {name} is {first_options.get(name)} on "
                f"rank 0 and {theirs.get(name)} on rank {rank}"
            )
        difference = _first_difference(first_model, their_model, rank)
        if difference is not None:
            raise MismatchError(f"the ranks have different models: {difference}")


@contextlib.contextmanager
def agreeing(
    comm: Transport, call: CollectiveCall, model: Described | None = None
) -> Iterator[dict[str, Any]]:
    """Yields a dict for what the ranks compare, and raises on every rank, as compare(), what one of
    them raises in the block. model: compared as the block leaves it.
    """
    described: dict[str, Any] = {}
    problem = None
    try:
        yield described
    except Exception as error:  # whatever a user's class raises: the others are to hear of it
        problem = error
    compare(comm, problem, described, call, model)


def _in_words(problem: Exception | None) -> str | None:
    """Words it for the other ranks. Names the type where the text may say nothing by itself."""
    if problem is None:
        return None
    says_enough = isinstance(problem, (ValueError, TypeError, FastcommError))
    return str(problem) if says_enough else f"{type(problem).__name__}: {problem}"


def _first_key(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Finds the first key that differs, or is there on one side only."""
    return next((key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)), None)


def shown(value: object) -> str:
    """A value of an optimizer's group, as ranks compare it: all digits of a tensor, and no object's
    address, which is each rank's own.
    """
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return type(value).__qualname__ if " at 0x" in text else text


def _first_difference(ours: Described, theirs: Described, rank: int) -> str | None:
    """In words, where the model of `rank` first differs from that of rank 0."""
    here, there = (Counter(name for name, _ in one) for one in (ours, theirs))
    lacking = [
        f"rank {holder} has {next(iter(more))}, which rank {other} lacks"
        for holder, more, other in ((0, here - there, rank), (rank, there - here, 0))
        if more
    ]
    if lacking:
        return ", and ".join(lacking)
    for (name, mine), (their_name, their) in zip(ours, theirs, strict=True):
        if name != their_name:
            return f"where rank 0 has {name}, rank {rank} has {their_name}"
        for what, value in mine.items():
            if their[what] != value:
                return f"{name} has {what} {value} on rank 0 and {their[what]} on rank {rank}"
    return None


def is_arithmetic_alike(comm: Transport) -> bool:
    """Whether an optimizer's step on the CPU has the same bits on all ranks: they have one torch,
    processors of one kind, and as many threads, among which torch divides a tensor. Collective.
    """
    processor = platform.machine(), torch.backends.cpu.get_cpu_capability()
    kind = torch.__version__, *processor, torch.get_num_threads()
    return gather_unequal(comm, kind, ATTACH.name) is None


def compare_named(comm: Transport, named: NamedTensors, call: str, **arguments: int) -> None:
    """Raises MismatchError, on every rank, unless all have given the call these arguments, and have
    tensors of these names, shapes and dtypes.
    """
    compare(comm, None, arguments, CollectiveCall(call, "arguments", ""), described(named))


def copy_from(comm: Transport, src: int, named: NamedTensors, call: str) -> None:
    """Copies rank src's tensors to the others. Raises as compare_named(); then none has changed."""
    compare_named(comm, named, call, src=src)
    with naming(call):
        broadcast(comm, [tensor for _, tensor in named], src)


def broadcast(comm: Transport, tensors: Iterable[Tensor], src: int) -> None:
    """Copies rank src's tensors, of any strides and dtype, to the others: as bytes. The ranks have
    compared them before.
    """
    targets = [distinct_elements(tensor.detach()) for tensor in tensors]
    flats = [_flat(target) for target in targets]
    octets = [flat.view(torch.uint8) for flat in flats]
    # a collective for each of many small ones would take longer than a copy of them
    small = [one for one in octets if one.numel() <= _SMALL]
    together = torch.cat(small) if small else None
    large = [one for one in octets if one.numel() > _SMALL]
    comm.broadcast_all(large if together is None else [together, *large], src)
    if together is not None and comm.rank != src:
        torch._foreach_copy_(small, list(together.split([one.numel() for one in small])))
    for target, flat in zip(targets, flats, strict=True):
        if flat.data_ptr() != target.data_ptr() or target.is_neg() or target.is_conj():
            target.copy_(flat.view(target.shape))


def _flat(tensor: Tensor) -> Tensor:
    """The elements in order, in the tensor's own memory if it holds them in that order."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat if flat.numel() != 1 else flat.as_strided((1,), (1,))  # its stride may be anything


# ---- what the tensors hold ----------------------------------------------------------------------


def check_model_in_sync(
    comm: Transport, model: Model, optimizer: torch.optim.Optimizer | None, kind: str
) -> None:
    """Compares the model's parameters and buffers, and what the optimizer holds if there is one.
    Raises MismatchError naming the first that is not the same on all ranks. kind: the optimizer's,
    in words.
    """
    with agreeing(comm, CHECK_IN_SYNC) as described:
        described["the optimizer"] = kind
        own = _model_in_words(model, optimizer)  # raises if it is no optimizer
    ranks = gather_unequal(comm, own, CHECK_IN_SYNC.name) or []
    for name in dict.fromkeys(name for words in ranks for name in words):
        holders: dict[str, list[str]] = {}
        for rank, words in enumerate(ranks):
            holders.setdefault(words.get(name, "none"), []).append(str(rank))
        if len(holders) > 1:
            shown = "; ".join(f"rank {', '.join(who)}: {held}" for held, who in holders.items())
            raise MismatchError(
                f"{name} is not the same on all ranks: {shown}. Ranks listed together have equal "
                "values. sync_buffers() copies rank 0's buffers to all, which are each rank's own "
                "until then; refresh() the parameters, too; for an optimizer, load rank 0's "
                "optimizer.state_dict() on every rank (full_state_dict() of a ShardedOptimizer)"
            )


def _model_in_words(model: Model, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    tensors = named_tensors(model)
    if optimizer is None:
        return contents_in_words(tensors, [])
    names = {parameter: name for name, parameter in named_parameters(model)}
    more, values = optimizer_contents(optimizer.param_groups, optimizer.state, names)
    return contents_in_words(tensors + more, values)


def contents_in_words(tensors: NamedTensors, values: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What a rank holds, by name: a value as it is, a tensor by its checksum."""
    for name, tensor in tensors:
        if not is_readable(tensor):
            raise ValueError(f"{name} {without_memory(tensor)}")
    bits = checksums([tensor for _, tensor in tensors])
    words = [
        (name, f"{tensor.dtype} {list(tensor.shape)} #{number & (2**64 - 1):016x}")
        for (name, tensor), number in zip(tensors, bits, strict=True)
    ]
    held: dict[str, str] = {}
    for name, word in (*words, *values):  # a name may come twice
        held[name] = f"{held[name]}, {word}" if name in held else word
    return held


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    if not tensors:
        return []
    return [int(number) for number in torch.stack([_checksum(t).cpu() for t in tensors]).tolist()]


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum of all bits and their order: a wrapping sum of words times odd numbers."""
    octets = _flat(tensor.detach()).view(torch.uint8)
    octets = torch.cat([octets, octets.new_zeros(-octets.numel() % 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, octets.numel() // 8, _WORDS):
        words = octets.view(torch.int64)[begin : begin + _WORDS]
        indices = torch.arange(
            begin, begin + words.numel(), dtype=torch.int64, device=tensor.device
        )
        total += ((words ^ (words >> 29)) * (2 * indices + 1)).sum()
    return total


def optimizer_contents(
    groups: Sequence[dict[str, Any]],
    states: Mapping[Any, dict[str, Any]],
    names: Mapping[Parameter, str],
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, str]]]:
    """The tensors and the other values that an optimizer uses, each with a name. states: by
    parameter. names: of the model's parameters.
    """
    tensors: list[tuple[str, Tensor]] = []
    values: list[tuple[str, str]] = []

    def note(name: str, value: object) -> None:
        if isinstance(value, Tensor):
            tensors.append((name, value))
        else:
            values.append((name, shown(value)))

    for i, group in enumerate(groups):
        for key, value in group.items():
            if key != "params":
                note(f"{key} of the optimizer's group {i}", value)
        for j, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"{j} of the optimizer's group {i}")
            for key, value in states.get(parameter, {}).items():
                note(f"the optimizer's {key} of parameter {name}", value)
    return tensors, values


def named_tensors(model: Model) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, named as in messages; in place of one that wraps tensors, these."""
    parameters = [(f"parameter {name}", p) for name, p in named_parameters(model)]
    return unwrapped(parameters) + named_buffers(model)


def named_buffers(model: Model) -> list[tuple[str, Tensor]]:
    """As named_tensors()."""
    buffers = model.named_buffers() if isinstance(model, nn.Module) else ()
    return unwrapped((f"buffer {name}", buffer) for name, buffer in buffers)


def unwrapped(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """With what it wraps in place of a tensor that wraps others. A DTensor stays, of which ranks of
    a mesh may have a part of their own.
    """
    plain: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if is_wrapper(tensor) and not hasattr(tensor, "device_mesh"):
            inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            plain += unwrapped((f"{name}.{one}", getattr(tensor, one)) for one in inner)
        else:
            plain.append((name, tensor))
    return plain


# ---- a gradient ---------------------------------------------------------------------------------


def misfit_in_slot(parameter: Parameter, gradient: Tensor, view: Tensor) -> str | None:
    """Why the gradient does not fit its slot."""
    if gradient.layout is not torch.strided:
        return (
            "is sparse, and was to be dense at attach(): name the parameter in "
            "Reducer(sparse_parameters=[...]) on every rank, or use sparse=False"
        )
    return misfit(parameter, gradient, view, view.device)


def misfit(
    parameter: Parameter, gradient: Tensor, like: Tensor, device: torch.device
) -> str | None:
    """Why the gradient is not what was planned for: of like's shape and dtype, on the device."""
    if gradient.shape != like.shape or parameter.shape != like.shape:
        was, now = tuple(like.shape), tuple(gradient.shape)
        return (
            f"has shape {now}, and had {was} at attach(): call refresh() on every rank after "
            "changing a parameter's shape"
        )
    if gradient.dtype != like.dtype or parameter.dtype not in (like.dtype, gradient.dtype):
        return (
            f"is {gradient.dtype}, and was {like.dtype} at attach(): call refresh() on every rank "
            "after changing a parameter's dtype"
        )
    if gradient.device != device:
        return (
            f"is on {gradient.device}, and was on {device} at attach(): call refresh() on "
            "every rank after moving the model"
        )
    return None if is_readable(gradient) else without_memory(gradient)
