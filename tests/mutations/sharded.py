"""ShardedOptimizer: shards, pieces, their state, and torch's helpers."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SHARES = "fastcomm/reducer/features/shards.py"
SHARDED = "fastcomm/optim/sharded.py"


def _training(test: str) -> tuple[str]:
    return (f"tests/optim/test_sharded.py::test_{test}",)


def _state(test: str) -> tuple[str]:
    return (f"tests/optim/test_sharded_state.py::test_{test}",)


def _distributed(test: str) -> tuple[str]:
    return (f"tests/optim/test_distributed_checkpoints.py::test_{test}",)


def _failures(test: str) -> tuple[str]:
    return (f"tests/optim/test_sharded_failures.py::test_{test}",)


MUTATIONS = (
    Mutation(
        name="shards: autograd does not know that a step has written to the parameters",
        file="fastcomm/reducer/features/shards.py",
        within="BucketShard.begin_step",
        old="increment_version([p for p, is_stepped in stepped if p is not None and is_stepped])",
        new="pass",
        tests=("tests/contract/test_autograd.py",),
    ),
    Mutation(
        name="sharded: parameters share a storage with the places they are looked for at",
        file=SHARES,
        within="BucketShard._take_in",
        old="parameter.data = self._view(i)",
        new="parameter.data = self._views[i]",
        tests=_training("parameters_that_were_moved_go_on_training"),
    ),
    Mutation(
        name="sharded: what one rank has loaded stays where another could not",
        file=SHARDED,
        within="ShardedOptimizer.load_state_dict",
        old="checkpoints.load(inner, saved, self._parts)",
        new="checkpoints.load(inner, saved, self._parts)\nself._inner = inner",
        tests=("tests/optim/test_sharded_state.py", "tests/optim/test_sharded_failures.py"),
    ),
    Mutation(
        name="sharded: a rank steps before the others have come to their step",
        file=SHARDED,
        within="ShardedOptimizer.step",
        old="not self.comm.has_streams",
        new="False",
        tests=_failures("a_failure_between_backward_and_step_leaves_no_rank_ahead"),
    ),
)
