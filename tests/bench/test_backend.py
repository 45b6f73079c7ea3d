"""The backend's benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_python import python

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


def test_the_benchmark_writes_what_it_measured(tmp_path):
    path = tmp_path / "backend.json"
    done = python(
        BENCH / "backend.py",
        *["--models", "mlp", "--rounds", "2", "--steps", "1", "-e", "64K", "--json", path],
        *["--bucket-views", "--plot", tmp_path / "backend.png"],
        env={"GLOO_SOCKET_IFNAME": "lo"},
        imports=["tests.support.small_models"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert [row["bytes"] for row in result["all_reduce"]] == [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    assert set(result["ddp"]["mlp"]["overhead_ms"]) == {"unreduced", "fastcomm", "gloo"}
    assert result["bucket_views"] is True
    assert (tmp_path / "backend.png").stat().st_size > 0
    # Figures, not what they ought to be.
    assert "times as fast as Gloo: " in done.stdout and "met" not in done.stdout.split()
