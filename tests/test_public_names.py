"""The public names and their signatures stand in public_names.txt, so that nobody changes one
without noticing. After a change that is meant:

    python -m tests.test_public_names > tests/public_names.txt
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.docstrings import INTERNAL
from fastcomm.comm.communicator import Communicator
from fastcomm.comm.transport import Transport
from fastcomm.control.collectives import Collectives
from fastcomm.transports.group.communicator import GroupCommunicator
from fastcomm.transports.nccl.communicator import NcclCommunicator
from fastcomm.transports.shm.communicator import ShmCommunicator

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "public_names.txt"


def public_names() -> Iterator[str]:
    """A line for each entry of docs/reference, and for each member of a class there."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    for entry in sorted(re.findall(r"^<!-- (fastcomm\S+) -->$", pages, re.MULTILINE)):
        module, _, name = entry.rpartition(".")
        public = getattr(importlib.import_module(module), name)
        yield f"{entry}{signature(public)}"
        if isinstance(public, type):
            yield from sorted(f"{entry}.{line}" for line in members(public))


def members(cls: type) -> Iterator[str]:
    """Without those that the site leaves out, too, and those of torch's and Python's classes."""
    seen = set()
    for base in (one for one in cls.__mro__ if one.__module__.startswith("fastcomm")):
        for name in inspect.get_annotations(base):
            if re.search(rf"^{name}: ", inspect.getdoc(base) or "", re.MULTILINE):
                yield name
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            text = member.__doc__ if callable(member) or isinstance(member, property) else None
            if text and not text.startswith(INTERNAL):
                yield f"{name}{signature(member)}"


def signature(member: object) -> str:
    """Names and defaults, which a caller writes. Nothing for what is not called."""
    if not callable(member) or (isinstance(member, type) and issubclass(member, Exception)):
        return ""
    signature = inspect.signature(member)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


def test_public_names_are_those_of_the_snapshot() -> None:
    was, now = SNAPSHOT.read_text().splitlines(), list(public_names())
    changes = [
        line
        for line in difflib.unified_diff(was, now, n=0, lineterm="")
        if re.match(r"[+-](?![+-])", line)
    ]
    assert not changes, (
        "public names have changed:\n"
        + "\n".join(changes)
        + "\nWhat is gone or is called in another way breaks scripts: keep it working for a minor "
        "version, with a warning (CONTRIBUTING.md, Changing what is public). Where the change is "
        "meant: python -m tests.test_public_names > tests/public_names.txt"
    )


@pytest.mark.parametrize("cls", [GroupCommunicator, NcclCommunicator, ShmCommunicator])
def test_every_backend_has_every_method_of_a_communicator_as_it_is_documented(cls):
    for name in sorted(Transport.__abstractmethods__):
        assert not getattr(getattr(cls, name), "__isabstractmethod__", False), name
    for name, method in vars(Communicator).items():
        if inspect.isfunction(method) and name not in ("__enter__", "__exit__", "close"):
            assert signature(getattr(cls, name)) == signature(method), name
            assert name not in vars(Collectives) or getattr(cls, name).__doc__ == method.__doc__


if __name__ == "__main__":
    print("\n".join(public_names()))
