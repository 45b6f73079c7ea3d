"""fastcomm/torch_backend: the process group, its works, and DDP's hook."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROCESS_GROUP = "fastcomm/torch_backend/process_group.py"
WORK = "fastcomm/torch_backend/work.py"
HOOK = "fastcomm/torch_backend/ddp_hook.py"
GLOO_ENGINE = "fastcomm/torch_backend/gloo_engine.py"

HOOK_TESTS = ("tests/backend/test_ddp_hook.py",)
COLLECTIVES_TESTS = ("tests/backend/test_collectives.py",)
DDP_BUCKETS = "fastcomm/torch_backend/ddp_buckets.py"
DDP_BUCKETS_TESTS = ("tests/backend/test_ddp_buckets.py",)

MUTATIONS = (
    Mutation(
        name="backend: DDP's hook divides a sum",
        file=HOOK,
        within="all_reduce_hook",
        old='else "sum"',
        new='else "mean"',
        tests=HOOK_TESTS,
    ),
    Mutation(
        name="backend: halves go to Gloo",
        file=PROCESS_GROUP,
        within="",
        old="frozenset(CPU_DTYPES)",
        new="frozenset(CPU_DTYPES) - {torch.float16, torch.bfloat16}",
        tests=COLLECTIVES_TESTS,
    ),
    Mutation(
        name="backend: a poll does not end at its deadline",
        file=WORK,
        within="UnderWay.wait",
        old="Deadline(timeout.total_seconds())",
        new="Deadline(timeout.total_seconds() + 3600)",
        tests=("tests/backend/test_hosts.py::test_a_wait_ends_at_its_own_timeout",),
    ),
    Mutation(
        name="backend: a process that ended a moment later is not looked for",
        file=GLOO_ENGINE,
        within="GlooEngine.raise_if_lost",
        old="_OF_CONNECTIONS in str(error)",
        new="_OF_CONNECTIONS not in str(error)",
        tests=("tests/backend/test_lost_processes.py",),
    ),
    Mutation(
        name="backend: 16-bit buckets are torch's",
        file=DDP_BUCKETS,
        within="_is_bucket",
        old="dtype in FLOATS",
        new="dtype in (torch.float32, torch.float64)",
        tests=DDP_BUCKETS_TESTS,
    ),
)
