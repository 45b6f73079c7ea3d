"""The network between hosts that are network namespaces, as a process: the links take their time.

Each host has a TUN device. A packet leaves it over the host's link, and arrives over the link of
the host that it is addressed to. Both links carry so many bytes a second each way; `delay_s` is the
time from one end to the other, so a round trip takes twice as long. What has to wait, waits: no
packet is dropped. This process is what tc's netem is where the kernel has that.

    python -m tests.support.delay_line RATE DELAY_S NAMESPACE...

RATE is tc's "1gbit", or empty: as fast as this process. It says when it is ready; each line that it
reads is the number of a host to cut off, and it ends when there are no more. namespaces.py starts
it.

Up to 64 KiB of a TCP connection are one packet here, as they are in a virtual link (the kernel's
segmentation offload, asked for below), though the connection counts packets of 1,500 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

from tests.support import namespaces

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_CHECKSUMS, _LARGE_IPV4 = 0x1, 0x2  # what the kernel need not do before it hands a packet out
_HEADER = 10  # struct virtio_net_hdr, in front of each packet: says how large its segments are
_IPV4 = 4
_STDIN = 0
_LARGEST = _HEADER + 2**16


def bytes_per_s_of(rate: str) -> float:
    """tc's "100mbit" or "1gbit" as a number."""
    match = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate)
    if match is None:
        raise ValueError(f"a rate such as 100mbit or 1gbit was expected, not {rate!r}")
    return float(match[1]) * 1000.0 ** " kmg".index(match[2] or " ") / 8


class Link:
    """Of one host. queue: packets to it, and when each has arrived. free_up, free_down: when all
    that was sent over it so far, from and to the host, is through.
    """

    def __init__(self, namespace: str) -> None:
        namespaces.enter(namespace)
        self.device = os.open(namespaces.TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        name = namespaces.INTERFACE.encode()
        fcntl.ioctl(self.device, _TUNSETIFF, struct.pack("16sH22x", name, flags))
        fcntl.ioctl(self.device, _TUNSETOFFLOAD, _CHECKSUMS | _LARGE_IPV4)
        self.queue: deque[tuple[float, bytes]] = deque()
        self.free_up = self.free_down = 0.0
        self.is_cut = False

    def deliver(self, now: float) -> None:
        """Hands the host the packets that have arrived by now."""
        while self.queue and self.queue[0][0] <= now:
            _, packet = self.queue.popleft()
            with contextlib.suppress(OSError):  # not one that its kernel takes
                os.write(self.device, packet)


def forward(links: Sequence[Link], bytes_per_s: float, delay_s: float) -> None:
    """Hands packets on until standard input ends."""
    by_device = {link.device: link for link in links}
    while True:
        now = time.monotonic()
        for link in links:
            link.deliver(now)
        dues = [link.queue[0][0] for link in links if link.queue]
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        for readable in select.select([_STDIN, *by_device], [], [], timeout)[0]:
            if readable == _STDIN:
                command = os.read(_STDIN, 80)
                if not command:
                    return
                links[int(command)].is_cut = True
                print("cut", flush=True)
                continue
            source, packet = by_device[readable], os.read(readable, _LARGEST)
            host = _host_of(packet)
            if not 0 <= host < len(links) or source.is_cut or links[host].is_cut:
                continue
            target, on_link_s = links[host], len(packet) / bytes_per_s
            source.free_up = max(source.free_up, time.monotonic()) + on_link_s
            target.free_down = max(target.free_down + on_link_s, source.free_up)
            target.queue.append((target.free_down + delay_s, packet))


def _host_of(packet: bytes) -> int:
    """Which host the packet is addressed to, by its last number; none if negative or too large."""
    return packet[_HEADER + 19] - 1 if packet[_HEADER] >> 4 == _IPV4 else -1


def main() -> None:
    rate, delay_s, *hosts = sys.argv[1:]
    bytes_per_s = bytes_per_s_of(rate) if rate else math.inf
    links = [Link(host) for host in hosts]
    with contextlib.suppress(OSError):  # a link does not wait for a core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    forward(links, bytes_per_s, float(delay_s))


if __name__ == "__main__":
    main()
