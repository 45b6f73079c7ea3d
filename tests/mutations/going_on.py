"""Ranks that meet anew when others are lost, and a loop that goes on."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

ELASTIC = "fastcomm/reducer/features/elastic.py"
LOOP = "tests/reducer/features/test_elastic.py::test_"
MISSED = f"{LOOP}a_rank_that_has_missed_a_step_gets_it_from_one_that_has_not"

MUTATIONS = (
    Mutation(
        name="elastic: the least far tells the others",
        file=ELASTIC,
        within="compare_ranks",
        old="furthest = max(ranks)",
        new="furthest = min(ranks)",
        tests=(MISSED,),
    ),
    Mutation(
        name="elastic: what was accumulated before a loss is gone",
        file=ELASTIC,
        within="Elastic._batches",
        old="have_all is None",
        new="have_all is None and not self._taken.clear()",
        tests=(f"{LOOP}what_was_accumulated_is_made_again_when_a_rank_is_lost",),
    ),
    Mutation(
        name="elastic: batches of a step that others have made come again",
        file=ELASTIC,
        within="Elastic._batches",
        old="self._n_rounds > n_rounds",
        new="self._n_rounds > n_rounds and not self._again",
        tests=(MISSED,),
    ),
)
