"""Generated programs over every transport, the same ones in every run, and what is told of one that
fails. `make soak` runs others, for longer; tests/programs/strategies.py says how they are drawn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from tests import programs
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


# What is told of a program that fails.


@dataclass(frozen=True)
class Toy:
    """Does something wrong on the last rank when some number is 10 or more."""

    wrong: str
    numbers: tuple[int, ...]

    def run(self, comm: Any) -> list[dict[str, Any]]:
        comm.barrier()
        is_wrong = max(self.numbers, default=0) >= 10 and comm.rank == comm.world_size - 1
        if is_wrong and self.wrong == "raises":
            raise ValueError("out of luck")
        if is_wrong and self.wrong == "hangs":
            time.sleep(1000)
        comm.barrier()
        return [{"the same": 1}, {"the number": 2 if is_wrong and self.wrong == "differs" else 1}]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "wrong, text",
    [
        ("raises", "ValueError: out of luck"),
        ("differs", "after operation 1 the ranks differ in the number: [1, 2]"),
        ("hangs", "had not answered and was killed"),
    ],
)
def test_a_program_that_fails_is_shrunk_and_told(monkeypatch, ranks, wrong, text):
    numbers = st.lists(st.integers(0, 20), max_size=3).map(tuple)
    toys = {"toy": lambda n_ranks, transport: st.builds(Toy, st.just(wrong), numbers)}
    monkeypatch.setattr(batches, "STRATEGIES", toys)
    if wrong == "hangs":  # every try takes until the limit
        monkeypatch.setattr(batches, "PROGRAM_LIMIT_S", 2.0)
        monkeypatch.setattr(batches, "SHRINKING_S", 0.0)
    with pytest.raises(batches.Failed) as told:
        batches.find_failure(ranks, "toy", 2, "shm", 10, SEED)
    assert text in str(told.value)
    least = "" if wrong == "hangs" else "10,)))"
    assert f"replay('shm', 2, Toy(wrong='{wrong}', numbers=({least}" in str(told.value)


@pytest.mark.parametrize("kind", batches.STRATEGIES)
def test_programs_are_drawn_alike_in_every_run(kind):
    first, second = (batches.draw(kind, 3, "shm", 20, SEED) for _ in range(2))
    assert first == second
    assert batches.draw(kind, 3, "shm", 20, SEED + 1) != first
    assert eval(repr(first), vars(programs)) == first
