"""Ranks that step by themselves: LocalSGD and DiLoCo, and how their syncs end."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LOCAL_SGD = "fastcomm/optim/local_sgd.py"


def _result(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_local_sgd.py::test_{name}",)


def _sync(name: str) -> tuple[str, ...]:
    return (f"tests/optim/test_syncs.py::test_{name}",)


_DILOCO = _result("diloco_steps_where_ranks_sync_and_where_sync_is_called")
_FAILS = _sync("a_sync_that_fails_changes_nothing")

MUTATIONS = (
    Mutation(
        name="local sgd: a sync is applied before all buckets are reduced",
        file=LOCAL_SGD,
        within="LocalSGD._sync",
        old="interruption = _average(",
        new="self._apply()\ninterruption = _average(",
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
        file=LOCAL_SGD,
        within="DiLoCo._fill",
        old="torch._foreach_sub_(views, parameters)",
        new=("torch._foreach_sub_(views, parameters)\ntorch._foreach_neg_(views)"),
        tests=_DILOCO,
    ),
)
