"""init() and connect(): bring the ranks together and pick the transport. They own nothing once the
transport is made.

How ranks meet is in bootstrap.py.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastcomm.comm.communicator import Communicator
from fastcomm.comm.forms import Form
from fastcomm.comm.transport import Transport
from fastcomm.errors import InitError
from fastcomm.launching import launchers
from fastcomm.launching.bootstrap import StoreBootstrap, TakenIn, meet, meet_in_group
from fastcomm.launching.bootstrap import host_identity as _host_identity
from fastcomm.launching.membership import Fixed, arrive
from fastcomm.postmortem.dump import watch
from fastcomm.postmortem.whereabouts import answer_questions
from fastcomm.transports.group.communicator import GroupCommunicator, HierarchicalCommunicator
from fastcomm.transports.group.exchange import UNLIMITED, Exchange
from fastcomm.transports.nccl.communicator import NcclCommunicator
from fastcomm.transports.shm.communicator import ShmCommunicator
from fastcomm.transports.shm.ring import MAX_RANKS

BACKENDS = ("auto", "shm", "nccl", "group", "hierarchical")


def init(
    backend: str = "auto",
    *,
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = timedelta(minutes=5),
    group: dist.ProcessGroup | None = None,
) -> Communicator:
    """Connects `world_size` ranks and returns this rank's communicator. Every rank must call it,
    with the same arguments.

    backend: "shm" (shared memory, on one host), "hierarchical" (shared memory in each host, Gloo
        between hosts), "nccl" (a CUDA device for each rank), "group" (Gloo), or "auto": nccl on a
        CUDA device, otherwise shm if all ranks share a host and hierarchical if not, and group if a
        host has more than 64 ranks. Gloo uses the network interface in GLOO_SOCKET_IFNAME.
    init_method: where the ranks meet. "env://": what torchrun, mpirun, mpiexec or srun has put into
        the environment. Otherwise "tcp://host:port" or "file:///path", with rank= and world_size=.
    rank, world_size: not needed under a launcher. world_size=1 alone makes a communicator of one
        rank without a meeting point, to debug a script.
    group: a torch.distributed group, whose ranks meet through it. init_method, rank and world_size
        are not needed then.
    device: where the gradients are. None: this rank's CUDA device for "nccl", and for "auto" if
        there is one; otherwise the CPU. The CUDA device is the one with this rank's number on its
        host (LOCAL_RANK under torchrun), or the only one that this process sees. It becomes torch's
        current device.
    timeout: a timedelta; how long to wait for missing ranks here, and later in every collective.

    Raises InitError, on every rank, if the ranks cannot be connected: it names the rank and says
    what to do. Raises NcclError if NCCL fails on this rank, ValueError or TypeError for bad
    arguments.
    """
    _check_arguments(backend, init_method, timeout, group)
    started_as = (rank, world_size) if group is None else (dist.get_rank(), dist.get_world_size())
    place = _choose_device(backend, device, *started_as)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    connect_here = functools.partial(connect, device=place, timeout=timeout)
    if group is not None:
        meeting = meet_in_group(group, timeout)
        comm, neighbours = connect_here(meeting, backend, is_own_store=False)
        comm.membership = Fixed(meeting, connect_here, backend, neighbours)
    else:
        bootstrap = meet(init_method, rank, world_size, timeout)
        comm = arrive(bootstrap, connect_here, backend, timeout)
    warn_of_threads(comm, comm.membership.neighbours)
    return comm


def connect(
    bootstrap: StoreBootstrap,
    backend: str,
    *,
    device: torch.device,
    timeout: timedelta,
    is_own_store: bool = True,
) -> tuple[Transport, list[int]]:
    """Makes the communicator of ranks that have met. Returns the ranks of this host, too.

    is_own_store: the store where they have met is not that of a torch.distributed group.
    """
    watch()  # from now on it tells other ranks, and whoever asks for a dump, where it stands
    answer_questions()
    try:
        neighbours = _neighbours(bootstrap, backend, device)
        comm = _communicator(bootstrap, neighbours, device, timeout)
        if is_own_store:
            bootstrap.finish()
        # the store may live in one of the ranks: it must not go before all have read from it
        comm.barrier()
        return comm, neighbours.ranks
    except TakenIn:  # no failure
        raise
    except BaseException as error:
        bootstrap.fail_by(error)
        raise


def _choose_device(
    backend: str, device: torch.device | str | None, rank: int | None, world_size: int | None
) -> torch.device:
    """The device of the gradients, with an index if it is a CUDA device."""
    if device is None:
        device = "cpu"
        if backend in ("auto", "nccl") and torch.cuda.is_available():
            # Some launchers show each rank its own device alone.
            is_only = torch.cuda.device_count() == 1
            index = 0 if is_only else launchers.local_rank(rank, world_size)
            device = "cuda" if index is None else f"cuda:{index}"
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InitError(
            f"device {place}: torch finds no CUDA device (is it a CUDA build, is there a driver?)"
        )
    if place.type not in ("cpu", "cuda") or (
        backend not in ("auto", "nccl") and place.type != "cpu"
    ):
        raise InitError(
            f"no transport {backend!r} for device {place}: fastcomm reduces on the CPU (shm, "
            "hierarchical, group) and on CUDA devices (nccl)"
        )
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _check_arguments(backend: str, init_method: object, timeout: object, group: object) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if not isinstance(init_method, str):
        raise TypeError(f"init_method must be a str, such as 'env://'; got {init_method!r}")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta(seconds=...); got {timeout!r}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed group that this rank is in; got {group!r} (of "
            'a DeviceMesh, pass mesh["name"].get_group())'
        )


class _Neighbours(NamedTuple):
    backend: str  # that all ranks use: never "auto"
    ranks: list[int]  # of this rank's host
    local_rank: int  # this rank's number among them
    hosts: list[list[int]]  # the ranks of every host


def _communicator(
    bootstrap: StoreBootstrap, neighbours: _Neighbours, device: torch.device, timeout: timedelta
) -> Transport:
    """Makes the communicator, once the ranks have met."""
    place = bootstrap.rank, bootstrap.world_size, neighbours.local_rank
    if neighbours.backend == "nccl":
        return NcclCommunicator(*place, bootstrap, timeout, device, neighbours.ranks)
    if neighbours.backend == "shm":
        away = [r for r in range(bootstrap.world_size) if r not in neighbours.ranks]
        if away:
            raise InitError(
                f"rank {bootstrap.rank} shares no memory with ranks {away}: they run on another "
                "host (or in another container). The shm transport needs all ranks on one host; "
                "across hosts use 'hierarchical', or 'auto'"
            )
        return ShmCommunicator(*place, bootstrap, timeout)
    # Also where ranks meet in a user's group: what else the user does with that is not disturbed.
    ranks = neighbours.ranks
    if neighbours.backend == "group" or max(map(len, neighbours.hosts)) == 1:
        exchange = Exchange(bootstrap.rank, [[rank] for rank in range(bootstrap.world_size)])
    else:
        here = ranks.index(bootstrap.rank), len(ranks), neighbours.local_rank
        of_host = _OneHost(bootstrap, ranks)
        shm = ShmCommunicator(*here, of_host, UNLIMITED)
        exchange = Exchange(bootstrap.rank, neighbours.hosts, shm)
    of = GroupCommunicator if neighbours.backend == "group" else HierarchicalCommunicator
    return of(*place, bootstrap, timeout, ranks, exchange)


class _OneHost:
    """A bootstrap for the ranks of one host, over the bootstrap of all ranks."""

    def __init__(self, bootstrap: StoreBootstrap, ranks: Sequence[int]) -> None:
        self._bootstrap, self._ranks = bootstrap, ranks

    def exchange(self, value: Any, form: Form) -> list[Any]:
        values = self._bootstrap.exchange(value, form)
        return [values[rank] for rank in self._ranks]


def warn_of_threads(comm: Transport, ranks: Sequence[int]) -> None:
    """By itself torch has as many threads as its process has cores. Ranks that share their cores
    then take about twice as long. torchrun and Ray set OMP_NUM_THREADS; srun and mpirun may give
    each rank cores of its own, which then are not too few.

    ranks: of this host. The first of them warns.
    """
    n_threads = torch.get_num_threads()
    if comm.device.type != "cpu" or comm.rank != ranks[0]:
        return
    if n_threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    n_cores = len(set[int]().union(*(_cores_of(comm.processes[rank].pid) for rank in ranks)))
    if len(ranks) * n_threads > n_cores:
        warnings.warn(
            f"{len(ranks)} ranks have {n_threads} threads each, and {n_cores} cores in all: set "
            f"OMP_NUM_THREADS={max(1, n_cores // len(ranks))} in the environment of every rank",
            RuntimeWarning,
            stacklevel=3,
        )


def _cores_of(pid: int) -> set[int]:
    """The cores a process may run on."""
    try:
        return os.sched_getaffinity(pid)
    except OSError:  # it has ended, or FASTCOMM_HOST_ID says that it runs here, and it does not
        return os.sched_getaffinity(0)


def _refuse_different(backends: Sequence[str], names: Sequence[int]) -> None:
    """Raises InitError, on all ranks, where they ask for different ones."""
    by_backend: dict[str, list[int]] = {}
    for name, backend in zip(names, backends, strict=True):
        by_backend.setdefault(backend, []).append(name)
    if len(by_backend) > 1:
        each = "; ".join(
            f"rank {', '.join(map(str, ranks))}: {backend}" for backend, ranks in by_backend.items()
        )
        raise InitError(
            f"the ranks ask for different backends ({each}): pass every rank the same backend, and "
            "devices of one kind"
        )


def _neighbours(bootstrap: StoreBootstrap, backend: str, place: torch.device) -> _Neighbours:
    """Finds out which ranks run on which host, and which backend they use: the ranks exchange their
    hosts and which backend they ask for. Raises InitError where they ask for different ones.
    """
    asked = "nccl" if place.type == "cuda" else backend
    told = bootstrap.exchange([_host_identity(), asked], (str, str))
    hosts: dict[str, list[int]] = {}
    for rank, (identity, _) in enumerate(told):
        hosts.setdefault(identity, []).append(rank)
    n_most = max(map(len, hosts.values()))
    chosen = "group" if n_most > MAX_RANKS else "shm" if len(hosts) == 1 else "hierarchical"
    backends = [chosen if theirs == "auto" else theirs for _, theirs in told]
    _refuse_different(backends, bootstrap.names)
    if bootstrap.names[bootstrap.rank] == 0 and asked == "auto" and n_most > MAX_RANKS:
        warnings.warn(
            f"a host has {n_most} ranks, and shared memory takes {MAX_RANKS}: 'auto' takes Gloo "
            f"(backend 'group') for all ranks. Start at most {MAX_RANKS} ranks on a host",
            RuntimeWarning,
            stacklevel=3,
        )
    ranks = hosts[told[bootstrap.rank][0]]
    mine = launchers.local_rank(bootstrap.rank, bootstrap.world_size)
    local_rank = ranks.index(bootstrap.rank) if mine is None else mine
    return _Neighbours(backends[0], ranks, local_rank, list(hosts.values()))
