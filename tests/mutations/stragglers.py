"""Which rank the others wait for."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STRAGGLERS = "fastcomm/insight/stragglers.py"
TEST = "tests/insight/test_stragglers.py::test_"

MUTATIONS = (
    Mutation(
        name="stragglers: a straggler costs what it is late by, also where another is later",
        file=STRAGGLERS,
        within="find",
        old="own - max(others)",
        new="own - min(others)",
        tests=(f"{TEST}the_cost_of_one_of_two_late_ranks_is_what_it_has_over_the_other",),
    ),
)
