"""Where the ranks of a benchmark meet: on one host, or on hosts that are network namespaces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lib import launch

PORT = 29500  # in namespaces of our own every port is free


def places_of(hosts: Any) -> list[list[Any]]:
    """For each rank its host's namespace, the init_method, and what its environment has. hosts: of
    tests/support/namespaces.py.
    """
    return [
        [hosts.namespace(host), f"tcp://{hosts.address(0)}:{PORT}", hosts.environment(rank)]
        for rank, host in enumerate(hosts.host_of)
    ]


def enter(rank: int, places: Sequence[Sequence[Any]] | None) -> tuple[str, str]:
    """The rank's side: goes to its own of these places, if there are any. Returns the backend and
    the init_method.
    """
    if not places:
        return "shm", f"file://{launch.scratch()}/ranks"
    from tests.support import namespaces

    namespace, method, environment = places[rank]
    namespaces.enter(namespace)
    os.environ.update(environment)
    return "hierarchical", method
