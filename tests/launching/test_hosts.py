"""Which processes take each other for neighbours, with whom they share memory."""

from __future__ import annotations

import ctypes
import os

import pytest

from fastcomm.launching import rendezvous
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

_CLONE_NEWPID = 0x20000000


def _identities(place):
    """Of this process, of a child, and of a child in a pid namespace of its own; None if it may not
    be made.
    """
    identities = [rendezvous._host_identity(), _identity_in_a_child()]
    may_unshare = ctypes.CDLL(None).unshare(_CLONE_NEWPID) == 0
    return [*identities, _identity_in_a_child() if may_unshare else None]


def _identity_in_a_child():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, rendezvous._host_identity().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_processes_of_another_pid_namespace_are_on_another_host():
    own, child, elsewhere = values_of(fresh_ranks(1, _identities))[0]
    assert own == child
    if elsewhere is None:
        pytest.skip("may not make a pid namespace: needs root")
    assert elsewhere != own


def test_a_host_has_the_name_that_the_environment_gives_it(monkeypatch):
    monkeypatch.setenv("FASTCOMM_HOST_ID", "somewhere")
    assert rendezvous._host_identity() == "somewhere"
