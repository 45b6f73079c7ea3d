"""Reducer: makes loss.backward() reduce the gradients of a model over all ranks. Changes no module: it lives in hooks on the parameters.

One backward is one round: hooks count gradients, a full bucket is launched in plan order, and when autograd is through, a callback of
its own waits for the buckets. The method is that of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
section 3.2; where it departs from DistributedDataParallel, the departure is said in a comment.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.bucket import Bucket
from fastcomm.communicator import Communicator, canonical_op, gather_objects
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.hook_bucket import Hook, HookedPlace, hooks_of
from fastcomm.layout import plan_buckets
from fastcomm.rendezvous import init

MB = 1024 * 1024

# Which reducer reduces a parameter: two would reduce its gradient twice.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
_attached: weakref.WeakSet[Reducer] = weakref.WeakSet()
# How many models were attached to a communicator. Attaching is collective, so the count is the same on all ranks: it keeps the buckets
# of several reducers apart.
_n_attached: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


class Reducer:
    """Reduces gradients over all ranks during backward.

    comm: the communicator; None means fastcomm.init().
    bucket_cap_mb, first_bucket_cap_mb: a bucket is closed when it holds so many MiB; the first one small, so that communication starts
        early.
    op: "mean", "sum" or another op of the communicator. What is reduced is all that .grad holds: with another op than "mean", clear the
        gradients before every backward that is reduced, or what was reduced before is reduced once more.
    wire_dtype: reduce floating-point gradients in this dtype (torch.bfloat16, torch.float16; over NCCL also torch.float8_e4m3fn, in
        which infinities become 448, and torch.float8_e5m2); they keep their own dtype.
    streams: over NCCL, how many communicators, each with a stream of its own, take turns at the buckets. No effect on the CPU.
    hook: a communication hook written for DDP, as (state, function), which then reduces every bucket in place of the communicator, with a
        division of its own if any; a list of them is a chain, in which each gets what the one before has left. `op` has no effect then.
    overlap: launch buckets as they become full. False launches all of them at the end of backward: for models whose parameters get
        several gradients in one backward (reentrant checkpointing of shared layers).
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        *,
        bucket_cap_mb: float = 25,
        first_bucket_cap_mb: float = 1,
        op: str = "mean",
        wire_dtype: torch.dtype | None = None,
        streams: int = 1,
        hook: Hook | Sequence[Hook] | None = None,
        overlap: bool = True,
    ) -> None:
        if bucket_cap_mb <= 0 or first_bucket_cap_mb <= 0:
            raise ValueError(f"bucket caps must be positive; got {bucket_cap_mb} and {first_bucket_cap_mb}")
        if streams < 1:
            raise ValueError(f"streams must be at least 1; got {streams}")
        self.op = canonical_op(op)
        self.comm: Communicator = init() if comm is None else comm
        wires = (torch.bfloat16, torch.float16, torch.float32, *((torch.float8_e4m3fn, torch.float8_e5m2) if self.comm.has_streams else ()))
        if wire_dtype is not None and wire_dtype not in wires:
            raise ValueError(f"over {self.comm.backend}, wire_dtype must be one of {', '.join(map(str, wires))}; got {wire_dtype!r}")
        # Ranks that differ here would reduce different buckets, or the same ones differently.
        self._options = {
            "bucket_cap_mb": bucket_cap_mb,
            "first_bucket_cap_mb": first_bucket_cap_mb,
            "op": self.op,
            "wire_dtype": str(wire_dtype),
            "streams": streams,
            "hook": [function.__qualname__ if hasattr(function, "__qualname__") else repr(function) for _, function in hooks_of(hook)],
        }
        self._cap_bytes = int(bucket_cap_mb * MB)
        self._first_cap_bytes = int(first_bucket_cap_mb * MB)
        self._hooks = hooks_of(hook)
        if self._hooks and wire_dtype is not None:
            raise ValueError("wire_dtype has no effect on what a hook reduces: use a hook that compresses")
        self._wire_dtype = wire_dtype
        self._n_lanes = streams
        self._overlap = overlap
        # Nothing here keeps the model alive: the hooks on its parameters keep the reducer, and both go when it goes.
        self._model: Callable[[], nn.Module | list[tuple[str, Parameter]] | None] | None = None
        self._buckets: list[Bucket] = []
        self._frozen: list[tuple[str, weakref.ref[Parameter]]] = []
        self._handles: list[RemovableHandle] = []
        self._is_synchronizing = True  # False inside no_sync
        self._has_callback = False  # the running backward will call us at its end
        self._is_open = False  # a round has begun: some gradient is ready
        self._number = 0  # among the reducers of the communicator
        self._n_launched = 0
        self._n_abandoned = 0  # comm.n_abandoned when the round began

    # -- attaching --------------------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module | Iterable[tuple[str, Parameter]]) -> Reducer:
        """Reduces the gradients of `model` (a module, or named parameters) from now on. Collective: every rank calls it. Returns self.

        Checks that the reducers' options, and name, shape, dtype, strides and requires_grad of all parameters, agree on all ranks, then
        copies rank 0's parameters and buffers to the others. Attach after moving, copying or compiling the model, and before or after
        making the optimizer.

        Raises MismatchError on every rank, naming the first difference; ValueError when there is nothing to train, when the model is
        on another device than the communicator, or attached already.
        """
        source = model if isinstance(model, nn.Module) else list(model)
        named = list(source.named_parameters()) if isinstance(source, nn.Module) else source
        buffers = list(source.named_buffers()) if isinstance(source, nn.Module) else []
        self._verify(named, buffers)
        _broadcast(self.comm, [tensor.detach() for _, tensor in (*named, *buffers)], 0)
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, weakref.ref(p)) for name, p in named if not p.requires_grad]
        try:
            self._buckets = self._make_buckets([name for name, _ in trainable], [p for _, p in trainable])
        except BaseException:  # memory, for example: the other ranks are not to wait for this one
            with contextlib.suppress(FastcommError):
                self.comm.abandon()
            raise
        self._model = weakref.ref(source) if isinstance(source, nn.Module) else _named_references(source)
        for bucket in self._buckets:
            for i, index in enumerate(bucket.indices):
                parameter = trainable[index][1]
                _owners[parameter] = weakref.ref(self)
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook_for(bucket, i)))
        _attached.add(self)
        self.comm.barrier()  # what was prepared here is in place, whatever stream the first backward runs on
        return self

    def _verify(self, named: list[tuple[str, Parameter]], buffers: list[tuple[str, Tensor]]) -> None:
        """Every rank learns every rank's model, or why it has none, and all come to the same verdict."""
        problem = self._find_problem(named)
        signature = (
            None
            if problem
            else [_signature(kind, *entry) for kind, entries in (("parameter", named), ("buffer", buffers)) for entry in entries]
        )
        ranks = gather_objects(self.comm, (str(problem) if problem else None, self._options, signature))
        if problem is not None:
            raise problem
        for rank, (trouble, _, _) in enumerate(ranks):
            if trouble is not None:
                raise FastcommError(f"rank {rank} cannot attach its model: {trouble}")
        for rank, (_, options, model) in enumerate(ranks):
            for name, value in options.items():
                if value != self._options[name]:
                    ours = f"{self._options[name]} on rank {self.comm.rank}"
                    raise MismatchError(f"the ranks have different reducers: {name} is {ours} and {value} on rank {rank}")
            difference = _first_difference(ranks[0][2], model, rank)
            if difference is not None:
                raise MismatchError(f"the ranks attach different models: {difference}")

    def _find_problem(self, named: list[tuple[str, Parameter]]) -> ValueError | None:
        """What is wrong with the model on this rank alone."""
        if self._model is not None:
            return ValueError("this reducer is attached already; detach() it first, or make one reducer for each model")
        if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
            return ValueError("attach() takes a module or named parameters: model.named_parameters(), not model.parameters()")
        if not any(p.requires_grad for _, p in named):
            return ValueError("the model has no parameter that requires a gradient: there is nothing to reduce")
        if len({id(p) for _, p in named}) < len(named):
            return ValueError("a parameter is given twice: its gradient would be reduced twice")
        for name, parameter in named:
            if isinstance(parameter, UninitializedParameter):
                return ValueError(f"parameter {name} is not initialised: run the lazy modules once before attach()")
            if parameter.device != self.comm.device:
                return ValueError(f"parameter {name} is on {parameter.device}, but the communicator reduces on {self.comm.device}")
            if parameter.requires_grad and not parameter.dtype.is_floating_point:
                return ValueError(f"parameter {name} is {parameter.dtype}; only real floating-point gradients can be reduced")
            owner = _owners.get(parameter)
            if owner is not None and owner() is not None:
                return ValueError(f"parameter {name} is attached to another reducer already; detach() that one first")
        return None

    def _make_buckets(self, names: list[str], parameters: list[Parameter]) -> list[Bucket]:
        layouts = plan_buckets(
            [(p.numel(), p.dtype, p.element_size()) for p in parameters], cap_bytes=self._cap_bytes, first_cap_bytes=self._first_cap_bytes
        )
        self._number = _n_attached.get(self.comm, 0)
        _n_attached[self.comm] = self._number + 1
        first_label = self._number * 65536 + 1
        buckets = []
        for i, layout in enumerate(layouts):
            hooked = HookedPlace(self._hooks, i, i == len(layouts) - 1) if self._hooks else None
            buckets.append(Bucket(first_label + i, layout, parameters, names, self.comm, self._wire_dtype, i % self._n_lanes, hooked))
        return buckets

    def detach(self) -> None:
        """Ends the reduction of this model. Gradients stay what they are, in memory of their own."""
        for handle in self._handles:
            handle.remove()
        for bucket in self._buckets:
            bucket.release()
            for parameter in bucket.parameters:
                if parameter is not None:
                    _owners.pop(parameter, None)
        self._handles, self._buckets, self._frozen, self._model = [], [], [], None
        self._is_open = False
        _attached.discard(self)

    def _attached_model(self) -> nn.Module | list[tuple[str, Parameter]]:
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("the reducer has no model (any more): attach(model) first")
        return model

    def refresh(self) -> None:
        """Call it, on every rank, after parameters were frozen, unfrozen, added or removed. Plans anew, and copies rank 0's values."""
        model = self._attached_model()
        self.detach()
        self.attach(model)

    # -- one round --------------------------------------------------------------------------------------------------------------

    def _hook_for(self, bucket: Bucket, i: int) -> Callable[[Tensor], None]:
        # This runs for every parameter in every backward: it counts, and nothing more. The work is done once per bucket.
        ready = bucket.ready

        def gradient_is_ready(parameter: Tensor) -> None:
            if not self._is_synchronizing:
                bucket.unsynced[i] = True
                return
            if not self._has_callback:
                self._begin()
            if ready[i]:
                self._check_second_gradient(bucket, i)
                return
            ready[i] = True
            bucket.n_pending -= 1
            if not bucket.n_pending and self._overlap:
                self._launch_full_buckets()

        if not self.comm.has_streams:
            return gradient_is_ready

        def gradient_is_ready_on_its_stream(parameter: Tensor) -> None:
            bucket.note_stream()
            gradient_is_ready(parameter)

        return gradient_is_ready_on_its_stream

    def _begin(self) -> None:
        """Asks autograd to call back at the end of the running backward."""
        if not self._is_open:
            self._is_open = True
            self._n_abandoned = self.comm.n_abandoned
        self._has_callback = True
        callback = _EndOfBackward(self)
        # A backward that ends with an exception drops the callback uncalled; then the round must be ended all the same.
        callback.dropped = weakref.finalize(callback, _leave_if_alive, weakref.ref(self))
        callback.dropped.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _check_second_gradient(self, bucket: Bucket, i: int) -> None:
        """With reentrant checkpointing a shared parameter gets several gradients in one backward. Good as long as the bucket is here."""
        if bucket.is_launched:
            raise FastcommError(
                f"parameter {bucket.names[i]} got another gradient in this backward after its bucket was launched (shared parameters "
                "under reentrant checkpointing do this): use checkpoint(..., use_reentrant=False) or Reducer(overlap=False)"
            )

    def _launch_full_buckets(self) -> None:
        """Launches in plan order, so that all ranks launch the same buckets in the same order.

        The last bucket is left to the end of backward. It is full only then anyway; and so no rank gets its gradients before all ranks
        have come to the end, and an exception on one rank is one on all.
        """
        while self._n_launched < len(self._buckets) - 1 and not self._buckets[self._n_launched].n_pending:
            self._launch_next()

    def _launch_next(self) -> None:
        self._buckets[self._n_launched].launch(self.op)
        self._n_launched += 1

    def _end_of_backward(self) -> None:
        self._has_callback = False
        is_inside, node = _enclosing_backward()
        if node is not None:
            self._continue_after(node)
        elif not is_inside or all(not bucket.n_pending for bucket in self._buckets):
            self.synchronize()

    def _continue_after(self, node: torch.autograd.graph.Node) -> None:
        """The backward that ended was run by `node`, a reentrant checkpoint, inside another one: asks for a callback at the end of that.

        Callbacks belong to the running backward, which the outer one is again as soon as it comes to the nodes behind `node`.
        """
        handles: list[RemovableHandle] = []

        def outer_backward_goes_on(_: object) -> None:
            for handle in handles:
                handle.remove()
            if not self._has_callback:
                self._begin()

        handles.extend(behind.register_prehook(outer_backward_goes_on) for behind, _ in node.next_functions if behind is not None)

    def synchronize(self) -> None:
        """Ends the round: launches what is left, waits, and leaves every gradient reduced. Does nothing when no round is open.

        Called at the end of backward and before every torch.optim optimizer's step. Raises FastcommError when the gradients are of no
        use: a peer was lost, or another rank's backward ended with an exception.
        """
        if not self._is_open:
            self.comm.check()
            return
        try:
            while self._n_launched < len(self._buckets):
                self._launch_next()
            for bucket in self._buckets:
                bucket.finish()
            for bucket in self._buckets:
                bucket.settle_missing()
        except BaseException:  # also Ctrl-C
            self._leave()
            raise
        self._close()
        for name, reference in self._frozen:
            parameter = reference()
            if parameter is not None and parameter.requires_grad:
                raise FastcommError(
                    f"parameter {name} was unfrozen after attach(): its gradient is not reduced. Call refresh() on every rank"
                )

    def _leave(self) -> None:
        """The round cannot be ended as it should, because backward has raised, or a bucket. The other ranks hear of it."""
        self._has_callback = False
        if not self._is_open:
            return
        try:
            if self.comm.n_abandoned == self._n_abandoned:  # else the round has ended with another rank's or another reducer's
                with contextlib.suppress(FastcommError):  # what went wrong is on its way to the user already
                    self.comm.abandon()
        finally:
            for bucket in self._buckets:  # half reduced: an optimizer that steps all the same must not drive the ranks apart
                bucket.drop_gradients()
            self._close()

    def _close(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._n_launched = 0
        self._is_open = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on this rank only; the next one outside reduces the sum. Decided at backward."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    # -- with the reduced gradients -------------------------------------------------------------------------------------------------

    def _with_gradient(self) -> list[Parameter]:
        return [p for bucket in self._buckets for p in bucket.parameters if p is not None and p.grad is not None]

    def grad_norm(self) -> Tensor:
        """The 2-norm of all reduced gradients together, as they are now: a scalar tensor, equal on all ranks. Does not synchronise with the
        device: over NCCL it is one pass over each bucket, as GradScaler and others change gradients unseen."""
        self._settle()
        return self._norm([bucket.square_sum() for bucket in self._buckets])

    def _settle(self) -> None:
        self._attached_model()
        self.synchronize()

    def _norm(self, square_sums: list[Tensor | None]) -> Tensor:
        known = [square_sum for square_sum in square_sums if square_sum is not None]
        if len(known) < len(square_sums):
            return torch.nn.utils.get_total_norm([p.grad for p in self._with_gradient() if p.grad is not None])
        norm = torch.stack(known).sum().sqrt()
        return norm if any(bucket.dtype == torch.float64 for bucket in self._buckets) else norm.float()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before, as torch.nn.utils.clip_grad_norm_."""
        if max_norm <= 0:
            raise ValueError(f"max_norm must be positive; got {max_norm}")
        self._settle()
        square_sums = [bucket.square_sum() for bucket in self._buckets]
        norm = self._norm(square_sums)
        if None in square_sums:
            torch.nn.utils.clip_grads_with_norm_(self._with_gradient(), max_norm, norm)
        else:  # all gradients lie in the flat buffers
            factor = (max_norm / (norm + 1e-6)).clamp(max=1)
            for bucket in self._buckets:
                bucket.scale_(factor)
        return norm

    def nonfinite_count(self) -> Tensor:
        """How many elements of the reduced gradients are infinite or NaN: an int64 scalar tensor, equal on all ranks. To skip a step."""
        self._settle()
        found = [bucket.n_nonfinite() for bucket in self._buckets]
        counts = [count for count in found if count is not None]
        if len(counts) < len(found):
            counts = [(~torch.isfinite(p.grad)).sum() for p in self._with_gradient() if p.grad is not None]
        return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=self.comm.device)

    def sync_buffers(self, src: int = 0) -> None:
        """Copies rank `src`'s buffers (batch-norm statistics, ...) to the other ranks. Collective; never done behind your back."""
        model = self._attached_model()
        if isinstance(model, nn.Module):
            _broadcast(self.comm, list(model.buffers()), src)


class _EndOfBackward:
    """What autograd calls when a backward is through; see Reducer._begin."""

    dropped: weakref.finalize[Any, Any]

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self.dropped.detach()
        self._reducer._end_of_backward()


def _leave_if_alive(reference: weakref.ref[Reducer]) -> None:
    reducer = reference()
    if reducer is not None:
        reducer._leave()


def _synchronize_all(*_: object) -> None:
    """The net under the callback: whatever round is still open when an optimizer steps is ended first."""
    for reducer in sorted(_attached, key=lambda reducer: reducer._number):  # in the same order on all ranks
        if not reducer._has_callback:  # not for an optimizer that steps inside backward
            reducer.synchronize()


register_optimizer_step_pre_hook(_synchronize_all)

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_BACKWARD_OF_A_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


def _enclosing_backward() -> tuple[bool, torch.autograd.graph.Node | None]:
    """Whether the backward that is ending now was run inside another one, and the autograd Function that did it, if it was one.

    A reentrant checkpoint does it, or a hook that calls backward. Autograd has no name for that; the stack has. On a GPU hooks run on a
    thread of autograd's own, where the outermost backward is not on the stack.
    """
    n_backwards = int(isinstance(threading.current_thread(), threading._DummyThread))
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _BACKWARD_OF_A_FUNCTION:
            return True, frame.f_locals["self"]
        n_backwards += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return n_backwards > 1, None


def _broadcast(comm: Communicator, tensors: list[Tensor], src: int) -> None:
    """Copies rank src's tensors, of any strides and dtype, to the others: as bytes."""
    flats = [tensor.contiguous().reshape(-1) for tensor in tensors]
    comm.broadcast_all([flat.view(torch.uint8) for flat in flats], src)
    for tensor, flat in zip(tensors, flats, strict=True):
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def _signature(kind: str, name: str, tensor: Tensor) -> tuple[str, str, dict[str, Any]]:
    described: dict[str, Any] = {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype)}
    if kind == "parameter":
        described |= {"strides": tensor.stride(), "requires_grad": tensor.requires_grad}
    return kind, name, described


