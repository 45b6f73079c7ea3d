"""Hosts that are network namespaces: each has an interface, an address and, if wanted, a limited
link to a switch that joins them all.

The machine's own network stays as it is: the switch is a bridge in a namespace of its own. Ranks
are processes that enter the namespace of their host; their kernel is the same, so FASTCOMM_HOST_ID
tells them apart. Needs ip(8), tc(8) for limits, and root's rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_PREFIX = "fastcomm-"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class Hosts:
    """`len(ranks)` hosts with so many ranks each, numbered from the first host on. A context
    manager: it makes and removes them.

    rate: of every link, each way, as tc(8) writes it ("1gbit"); None: as fast as the machine.
    """

    def __init__(self, ranks: Sequence[int], rate: str | None = None) -> None:
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._rate = rate
        self.world_size = sum(ranks)
        self.host_of = [host for host, n in enumerate(ranks) for _ in range(n)]

    def __enter__(self) -> Hosts:
        _remove_what_a_killed_run_has_left()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        """What makes the rank one of its host's. It has to `enter` the namespace, too."""
        host = self.host_of[rank]
        return {"FASTCOMM_HOST_ID": f"host {host}", "GLOO_SOCKET_IFNAME": INTERFACE}

    def cut(self, host: int) -> None:
        """Takes the host off the network; its packets vanish."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in sorted(set(self.host_of)):
            namespace, port = self.namespace(host), f"port{host}"
            _run("ip", "netns", "add", namespace)
            _run(
                "ip",
                "link",
                "add",
                INTERFACE,
                "netns",
                namespace,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            _run(
                "ip",
                "-n",
                namespace,
                "address",
                "add",
                f"{self.address(host)}/24",
                "dev",
                INTERFACE,
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
            for where, interface in (
                (namespace, "lo"),
                (namespace, INTERFACE),
                (self._switch, port),
            ):
                _run("ip", "-n", where, "link", "set", interface, "up")
            if self._rate is not None:
                for where, interface in ((namespace, INTERFACE), (self._switch, port)):
                    # The bucket holds several of the large packets that a virtual link carries; the
                    # queue waits rather than drops.
                    limits = ("rate", self._rate, "burst", "256kb", "latency", "50ms")
                    _run(
                        "tc", "-n", where, "qdisc", "add", "dev", interface, "root", "tbf", *limits
                    )

    def _remove(self) -> None:
        for path in _FOLDER.glob(f"{self._name}-*"):
            _delete(path.name)


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc were not found: apt-get install iproute2"
    try:
        with Hosts([1], rate="1gbit"):
            return None
    except RuntimeError as error:
        return f"may not make network namespaces ({error}): needs root and the right to unshare"


def enter(namespace: str) -> None:
    """Moves the calling thread, and those it will start, into the namespace. Raises OSError."""
    descriptor = os.open(_FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(
                ctypes.get_errno(), f"setns to {namespace}: {os.strerror(ctypes.get_errno())}"
            )
    finally:
        os.close(descriptor)


def _remove_what_a_killed_run_has_left() -> None:
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            _delete(path.name)


def _delete(namespace: str) -> None:
    with contextlib.suppress(RuntimeError):
        _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if outcome.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {outcome.stderr.strip()}")
