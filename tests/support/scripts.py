"""Scripts with some ranks, started as torchrun starts them, but forked with torch loaded: what a
test of an example takes is mostly the import of torch otherwise, three times with the launcher's.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.bodies import Place
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, torchrun_env


def printed_by(script: Path, *arguments: str, folder: Path | None = None, ranks: int = 2) -> str:
    """What the ranks print, rank 0 first. folder: where they run, and leave their files."""
    common = {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RESTART_COUNT": "0"}
    environments = [one | common for one in torchrun_env(ranks)]
    outcomes = fresh_ranks(ranks, _run, script, arguments, folder, env=environments, timeout=280)
    return "".join(values_of(outcomes))


def _run(place: Place, script: Path, arguments: Sequence[str], folder: Path | None) -> str:
    os.chdir(folder or ".")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
