"""The torch.distributed backend "fastcomm": `init_process_group("fastcomm")` after `import fastcomm`.

A group owns a communicator for CPU tensors, where its ranks share a host; one for CUDA tensors, made at the first of them; and torch's
own engines, Gloo and NCCL, which do whatever these two do not. Which way a call goes depends on what all ranks know alike: the kind of
collective, its op, the tensor's dtype and device. docs/backend.md lists it. Sub-groups are groups of their own, and made the same way.
"""

# mypy: disable-error-code="override, assignment, no-any-return"
# torch calls these methods with lists and options; its stubs declare more forms, and do not declare the engines.

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
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
        self._store: Store = rendezvous._numbered(options.store, f"{options.group_id} of {options.global_ranks_in_group}")
        self._timeout: timedelta = options.timeout
        self._lock = threading.Lock()  # communicators take one thread at a time
        self._progress = _Progress(self._lock)
        self._nccl: Communicator | None = None
        self._side_stream: Any = None
        self._shm = self._meet_on_host()
        self._register_engines(options)

    def _meet(self, purpose: str) -> rendezvous._StoreBootstrap:
        return rendezvous._StoreBootstrap(PrefixStore(purpose, self._store), self.rank(), self.size(), self._timeout)

    def _meet_on_host(self) -> Communicator | None:
        """The communicator for CPU tensors. None, on all ranks, where they run on several hosts: this is the place for a transport that
        spans them."""
        bootstrap = self._meet("shm")
        try:
            hosts = bootstrap.exchange(rendezvous._host_identity())
            if len(set(hosts)) > 1:
                return None
            return ShmCommunicator(self.rank(), self.size(), rendezvous._local_rank(self.rank()), bootstrap, self._timeout)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the store may be what failed
                bootstrap.fail(f"rank {self.rank()} failed in init_process_group: {error}")
            raise

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
        self._progress.stop()
        for comm in self._communicators():
            comm.close()
        super().shutdown()

    def abort(self) -> None:
        """Ends the collectives under way, on the other ranks, too."""
        self._progress.stop()
        for comm in self._communicators():
            comm.abort()
        super().abort()

    def _communicators(self) -> list[Communicator]:
        return [comm for comm in (self._shm, self._nccl) if comm is not None]

    # -- which way --

    def _transport(self, tensor: Tensor) -> Communicator | None:
        """What takes this tensor on the fast path, or None."""
        if tensor.dtype not in _DTYPES or tensor.layout is not _STRIDED:
            return None
        if tensor.is_cpu:
            return self._shm
        return self._nccl_on(tensor.device) if tensor.is_cuda else None

    def _nccl_on(self, device: torch.device) -> Communicator:
        with self._lock:
            if self._nccl is None:
                device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
                self._nccl = rendezvous._connect(self._meet("cuda"), self._timeout, device)
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
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if opts.asyncOp:
            return self._start(comm, tensor, flat, op)
        with self._lock:
            comm.all_reduce(flat, op)
        if flat is not tensor:
            _put(tensor, flat)
        return _DONE

    def _start(self, comm: Communicator, tensor: Tensor, flat: Tensor, op: str) -> c10d.Work:
        with self._lock:
            work = comm.all_reduce(flat, op, async_op=True)
            assert work is not None
            if not comm.has_streams and not work.is_completed():
                self._progress.watch(work)
        return _AllReduce(self, work, tensor, flat)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE_COALESCED) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        comm = self._transport(tensors[0])
        if comm is None or op is None:
            return self._engine(tensors[0].device).allreduce_coalesced(tensors, opts)
        for tensor in tensors:
            self._reduce(comm, tensor, op)
        return _finished(tensors, opts)

    def _reduce(self, comm: Communicator, tensor: Tensor, op: str) -> None:
        flat = tensor.contiguous()
        with self._lock:
            comm.all_reduce(flat, op)
        _put(tensor, flat)

    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST) -> c10d.Work:
        tensor = tensors[0]
        comm = self._transport(tensor)
        if comm is None or len(tensors) != 1:
            return self._engine(tensor.device).broadcast(tensors, opts)
        flat = tensor.contiguous()
        with self._lock:
            comm.broadcast(flat, opts.rootRank)
        if opts.rootRank != self.rank():
            _put(tensor, flat)
        return _finished(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALL_GATHER) -> c10d.Work:
        tensor = inputs[0]
        comm = self._transport(tensor)
        if comm is None or len(inputs) != 1 or not _are_alike(outputs[0], tensor):
            return self._engine(tensor.device).allgather(outputs, inputs, opts)
        rows = tensor.new_empty((self.size(), tensor.numel()))
        with self._lock:
            comm.all_gather_single(rows, tensor.contiguous())
        for place, row in zip(outputs[0], rows, strict=True):
            _put(place, row.view(place.shape))
        return _finished(outputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = _ALL_GATHER) -> c10d.Work:
        comm = self._transport(input)
        if comm is None:
            return self._engine(input.device)._allgather_base(output, input, opts)
        self._gather(comm, output, input)
        return _finished([output], opts)

    def _gather(self, comm: Communicator, output: Tensor, input: Tensor) -> None:
        flat = output.contiguous()
        with self._lock:
            comm.all_gather_single(flat, input.contiguous())
        _put(output, flat)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_GATHER) -> c10d.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input, opts).wait()
        return _finished(outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _REDUCE_SCATTER) -> c10d.Work:
        output = outputs[0]
        op = _OPS.get(hash(opts.reduceOp))
        comm = self._transport(output)
        if comm is None or op is None or len(outputs) != 1 or not _are_alike(inputs[0], output):
            return self._engine(output.device).reduce_scatter(outputs, inputs, opts)
        self._scatter(comm, output, torch.cat([part.detach().reshape(-1) for part in inputs[0]]), op)
        return _finished(outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        comm = self._transport(input)
        if comm is None or op is None:
            return self._engine(input.device)._reduce_scatter_base(output, input, opts)
        self._scatter(comm, output, input, op)
        return _finished([output], opts)

    def _scatter(self, comm: Communicator, output: Tensor, input: Tensor, op: str) -> None:
        flat = output.contiguous()
        with self._lock:
            comm.reduce_scatter_single(flat, input.contiguous(), op)
        _put(output, flat)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = _REDUCE_SCATTER,
    ) -> c10d.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input, opts).wait()
        return _finished(outputs, opts)

    def barrier(self, opts: Any = _BARRIER) -> c10d.Work:
        device = opts.device or torch.device("cpu")
        comm = self._nccl_on(device) if device.type == "cuda" else self._shm
        if comm is None:
            return self._engine(device).barrier(opts)
        with self._lock:
            comm.barrier()
        return _DONE

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


