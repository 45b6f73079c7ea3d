"""The backend's benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_writes_what_it_measured(tmp_path):
    path = tmp_path / "backend.json"
    script = Path(__file__).resolve().parent.parent.parent / "bench" / "backend.py"
    command = [
        sys.executable,
        str(script),
        "--models",
        "mlp",
        "--rounds",
        "2",
        "--steps",
        "1",
        "--json",
        str(path),
        "--plot",
        str(tmp_path / "backend.png"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert [row["bytes"] for row in result["all_reduce"]] == [
        4**exponent for exponent in range(5, 14)
    ]
    assert set(result["ddp"]["mlp"]["overhead_ms"]) == {"fastcomm", "gloo"}
    assert (tmp_path / "backend.png").stat().st_size > 0
    # Figures, not what they ought to be.
    assert "times as fast as Gloo: " in done.stdout and "met" not in done.stdout.split()
