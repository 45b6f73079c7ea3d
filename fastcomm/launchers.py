"""Which launcher has started this process, and what it says: the rank, the number of ranks, and
where they meet. torchrun and whoever sets its variables come first, then MPI's, then SLURM's.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastcomm.errors import InitError

_DEFAULT_PORT = 29500  # torch's
_FIRST_SLURM_PORT = 15000


class Launcher(NamedTuple):
    """Names of environment variables. local_rank, local_size: among the ranks of a host; more than
    one name where releases differ.
    """

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), ())
_OMPI, _MV2, _JSM = "OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE"
LAUNCHERS = (
    TORCHRUN,
    *(
        Launcher(name, f"{p}_RANK", f"{p}_SIZE", (f"{p}_LOCAL_RANK",), (f"{p}_LOCAL_SIZE",))
        for name, p in (("OpenMPI's mpirun", _OMPI), ("MVAPICH's mpirun", _MV2), ("jsrun", _JSM))
    ),
    # PALS sets PMI_RANK, too.
    Launcher("PALS", "PALS_RANKID", "PMI_SIZE", ("PALS_LOCAL_RANKID",), ("PMI_LOCAL_SIZE",)),
    Launcher(
        "mpiexec",  # MPICH's and Intel MPI's
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    SRUN,
)


def launcher() -> Launcher:
    """Raises InitError if there is none."""
    found = _launcher_or_none()
    if found is None:
        raise _not_set("RANK")
    return found


def is_first_rank() -> bool:
    """Or not one of several processes that a launcher has started."""
    found = _launcher_or_none()
    return found is None or os.environ[found.rank] == "0"


def local_rank() -> int | None:
    """This process's number on its host. None if no launcher says."""
    found = _launcher_or_none() or TORCHRUN
    return _first_number(found.local_rank)


def number(name: str) -> int:
    """The value of an environment variable. Raises InitError."""
    value = _value(name)
    if not value.isdecimal():
        raise InitError(f"the environment variable {name} must be a number; it is {value!r}")
    return int(value)


def meeting_point(started_by: Launcher, world_size: int) -> str:
    """tcp:// or file://, the same for all ranks that the launcher has started. MASTER_ADDR comes
    first. Raises InitError where neither says anything.
    """
    if started_by is TORCHRUN:
        return _tcp(_value("MASTER_ADDR"), number("MASTER_PORT"))
    if "MASTER_ADDR" in os.environ:
        port = number("MASTER_PORT") if "MASTER_PORT" in os.environ else _DEFAULT_PORT
        return _tcp(os.environ["MASTER_ADDR"], port)
    if started_by is SRUN:
        port = _FIRST_SLURM_PORT + number("SLURM_JOB_ID") % 10_000
        return _tcp(first_host(_value(_slurm("NODELIST"))), port)
    if _first_number(started_by.local_size) == world_size:
        return f"file://{_own_folder()}/{_id_of_launcher(started_by.rank)}"
    raise InitError(
        f"the ranks run on several hosts, and {started_by.name} does not say where they meet: set "
        "MASTER_ADDR to the name of rank 0's host, in the environment of every rank"
    )


def serves_store() -> bool:
    """Whether torchrun serves the store at MASTER_ADDR, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_host(hosts: str) -> str:
    """The first of a list as SLURM writes it: "node03" of "node[03-07,9],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)[0]  # type: ignore[index]  # "" matches
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _launcher_or_none() -> Launcher | None:
    for one in LAUNCHERS:
        if one.rank in os.environ and not (one is SRUN and _is_interactive()):
            return one
    return None


def _is_interactive() -> bool:
    """A shell that srun has started: what is started from there by hand is no task of its own."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def _slurm(what: str) -> str:
    """A step may have fewer tasks and hosts than its job."""
    step = f"SLURM_STEP_{what}"
    return step if step in os.environ else f"SLURM_{what}"


def _first_number(names: tuple[str, ...]) -> int | None:
    return next((number(name) for name in names if name in os.environ), None)


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _own_folder() -> Path:
    """Where no other user may put a file that ours would read."""
    folder = Path(tempfile.gettempdir(), f"fastcomm-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise InitError(f"{folder} belongs to another user: set TMPDIR, or MASTER_ADDR")
    return folder


def _id_of_launcher(rank_variable: str) -> str:
    """Of the process that has started the ranks of this host, directly or through a script: the
    nearest one that is no rank itself. No other process since the machine was started has it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    for pid in _ancestors():
        if not _is_set_for(pid, rank_variable):
            return f"{boot}-{pid}-{_stat(pid)[19]}"
    return f"{boot}-{os.getppid()}"


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = int(_stat(pid)[1])


def _is_set_for(pid: int, variable: str) -> bool:
    """Whether the process was started with it. One of another user's is no rank of ours."""
    try:
        return f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return False


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says, from the third field on: the second may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _value(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise _not_set(name)
    return value


def _not_set(name: str) -> InitError:
    return InitError(
        f"{name} is not set: start the script with `torchrun --nproc-per-node=2 "
        f"{os.path.basename(sys.argv[0]) or 'train.py'}`, or under mpirun or srun, "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as docs/launching.md says, or "
        "pass init_method='tcp://host:port' with rank= and world_size=, or, for one rank "
        "alone, world_size=1"
    )
