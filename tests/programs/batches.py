"""Draws programs, runs them on ranks in batches, and shrinks one that fails to what is needed."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hypothesis
from hypothesis import HealthCheck, Phase, settings

from tests.programs.strategies import collective_programs, reducer_programs
from tests.support.outcomes import RankError
from tests.support.ranks import Ranks

# What draws programs for so many ranks over a transport.
STRATEGIES: dict[str, Callable[[int, str], Any]] = {
    "reducer": reducer_programs,
    "collective": collective_programs,
}
# Many times what a program takes: who takes longer hangs.
PROGRAM_LIMIT_S = 20.0
SHRINKING_S = 90.0


class Program(Protocol):
    """Plain data. run() gives, by operation, what must be equal on all ranks; None once this rank
    has left."""

    def run(self, comm: Any) -> list[dict[str, Any] | None]: ...


class Failed(AssertionError):
    """A program failed: prints how to run it again, and what happened on the ranks."""


@dataclass(frozen=True)
class Failure:
    """Of the program `index` of a batch."""

    index: int
    text: str


# ---- on the ranks --------------------------------------------------------------------------------


def run_programs(comm: Any, programs: Sequence[Program], progress: str) -> list[Any]:
    """Returns what each program returned. Leaves in a file which program each rank has come to."""
    results = []
    with open(progress, "r+b", buffering=0) as file:
        for i, program in enumerate(programs):
            os.pwrite(file.fileno(), struct.pack("i", i), 4 * comm.rank)
            try:
                results.append(program.run(comm))
            except BaseException:
                comm.abort()  # nobody is to wait for this rank
                raise
    return results


# ---- in the test's process -----------------------------------------------------------------------


def draw(kind: str, n_ranks: int, transport: str, count: int, seed: int) -> list[Program]:
    """The `count` programs that this seed gives."""
    drawn = []
    for number in range(count):
        programs: list[Program] = []
        _for_all(kind, n_ranks, transport, (seed, number), programs.append)
        drawn.append(programs[-1])
    return drawn


def _for_all(
    kind: str, n_ranks: int, transport: str, seed: tuple[int, int], take: Callable[[Program], None]
) -> None:
    """Calls `take` with the simplest program, another one, and, when it raises, with smaller ones.

    Hypothesis begins with what is simplest, goes on with what is random, and then tries variations
    of that: with so few programs those would leave no time for others.
    """
    number = zlib.crc32(repr((kind, n_ranks, transport, seed)).encode())

    @hypothesis.seed(number)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(STRATEGIES[kind](n_ranks, transport))
    def both(program: Program) -> None:
        take(program)

    both()


def find_failure(
    ranks: Ranks, kind: str, n_ranks: int, transport: str, count: int, seed: int
) -> int:
    """Runs so many programs, in one batch; returns how many. Raises Failed with the least one that
    fails."""
    programs = draw(kind, n_ranks, transport, count, seed)
    batch = _failure_of(ranks, n_ranks, transport, programs)
    if batch is None:
        return len(programs)
    for number, program in enumerate(programs):
        failure = _failure_of(ranks, n_ranks, transport, [program])
        if failure is not None:
            shrink = functools.partial(_for_all, kind, n_ranks, transport, (seed, number))
            program, failure = _shrunk(ranks, n_ranks, transport, program, failure, shrink)
            raise Failed(f"replay({transport!r}, {n_ranks}, {program!r})\n\n{failure.text}")
    raise Failed(
        f"program {batch.index} of find_failure(Ranks(), {kind!r}, {n_ranks}, {transport!r}, "
        f"{count}, {seed}) fails, but not alone. It is\n"
        f"{programs[batch.index]!r}\n\n{batch.text}"
    )


def _shrunk(
    ranks: Ranks,
    n_ranks: int,
    transport: str,
    program: Program,
    failure: Failure,
    for_all: Callable[[Callable[[Program], None]], None],
) -> tuple[Program, Failure]:
    """The least program that fails, and how, as far as there is time for it."""
    known: dict[Program, Failure | None] = {program: failure}
    failing = [(program, failure)]
    deadline = time.monotonic() + SHRINKING_S

    def run_alone(program: Program) -> None:
        if program not in known and time.monotonic() < deadline:
            known[program] = _failure_of(ranks, n_ranks, transport, [program])
        failure = known.get(program)
        if failure is not None:
            failing.append((program, failure))
            raise Failed

    with contextlib.suppress(Failed, hypothesis.errors.Flaky):
        for_all(run_alone)
    return failing[-1]


def replay(transport: str, n_ranks: int, *programs: Program) -> None:
    """Runs programs on ranks of their own. Raises Failed."""
    ranks = Ranks()
    try:
        failure = _failure_of(ranks, n_ranks, transport, programs)
    finally:
        ranks.close()
    if failure is not None:
        raise Failed(f"program {failure.index}: {failure.text}")


def _failure_of(
    ranks: Ranks, n_ranks: int, transport: str, programs: Sequence[Program]
) -> Failure | None:
    """Of the first program that fails."""
    limit_s = PROGRAM_LIMIT_S * (1 + len(programs) / 20)
    with tempfile.NamedTemporaryFile(prefix="programs-") as progress:
        Path(progress.name).write_bytes(bytes(4 * n_ranks))
        before, ranks.transport = ranks.transport, transport
        try:
            results = ranks(n_ranks, run_programs, programs, progress.name, timeout=limit_s)
        except RankError as error:
            reached = struct.unpack(f"{n_ranks}i", Path(progress.name).read_bytes())
            return Failure(min(reached), str(error))
        finally:
            ranks.transport = before
    for i, by_rank in enumerate(zip(*results, strict=True)):
        for operation, column in enumerate(zip(*by_rank, strict=True)):
            facts = [one for one in column if one is not None]
            differing = sorted({key for one in facts for key in one if one != facts[0]})
            for what in differing:
                values = [one.get(what) for one in facts]
                if any(value != values[0] for value in values):
                    text = f"after operation {operation} the ranks differ in {what}: {values}"
                    return Failure(i, text)
    return None
