"""The torch.distributed backend "fastcomm": `init_process_group("fastcomm")` after `import
fastcomm`, or without where fastcomm is installed (fastcomm_autoload.py).

A group owns a communicator for CPU tensors, over shared memory where its ranks share a host,
hierarchical where they do not; one for CUDA tensors, made at the first of them; and torch's own
engines, Gloo and NCCL, which do whatever these two do not. Which way a call goes depends only on
what is equal on all ranks: the kind of collective, its op, the tensor's dtype and device; see
docs/backend.md. Sub-groups are groups of their own, and made the same way.
"""

# mypy: disable-error-code="override, assignment, no-any-return"
# torch calls these methods with lists and options; its stubs declare more forms, and do not declare
# the engines.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore, ReduceOp  # type: ignore[attr-defined]

from fastcomm.comm.autograd_stack import caller_is_called_by_autograd
from fastcomm.comm.collective import CPU_DTYPES, REDUCTIONS, refuse_without_memory
from fastcomm.comm.who import Process, in_words
from fastcomm.comm.words import DIED
from fastcomm.errors import InitError, PeerLostError
from fastcomm.launching.bootstrap import (
    Caller,
    StoreBootstrap,
    count_as_finished,
    enter_part,
    own_connection,
    said_of,
)
from fastcomm.launching.rendezvous import connect, warn_of_threads
from fastcomm.launching.timed_store import TimedStore
from fastcomm.torch_backend.ddp_buckets import lend_memory_to_ddp
from fastcomm.torch_backend.gloo_engine import GlooEngine, ended
from fastcomm.torch_backend.work import (
    Finished,
    SharedCommunicator,
    hold_works_of_join,
    is_async,
    put_all,
)

NAME = "fastcomm"
_INIT = Caller("init_process_group")
_NEW_GROUP = Caller(
    "new_group", "do all ranks call new_group for the same groups, in the same order?"
)

# By hash: the hash of a ReduceOp is the number of its op, and comparing two ReduceOps takes longer
# than a small all-reduce.
_OPS = {hash(getattr(ReduceOp, one.of_torch)): one.name for one in REDUCTIONS}
_DTYPES = frozenset(CPU_DTYPES)
_STRIDED = torch.strided
# Options of calls that give none.
_ALL_REDUCE = c10d.AllreduceOptions()
_ALL_REDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_BROADCAST = c10d.BroadcastOptions()
_ALL_GATHER = c10d.AllgatherOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_BARRIER = c10d.BarrierOptions()
_ALL_TO_ALL = c10d.AllToAllOptions()
_DONE = Finished([])


def _left_to_engine(name: str, *, tensors_at: int) -> Callable[..., c10d.Work]:
    """A call of torch's engine. tensors_at: of the argument whose tensors say on which device."""

    def call(group: ProcessGroup, *arguments: Any) -> c10d.Work:
        return group._by_engine(name, arguments[tensors_at][0], *arguments)

    return call


class ProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed. Made by init_process_group and new_group; ended by
    destroy_process_group.

    Its collectives raise FastcommError and its children on the fast path, torch's errors on the
    other, and ValueError or TypeError for tensors that do not fit together. Threads may share it;
    the ranks still have to call the same collectives in the same order.
    """

    def __init__(self, options: Any) -> None:
        """options: torch's _DistributedBackendOptions. Collective. Raises InitError where a rank is
        missing, and names it; on a rank that asks for a group to be reconfigured later, too.
        """
        if getattr(options, "enable_reconfigure", False):  # not before torch 2.15
            raise InitError(
                f"a group of the backend {NAME!r} cannot be reconfigured: leave enable_reconfigure "
                "out; when ranks are lost, destroy_process_group() and init_process_group() make a "
                "new one"
            )
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Ranks may begin again on a store that has outlived a group of the same name: its keys are
        # not for this group.
        members = f"group {options.group_id} of {options.global_ranks_in_group}"
        with said_of(self.rank(), members):
            timed = TimedStore(options.store, options.timeout)
            prefix, pass_on = enter_part(timed, self.rank(), members)
        self._store = PrefixStore(prefix, options.store)
        self._timeout: timedelta = options.timeout
        # Rank r of this group is rank members[r] of all.
        self._members: list[int] = options.global_ranks_in_group or list(range(self.size()))
        self._nccl_lock = threading.Lock()
        self._nccl: SharedCommunicator | None = None
        caller = _INIT if dist.group.WORLD is None else _NEW_GROUP
        self._cpu, self._peers = self._connect("cpu", torch.device("cpu"), caller)
        try:
            with said_of(self.rank(), members):
                pass_on()
            count_as_finished(options.store)
            self._register_engines(options)
            # Gloo connects one side first: no rank may end the group while another connects.
            self._cpu.comm.barrier()
        except Exception:
            self._cpu.close()  # else the others would wait for this rank
            raise
        hold_works_of_join()
        lend_memory_to_ddp(self, self._cpu.empty)

    def _connect(
        self, name: str, device: torch.device, caller: Caller
    ) -> tuple[SharedCommunicator, list[Process]]:
        """Makes a communicator. Also returns the processes of the other ranks on this host."""
        world = dist.group.WORLD
        look = partial(world.look_for, self._members) if isinstance(world, ProcessGroup) else None
        with said_of(self._members[self.rank()], "this communicator"):
            store = own_connection(PrefixStore(name, self._store), self._timeout)
            bootstrap = StoreBootstrap(
                *(store, self.rank(), self.size(), self._timeout),
                caller=caller,
                names=self._members,
                look=look,
            )
        comm, neighbours = connect(
            bootstrap, "auto", device=device, timeout=self._timeout, is_own_store=False
        )
        warn_of_threads(comm, neighbours)
        peers = [comm.processes[rank] for rank in neighbours if rank != self.rank()]
        return SharedCommunicator(comm), peers

    def _register_engines(self, options: Any) -> None:
        """Gives the base class the engines for the other calls, one per device."""
        types = dist.ProcessGroup.BackendType
        self._nccl_engine: Any = None
        gloo = dist.ProcessGroupGloo(
            PrefixStore("gloo", self._store), self.rank(), self.size(), timeout=self._timeout
        )
        if hasattr(gloo.options, "global_ranks_in_group"):  # not in torch 2.7
            gloo.options.global_ranks_in_group = options.global_ranks_in_group
            gloo.options.group_name = options.group_id
        self._gloo = GlooEngine(gloo, self._peers, self._members)
        self._register_backend(torch.device("cpu"), types.CUSTOM, gloo)
        self._set_default_backend(types.CUSTOM)
        if dist.is_nccl_available() and torch.cuda.is_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = self._timeout
            nccl_options.global_ranks_in_group = options.global_ranks_in_group
            nccl_options.group_name = options.group_id
            nccl = dist.ProcessGroupNCCL(
                PrefixStore("nccl", self._store), self.rank(), self.size(), nccl_options
            )
            self._nccl_engine = nccl
            self._register_backend(torch.device("cuda"), types.NCCL, nccl)

    def getBackendName(self) -> str:  # noqa: N802 (torch asks for it by this name)
        return NAME

    # -- the end --

    def shutdown(self) -> None:
        """For destroy_process_group. Peers that still wait for this rank get PeerLostError."""
        for shared in filter(None, (self._cpu, self._nccl)):
            shared.close()
        super().shutdown()

    def abort(self) -> None:
        """Ends the collectives under way, on the other ranks, too."""
        for shared in filter(None, (self._cpu, self._nccl)):
            shared.abort()
        super().abort()

    # Torch 2.15 would reconfigure Gloo's engine, and leave the communicators as they are.
    supports_reconfigure = False

    # -- which way --

    def _transport(self, tensor: Tensor) -> SharedCommunicator | None:
        """The communicator that takes this tensor on the fast path, or None."""
        if tensor.dtype not in _DTYPES or tensor.layout is not _STRIDED:
            return None
        if tensor.is_cpu:
            return self._cpu
        return self._nccl_on(tensor.device) if tensor.is_cuda else None

    def _mover(self, tensor: Tensor) -> SharedCommunicator | None:
        """For calls that only move: across hosts Gloo is as good, and needs no announcement."""
        return None if tensor.is_cpu and self._cpu.comm.is_threadsafe else self._transport(tensor)

    def _nccl_on(self, device: torch.device) -> SharedCommunicator:
        with self._nccl_lock:
            if self._nccl is None:
                caller = Caller(
                    f"the first collective on {device}",
                    "do all ranks call the same collectives on CUDA tensors?",
                )
                self._nccl, _ = self._connect("cuda", device, caller)
            return self._nccl

    # Calls torch's engines directly. The base class would find the same ones. But it asks Python
    # whether a method is overridden, and then keeps the GIL during the call; an engine's thread may
    # want the GIL while it holds the engine's lock.

    def _by_engine(self, name: str, tensor: Tensor, *arguments: Any) -> c10d.Work:
        """Calls `name` of torch's engine for the device of `tensor`. It writes to the first one."""
        if tensor.is_cpu:
            refuse_without_memory(tensor)
            return self._gloo.call(name, *arguments)
        if tensor.is_cuda and self._nccl_engine is not None:
            return getattr(self._nccl_engine, name)(*arguments)
        devices = "cpu" if self._nccl_engine is None else "cpu and cuda"
        message = f"the backend {NAME!r} takes tensors on {devices}; got one on {tensor.device}"
        raise ValueError(message)

    # -- what the group knows of itself --

    def look_for(self, ranks: list[int]) -> None:
        comm = self._cpu.comm
        known = getattr(comm.failure, "ranks", ())
        here = ended(one for one in self._peers if one.rank in ranks)
        lost = sorted({*here, *(comm.processes[rank] for rank in ranks if rank in known)})
        if lost:
            raise PeerLostError(f"{in_words(lost)} {DIED}", [one.rank for one in lost])

    def _set_sequence_number_for_group(self) -> None:
        """torch calls it for every group, and warns from 2.15 on of one that has it not."""

    # -- collectives: the fast path, else torch's engine --

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALL_REDUCE) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        tensor = tensors[0]
        shared = self._transport(tensor)
        if shared is None or op is None or len(tensors) != 1:
            return self._by_engine("allreduce", tensor, tensors, opts)
        # DDP waits at once: what moves only inside calls may as well move in this one.
        by_ddp = not shared.comm.progresses_itself and caller_is_called_by_autograd()
        if (is_async(opts) and not by_ddp) or not tensor.is_contiguous():
            return self._all_reduce(shared, tensors, op, opts)
        with shared.turn:  # the fast path of the most frequent calls
            shared.comm.all_reduce(tensor, op)
        return Finished(tensors) if is_async(opts) else _DONE

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: Any = _ALL_REDUCE_COALESCED
    ) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        shared = _common(map(self._transport, tensors))
        if shared is None or op is None:
            return self._by_engine("allreduce_coalesced", tensors[0], tensors, opts)
        return self._all_reduce(shared, tensors, op, opts)

    def _all_reduce(
        self, shared: SharedCommunicator, tensors: list[Tensor], op: str, opts: Any
    ) -> c10d.Work:
        """Makes one call for each dtype: the ranks have the same, in the same order."""
        flats = [tensor.contiguous() for tensor in tensors]
        calls = [partial(shared.comm.all_reduce, flats[0], op)]
        if len(flats) > 1:
            alike: dict[torch.dtype, list[Tensor]] = {}
            for flat in flats:
                alike.setdefault(flat.dtype, []).append(flat)
            calls = [partial(shared.comm.all_reduce_coalesced, some, op) for some in alike.values()]
        return shared.run(calls, tensors, list(zip(tensors, flats, strict=True)), is_async(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST) -> c10d.Work:
        tensor = tensors[0]
        shared = self._mover(tensor)
        if shared is None or len(tensors) != 1:
            return self._by_engine("broadcast", tensor, tensors, opts)
        flat = tensor.contiguous()
        places = [] if opts.rootRank == self.rank() else [(tensor, flat)]
        return shared.run(
            [partial(shared.comm.broadcast, flat, opts.rootRank)], tensors, places, is_async(opts)
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALL_GATHER
    ) -> c10d.Work:
        tensor = inputs[0]
        shared = self._mover(tensor)
        if shared is None or len(inputs) != 1 or not self._are_alike(outputs[0], tensor):
            return self._by_engine("allgather", tensor, outputs, inputs, opts)
        rows = tensor.new_empty((self.size(), tensor.numel()))
        places = [
            (place, row.view(place.shape)) for place, row in zip(outputs[0], rows, strict=True)
        ]
        return shared.run(
            [partial(shared.comm.all_gather_single, rows, tensor.contiguous())],
            outputs,
            places,
            is_async(opts),
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = _ALL_GATHER) -> c10d.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_GATHER
    ) -> c10d.Work:
        shared = _common(map(self._mover, inputs))
        if shared is None:
            pairs = zip(outputs, inputs, strict=True)
            works = [self._by_engine("_allgather_base", inp, out, inp, opts) for out, inp in pairs]
            return _last_of(works)
        return self._run_each(shared, shared.comm.all_gather_single, outputs, inputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> c10d.Work:
        output, parts = outputs[0], inputs[0]
        are_alike = len(outputs) == 1 and self._are_alike(parts, output)
        if are_alike and hash(opts.reduceOp) in _OPS and self._transport(output) is not None:
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            return self._reduce_scatter_base(output, whole, opts)
        if output.is_cpu:
            return self._gloo.reduce_scatter(output, parts, opts)
        return self._by_engine("reduce_scatter", output, outputs, inputs, opts)

    def _reduce_scatter_base(
        self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER
    ) -> c10d.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _REDUCE_SCATTER
    ) -> c10d.Work:
        op = _OPS.get(hash(opts.reduceOp))
        shared = _common(map(self._transport, inputs))
        if shared is None or op is None:
            return _last_of(
                [
                    self._gloo.reduce_scatter(out, list(inp.reshape(self.size(), -1)), opts)
                    if inp.is_cpu
                    else self._by_engine("_reduce_scatter_base", inp, out, inp, opts)
                    for out, inp in zip(outputs, inputs, strict=True)
                ]
            )
        return self._run_each(shared, shared.comm.reduce_scatter_single, outputs, inputs, opts, op)

    def _run_each(
        self,
        shared: SharedCommunicator,
        call: Callable[..., Any],
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        *op: str,
    ) -> c10d.Work:
        """Makes the communicator's call for each output and its input."""
        flats = [output.contiguous() for output in outputs]
        calls = [
            partial(call, flat, inp.contiguous(), *op)
            for flat, inp in zip(flats, inputs, strict=True)
        ]
        return shared.run(calls, outputs, list(zip(outputs, flats, strict=True)), is_async(opts))

    def barrier(self, opts: Any = _BARRIER) -> c10d.Work:
        device = opts.device or torch.device("cpu")
        shared = self._nccl_on(device) if device.type == "cuda" else self._cpu
        return shared.run([shared.comm.barrier], [], [], is_async(opts))

    def _are_alike(self, tensors: list[Tensor], like: Tensor) -> bool:
        """Whether the tensors are equal parts. Raises ValueError unless each rank has one."""
        if len(tensors) != self.size():
            raise ValueError(f"a list of {len(tensors)} tensors for {self.size()} ranks")
        kinds = {(one.dtype, one.layout, one.device, one.numel()) for one in (like, *tensors)}
        return len(kinds) == 1

    # -- what torch's engine does alone --

    reduce = _left_to_engine("reduce", tensors_at=0)
    gather = _left_to_engine("gather", tensors_at=1)
    scatter = _left_to_engine("scatter", tensors_at=0)
    allgather_coalesced = _left_to_engine("allgather_coalesced", tensors_at=1)
    send = _left_to_engine("send", tensors_at=0)
    recv = _left_to_engine("recv", tensors_at=0)
    recv_anysource = _left_to_engine("recv_anysource", tensors_at=0)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = _ALL_TO_ALL,
    ) -> c10d.Work:
        sizes = output_split_sizes, input_split_sizes
        return self._by_engine("alltoall_base", input, output, input, *sizes, opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_TO_ALL
    ) -> c10d.Work:
        if not inputs[0].is_cpu:
            return self._by_engine("alltoall", inputs[0], outputs, inputs, opts)
        # Gloo does not take lists.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        output = flat.new_empty(sum(sizes))
        input_sizes = [tensor.numel() for tensor in inputs]
        self.all_to_all_single(output, flat, sizes, input_sizes, opts).wait()
        parts = zip(outputs, output.split(sizes), strict=True)
        put_all([(tensor, part.view(tensor.shape)) for tensor, part in parts])
        return Finished(outputs)

    # torch 2.13's names, beside the older ones.
    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _common(ways: Iterable[SharedCommunicator | None]) -> SharedCommunicator | None:
    """The communicator that takes all tensors of a call, or None."""
    different = set(ways)
    return different.pop() if len(different) == 1 else None


def _last_of(works: list[c10d.Work]) -> c10d.Work:
    """Waits for all of an engine's Works but the last, and returns that one."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


dist.Backend.register_backend(
    NAME, lambda options, _: ProcessGroup(options), extended_api=True, devices=["cpu", "cuda"]
)
