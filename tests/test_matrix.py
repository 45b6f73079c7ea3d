"""Runs every row of the matrix over every transport; docs/guarantees.md says what the rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarantees import page
from matrix import ROWS, THEMES, run_row
from ranks import fresh_ranks, values_of

ROOT = Path(__file__).resolve().parent.parent
WORLDS = [
    ("shm", 2),
    ("shm", 3),
    ("nccl", 2),
    ("hosted", 2),
    ("hierarchical", 2),
    ("hierarchical", 4),
]


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]} of {world[1]}")
def test_row(ranks, monkeypatch, world, row):
    transport, world_size = world
    if not row.needs:
        pytest.skip("this release of torch has no such feature")
    if row.is_whole:
        monkeypatch.setattr(ranks, "transport", transport)
        first, *others = ranks(world_size, run_row, row.name)
    else:
        outcomes = fresh_ranks(world_size, run_row, row.name, transport=transport, pass_comm=True)
        first, *others = values_of(outcomes)
    assert all(digests == first for digests in others), "gradients or parameters differ by rank"


def test_the_page_of_guarantees_says_what_the_rows_say():
    current = (ROOT / "docs" / "guarantees.md").read_text()
    assert current == page(), "python tests/guarantees.py > docs/guarantees.md"


def test_every_error_says_what_to_do_instead():
    assert [row.name for row in ROWS.values() if not row.is_reduced and not row.instead] == []


def test_no_row_is_missing_from_the_themes():
    assert {row.theme for row in ROWS.values()} == {theme.__name__ for theme in THEMES}
