"""Which launcher has started this process, and what it says: the rank, the number of ranks, and
where they meet. torchrun and whoever sets its variables come first, then MPI's, then SLURM's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from fastcomm.comm.who import stat_of
from fastcomm.errors import InitError

_DEFAULT_PORT = 29500  # torch's
_FIRST_SLURM_PORT = 15000
_PARENT, _START_TIME = 1, 19  # of what stat_of() returns


class Launcher(NamedTuple):
    """Names of environment variables. local_rank, local_size: among the ranks of a host. sign: what
    it is recognised by, if not by the rank.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    sign: str = ""


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
_OMPI, _MV2, _JSM = "OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE"
_HYDRAS = "MPI_LOCALRANKID"  # MPICH's and Intel MPI's mpiexec set it, and nobody else
LAUNCHERS = (
    TORCHRUN,
    *(
        Launcher(name, f"{p}_RANK", f"{p}_SIZE", f"{p}_LOCAL_RANK", f"{p}_LOCAL_SIZE")
        for name, p in (("OpenMPI's mpirun", _OMPI), ("MVAPICH's mpirun", _MV2), ("jsrun", _JSM))
    ),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", _HYDRAS, "MPI_LOCALNRANKS", sign=_HYDRAS),
    # Before those whose names it sets, too, for an MPI that it starts (--mpi=pmi2, cray_shasta).
    SRUN,
    Launcher("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def launcher() -> Launcher:
    """Raises InitError if there is none."""
    found = _launcher_or_none()
    if found is None:
        raise _not_set("RANK")
    return found


def local_rank(rank: int | None, world_size: int | None) -> int | None:
    """This rank's number on its host. None if no launcher says it, or if the launcher has started
    another rank than the arguments say: a task may start ranks itself.
    """
    found = _launcher_or_none() or TORCHRUN
    is_its_own = found is TORCHRUN or all(
        told is None or str(told) == os.environ.get(name)
        for told, name in ((rank, found.rank), (world_size, found.world_size))
    )
    return number(found.local_rank) if is_its_own and found.local_rank in os.environ else None


def number(name: str) -> int:
    value = _value(name)
    if not value.isdecimal():
        raise InitError(f"the environment variable {name} must be a number; it is {value!r}")
    return int(value)


def meeting_point(started_by: Launcher, world_size: int) -> str:
    """tcp:// or file://, the same for all ranks that the launcher has started. MASTER_ADDR comes
    first. Raises InitError where neither says anything.
    """
    if started_by is TORCHRUN:
        return _tcp("MASTER_ADDR", _value("MASTER_ADDR"), _port())
    if "MASTER_ADDR" in os.environ:
        return _tcp("MASTER_ADDR", os.environ["MASTER_ADDR"], _port(_DEFAULT_PORT))
    if started_by is SRUN:
        # A step may run on fewer hosts than its job.
        hosts = os.environ.get("SLURM_STEP_NODELIST") or _value("SLURM_NODELIST")
        by_job = _FIRST_SLURM_PORT + number("SLURM_JOB_ID") % 10_000
        return _tcp(f"the first host of SLURM's list {hosts!r}", first_host(hosts), _port(by_job))
    if started_by.local_size in os.environ and number(started_by.local_size) == world_size:
        return f"file://{own_folder()}/{_id_of_launcher(started_by)}"
    raise InitError(
        f"rank {os.environ[started_by.rank]} of {world_size}: {started_by.name} does not say where "
        "ranks of several hosts meet, nor that all run on this one: set MASTER_ADDR to the name of "
        "rank 0's host, in the environment of every rank"
    )


def first_host(hosts: str) -> str:
    """Of SLURM's list: "node03" of "node[03-07,9],login". A list that is cut off keeps a "["."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\]?)*", hosts)[0]  # type: ignore[index]  # "" matches
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _launcher_or_none() -> Launcher | None:
    return next((one for one in LAUNCHERS if (one.sign or one.rank) in os.environ), None)


def _port(otherwise: int | None = None) -> int:
    if otherwise is not None and "MASTER_PORT" not in os.environ:
        return otherwise
    port = number("MASTER_PORT")
    if not 0 < port < 2**16:
        raise InitError(f"MASTER_PORT must be from 1 to 65535; it is {port}")
    return port


def _tcp(source: str, host: str, port: int) -> str:
    """source: what has named the host, for the error."""
    bare = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        return f"tcp://[{ipaddress.IPv6Address(bare)}]:{port}"
    if not re.fullmatch(r"[\w.-]+", bare):
        raise InitError(
            f"{source} must be the name or the address of rank 0's host, without a port, which "
            f"MASTER_PORT names; it is {host!r}"
        )
    return f"tcp://{bare}:{port}"


def own_folder() -> Path:
    """Where no other user may put a file that ours would read."""
    try:
        folder = Path(tempfile.gettempdir(), f"fastcomm-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise no_folder(error) from error
    if owner != os.getuid():
        raise InitError(f"{folder} belongs to another user: set TMPDIR")
    return folder


def no_folder(error: OSError) -> InitError:
    return InitError(
        f"there is no folder for what this user's ranks share: {error}. Set TMPDIR to a folder "
        "that this user can write to, on a disk with room, in the environment of every rank; see "
        "`ulimit -f`, too"
    )


def _id_of_launcher(started_by: Launcher) -> str:
    """Names the process that has started the ranks of this host, directly or through a script: the
    nearest one that is no rank itself. No other process since the machine was started has the name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    try:
        pid = os.getppid()
        while pid > 0:
            if not _is_set_for(pid, started_by.rank):
                return f"{boot}-{pid}-{stat_of(pid)[_START_TIME]}"
            pid = int(stat_of(pid)[_PARENT])
    except (FileNotFoundError, ProcessLookupError):  # hidden by how /proc is mounted, or gone
        pass
    raise InitError(
        f"rank {os.environ[started_by.rank]} cannot tell which process has started the ranks: set "
        "MASTER_ADDR to the name of this host, in the environment of every rank"
    )


def _is_set_for(pid: int, variable: str) -> bool:
    """Whether the process was started with it. One of another user's is no rank of ours."""
    try:
        return f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return False


def _value(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise _not_set(name)
    return value


def _not_set(name: str) -> InitError:
    return InitError(
        f"{name} is not set: start the script with `python -m fastcomm run "
        f"{os.path.basename(sys.argv[0]) or 'train.py'}`, or under torchrun, mpirun or srun, "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as docs/launching.md says, or "
        "pass init_method='tcp://host:port' with rank= and world_size=, or, for one rank "
        "alone, world_size=1"
    )
