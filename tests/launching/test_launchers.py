"""Ranks that other launchers than torchrun start. Their environments are put up here, SLURM's and
all; ci/launchers.sh runs the real mpiexecs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest

import fastcomm
from fastcomm import InitError
from fastcomm.launching import launchers
from tests.support.outcomes import values_of
from tests.support.rank_process import LAUNCHER_VARIABLES
from tests.support.ranks import fresh_ranks, own_port, torchrun_env
from tests.support.reference import check_all_reduce

SOON = timedelta(seconds=5)  # for what must be refused: else it would wait for a rank

SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_NTASKS": "{n}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_JOB_ID": "{job}",
    "SLURM_NODELIST": "localhost,node[07-12]",
}


def _of_mpi(prefix):
    return {
        f"{prefix}_RANK": "{rank}",
        f"{prefix}_SIZE": "{n}",
        f"{prefix}_LOCAL_RANK": "{rank}",
        f"{prefix}_LOCAL_SIZE": "{n}",
    }


PALS = {
    "PALS_RANKID": "{rank}",
    "PALS_LOCAL_RANKID": "{rank}",
    "PMI_RANK": "{rank}",
    "PMI_SIZE": "{n}",
    "PMI_LOCAL_SIZE": "{n}",
}
MPICH = {
    "PMI_RANK": "{rank}",
    "PMI_SIZE": "{n}",
    "MPI_LOCALRANKID": "{rank}",
    "MPI_LOCALNRANKS": "{n}",
}
ENVIRONMENTS = {
    "srun": SLURM,
    "OpenMPI": _of_mpi("OMPI_COMM_WORLD"),
    "MVAPICH": _of_mpi("MV2_COMM_WORLD"),
    "jsrun": _of_mpi("JSM_NAMESPACE"),
    "PALS": PALS,
    "mpiexec": MPICH,
    # An MPI that srun, or a batch script of SLURM's, has started.
    "mpiexec in SLURM": {**SLURM, **MPICH, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    # What srun sets for an MPI.
    "srun --mpi=pmi2": {**SLURM, "PMI_RANK": "{rank}", "PMI_SIZE": "{n}"},
    "srun on a Cray": {**SLURM, **PALS},
}


def environments(names, n):
    """By rank. The job's number leads to a port that is free."""
    job = own_port(15_000) - 15_000
    return [
        {key: value.format(rank=rank, n=n, job=job) for key, value in names.items()}
        for rank in range(n)
    ]


def _describe(place):
    with fastcomm.init() as comm:
        check_all_reduce(comm, where="comm.empty")
        return comm.rank, comm.world_size, comm.local_rank, comm.backend


@pytest.mark.parametrize("names", [SLURM, _of_mpi("OMPI_COMM_WORLD")], ids=["srun", "OpenMPI"])
def test_init_under_a_launcher_needs_no_configuration(names):
    outcomes = fresh_ranks(2, _describe, env=environments(names, 2))
    assert values_of(outcomes) == [(0, 2, 0, "shm"), (1, 2, 1, "shm")]


