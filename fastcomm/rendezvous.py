"""init() and connect(): bring the ranks together over one of torch's stores and pick the transport.
Own nothing once that is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import ParseResult, urlparse

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastcomm.communicator import Communicator
from fastcomm.errors import FastcommError, InitError, PeerLostError
from fastcomm.group.communicator import GroupCommunicator
from fastcomm.group.hierarchical import HierarchicalCommunicator
from fastcomm.nccl.communicator import NcclCommunicator
from fastcomm.shm.communicator import ShmCommunicator
from fastcomm.shm.ring import MAX_RANKS

BACKENDS = ("auto", "shm", "nccl", "group", "hierarchical")
_POLL_S = 0.002

# How often each meeting point was used by this process: ranks that make several communicators keep
# them apart by this number.
_uses: dict[str, int] = {}


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
    """Brings `world_size` ranks together and returns this rank's communicator. Every rank must call
    it, with the same arguments.

    backend: "shm" (ranks of one host over shared memory), "hierarchical" (shared memory in each
        host, Gloo across hosts), "nccl" (a CUDA device for each rank), "group" (CPU tensors over
        `group`, or over Gloo), or "auto": nccl for a CUDA device, else shm where all ranks share a
        host, hierarchical where they do not, and group where a host has more than the 64 ranks that
        can share memory. Gloo takes the network interface that GLOO_SOCKET_IFNAME names.
    init_method: "env://" (torchrun sets it up), "tcp://host:port" or "file:///path", the latter two
        with rank= and world_size=.
    group: an existing torch.distributed group whose ranks meet instead; init_method, rank and
        world_size are then not needed.
    device: where the gradients are. None means this rank's CUDA device, cuda:LOCAL_RANK, for "nccl"
        and, where there is one, for "auto"; else the CPU.
    timeout: a timedelta; how long to wait for missing ranks here, and later in every collective.

    Raises InitError, on every rank, when the ranks cannot be brought together: it names the rank
    and says what to do; NcclError when NCCL itself fails on this rank. Raises ValueError or
    TypeError for bad arguments.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta; got {timeout!r}")
    place = _choose_device(backend, device)
    is_nccl = backend == "nccl" or place.type == "cuda"
    bootstrap = (
        _meet_in_group(group, timeout, is_nccl)
        if group is not None
        else _meet(init_method, rank, world_size, timeout)
    )
    with _told_to_all(bootstrap):
        neighbours = _neighbours(bootstrap)
        if is_nccl:
            comm: Communicator = _connect_on_cuda(bootstrap, timeout, place, neighbours)
        else:
            comm = _connect_on_cpu(backend, bootstrap, timeout, group, neighbours)
        if isinstance(bootstrap, _StoreBootstrap):
            count_as_finished(bootstrap.whole_store())
        # the store may live in one of the ranks: it must not go before all have read from it
        comm.barrier()
        return comm


def connect(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    *,
    caller: str,
    names: Sequence[int],
    look: Callable[[], None] | None,
) -> tuple[Communicator, list[int]]:
    """A communicator as init("auto") makes it, and the ranks of this host.

    store: for these ranks alone. Errors name the caller, and each rank by its number in `names`.
    look: called while this rank waits for others; raises PeerLostError when one will not come.
    """
    bootstrap = _StoreBootstrap(_clone(store), rank, world_size, timeout, caller, names, look)
    with _told_to_all(bootstrap):
        neighbours = _neighbours(bootstrap)
        if device.type == "cuda":
            return _connect_on_cuda(bootstrap, timeout, device, neighbours), neighbours.ranks
        return _connect_on_cpu("auto", bootstrap, timeout, None, neighbours), neighbours.ranks


