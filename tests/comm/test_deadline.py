"""Deadlines count the time in which a process runs, and end."""

from __future__ import annotations

from pathlib import Path

import fastcomm
from fastcomm.comm import deadline
from fastcomm.comm.deadline import Deadline
from fastcomm.comm.times import COUNTED_S


def test_a_deadline_ends_on_a_machine_where_every_look_comes_late(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now)
    monkeypatch.setattr(deadline, "_looked", (now, 0.0))
    end, n_looks = Deadline(10), 0
    while not end.is_over():
        now += 3600
        n_looks += 1
    assert n_looks == 10 / COUNTED_S


def test_no_wait_counts_by_a_clock_that_goes_on_while_the_process_is_stopped():
    paths = Path(fastcomm.__file__).parent.rglob("*.py*")
    sources = [path for path in paths if path.suffix in (".py", ".pyx")]
    # All but the first leave something alone for so long, and wait for nobody.
    counting = {path.name for path in sources if "time.monotonic()" in path.read_text()}
    assert counting == {"deadline.py", "dump.py", "elastic.py", "membership.py"}
