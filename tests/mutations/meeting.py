"""The watchdog, the bootstrap and the rendezvous: how ranks meet, and how they notice that one is
gone.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WATCHDOG = "fastcomm/comm/watchdog.py"
RENDEZVOUS = "fastcomm/launching/rendezvous.py"
BOOTSTRAP = "fastcomm/launching/bootstrap.py"
LAUNCHERS = "fastcomm/launching/launchers.py"

LAUNCHER_TESTS = "tests/launching/test_launchers.py::test_"
WATCHDOG_TESTS = ("tests/comm/test_watchdog.py",)
CHANNELS = "fastcomm/launching/channels.py"
MESSAGES = "tests/contract/test_messages.py"

MUTATIONS = (
    Mutation(
        name="channels: a message that its rank waits for overtakes the others",
        file=CHANNELS,
        within="_Channel.move",
        old="self._is_idle() and not async_op",
        new="not async_op",
        tests=(
            f"{MESSAGES}::test_messages_of_one_rank_to_another_arrive_in_the_order_of_the_calls",
        ),
    ),
    Mutation(
        name="channels: a lost rank has its number in the channel",
        file=CHANNELS,
        within="_Channel.naming_ranks",
        old="[self._peer] if error.ranks else []",
        new="error.ranks",
        tests=(f"{MESSAGES}::test_a_rank_that_will_not_send_any_more_is_named[shm-killed-True]",),
    ),
    Mutation(
        name="channels: a tensor is checked by the two ranks alone",
        file=CHANNELS,
        within="Channels.move",
        old="comm.check_tensor(tensor)",
        new="",
        tests=(f"{MESSAGES}::test_bad_arguments_are_refused_before_the_other_rank_is_involved",),
    ),
    Mutation(
        name="channels: no dump tells that a first message did not come",
        file=CHANNELS,
        within="Channels._meet",
        old="Lifetime().end(error)",
        new="pass",
        tests=(
            "tests/insight/test_diagnosis.py::"
            "test_a_message_that_never_comes_is_shown_with_where_its_sender_stands[shm-0]",
        ),
    ),
    Mutation(
        name="channels: nobody looks whether the other rank has ended",
        file="fastcomm/launching/membership.py",
        within="Fixed._look_for_peer",
        old="process_has_ended(pid)",
        new="False",
        tests=(f"{MESSAGES}::test_a_rank_that_will_not_send_any_more_is_named[shm-killed-False]",),
    ),
    Mutation(
        name="watchdog: a peer that closed after the same collective is lost",
        file=WATCHDOG,
        within="Watchdog._judge",
        old="where < [comm.epoch, number]",
        new="where <= [comm.epoch, number]",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: an idle rank 0 is a mismatch",
        file=WATCHDOG,
        within="Watchdog._compare",
        old="first[1] not in (what, NOTHING)",
        new="first[1] != what",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank that closed in good order is dead once its process ends",
        file=WATCHDOG,
        within="Watchdog._give_up_dead",
        old="[rank for rank in ended if rank not in self._closed]",
        new="list(ended)",
        tests=(*WATCHDOG_TESTS, "tests/contract/test_ending.py"),
    ),
    Mutation(
        name="watchdog: descriptors of processes stay open",
        file=WATCHDOG,
        within="Watchdog._run",
        old="os.close(lifeline)",
        new="pass",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: an abandonment is heard in another epoch",
        file=WATCHDOG,
        within="Watchdog._hear",
        old='f"abandoned/{newest[1]}"',
        new='f"abandoned/{newest[1] - 1}"',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank raises its own failure though another was first",
        file=WATCHDOG,
        within="Watchdog.give_up",
        old="error = _failure_of(first, comm.world_size)",
        new="pass",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank that has closed twice holds up the watchdog",
        file=WATCHDOG,
        within="Watchdog._read_closing",
        old='f"closed/{self._n_closings}"',
        new='f"closed/{len(self._closed)}"',
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="messages: any integer is in a range",
        file="fastcomm/comm/messages.py",
        within="_fits",
        old="type(value) is int and value in form",
        new="type(value) is int",
        tests=("tests/comm/test_messages.py",),
    ),
    Mutation(
        name="watchdog: a lost rank's number does not travel with the failure",
        file=WATCHDOG,
        within="failure_note",
        old='getattr(error, "ranks", ())',
        new="()",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a rank says only once where it stands",
        file=WATCHDOG,
        within="Watchdog._publish",
        old="self._published != (comm.epoch, number, self._is_asked)",
        new="self._published is None",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="watchdog: a store that is gone ends those who wait for nothing",
        file=WATCHDOG,
        within="Watchdog._tick",
        old="if stalled is not None:\n    self._give_up_dead(",
        new="if True:\n    stalled = stalled or (0, 0.0, NOTHING)\n    self._give_up_dead(",
        tests=WATCHDOG_TESTS,
    ),
    Mutation(
        name="bootstrap: ranks of two pid namespaces share memory",
        file=BOOTSTRAP,
        within="host_identity",
        old="f\"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}\"",
        new='f"{boot_id.read().strip()}"',
        tests=("tests/launching/test_hosts.py",),
    ),
    Mutation(
        name="rendezvous: a failure of one is not told to the others",
        file=RENDEZVOUS,
        within="_told_to_all",
        old='bootstrap.fail(f"{bootstrap.name} failed in {bootstrap.caller}: {error}")',
        new="pass",
        tests=("tests/launching/test_refusals.py",),
    ),
    Mutation(
        name="rendezvous: the local rank is the rank",
        file=RENDEZVOUS,
        within="_neighbours",
        old="ranks.index(bootstrap.rank)",
        new="bootstrap.rank",
        tests=(
            "tests/transports/group/test_hierarchical.py::"
            "test_init_chooses_it_where_ranks_have_several_hosts",
        ),
    ),
    Mutation(
        name="rendezvous: ranks that ask for auto use no backend of their own",
        file=RENDEZVOUS,
        within="_neighbours",
        old="_Neighbours(backends[0]",
        new="_Neighbours(backend",
        tests=(
            "tests/transports/group/test_hierarchical.py::"
            "test_ranks_of_several_hosts_may_meet_in_a_group",
        ),
    ),
    Mutation(
        name="rendezvous: nobody compares the backends that ranks ask for",
        file=RENDEZVOUS,
        within="_refuse_different",
        old="len(by_backend) > 1",
        new="False",
        tests=("tests/launching/test_refusals.py",),
    ),
    Mutation(
        name="bootstrap: communicators of one process meet at one place",
        file=BOOTSTRAP,
        within="_enter_part",
        old=("_end_part(store, number, name)\nnumber = store.add(counter, 0)"),
        new="pass",
        tests=("tests/launching/test_meeting.py",),
    ),
    Mutation(
        name="bootstrap: a store's file goes while a rank opens it again",
        file=BOOTSTRAP,
        within="count_as_finished",
        old="_file_stores[path] = store",
        new="pass",
        tests=("tests/launching/test_meeting.py::test_ranks_leave_no_file_behind_when_they_end",),
    ),
    Mutation(
        name="lost peers: a process that comes to its end tells nobody",
        file="fastcomm/comm/script_end.py",
        within="_tell",
        old="end.tell_of_end(has_raised)",
        new="pass",
        tests=("tests/contract/test_lost_peers.py",),
    ),
    Mutation(
        name="lost peers: who has raised is said to have ended in good order",
        file="fastcomm/comm/script_end.py",
        within="_tell",
        old='getattr(sys, "last_value", None) is not None',
        new="False",
        tests=("tests/contract/test_lost_peers.py",),
    ),
    Mutation(
        name="bootstrap: a rank may be given to two processes",
        file=BOOTSTRAP,
        within="StoreBootstrap._enter",
        old="not self._claim_rank()",
        new="False",
        tests=("tests/launching/test_refusals.py",),
    ),
    Mutation(
        name="bootstrap: who has met others does not meet one that has met nobody",
        file=BOOTSTRAP,
        within="StoreBootstrap.exchange",
        old="self._pass_on()",
        new="",
        tests=("tests/launching/test_meeting.py",),
    ),
    Mutation(
        name="bootstrap: attempts of torchrun meet at one place",
        file=BOOTSTRAP,
        within="_prefix",
        old="f\"fastcomm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}\"",
        new='f"fastcomm/{name}"',
        tests=("tests/launching/test_meeting.py",),
    ),
    Mutation(
        name="launchers: what an interactive shell starts is a rank",
        file=LAUNCHERS,
        within="_launcher_or_none",
        old="None if found is SRUN and _is_interactive() else found",
        new="found",
        tests=(f"{LAUNCHER_TESTS}a_shell_that_srun_has_started_is_no_rank",),
    ),
    Mutation(
        name="launchers: what srun starts in a shell of salloc's is no rank",
        file=LAUNCHERS,
        within="_is_interactive",
        old='is_named_so and _has_terminal(os.environ.get("SLURM_TASK_PID", "self"))',
        new="is_named_so",
        tests=(f"{LAUNCHER_TESTS}what_srun_starts_in_a_shell_of_salloc_is_a_rank",),
    ),
    Mutation(
        name="launchers: ranks meet by their parent, a script of each rank's own included",
        file=LAUNCHERS,
        within="_id_of_launcher",
        old="not _is_set_for(pid, started_by.rank)",
        new="True",
        tests=(
            f"{LAUNCHER_TESTS}ranks_meet_by_the_process_that_started_them_also_through_a_script",
        ),
    ),
    Mutation(
        name="launchers: ranks of several hosts meet at a file",
        file=LAUNCHERS,
        within="meeting_point",
        old="started_by.local_size in os.environ and number(started_by.local_size) == world_size",
        new="started_by.local_size in os.environ",
        tests=(f"{LAUNCHER_TESTS}ranks_of_mpi_on_several_hosts_are_asked_for_an_address",),
    ),
    Mutation(
        name="launchers: ranks that a task of srun's starts itself have its local rank",
        file=LAUNCHERS,
        within="local_rank",
        old="is_its_own and found.local_rank in os.environ",
        new="found.local_rank in os.environ",
        tests=(f"{LAUNCHER_TESTS}ranks_that_one_task_starts_itself_have_local_ranks_of_their_own",),
    ),
    Mutation(
        name="launchers: what srun sets for an MPI hides srun",
        file=LAUNCHERS,
        within="",
        old='Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", _HYDRAS, "MPI_LOCALNRANKS", sign=_HYDRAS)',
        new='Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", _HYDRAS, "MPI_LOCALNRANKS",)',
        tests=(f"{LAUNCHER_TESTS}init_under_a_launcher_needs_no_configuration",),
    ),
    Mutation(
        name="meeting: a torch that is too new is named at every start",
        file=RENDEZVOUS,
        within="",
        old="@functools.cache\ndef _warn_of_torch",
        new="def _warn_of_torch",
        tests=("tests/launching/test_init.py",),
    ),
    Mutation(
        name="meeting: every rank of a process group names a torch that is too new",
        file=RENDEZVOUS,
        within="connect",
        old="names[rank] == 0",
        new="True",
        tests=("tests/launching/test_init.py",),
    ),
)