@contextlib.contextmanager
def _told_to_all(bootstrap: _StoreBootstrap | _GroupBootstrap) -> Iterator[None]:
    """An error of this rank's ends the waiting of the others."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the meeting point may be what failed
            bootstrap.fail(f"{bootstrap.name} failed in {bootstrap.caller}: {error}")
        raise


def _choose_device(backend: str, device: torch.device | str | None) -> torch.device:
    """Where the gradients are, with an index if it is a CUDA device."""
    if device is None:
        wants_cuda = backend in ("auto", "nccl") and torch.cuda.is_available()
        device = (
            f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"
            if wants_cuda
            else "cpu"
        )
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
            "hierarchical, group) "
            "and on CUDA devices (nccl)"
        )
    return (
        torch.device("cuda", torch.cuda.current_device())
        if place.type == "cuda" and place.index is None
        else place
    )


class _Neighbours(NamedTuple):
    ranks: list[int]  # of this rank's host
    local_rank: int  # this rank's number among them
    hosts: list[list[int]]  # the ranks of every host


def _connect_on_cuda(
    bootstrap: _StoreBootstrap | _GroupBootstrap,
    timeout: timedelta,
    device: torch.device,
    neighbours: _Neighbours,
) -> NcclCommunicator:
    """The ranks have met; makes the communicator on `device`."""
    place = bootstrap.rank, bootstrap.world_size, neighbours.local_rank
    return NcclCommunicator(*place, bootstrap, timeout, device, neighbours.ranks)


def _connect_on_cpu(
    backend: str,
    bootstrap: _StoreBootstrap | _GroupBootstrap,
    timeout: timedelta,
    group: dist.ProcessGroup | None,
    of_host: _Neighbours,
) -> Communicator:
    """The ranks have met; makes the communicator on the CPU."""
    neighbours, local_rank, hosts = of_host
    place = bootstrap.rank, bootstrap.world_size, local_rank
    if backend == "auto":
        is_crowded = max(map(len, hosts)) > MAX_RANKS
        backend = "group" if is_crowded else "shm" if len(hosts) == 1 else "hierarchical"
    if backend == "shm":
        away = [r for r in range(bootstrap.world_size) if r not in neighbours]
        if away:
            raise InitError(
                f"rank {bootstrap.rank} shares no memory with ranks {away}: they run on another "
                "host (or in another container). "
                "The shm transport needs all ranks on one host; across hosts use 'hierarchical', "
                "or 'auto'"
            )
        return ShmCommunicator(*place, bootstrap, timeout)
    if isinstance(
        bootstrap, _GroupBootstrap
    ):  # what goes on after init, in threads of its own, needs a store
        bootstrap.leave()
        bootstrap = _meet_at_store_of(bootstrap.group, timeout)
    with _told_to_all(bootstrap):
        if backend == "hierarchical":
            return HierarchicalCommunicator(*place, bootstrap, timeout, hosts)
        # A group over Gloo is asked for its ranks only: one of our own is not in the way of what
        # else the user does with it.
        is_foreign = group is not None and dist.get_backend(group) != "gloo"
        return GroupCommunicator(
            *place, bootstrap, timeout, neighbours, group if is_foreign else None
        )


def _neighbours(bootstrap: _StoreBootstrap | _GroupBootstrap) -> _Neighbours:
    """The ranks tell each other which host they run on."""
    identities = bootstrap.exchange(_host_identity())
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    neighbours = hosts[identities[bootstrap.rank]]
    local_rank = _local_rank(neighbours.index(bootstrap.rank))
    return _Neighbours(neighbours, local_rank, list(hosts.values()))


class _StoreBootstrap:
    """Ranks that meet at a torch.distributed store. Their values pass through it as JSON; a failure
    of one is told to all.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        caller: str = "fastcomm.init",
        names: Sequence[int] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """names: the ranks' numbers, for messages. look: raises PeerLostError when one is lost."""
        self.rank = rank
        self.world_size = world_size
        self.caller = caller
        self._names = names or range(world_size)
        self.name = f"rank {self._names[rank]}"
        self._look_at_peers = look
        self._store = store
        self._timeout = timeout
        self._n_exchanges = 0
        self._exchange = ""  # the name of the newest
        self._enter()

    def _enter(self) -> None:
        if self._store.add(f"claim/{self.rank}", 1) > 1:
            self._refuse(
                f"{self.name} was given to two processes: every process needs a rank of its own, "
                "and every run a port or file of its own (delete a file that an earlier run has "
                "left behind)"
            )
        agreed = self._store.compare_set("world_size", "", str(self.world_size)).decode()
        if int(agreed) != self.world_size:
            theirs = f"another rank with {agreed}"
            self._refuse(f"{self.name} was started with world_size {self.world_size}, {theirs}")

    def _refuse(self, message: str) -> None:
        self.fail(message)
        raise InitError(message)

    def exchange(
        self, value: Any, look: Callable[[], None] | None = None, name: str | None = None
    ) -> list[Any]:
        """Every rank's value, by rank. Raises InitError when a rank is missing after the timeout,
        or has failed.

        look: called while waiting, in place of the own one; raises when a rank will not come. name:
        of an exchange that some ranks may leave out; the others are counted.
        """
        self._n_exchanges += name is None
        self._exchange = name or str(self._n_exchanges)
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            self._store.set(f"{self._exchange}/{self.rank}", json.dumps(value))
            return [
                json.loads(self._get(r, deadline, look or self.look))
                for r in range(self.world_size)
            ]
        except FastcommError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> InitError:
        return InitError(f"{self.name} lost the meeting point (did rank 0 end?): {error}")

    def _get(self, rank: int, deadline: float, look: Callable[[], None]) -> bytes:
        key = f"{self._exchange}/{rank}"
        while not self._store.check([key]):
            look()
            if time.monotonic() > deadline:
                raise self._missing()
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))

    def _missing(self) -> InitError:
        came = [self._store.check([f"{self._exchange}/{r}"]) for r in range(self.world_size)]
        missing = [name for name, is_there in zip(self._names, came, strict=True) if not is_there]
        if self.caller == "new_group":
            advice = "do all ranks call new_group for the same groups, in the same order?"
        else:
            advice = "were they started, and can they reach the same init_method?"
        waited = f"waited {self._timeout.total_seconds():g} s in {self.caller}"
        return InitError(
            f"{self.name} {waited} for {self.world_size} ranks; missing: rank "
            f"{', '.join(map(str, missing))}; {advice}"
        )

    def look(self) -> None:
        """Raises InitError if another rank is lost or has failed, or the store is gone."""
        try:
            if self._look_at_peers is not None:
                self._look_at_peers()
            if self._store.check(["failed"]):
                raise InitError(self._store.get("failed").decode())
        except PeerLostError as error:
            raise InitError(f"{self.name} waits in {self.caller}: {error}") from error
        except FastcommError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def fail(self, message: str) -> None:
        """Ends the exchange of the other ranks, too. The first failure is the one they hear of."""
        self._store.compare_set("failed", "", message)

    def whole_store(self) -> Store:
        return self._store

    def store(self, name: str) -> Store:
        """A part of the store for others to use."""
        return PrefixStore(name, self._store)

    # What the ranks tell each other after init; see fastcomm.watchdog.Notes.

    def write(self, key: str, value: str) -> None:
        self._store.set(f"note/{key}", value)

    def write_once(self, key: str, value: str) -> str:
        """Returns what stands there now, which another rank may have written first."""
        return bytes(self._store.compare_set(f"note/{key}", "", value)).decode()

    def read(self, key: str) -> str | None:
        return (
            bytes(self._store.get(f"note/{key}")).decode()
            if self._store.check([f"note/{key}"])
            else None
        )


