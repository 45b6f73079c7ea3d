"""What other projects' launchers do with a job that loses a rank: see docs/elastic.md.
Skips those that this machine does not have; ci/launchers.sh brings OpenMPI and MPICH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from tests.support.rank_process import LAUNCHER_VARIABLES
from tests.support.ranks import own_port

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINING = ROOT / "tests/support/lossy_training.py"
# What a shell between the launcher and a rank runs.
OR_KILLED, OR_AGAIN = '"$@"; test $? = 0 -o $? = 137', '"$@" || "$@"'


class Launcher(NamedTuple):
    """command: starts three ranks. options, script: what lets the others go on without a lost one.
    status: what it then ends with. is_in_job: it needs the variables of SLURM's job.
    """

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    script: str | None = None
    status: int = 0
    is_in_job: bool = False


def _openmpi() -> Launcher:
    for name in ("mpirun", "mpirun.openmpi"):
        found = shutil.which(name)
        if found is not None and "open-mpi.org" in _said_by(found, "--version"):
            command = (found, "--allow-run-as-root", "--oversubscribe", "-n", "3")
            return Launcher(command, options=("--enable-recovery",))
    pytest.skip("there is no mpirun of OpenMPI's")


def _mpich() -> Launcher:
    found = shutil.which("mpiexec.hydra")
    if found is None:
        pytest.skip("there is no mpiexec.hydra, which is MPICH's")
    return Launcher((found, "-n", "3"), script=OR_KILLED)


def _srun() -> Launcher:
    found = shutil.which("srun")
    if found is None or "SLURM_JOB_ID" not in os.environ:
        pytest.skip("this is no job of SLURM's: salloc -n 3 python -m pytest")
    command = (found, "--quiet", "--nodes=1", "--ntasks=3", "--overcommit")
    options = ("--kill-on-bad-exit=0", "--wait=0")
    return Launcher(command, options, status=137, is_in_job=True)


def _torchrun() -> Launcher:
    options = ("--standalone", "--nproc-per-node=3", "--max-restarts=0", "--no-python")
    return Launcher((sys.executable, "-m", "torch.distributed.run", *options))


def _said_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _over(*launchers: Callable[[], Launcher]) -> pytest.MarkDecorator:
    """Functions, so that each is looked for when its test runs."""
    names = [one.__name__[1:] for one in launchers]
    return pytest.mark.parametrize("find", launchers, ids=names)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: launchers put sockets there."""
    with TemporaryDirectory() as name:
        yield Path(name)


def _run(launcher: Launcher, script: str | None, folder: Path, *arguments: str) -> tuple[int, str]:
    """What the launcher ends with, and what it and its ranks have printed. script: of a shell."""
    shell = () if script is None else ("sh", "-c", script, "sh")
    training = (sys.executable, str(TRAINING), str(folder), *arguments)
    with subprocess.Popen(
        [*launcher.command, *shell, *training],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(launcher, folder),
        text=True,
    ) as run:
        try:
            printed, _ = run.communicate()
        finally:
            run.terminate()  # where pytest's time is over: it ends its ranks
    return run.returncode, printed


def _environment(launcher: Launcher, folder: Path) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if launcher.is_in_job or not (name in LAUNCHER_VARIABLES or name.startswith("SLURM_"))
    }
    return env | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "MASTER_PORT": str(own_port()),  # srun's would be the same for all tests of a job
    }


def _ends(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks have left, by the rank they were started as."""
    files = sorted(folder.glob("rank *"))
    return {int(one.name.split()[1]): json.loads(one.read_text()) for one in files}


@pytest.mark.parametrize("victim", [0, 1])
@_over(_openmpi, _mpich, _srun)
def test_the_others_go_on_without_a_lost_rank(
    find: Callable[[], Launcher], victim: int, folder: Path
) -> None:
    launcher = find()
    lets_live = launcher._replace(command=(*launcher.command, *launcher.options))
    status, printed = _run(lets_live, launcher.script, folder, str(victim), "none comes")
    end = {"made": 30, "steps": 30, "ranks": 2}
    assert _ends(folder) == {rank: end for rank in range(3) if rank != victim}, printed
    assert status == launcher.status, printed


@_over(_openmpi, _mpich, _srun, _torchrun)
def test_a_shell_starts_another_process_in_place_of_a_lost_rank(
    find: Callable[[], Launcher], folder: Path
) -> None:
    status, printed = _run(find(), OR_AGAIN, folder, "1", "another comes")
    ends = _ends(folder)
    assert [one["ranks"] for one in ends.values()] == [3, 3, 3], printed
    has_made_all = {rank: one["made"] == one["steps"] for rank, one in ends.items()}
    assert has_made_all == {0: True, 1: False, 2: True}, printed
    assert status == 0, printed
