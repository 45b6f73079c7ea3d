"""The torch.distributed backend "fastcomm": `init_process_group("fastcomm")` after `import fastcomm`.

A group owns a communicator for CPU tensors, over shared memory where its ranks share a host, hierarchical where they do not; one for CUDA
tensors, made at the first of them; and torch's own engines, Gloo and NCCL, which do whatever these two do not. Which way a call goes
depends on what all ranks know alike: the kind of collective, its op, the tensor's dtype and device. docs/backend.md lists it. Sub-groups
are groups of their own, and made the same way.
"""

# mypy: disable-error-code="override, assignment, no-any-return"
# torch calls these methods with lists and options; its stubs declare more forms, and do not declare the engines.

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.futures import Future

from fastcomm import rendezvous
from fastcomm.communicator import Communicator, Work
from fastcomm.errors import FastcommError, TimeoutError
from fastcomm.hosted import HostedCommunicator
from fastcomm.shm import ShmCommunicator

NAME = "fastcomm"

# By hash: a ReduceOp's is the number of its op, and comparing two of them takes longer than a small all-reduce.
_OPS = {
    hash(op): name
    for op, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.PRODUCT, "prod"),
    )
}
_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8))
_STRIDED = torch.strided
# Options of calls that give none.
_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_BROADCAST = c10d.BroadcastOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_BARRIER = c10d.BarrierOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_POLL_S = 50e-6
# How long a collective under way may lie before this rank goes on with it by itself: long against a collective, short against a step.
_PROGRESS_S = 1e-3


class ProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed. Made by init_process_group and new_group; ended by destroy_process_group.

    Its collectives raise FastcommError and its children on the fast path, torch's errors on the other, and ValueError or TypeError for
    tensors that do not fit together. Threads may share it; the ranks still have to call the same collectives in the same order.
    """

    def __init__(self, options: Any) -> None:
        """options: torch's _DistributedBackendOptions. Collective. Raises InitError where a rank is missing, and names it."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Ranks may begin again on a store that has outlived a group of the same name: what stood there then is not for this one.
        self._store: Store = rendezvous.own_part(options.store, f"{options.group_id} of {options.global_ranks_in_group}")
        self._timeout: timedelta = options.timeout
        self._lock = threading.Lock()  # communicators take one thread at a time
        self._progress = _Progress(self._lock)
        self._completer = _Completer()
        self._nccl: Communicator | None = None
        self._side_stream: Any = None
        self._cpu = self._connect("cpu", torch.device("cpu"))
        self._register_engines(options)

    def _connect(self, name: str, device: torch.device) -> Communicator:
        store = PrefixStore(name, self._store)
        return rendezvous.connect(store, self.rank(), self.size(), device, self._timeout, "init_process_group")

    def _register_engines(self, options: Any) -> None:
        """Gives the base class what does the rest. The type says which of them is the default; each device has one."""
        types = dist.ProcessGroup.BackendType
        self._engines: dict[str, Any] = {}
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", self._store), self.rank(), self.size(), timeout=self._timeout)
        gloo.options.global_ranks_in_group = options.global_ranks_in_group
        gloo.options.group_name = options.group_id
        gloo._set_sequence_number_for_group()
        self._engines["cpu"] = gloo
        self._register_backend(torch.device("cpu"), types.CUSTOM, gloo)
        self._set_default_backend(types.CUSTOM)
        if dist.is_nccl_available() and torch.cuda.is_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = self._timeout
            nccl_options.global_ranks_in_group = options.global_ranks_in_group
            nccl_options.group_name = options.group_id
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", self._store), self.rank(), self.size(), nccl_options)
            nccl._set_sequence_number_for_group()
            self._engines["cuda"] = nccl
            self._register_backend(torch.device("cuda"), types.NCCL, nccl)

    def getBackendName(self) -> str:  # noqa: N802 (torch asks for it by this name)
        return NAME

    # -- the end --

    def shutdown(self) -> None:
        """Called by destroy_process_group. Not collective: peers that still wait for this rank get PeerLostError."""
        self._stop_threads()
        for comm in self._communicators():
            comm.close()
        super().shutdown()

    def abort(self) -> None:
        """Ends the collectives under way, on the other ranks, too."""
        self._stop_threads()
        for comm in self._communicators():
            comm.abort()
        super().abort()

    def _communicators(self) -> list[Communicator]:
        return [self._cpu] if self._nccl is None else [self._cpu, self._nccl]

    def _stop_threads(self) -> None:
        self._progress.stop()
        self._completer.stop()

    # -- which way --

    def _transport(self, tensor: Tensor) -> Communicator | None:
        """What takes this tensor on the fast path, or None."""
        if tensor.dtype not in _DTYPES or tensor.layout is not _STRIDED:
            return None
        if tensor.is_cpu:
            return self._cpu
        return self._nccl_on(tensor.device) if tensor.is_cuda else None

    def _mover(self, tensor: Tensor) -> Communicator | None:
        """As _transport, for what is moved and not reduced: across hosts Gloo is as good at that, and asks nobody first."""
        return None if tensor.is_cpu and isinstance(self._cpu, HostedCommunicator) else self._transport(tensor)

    def _nccl_on(self, device: torch.device) -> Communicator:
        with self._lock:
            if self._nccl is None:
                device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
                self._nccl = self._connect("cuda", device)
                self._side_stream = torch.cuda.Stream(device)
            return self._nccl

    def _engine(self, device: torch.device) -> Any:
        """Torch's engine for a device, to be called directly. The base class would find the same one, but where it asks Python whether a
        method is overridden it keeps the GIL during the call, and an engine's thread may want that while it holds the engine's lock."""
        engine = self._engines.get(device.type)
        if engine is None:
            raise ValueError(f"the backend {NAME!r} takes tensors on {' and '.join(self._engines)}; got one on {device}")
        return engine

    # -- collectives: the fast path, else torch's engine --

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        tensor = tensors[0]
        comm = self._transport(tensor)
        if comm is None or op is None or len(tensors) != 1:
            return self._engine(tensor.device).allreduce(tensors, opts)
        if _is_async(opts) or not tensor.is_contiguous():
            return self._all_reduce(comm, tensors, op, opts)
        with self._lock:  # the short way of the most frequent call
            comm.all_reduce(tensor, op)
        return _DONE

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE_COALESCED) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        comm = self._transport(tensors[0])
        if comm is None or op is None:
            return self._engine(tensors[0].device).allreduce_coalesced(tensors, opts)
        return self._all_reduce(comm, tensors, op, opts)

    def _all_reduce(self, comm: Communicator, tensors: list[Tensor], op: str, opts: Any) -> c10d.Work:
        flats = [tensor.contiguous() for tensor in tensors]
        calls = [partial(comm.all_reduce, flat, op) for flat in flats]
        return self._run(comm, calls, tensors, list(zip(tensors, flats, strict=True)), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST) -> c10d.Work:
        tensor = tensors[0]
        comm = self._mover(tensor)
        if comm is None or len(tensors) != 1:
            return self._engine(tensor.device).broadcast(tensors, opts)
        flat = tensor.contiguous()
        places = [] if opts.rootRank == self.rank() else [(tensor, flat)]
        return self._run(comm, [partial(comm.broadcast, flat, opts.rootRank)], tensors, places, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALL_GATHER) -> c10d.Work:
        tensor = inputs[0]
        comm = self._mover(tensor)
        if comm is None or len(inputs) != 1 or not _are_alike(outputs[0], tensor):
            return self._engine(tensor.device).allgather(outputs, inputs, opts)
        rows = tensor.new_empty((self.size(), tensor.numel()))
        places = [(place, row.view(place.shape)) for place, row in zip(outputs[0], rows, strict=True)]
        return self._run(comm, [partial(comm.all_gather_single, rows, tensor.contiguous())], outputs, places, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = _ALL_GATHER) -> c10d.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_GATHER) -> c10d.Work:
        comm = self._mover(inputs[0])
        if comm is None:
            engine = self._engine(inputs[0].device)
            return _last_of([engine._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])
        flats = [output.contiguous() for output in outputs]
        calls = [partial(comm.all_gather_single, flat, input.contiguous()) for flat, input in zip(flats, inputs, strict=True)]
        return self._run(comm, calls, outputs, list(zip(outputs, flats, strict=True)), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _REDUCE_SCATTER) -> c10d.Work:
        output = outputs[0]
        if self._transport(output) is None or len(outputs) != 1 or not _are_alike(inputs[0], output):
            return self._engine(output.device).reduce_scatter(outputs, inputs, opts)
        whole = torch.cat([part.detach().reshape(-1) for part in inputs[0]])
        return self._reduce_scatter_base(output, whole, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER) -> c10d.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _REDUCE_SCATTER) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        comm = self._transport(inputs[0])
        if comm is None or op is None:
            engine = self._engine(inputs[0].device)
            return _last_of([engine._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])
        flats = [output.contiguous() for output in outputs]
        calls = [partial(comm.reduce_scatter_single, flat, input.contiguous(), op) for flat, input in zip(flats, inputs, strict=True)]
        return self._run(comm, calls, outputs, list(zip(outputs, flats, strict=True)), opts)

    def barrier(self, opts: Any = _BARRIER) -> c10d.Work:
        device = opts.device or torch.device("cpu")
        comm = self._nccl_on(device) if device.type == "cuda" else self._cpu
        return self._run(comm, [comm.barrier], [], [], opts)

    def _run(
        self,
        comm: Communicator,
        calls: Sequence[Callable[..., Any]],
        value: list[Any],
        places: list[tuple[Tensor, Tensor]],
        opts: Any,
    ) -> c10d.Work:
        """Calls a communicator's collectives. value: what the Work has for its result. places: where the caller wants what, afterwards."""
        if not _is_async(opts):
            with self._lock:
                for call in calls:
                    call()
            _put_all(places)
            return _DONE
        with self._lock:
            works = [call(async_op=True) for call in calls]
            if isinstance(comm, ShmCommunicator):  # the others' move by themselves
                self._progress.watch([work for work in works if not work.is_completed()])
        return _UnderWay(self, comm, works, value, places)

    # -- what torch's engine does alone --

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = _ALL_TO_ALL,
    ) -> c10d.Work:
        return self._engine(input.device).alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_TO_ALL) -> c10d.Work:
        if not inputs[0].is_cpu:
            return self._engine(inputs[0].device).alltoall(outputs, inputs, opts)
        # Gloo knows no lists.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        sizes, input_sizes = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
        output = flat.new_empty(sum(sizes))
        self._engine(flat.device).alltoall_base(output, flat, sizes, input_sizes, opts).wait()
        _put_all([(tensor, part.view(tensor.shape)) for tensor, part in zip(outputs, output.split(sizes), strict=True)])
        return _DONE

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> c10d.Work:
        return self._engine(tensors[0].device).send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> c10d.Work:
        return self._engine(tensors[0].device).recv(tensors, src, tag)

    # torch 2.13's names beside those from before.
    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _is_async(opts: Any) -> bool:
    """Whether the caller wants a Work to wait for. Older torch does not say, and waits for every Work."""
    return getattr(opts, "asyncOp", True)


