"""Hosts that are network namespaces: each has an interface, an address and, if wanted, a limited
link to a switch that joins them all.

The machine's own network stays as it is: the switch is a bridge in a separate namespace, or, for
a network with a delay, a process (delay_line.py). Ranks are processes that enter the namespace of
their host; their kernel is the same, so FASTCOMM_HOST_ID tells them apart. Needs ip(8), tc(8) for
limits, /dev/net/tun for a delay, and root's rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_PREFIX = "fastcomm-"
TUN = Path("/dev/net/tun")
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class Hosts:
    """`len(ranks)` hosts with so many ranks each, numbered from the first host on. A context
    manager: it makes and removes them.

    rate: of every link, each way, as tc(8) writes it ("1gbit"); None: as fast as the machine.
    delay_s: from each host to each other one, so that a round trip takes twice as long.
    """

    def __init__(self, ranks: Sequence[int], rate: str | None = None, delay_s: float = 0.0) -> None:
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._rate, self._delay_s = rate, delay_s
        self._line: DelayLine | None = None  # in place of the switch, if there is a delay
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
        if self._line is not None:
            self._line.cut(host)
        else:
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _build(self) -> None:
        hosts = sorted(set(self.host_of))
        for host in hosts:
            _run("ip", "netns", "add", self.namespace(host))
        if self._delay_s > 0:
            for host in hosts:
                _make_tunnel(self.namespace(host))
        else:
            self._build_switch(hosts)
        for host in hosts:
            namespace, address = self.namespace(host), f"{self.address(host)}/24"
            _run("ip", "-n", namespace, "address", "add", address, "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", namespace, "link", "set", interface, "up")
        if self._delay_s > 0:
            self._line = DelayLine(self._rate, self._delay_s, [*map(self.namespace, hosts)])

    def _build_switch(self, hosts: Sequence[int]) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in hosts:
            namespace, port = self.namespace(host), f"port{host}"
            ends = (INTERFACE, "netns", namespace), ("name", port, "netns", self._switch)
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", self._switch, "link", "set", port, "up")
            if self._rate is not None:
                _limit(namespace, INTERFACE, self._rate)
                _limit(self._switch, port, self._rate)

    def _remove(self) -> None:
        if self._line is not None:
            self._line.close()
        for path in _FOLDER.glob(f"{self._name}-*"):
            _delete(path.name)


class DelayLine:
    """The process delay_line.py, for hosts that have their devices already."""

    def __init__(self, rate: str | None, delay_s: float, namespaces: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.delay_line", rate or "", str(delay_s)]
            + [*namespaces],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        if not self._answer():
            self.close()
            raise RuntimeError(f"the delay line ended with {self._process.returncode}")

    def cut(self, host: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host}\n")
        self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc were not found: apt-get install iproute2"
    try:
        with Hosts([1], rate="1gbit"):
            return None
    except RuntimeError as error:
        return f"may not make network namespaces ({error}): needs root and the right to unshare"


def why_no_delay() -> str | None:
    """Why there can be no such hosts with a delay between them; None if there can."""
    reason = why_not()
    if reason is None:
        try:
            TUN.open("r+b", buffering=0).close()
        except OSError as error:
            reason = f"a network with a delay needs {TUN} (modprobe tun): {error}"
    return reason


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


def _make_tunnel(namespace: str) -> None:
    """What enters it is read by the delay line."""
    _run("ip", "-n", namespace, "tuntap", "add", INTERFACE, "mode", "tun", "vnet_hdr")
    _run("ip", "-n", namespace, "link", "set", INTERFACE, "txqueuelen", "10000")


def _limit(namespace: str, interface: str, rate: str) -> None:
    # The bucket holds several of the large packets that a virtual link carries; the queue waits
    # rather than drops.
    limits = ("rate", rate, "burst", "256kb", "latency", "50ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


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
