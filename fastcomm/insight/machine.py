"""Machine: what the model of a step has to know of the computers: their links, and who shares the
cores. Read from a TOML file, or made of what was measured. Measures nothing itself.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastcomm.insight.collectives import ALGORITHMS, Cost, Link, all_gather, reduce_scatter

_LINK_UNITS = {
    "latency_us": ("latency_s", 1e-6),
    "gbytes_per_s": ("bytes_per_s", 1e9),
    "reduce_gbytes_per_s": ("reduce_bytes_per_s", 1e9),
    "core_share": ("core_share", 1.0),
}
_RATES = ("gbytes_per_s", "reduce_gbytes_per_s")
_STEP_KEYS = ("forward_ms", "backward_ms", "optimizer_ms")
_KEYS = ("name", "algorithm", "cores", "ranks_per_host", "links", "host", "network", "step")


@dataclass(frozen=True)
class Machine:
    """Hosts of equally many ranks, and what connects them.

    host, network: the link between the ranks of a host, and that between hosts; network None means
        that there is one host, of any number of ranks.
    algorithm: of an all-reduce, one of collectives.ALGORITHMS; "direct" is for one host.
    links: how many links a host has to the network.
    cores: of a host, which ranks compute with and communicate with; None: GPUs compute.
    step: parts of a step in seconds by name ("forward", "backward", "optimizer"), where the machine
        that measures is not this one.
    """

    host: Link
    network: Link | None = None
    algorithm: str = "ring"
    ranks_per_host: int = 8
    links: int = 1
    cores: int | None = None
    name: str = "a machine"
    step: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}; got {self.algorithm!r}"
            )
        if self.network is not None and self.algorithm == "direct":
            raise ValueError('algorithm "direct" is for ranks of one host: leave the network out')
        for name in ("ranks_per_host", "links", "cores"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on; got {value!r}")

    def local_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks a full host has."""
        return ranks if self.network is None else min(ranks, self.ranks_per_host)

    def hosts(self, ranks: int) -> int:
        return math.ceil(ranks / self.local_ranks(ranks))

    def crowding(self, ranks: int) -> float:
        """How many times as long a rank computes because ranks share cores, one thread each."""
        return 1.0 if self.cores is None else max(1.0, self.local_ranks(ranks) / self.cores)

    def delays_compute(self, ranks: int) -> bool:
        """Whether the work of communicating delays computing: where the computing thread does it
        itself, or where no core is spare for another one.
        """
        if self.cores is None:
            return False
        return self.algorithm == "direct" or self.local_ranks(ranks) >= self.cores

    def all_reduce(self, nbytes: float, ranks: int) -> Cost:
        """What it takes to reduce a flat buffer over so many ranks."""
        return self.reduce_scatter(nbytes, ranks).plus(self.all_gather(nbytes, ranks))

    def reduce_scatter(self, nbytes: float, ranks: int) -> Cost:
        """The first half of an all-reduce, after which each rank has its shard."""
        parts = self._parts(nbytes, ranks)
        return _total(reduce_scatter(*part) for part in parts)

    def all_gather(self, nbytes: float, ranks: int) -> Cost:
        """The second half, after which every rank has everything."""
        parts = self._parts(nbytes, ranks)
        return _total(all_gather(*part) for part in parts)

    def _parts(self, nbytes: float, ranks: int) -> list[tuple[str, Link, float, int]]:
        """What an all-reduce is made of: the algorithm, its link, bytes and ranks."""
        local, hosts = self.local_ranks(ranks), self.hosts(ranks)
        if self.network is None or hosts == 1:
            alone = "ring" if self.algorithm == "hierarchical" else self.algorithm
            return [(alone, self.host, nbytes, local)]
        wire = self.network.times(self.links)
        if self.algorithm == "hierarchical":
            # Each rank takes its part across hosts; the parts share the host's links.
            inside = "direct" if self.cores is not None else "ring"
            return [(inside, self.host, nbytes, local), ("exchange", wire, nbytes, hosts)]
        # A ring crosses each host's links once each way. In an exchange all ranks of a host send
        # to those of the others, over the same links.
        crowd = local * (ranks - local) / (ranks - 1) if self.algorithm == "exchange" else 1
        return [(self.algorithm, wire, crowd * nbytes, ranks)]


def _total(costs: Iterable[Cost]) -> Cost:
    total = Cost(0.0)
    for cost in costs:
        total = total.plus(cost)
    return total


def read(path: Path) -> Machine:
    """The machine that a TOML file describes; docs/scaling.md has an example. Raises ValueError,
    naming the file and what is wrong in it.
    """
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        raise ValueError(f"{path}: reading TOML needs Python 3.11 or newer") from None
    try:
        return of_table(toml.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def of_table(table: Mapping[str, Any]) -> Machine:
    """The machine of a TOML file's contents."""
    _refuse_unknown("", table, _KEYS)
    if "host" not in table:
        raise ValueError("[host] is missing: the link between the ranks of a host")
    network = _link("network", table["network"]) if "network" in table else None
    step = table.get("step", {})
    _refuse_unknown("step.", step, _STEP_KEYS)
    seconds = {name.removesuffix("_ms"): _number(f"step.{name}", step[name]) / 1e3 for name in step}
    plain = {name: table[name] for name in table if name not in ("host", "network", "step")}
    return Machine(_link("host", table["host"]), network, step=seconds, **plain)


def _link(name: str, table: Mapping[str, Any]) -> Link:
    _refuse_unknown(f"{name}.", table, tuple(_LINK_UNITS))
    missing = [key for key in ("latency_us", "gbytes_per_s") if key not in table]
    if missing:
        raise ValueError(f"[{name}] lacks {' and '.join(missing)}")
    values = {}
    for key, value in table.items():
        if key in _RATES and value == 0:
            raise ValueError(f"{name}.{key} must be more than 0")
        field_name, unit = _LINK_UNITS[key]
        values[field_name] = _number(f"{name}.{key}", value) * unit
    return Link(**values)


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # a NaN is not
        raise ValueError(f"{name} must be a number that is not negative; got {value!r}")
    return float(value)


def _refuse_unknown(where: str, table: Any, known: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        name = where.removesuffix(".")
        raise ValueError(f"{name} must be a table, [{name}]; got {table!r}")
    for name in table:
        if name not in known:
            raise ValueError(f"{where}{name} is unknown; known are {', '.join(known)}")
