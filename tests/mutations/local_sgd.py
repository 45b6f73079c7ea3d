"""Ranks that step by themselves: LocalSGD and DiLoCo, and how their syncs end."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LOCAL_SGD = "fastcomm/optim/local_sgd.py"
DILOCO = "fastcomm/optim/diloco.py"


def _result(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_local_sgd.py::test_{name}",)


def _sync(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_syncs.py::test_{name}",)


_IN_TURN = _result("fragments_sync_in_turn")
_FAILS = _sync("a_sync_that_fails_changes_nothing")

MUTATIONS = (
    Mutation(
        name="local sgd: a sync is applied before all buckets are reduced",
        file=LOCAL_SGD,
        within="LocalSGD._sync",
        old="interruption = sync.finish()\n",
        new="self._apply(buckets)\ninterruption = sync.finish()\n",
        tests=_FAILS,
    ),
    Mutation(
        name="local sgd: constant buffers lose their bits",
        file=LOCAL_SGD,
        within="LocalSGD.average_buffers",
        old="buffer.detach().double().reshape(-1)",
        new="buffer.detach().double().reshape(-1) * 1.0000001",
        tests=_result("buffers_stay_own_until_they_are_averaged"),
    ),
    Mutation(
        name="diloco: pseudo-gradients point the other way",
        file=DILOCO,
        within="DiLoCo._fill",
        old="torch._foreach_sub_(views, parameters)",
        new=("torch._foreach_sub_(views, parameters)\ntorch._foreach_neg_(views)"),
        tests=_IN_TURN,
    ),
)