@pytest.fixture
def bare(monkeypatch):
    """An environment that no launcher has been in."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def put_up(monkeypatch, names, rank=0, **others):
    for name, value in {**environments(names, 2)[rank], **others}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_launcher_says_which_rank_this_is_and_where_ranks_meet(bare, name):
    put_up(bare, ENVIRONMENTS[name], rank=1)
    found = launchers.launcher()
    assert [launchers.number(one) for one in (found.rank, found.world_size)] == [1, 2]
    assert launchers.local_rank(None, None) == 1
    assert re.match("tcp://localhost:|file:///", launchers.meeting_point(found, 2))


def test_what_torchrun_sets_comes_first(bare):
    put_up(bare, _of_mpi("OMPI_COMM_WORLD"), RANK="1", LOCAL_RANK="5")
    assert launchers.launcher() is launchers.TORCHRUN
    assert launchers.local_rank(None, None) == 5


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("RANK", None, "RANK is not set.*-m fastcomm run.*under torchrun.*init_method="),
        *((name, None, f"{name} is not set") for name in ("WORLD_SIZE", "MASTER_ADDR")),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        *((name, "two", f"{name} must be .*'two'") for name in ("RANK", "WORLD_SIZE")),
    ],
)
def test_a_part_of_torchruns_environment_is_not_enough(bare, name, value, words):
    for one, its in {**torchrun_env(1)[0], name: value}.items():
        if its is not None:
            bare.setenv(one, its)
    with pytest.raises(InitError, match=words):
        fastcomm.init(timeout=SOON)


def test_ranks_of_mpi_on_several_hosts_are_asked_for_an_address(bare):
    put_up(bare, MPICH, MPI_LOCALNRANKS="1")
    with pytest.raises(InitError, match="rank 0 of 2: mpiexec does not say.*MASTER_ADDR"):
        fastcomm.init(timeout=SOON)
    bare.setenv("MASTER_ADDR", "node1")
    assert launchers.meeting_point(launchers.launcher(), 2) == "tcp://node1:29500"
    bare.setenv("MASTER_PORT", "4321")
    assert launchers.meeting_point(launchers.launcher(), 2) == "tcp://node1:4321"


def _describe_rank_of_a_task(place):
    """A task of srun's, or of mpirun's, that starts ranks itself."""
    with fastcomm.init(init_method=place.init_method, rank=place.rank, world_size=2) as comm:
        return comm.local_rank


def test_ranks_that_one_task_starts_itself_have_local_ranks_of_their_own():
    env = environments(SLURM, 1)[0]
    assert values_of(fresh_ranks(2, _describe_rank_of_a_task, env=env)) == [0, 1]


def test_one_rank_in_a_batch_script_of_slurms_asks_it_for_nothing(bare):
    bare.setenv("SLURM_PROCID", "0")  # without SLURM_NTASKS, if the script asked for no number
    with fastcomm.init(world_size=1) as comm:
        assert (comm.rank, comm.local_rank) == (0, 0)


def _describe_told_its_rank(place):
    with fastcomm.init(rank=place.rank) as comm:
        return comm.rank, comm.world_size


def test_a_rank_may_be_told_where_the_environment_says_the_rest():
    """Also where a variable that torchrun has left promises a store."""
    said = {"RANK": None, "LOCAL_RANK": None, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = {**torchrun_env(2)[0], **said}
    assert values_of(fresh_ranks(2, _describe_told_its_rank, env=env)) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "address, place",
    [
        ("::1", "tcp://[::1]:4321"),
        ("[::1]", "tcp://[::1]:4321"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:4321"),
        ("127.0.0.1", "tcp://127.0.0.1:4321"),
        ("node-1.cluster_a", "tcp://node-1.cluster_a:4321"),
    ],
)
def test_an_address_may_be_spelt_in_any_usual_way(bare, address, place):
    put_up(bare, MPICH, MASTER_ADDR=address, MASTER_PORT="4321")
    assert launchers.meeting_point(launchers.launcher(), 2) == place


PORT, ADDRESS = "MASTER_PORT must be ", "MASTER_ADDR must be the name or the address "
LIST = "the first host of SLURM's list .* must be the name "


@pytest.mark.parametrize(
    "names, name, value, words",
    [
        *((MPICH, "MASTER_PORT", port, PORT) for port in ("65536", "0", "", "-1", " 80", "http")),
        *((MPICH, "MASTER_ADDR", host, ADDRESS) for host in ("", " ", "node1:80", "[::1]:80")),
        *((MPICH, "MASTER_ADDR", host, ADDRESS) for host in ("http://node1", "a b")),
        *((SLURM, "SLURM_STEP_NODELIST", hosts, LIST) for hosts in ("node[1-3", "node[]", "[")),
    ],
)
def test_what_is_no_address_is_refused(bare, names, name, value, words):
    place = {"MASTER_ADDR": "node1"} if name == "MASTER_PORT" else {}
    put_up(bare, names, **place, **{name: value})
    with pytest.raises(InitError, match=f"{words}.*it is .*{re.escape(value[:4])}"):
        fastcomm.init(timeout=SOON)


def test_a_step_of_slurm_meets_on_its_own_first_host(bare):
    put_up(bare, SLURM, SLURM_STEP_NODELIST="gpu[3,5]-ib", SLURM_JOB_ID="1234567")
    assert launchers.meeting_point(launchers.launcher(), 2) == "tcp://gpu3-ib:19567"
    bare.setenv("MASTER_PORT", "4321")
    assert launchers.meeting_point(launchers.launcher(), 2) == "tcp://gpu3-ib:4321"


# Without the rest of fastcomm, which would import torch.
SAY_WHERE = f"""
import sys, types
package = sys.modules["fastcomm"] = types.ModuleType("fastcomm")
package.__path__ = {fastcomm.__path__}
from fastcomm.launching import launchers as l
print(l.meeting_point(l.launcher(), 2))
"""


def _places_of_ranks(*start):
    """Where two ranks of one launcher, this process, would meet."""
    return [
        subprocess.run(
            [*start, sys.executable, "-c", SAY_WHERE],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for environment in environments(MPICH, 2)
    ]


def test_ranks_meet_by_the_process_that_started_them_also_through_a_script(bare, tmp_path):
    script = tmp_path / "wrap.sh"
    script.write_text('"$@"\nexit $?\n')  # the shell stays, as one process per rank
    one, other = _places_of_ranks("bash", str(script))
    assert one == other == _places_of_ranks()[0]
    assert one.startswith("file:///") and f"-{os.getpid()}-" in one


def test_a_launcher_that_is_hidden_asks_for_an_address(bare):
    put_up(bare, MPICH)
    bare.setattr("os.getppid", lambda: 2**22 + 1)  # more than any pid: as /proc with hidepid=2
    with pytest.raises(InitError, match="rank 0 cannot tell which process.*MASTER_ADDR"):
        fastcomm.init(timeout=SOON)


def test_a_file_in_the_place_of_the_folder_is_refused(bare, tmp_path):
    put_up(bare, MPICH)
    bare.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / f"fastcomm-{os.getuid()}").touch()
    with pytest.raises(InitError, match="no folder .*: .*File exists.*Set TMPDIR"):
        fastcomm.init(timeout=SOON)


def test_a_rank_that_its_launcher_does_not_tell_is_asked_for(bare):
    bare.setenv("MPI_LOCALRANKID", "0")
    with pytest.raises(InitError, match="PMI_RANK is not set"):
        fastcomm.init(timeout=SOON)


def test_the_folder_of_another_user_is_refused(bare, tmp_path):
    put_up(bare, MPICH)
    bare.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    bare.setattr("os.getuid", lambda: 12345)
    (tmp_path / "fastcomm-12345").mkdir()
    with pytest.raises(InitError, match="fastcomm-12345 belongs to another user"):
        fastcomm.init(timeout=SOON)
