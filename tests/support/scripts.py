"""Scripts with two ranks, started as torchrun starts them, but forked with torch loaded: what a
test of an example takes is mostly the import of torch otherwise, three times with the launcher's.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.bodies import Place
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, torchrun_env


def printed_by(script: Path, *arguments: str) -> str:
    """What the ranks print, rank 0 first."""
    outcomes = fresh_ranks(2, _run, script, arguments, env=_environments(), timeout=100)
    return "".join(values_of(outcomes))


def printed_with(script: Path, variants: Sequence[Sequence[str]]) -> list[str]:
    """What rank 0 prints with each of the arguments. The script's imports are done once."""
    environments = [_environments() for _ in variants]
    outcomes = fresh_ranks(2, _run_each, script, variants, environments, timeout=100)
    printed: list[str] = values_of(outcomes)[0]
    return printed


def _environments() -> list[dict[str, str]]:
    common = {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RESTART_COUNT": "0"}
    return [one | common for one in torchrun_env(2)]


def _run(place: Place, script: Path, arguments: Sequence[str]) -> str:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def _run_each(
    place: Place,
    script: Path,
    variants: Sequence[Sequence[str]],
    environments: Sequence[Sequence[dict[str, str]]],
) -> list[str]:
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="imported")
    return [
        _forked(place, script, arguments, by_rank[place.rank])
        for arguments, by_rank in zip(variants, environments, strict=True)
    ]


def _forked(place: Place, script: Path, arguments: Sequence[str], env: dict[str, str]) -> str:
    """Runs it in a child: no variant finds what another one has left."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        os.environ.update(env)
        theirs.send(_run(place, script, arguments))

    multiprocessing.current_process()._config["daemon"] = False  # or it may not have children
    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        printed: str = ours.recv()
    finally:
        process.join()
    return printed