def _put(target: Tensor, source: Tensor) -> None:
    """Brings a result to where the caller wants it, if it is not there."""
    if source is not target:
        target.detach().copy_(source)


def _are_alike(tensors: list[Tensor], like: Tensor) -> bool:
    return all(tensor.dtype is like.dtype and tensor.numel() == like.numel() for tensor in tensors)


# ---- work ------------------------------------------------------------------------------------------------------------------------


class _Finished(c10d.Work):
    """A collective that was over when its call returned."""

    def __init__(self, value: list[Any]) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._value

    def get_future(self) -> Future[list[Any]]:
        tensor = self._value[0] if self._value else None
        return _completed(self._value, tensor[0] if isinstance(tensor, list) else tensor)


_DONE = _Finished([])


def _finished(value: list[Any], opts: Any) -> c10d.Work:
    return _Finished(value) if opts.asyncOp else _DONE


def _completed(value: list[Any], tensor: Tensor | None) -> Future[list[Any]]:
    """On CUDA the future holds an event of the current stream: whoever waits for it is ordered after what lies there."""
    future: Future[list[Any]] = Future(devices=[tensor.device] if tensor is not None and tensor.is_cuda else None)
    future.set_result(value)
    return future


class _AllReduce(c10d.Work):
    """An all-reduce under way."""

    def __init__(self, group: ProcessGroup, work: Work, tensor: Tensor, flat: Tensor) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._tensor = tensor
        self._flat: Tensor | None = flat  # what is reduced; None when the result is in place

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what ended the collective, or TimeoutError after `timeout`, if that is given and comes before the group's."""
        if timeout is not None and timeout > timedelta(0):
            self._poll(timeout.total_seconds())
        with self._group._lock:
            self._work.wait()
        if self._flat is not None:
            _put(self._tensor, self._flat)
            self._flat = None
        return True

    synchronize = wait

    def _poll(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._group.rank()} waited {seconds:g} s for an all_reduce of {self._tensor.numel()} elements")
            time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        with self._group._lock:
            return self._work.is_completed()

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._tensor]

    def get_future(self) -> Future[list[Tensor]]:
        """Complete on the CPU. On CUDA it is complete on a stream of its own, so that the caller's is not held up before it waits."""
        if not self._tensor.is_cuda:
            self.wait()
            return _completed([self._tensor], None)
        with torch.cuda.stream(self._group._side_stream):
            self.wait()
            return _completed([self._tensor], self._tensor)


class _Progress:
    """Goes on with collectives that nobody waits for yet, from a thread of its own: peers that do wait for them may not depend on what
    this rank's caller does in between. Idle, and without a thread, as long as callers are quick."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._works: list[Work] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_over = False

    def watch(self, work: Work) -> None:
        """Called with the lock held."""
        self._works.append(work)
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


def _is_over(work: Work) -> bool:
    try:
        return work.is_completed()
    except FastcommError:  # whoever waits for it hears of it
        return True


def _create(options: Any, backend_options: Any) -> ProcessGroup:
    return ProcessGroup(options)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
