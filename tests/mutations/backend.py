"""fastcomm/torch_backend: the process group, its works, and DDP's hook."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROCESS_GROUP = "fastcomm/torch_backend/process_group.py"
WORK = "fastcomm/torch_backend/work.py"
HOOK = "fastcomm/torch_backend/ddp_hook.py"
ENGINE = "fastcomm/torch_backend/gloo_engine.py"
PEERS = "fastcomm/torch_backend/peers.py"

HOOK_TESTS = ("tests/backend/test_ddp_hook.py",)
WAYS_TESTS = ("tests/backend/test_ways.py",)
DDP_BUCKETS = "fastcomm/torch_backend/ddp_buckets.py"
DDP_BUCKETS_TESTS = ("tests/backend/test_ddp_buckets.py",)
COLLECTIVES = "tests/backend/test_collectives.py"
LATE = "tests/backend/test_late_ranks.py"

MUTATIONS = (
    Mutation(
        name="backend: a wire of DDP's hook keeps its size when buckets change",
        file=HOOK,
        within="HookState._wire_of",
        old="wire is None or wire.numel() != buffer.numel()",
        new="wire is None",
        tests=HOOK_TESTS,
    ),
    Mutation(
        name="backend: a failed backward's reductions come before the next one's",
        file=HOOK,
        within="all_reduce_hook",
        old="state._under_way.clear()",
        new="pass",
        tests=HOOK_TESTS,
    ),
    Mutation(
        name="backend: a future that has failed holds itself, and the graph of its backward",
        file=HOOK,
        within="_Reduction.finish",
        old="again(error) if isinstance(error, FastcommError) else error",
        new="error",
        tests=HOOK_TESTS,
    ),
    Mutation(
        name="backend: DDP's hook divides a sum",
        file=HOOK,
        within="all_reduce_hook",
        old='op = "sum"',
        new='op = "mean"',
        tests=HOOK_TESTS,
    ),
    Mutation(
        name="backend: halves go to Gloo",
        file=PROCESS_GROUP,
        within="",
        old="frozenset(CPU_DTYPES)",
        new="frozenset(CPU_DTYPES) - {torch.float16, torch.bfloat16}",
        tests=WAYS_TESTS,
    ),
    Mutation(
        name="backend: what is only moved does not go to Gloo",
        file=PROCESS_GROUP,
        within="ProcessGroup._mover",
        old="tensor.is_cpu and self._cpu.comm.is_threadsafe",
        new="False",
        tests=("tests/backend/test_hosts.py::test_what_is_only_moved_goes_to_gloo",),
    ),
    Mutation(
        name="backend: the thread that makes progress goes on for ever",
        file=WORK,
        within="_Progress.stop",
        old="self._is_stopped = True",
        new="",
        tests=WAYS_TESTS,
    ),
    Mutation(
        name="backend: nobody goes on with a work while its caller does something else",
        file=WORK,
        within="_Progress.watch",
        old="self._wake.set()",
        new="",
        tests=(
            f"{COLLECTIVES}::test_an_all_reduce_goes_on_while_its_caller_waits_for_something_else",
        ),
    ),
    Mutation(
        name="backend: a tensor with gaps is reduced in a copy",
        file=WORK,
        within="put_all",
        old="source is not target",
        new="source is None",
        tests=(COLLECTIVES,),
    ),
    Mutation(
        name="backend: the sender of a broadcast gets a copy back",
        file=PROCESS_GROUP,
        within="ProcessGroup.broadcast",
        old="[] if opts.rootRank == self.rank() else [(tensor, flat)]",
        new="[(tensor, flat)] if opts.rootRank == self.rank() else []",
        tests=(COLLECTIVES,),
    ),
    Mutation(
        name="backend: reading the number of collectives counts as one",
        file=WORK,
        within="CallCounter.value",
        old="self._n_reads += 1",
        new="",
        tests=("tests/backend/test_engine.py",),
    ),
    Mutation(
        name="backend: a poll does not end at its deadline",
        file=WORK,
        within="UnderWay._poll",
        old="Deadline(seconds)",
        new="Deadline(seconds + 3600)",
        tests=("tests/backend/test_hosts.py::test_a_wait_ends_at_its_own_timeout",),
    ),
    Mutation(
        name="backend: ranks of a group are named by their number in it",
        file=ENGINE,
        within="GlooEngine._blame",
        old='f"rank {self._members[rank]} (pid {pid})"',
        new='f"rank {rank} (pid {pid})"',
        tests=("tests/backend/test_lost_processes.py",),
    ),
    Mutation(
        name="backend: a work says that it is completed before its results are in place",
        file=WORK,
        within="UnderWay._is_placed",
        old=("self._shared.place_what_has_come()\nself.place_if_good()"),
        new="",
        tests=(f"{COLLECTIVES}::test_a_work_that_says_it_is_completed_has_its_results_in_place",),
    ),
    Mutation(
        name="backend: results of a work that was dropped never come",
        file=WORK,
        within="SharedCommunicator.run",
        old="self._unplaced.append(work)",
        new="pass",
        tests=(
            f"{COLLECTIVES}::test_results_of_a_work_that_was_dropped_are_in_place_after_a_barrier",
        ),
    ),
    Mutation(
        name="backend: Gloo gets a negated view without its sign",
        file=ENGINE,
        within="_flat",
        old="argument.detach().resolve_neg",
        new="argument.detach",
        tests=(
            "tests/backend/test_engine.py::test_a_negated_view_without_gaps_travels_as_it_looks",
        ),
    ),
    Mutation(
        name="backend: a view that went to Gloo is completed before it is in place",
        file=ENGINE,
        within="EngineWork.is_completed",
        old="self._place()",
        new="",
        tests=("tests/backend/test_engine.py::test_a_view_is_in_place_once_its_work_is_completed",),
    ),
    Mutation(
        name="backend: wait_tensor() does not find a collective under way",
        file=WORK,
        within="registered",
        old="c10d._register_work(tensor, lent)",
        new="pass",
        tests=("tests/backend/test_engine.py",),
    ),
    Mutation(
        name="backend: a late rank is a time-out of Gloo's",
        file=ENGINE,
        within="EngineWork.wait",
        old="deadline.is_over()",
        new="True",
        tests=(f"{LATE}::test_a_rank_that_comes_late_is_waited_for",),
    ),
    Mutation(
        name="backend: a collective that is completed as a wait times out has failed",
        file=ENGINE,
        within="EngineWork.wait",
        old=("if self._work.is_completed():\n    break"),
        new=("if self._work.is_completed():\n    raise"),
        tests=(f"{LATE}::test_a_collective_that_is_completed_as_a_wait_times_out_has_not_failed",),
    ),
    Mutation(
        name="backend: a process that ended a moment later is not looked for",
        file=PEERS,
        within="Peers.ended_soon",
        old="not deadline.is_over()",
        new="deadline.is_over()",
        tests=("tests/backend/test_lost_processes.py",),
    ),
    Mutation(
        name="backend: DDP's first buckets are torch's",
        file=DDP_BUCKETS,
        within="_lending.lending",
        old=("with _Lent(empty):\n    init(self, *arguments, **options)"),
        new="init(self, *arguments, **options)",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: DDP's gradients get fresh pages in every step",
        file=DDP_BUCKETS,
        within="_lending.lending",
        old="keep_freed_memory()",
        new="",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: the buckets that DDP makes anew are torch's",
        file=DDP_BUCKETS,
        within="_lending_again.lending",
        old=("with _Lent(empty):\n    is_rebuilt = rebuild(self)"),
        new="is_rebuilt = rebuild(self)",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: 16-bit buckets are torch's",
        file=DDP_BUCKETS,
        within="_is_bucket",
        old="dtype in FLOATS",
        new="dtype in (torch.float32, torch.float64)",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: a reducer that was never used is kept",
        file=DDP_BUCKETS,
        within="",
        old="_borrowers: WeakKeyDictionary[c10d.Reducer, Empty] = WeakKeyDictionary()",
        new="_borrowers: dict[c10d.Reducer, Empty] = {}",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: DDP's buckets are left to Works",
        file=PROCESS_GROUP,
        within="ProcessGroup.allreduce",
        old="is_async(opts) and not by_ddp",
        new="is_async(opts)",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: DDP gets a future without the bucket",
        file=PROCESS_GROUP,
        within="ProcessGroup.allreduce",
        old="Finished(tensors) if is_async(opts) else _DONE",
        new="_DONE",
        tests=DDP_BUCKETS_TESTS,
    ),
    Mutation(
        name="backend: a group claims that Gloo can reconfigure it",
        file=PROCESS_GROUP,
        within="ProcessGroup",
        old="supports_reconfigure = False",
        new="supports_reconfigure = True",
        tests=("tests/backend/test_groups.py",),
    ),
    Mutation(
        name="backend: DDP's buckets are known by no layout",
        file=DDP_BUCKETS,
        within="_is_bucket",
        old="layout is torch.strided",
        new="layout is None",
        tests=DDP_BUCKETS_TESTS,
    ),
)