def _last_of(works: list[c10d.Work]) -> c10d.Work:
    """One Work to wait for, of several of an engine's."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


def _put_all(places: list[tuple[Tensor, Tensor]]) -> None:
    """Brings results to where the caller wants them, where they are not there."""
    for target, source in places:
        if source is not target:
            target.detach().copy_(source)


def _are_alike(tensors: list[Tensor], like: Tensor) -> bool:
    return all(tensor.dtype is like.dtype and tensor.numel() == like.numel() for tensor in tensors)


# ---- work ------------------------------------------------------------------------------------------------------------------------


class _Finished(c10d.Work):
    """A collective that was over when its call returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


_DONE = _Finished()


class _UnderWay(c10d.Work):
    """Collectives under way: one, or several that were coalesced."""

    def __init__(
        self, group: ProcessGroup, comm: Communicator, works: list[Any], value: list[Any], places: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self._group, self._comm, self._works, self._value = group, comm, works, value
        # A hosted communicator has a thread of its own, and takes any number of callers.
        self._is_hosted = isinstance(comm, HostedCommunicator)
        self._turn: AbstractContextManager[object] = nullcontext() if self._is_hosted else group._lock
        self._places: list[tuple[Tensor, Tensor]] = places  # empty when the results are in place

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what ended the collective, or TimeoutError after `timeout`, if that is given and comes before the group's."""
        if timeout is not None and timeout > timedelta(0):
            self._poll(timeout.total_seconds())
        with self._turn:
            for work in self._works:
                work.wait()
            _put_all(self._places)
            self._places = []
        return True

    synchronize = wait

    def _poll(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._group.rank()} waited {seconds:g} s for a collective of the backend {NAME!r}")
            time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        with self._turn:
            return all(work.is_completed() for work in self._works)

    def result(self) -> list[Any]:
        self.wait()
        return self._value

    def get_future(self) -> Future[list[Any]]:
        """Over shared memory it is complete: no core is idle that could do something else meanwhile. Over the network it completes when
        the result is there. On CUDA it is complete on a stream of its own, so that the caller's is not held up before it waits."""
        if self._comm.has_streams:
            return self._future_on_side_stream()
        future: Future[list[Any]] = Future()
        if self._is_hosted:
            self._group._completer.complete(self, future)
        else:
            self.wait()
            future.set_result(self._value)
        return future

    def _future_on_side_stream(self) -> Future[list[Any]]:
        """It holds an event: whoever waits for it is ordered after the result."""
        with torch.cuda.stream(self._group._side_stream):
            self.wait()
            future: Future[list[Any]] = Future(devices=[self._comm.device])
            future.set_result(self._value)
        return future


class _Progress:
    """Goes on with collectives that nobody waits for yet, from a thread of its own: peers that do wait for them may not depend on what
    this rank's caller does in between. Idle, and without a thread, as long as callers are quick."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._works: list[Work] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_over = False

    def watch(self, works: list[Work]) -> None:
        """Called with the lock held."""
        if not works:
            return
        self._works += works
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastcomm-progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        self._is_over = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait()
            time.sleep(_PROGRESS_S)
            with self._lock:
                self._works = [work for work in self._works if not _is_over(work)]
                if not self._works:
                    self._wake.clear()


class _Completer:
    """Completes futures of collectives that move by themselves, in the order of their calls, from a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[_UnderWay, Future[list[Any]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, work: _UnderWay, future: Future[list[Any]]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastcomm-futures", daemon=True)
            self._thread.start()
        self._queue.put((work, future))

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        for work, future in iter(self._queue.get, None):
            try:
                future.set_result(work.result())
            except FastcommError as error:
                future.set_exception(error)  # type: ignore[arg-type]
            del work, future


def _is_over(work: Work) -> bool:
    try:
        return work.is_completed()
    except FastcommError:  # whoever waits for it hears of it
        return True


def _create(options: Any, backend_options: Any) -> ProcessGroup:
    return ProcessGroup(options)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
