"""Runs every row of the matrix; docs/compatibility.md shows them, and says where they run."""

from __future__ import annotations

import pytest

from tests.matrix import ROWS, THEMES, Row, run_row
from tests.matrix.compatibility import PAGE, filled
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

# A reducer waits for the one, and orders streams over the other.
WORLDS = [("shm", 2), ("nccl", 2)]
# One communicator to a reducer: how tensors travel differs, which tests/transports/group is about.
OVER_TORCH = [("group", 3), ("hierarchical", 3)]  # on one host; two on one host, and one


def _worlds_and_rows():
    for i, row in enumerate(ROWS.values()):
        for world in WORLDS if row.is_slow else [*WORLDS, OVER_TORCH[i % 2]]:
            yield world, row


@pytest.mark.parametrize(
    "world, row",
    list(_worlds_and_rows()),
    ids=lambda part: part.name if isinstance(part, Row) else f"{part[0]} of {part[1]}",
)
def test_row(ranks, monkeypatch, world, row):
    transport, world_size = world
    if not row.needs:
        pytest.skip("this release of torch has no such feature")
    if row.is_whole:
        monkeypatch.setattr(ranks, "transport", transport)
        ran = ranks(world_size, run_row, row.name)
    else:
        outcomes = fresh_ranks(world_size, run_row, row.name, transport=transport, pass_comm=True)
        ran = values_of(outcomes)
    assert all(one.digests == ran[0].digests for one in ran), "the ranks have different results"
    assert not all(one.has_heard for one in ran), "no rank has said what is wrong"


def test_the_page_on_compatibility_says_what_the_rows_say():
    current = PAGE.read_text()
    assert current == filled(current), "python -m tests.matrix.compatibility"


def test_every_error_says_what_to_do_instead():
    assert [row.name for row in ROWS.values() if not row.is_reduced and not row.instead] == []


def test_no_row_is_missing_from_the_themes():
    assert {row.theme for row in ROWS.values()} == {theme.__name__ for theme in THEMES}
