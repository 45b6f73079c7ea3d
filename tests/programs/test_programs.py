"""Generated programs over every transport, the same ones in every run. `make soak` runs others, for
longer; tests/programs/strategies.py says how they are drawn."""

from __future__ import annotations

import pytest

from tests.programs import batches

pytestmark = pytest.mark.thorough

SEED = 1
# By kind and transport, how many programs 2, 3 and 4 ranks run.
COUNTS = {
    "reducer": {
        "shm": (28, 12, 8),
        "nccl": (10, 6, 4),
        "group": (7, 5, 3),
        "hierarchical": (5, 5, 3),
    },
    "collective": {
        "shm": (48, 28, 18),
        "nccl": (16, 8, 6),
        "group": (14, 8, 6),
        "hierarchical": (8, 8, 6),
    },
}


def _cells(kind: str) -> list[tuple[str, int, int]]:
    return [(over, 2 + i, n) for over, counts in COUNTS[kind].items() for i, n in enumerate(counts)]


@pytest.mark.timeout(400)  # a program that fails is shrunk
@pytest.mark.parametrize("over, n_ranks, count", _cells("reducer"))
def test_a_reducer_does_what_local_training_would(ranks, over, n_ranks, count):
    batches.find_failure(ranks, "reducer", n_ranks, over, count, SEED)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("over, n_ranks, count", _cells("collective"))
def test_collectives_do_what_one_process_would(ranks, over, n_ranks, count):
    batches.find_failure(ranks, "collective", n_ranks, over, count, SEED)
