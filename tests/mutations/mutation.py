"""What a mutation is: plain data, and what follows from the name of its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutations.anchor import replaced


@dataclass(frozen=True)
class Mutation:
    """One defect: in the function `within` of `file`, `old` becomes `new`; see anchor.py.

    tests: those that must fail with it, as pytest's arguments.
    equivalent: why nobody can see it. It is not run then; it stands here so that nobody looks for a
    test again.
    """

    name: str
    file: str
    within: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def of(self, text: str) -> str:
        """The text of the file with the defect. Raises LookupError if it has no place for it."""
        return replaced(self.file, text, self.within, self.old, self.new)


def extensions_of(file: str) -> tuple[str, ...]:
    """Which extension modules have to be compiled again: comm.lifetime, for example."""
    path = Path(file)
    if path.parts[:2] == ("kernels", "shm"):
        is_arithmetic = path.name.startswith("reduce")
        return (
            ("transports.shm.ring", "transports.shm.reduce", "transports.group.shards")
            if is_arithmetic
            else ("transports.shm.ring",)
        )
    if path.parts[:2] == ("kernels", "wire"):
        return ("transports.group.wire",)
    if path.suffix == ".pyx":
        return (".".join(path.with_suffix("").parts[1:]),)
    return ()  # Python; kernels/cuda is compiled by the tests themselves