class _GroupBootstrap:
    """Ranks that belong to a torch.distributed group already."""

    caller = "fastcomm.init"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.name = f"rank {self.rank}"
        self.world_size = group.size()
        self.group = group
        self._is_over = False

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Raises InitError when a rank has failed."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, (value, None), group=self.group)
        failures = [failure for _, failure in values if failure is not None]
        if failures:
            self._is_over = True  # all ranks are in this exchange: nobody is left to be told
            raise InitError(failures[0])
        return [value for value, _ in values]

    def leave(self) -> None:
        """The ranks go on at another meeting point: nobody is in an exchange here any more."""
        self._is_over = True

    def fail(self, message: str) -> None:
        """Tells the others, in the exchange they are waiting in."""
        if not self._is_over:
            self._is_over = True
            dist.all_gather_object([None] * self.world_size, (None, message), group=self.group)


def _meet(
    init_method: str, rank: int | None, world_size: int | None, timeout: timedelta
) -> _StoreBootstrap:
    """Opens the store that init_method names."""
    place = urlparse(init_method)
    if place.scheme == "env":
        rank = int(_environment("RANK")) if rank is None else rank
        world_size = int(_environment("WORLD_SIZE")) if world_size is None else world_size
    if rank is None or world_size is None:
        raise ValueError(f"init_method {init_method!r} needs rank= and world_size=")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InitError(
            f"rank must be from 0 to world_size - 1; got rank {rank} and world_size {world_size}"
        )
    try:
        store = _open_store(place, rank, world_size, timeout)
    except (RuntimeError, OSError) as error:
        raise InitError(
            f"rank {rank} of {world_size} cannot open the meeting point {init_method!r}: {error}"
        ) from error
    return _StoreBootstrap(own_part(store, init_method), rank, world_size, timeout)