def _named_references(named: list[tuple[str, Parameter]]) -> Callable[[], list[tuple[str, Parameter]] | None]:
    """As a weak reference to the list: returns None once a parameter is gone."""
    references = [(name, weakref.ref(parameter)) for name, parameter in named]

    def recall() -> list[tuple[str, Parameter]] | None:
        recalled = [(name, reference()) for name, reference in references]
        alive = [(name, parameter) for name, parameter in recalled if parameter is not None]
        return alive if len(alive) == len(references) else None

    return recall


def _first_difference(ours: list[Any], theirs: list[Any], rank: int) -> str | None:
    """In words, where the model of `rank` first departs from that of rank 0."""
    for (kind, name, mine), (their_kind, their_name, their) in zip(ours, theirs, strict=False):
        if (kind, name) != (their_kind, their_name):
            return f"where rank 0 has {kind} {name}, rank {rank} has {their_kind} {their_name}"
        for what, value in mine.items():
            if their[what] != value:
                return f"{kind} {name} has {what} {value} on rank 0 and {their[what]} on rank {rank}"
    if len(ours) != len(theirs):
        longer, shorter, extra = (0, rank, ours[len(theirs) :]) if len(ours) > len(theirs) else (rank, 0, theirs[len(ours) :])
        return f"rank {longer} has {extra[0][0]} {extra[0][1]}, which rank {shorter} lacks"
    return None
