"""The watchdog, the bootstrap and the rendezvous: how ranks meet, and how they notice that one is
gone.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WATCHDOG = "fastcomm/watchdog.py"
RENDEZVOUS = "fastcomm/rendezvous.py"
BOOTSTRAP = "fastcomm/bootstrap.py"
LAUNCHERS = "fastcomm/launchers.py"

WATCHDOG_TESTS = ("tests/test_watchdog.py",)

MUTATIONS = (
    Mutation(
        name="watchdog: a peer that closed after the same collective is lost",
        file=WATCHDOG,
        old="where < [comm.epoch, number]",
        new="where <= [comm.epoch, number]",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: an idle rank 0 is a mismatch",
        file=WATCHDOG,
        old="first[1] not in (what, NOTHING)",
        new="first[1] != what",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank that closed in good order is dead once its process ends",
        file=WATCHDOG,
        old="[rank for rank in ended if rank not in self._closed]",
        new="list(ended)",
        tests=(*WATCHDOG_TESTS, "tests/contract/test_ending.py"),
    ),
    Mutation(
        name="watchdog: descriptors of processes stay open",
        file=WATCHDOG,
        old="            os.close(lifeline)\n",
        new="            pass\n",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: an abandonment is heard in another epoch",
        file=WATCHDOG,
        old='self._notes.read(f"abandoned/{newest[1]}")',
        new='self._notes.read(f"abandoned/{newest[1] - 1}")',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank raises its own failure though another was first",
        file=WATCHDOG,
        old='error = _failure_of(leave_note(self._notes, "failure", failure_note(error)))',
        new='leave_note(self._notes, "failure", failure_note(error))',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a lost rank's number does not travel with the failure",
        file=WATCHDOG,
        old='getattr(error, "ranks", ())])',
        new="()])",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank says only once where it stands",
        file=WATCHDOG,
        old="if self._published != (comm.epoch, number):",
        new="if self._published is None:",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a store that is gone ends those who wait for nothing",
        file=WATCHDOG,
        old="            if stalled is not None:\n                self._give_up_dead(comm, self._d",
        new="            if True:\n                stalled = stalled or (0, 0.0, NOTHING)\n"
        "                self._give_up_dead(comm, self._d",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="rendezvous: ranks of two pid namespaces share memory",
        file=RENDEZVOUS,
        old="return f\"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}\"",
        new='return f"{boot_id.read().strip()}"',
        tests=("tests/rendezvous/test_hosts.py",),
    ),
    Mutation(
        name="rendezvous: a failure of one is not told to the others",
        file=RENDEZVOUS,
        old='bootstrap.fail(f"{bootstrap.name} failed in {bootstrap.caller}: {error}")',
        new="pass",
        tests=("tests/rendezvous/test_refusals.py",),
    ),
    Mutation(
        name="rendezvous: the local rank is the rank",
        file=RENDEZVOUS,
        old="neighbours.index(bootstrap.rank) if mine is None",
        new="bootstrap.rank if mine is None",
        tests=(
            "tests/group/test_hierarchical.py::test_init_chooses_it_where_ranks_have_several_hosts",
        ),
    ),
    Mutation(
        name="bootstrap: communicators of one process meet at one place",
        file=BOOTSTRAP,
        old="        end(number)\n        number = store.add(counter, 0)\n",
        new="        pass\n",
        tests=("tests/rendezvous/test_meeting.py",),
    ),
    Mutation(
        name="bootstrap: a rank may be given to two processes",
        file=BOOTSTRAP,
        old='if self._store.add(f"claim/{self.rank}", 1) > 1:',
        new='if self._store.add(f"claim/{self.rank}", 1) > 2:',
        tests=("tests/rendezvous/test_refusals.py",),
    ),
    Mutation(
        name="bootstrap: who has met others does not meet one that has met nobody",
        file=BOOTSTRAP,
        old="        self._pass_on()\n        return values",
        new="        return values",
        tests=("tests/rendezvous/test_meeting.py",),
    ),
    Mutation(
        name="bootstrap: attempts of torchrun meet at one place",
        file=BOOTSTRAP,
        old='prefix = f"fastcomm/{attempt}/{name}"',
        new='prefix = f"fastcomm/{name}"',
        tests=("tests/rendezvous/test_meeting.py",),
    ),
    Mutation(
        name="bootstrap: a group that has failed to meet is out of step",
        file=BOOTSTRAP,
        old="            self._is_over = True  # all ranks see it",
        new="            pass  # all ranks see it",
        tests=("tests/rendezvous/test_init.py",),
    ),
    Mutation(
        name="launchers: what an interactive shell starts is a rank",
        file=LAUNCHERS,
        old="None if found is SRUN and _is_interactive() else found",
        new="found",
        tests=("tests/rendezvous/test_launchers.py",),
    ),
    Mutation(
        name="launchers: ranks meet by their parent, a script of each rank's own included",
        file=LAUNCHERS,
        old="if not _is_set_for(pid, started_by.rank):",
        new="if True:",
        tests=("tests/rendezvous/test_launchers.py",),
    ),
    Mutation(
        name="launchers: ranks of several hosts meet at a file",
        file=LAUNCHERS,
        old=" and number(started_by.local_size) == world_size:",
        new=":",
        tests=("tests/rendezvous/test_launchers.py",),
    ),
    Mutation(
        name="launchers: ranks that a task of srun's starts itself have its local rank",
        file=LAUNCHERS,
        old="if is_its_own and found",
        new="if found",
        tests=("tests/rendezvous/test_launchers.py",),
    ),
    Mutation(
        name="launchers: what srun sets for an MPI hides srun",
        file=LAUNCHERS,
        old=" sign=_HYDRAS),",
        new="),",
        tests=("tests/rendezvous/test_launchers.py",),
    ),
    Mutation(
        name="meeting: a torch that is too new is named at every start",
        file=RENDEZVOUS,
        old="@functools.cache\ndef _warn_of_torch",
        new="def _warn_of_torch",
        tests=("tests/rendezvous/test_init.py",),
    ),
    Mutation(
        name="meeting: every rank of a process group names a torch that is too new",
        file=RENDEZVOUS,
        old="    if names[rank] == 0:\n        _warn_of_torch()",
        new="    if True:\n        _warn_of_torch()",
        tests=("tests/rendezvous/test_init.py",),
    ),
)