def _open_store(place: ParseResult, rank: int, world_size: int, timeout: timedelta) -> Store:
    if place.scheme == "file" and place.path:
        if not os.access(os.path.dirname(place.path), os.W_OK):  # the store would wait for ever
            raise FileNotFoundError(
                f"{os.path.dirname(place.path)} is not a folder this process can write to"
            )
        return FileStore(place.path, world_size)
    if place.scheme == "env":
        host, port = _environment("MASTER_ADDR"), int(_environment("MASTER_PORT"))
        is_server = (
            rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )  # else torchrun serves the store itself
    elif place.scheme == "tcp" and place.hostname and place.port:
        host, port, is_server = place.hostname, place.port, rank == 0
    else:
        raise ValueError(
            f"init_method must be env://, tcp://host:port or file:///path; got {place.geturl()!r}"
        )
    # The store is not to wait for the ranks: it could not say which one is missing.
    return TCPStore(
        host, port, is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def count_as_finished(store: Store) -> None:
    """Has the last rank that lets go of a FileStore remove its file.

    All ranks call it once they have met, before any of them lets go. Torch removes the file when
    all ranks have finished and nobody uses it. A rank counts itself in two steps, though: of two
    that let go at the same time, one may see the other use it, and that one may have seen too few
    that had finished. So each rank counts as finished from here on.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        FileStore(store.path)  # type: ignore[attr-defined]  # it finishes here, and removes nothing


def _environment(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise InitError(
            f"{name} is not set: start the script with `torchrun --nproc-per-node=2 "
            f"{os.path.basename(sys.argv[0]) or 'train.py'}`, "
            "or pass init_method='tcp://host:port' with rank= and world_size="
        )
    if name != "MASTER_ADDR" and not value.isdecimal():
        raise InitError(f"the environment variable {name} must be a number; it is {value!r}")
    return value


def _local_rank(place: int) -> int:
    """The rank's number on its host: torchrun's word for it, else its place among the ranks that
    share the host.
    """
    return int(os.environ.get("LOCAL_RANK", place))


def _meet_in_group(
    group: dist.ProcessGroup, timeout: timedelta, is_nccl: bool
) -> _StoreBootstrap | _GroupBootstrap:
    """Ranks that belong to a group. NCCL's watchdog goes on using the meeting point from a thread
    of its own, which only a store bears.
    """
    return _meet_at_store_of(group, timeout) if is_nccl else _GroupBootstrap(group)


def _meet_at_store_of(group: dist.ProcessGroup, timeout: timedelta) -> _StoreBootstrap:
    store = _clone(dist.distributed_c10d._get_process_group_store(group))
    return _StoreBootstrap(
        own_part(store, f"group {group.group_name}"), group.rank(), group.size(), timeout
    )


def _clone(store: Store) -> Store:
    """With a connection of its own, where torch can do that: a wait of torch's would hold up the
    watchdog.
    """
    return store.clone() if hasattr(store, "clone") else store


def own_part(store: Store, name: str) -> Store:
    """The part of a store that belongs to one communicator alone. name: what else the ranks' uses
    of the store are told apart by.
    """
    _uses[name] = _uses.get(name, 0) + 1
    # torchrun starts everything anew after a failure, on the same store: keep the attempts apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"fastcomm/{attempt}/{_uses[name]}", store)


def _host_identity() -> str:
    """Equal for two processes exactly if they can map each other's memory: one kernel, one pid
    namespace. FASTCOMM_HOST_ID overrides it.
    """
    override = os.environ.get("FASTCOMM_HOST_ID")
    if override is not None:
        return override
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
