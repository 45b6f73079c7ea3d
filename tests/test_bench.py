"""The benchmarks run, with real ranks and tiny sizes, and write what they promise. Nothing here looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_allreduce_prints_the_table_of_nccl_tests_and_writes_json(tmp_path):
    path = tmp_path / "allreduce.json"
    printed = run("allreduce.py", *["-b", "1K", "-e", "64K", "-f", "8", "-n", "20", "-w", "2", "--peers", "gloo", "--json"], str(path))
    rows = [line.split() for line in printed.splitlines() if line and not line.startswith("#")]
    assert [row[:5] for row in rows] == [[str(n), str(n // 4), "float", "sum", "-1"] for n in (1024, 8192, 65536)]
    assert "# Out of bounds values : 0 OK" in printed
    result = json.loads(path.read_text())
    assert result["ranks"] == 2 and result["machine"]["cores"] >= 1
    for row in result["rows"]:
        assert set(row["ratios"]) == {"gloo/fastcomm", "fastcomm/bound"}
        assert row["fastcomm"]["in_place"]["wrong"] == 0


def test_allreduce_measures_ordinary_tensors_and_other_dtypes(tmp_path):
    path = tmp_path / "allreduce.json"
    run(
        "allreduce.py",
        "-b",
        "4K",
        "-e",
        "4K",
        "-n",
        "5",
        "-d",
        "bfloat16",
        "-o",
        "max",
        "--tensors",
        "ordinary",
        "--peers",
        "gloo",
        "--json",
        str(path),
    )
    assert json.loads(path.read_text())["tensors"] == "ordinary"


def test_step_compares_fastcomm_with_ddp_and_writes_json(tmp_path):
    path = tmp_path / "step.json"
    printed = run("step.py", *["--models", "mlp", "--rounds", "2", "--steps", "1", "--json"], str(path))
    assert "fastcomm's overhead is" in printed
    result = json.loads(path.read_text())["models"]["mlp"]
    assert set(result["quartiles_ms"]) == {"local", "fastcomm", "ddp", "ddp_views"}
    assert set(result["overhead_ms"]) == {"fastcomm", "ddp", "ddp_views"}
    assert result["parameters"] == sum(p * q + q for p, q in [(1024, 2048), (2048, 2048), (2048, 1024), (1024, 10)])


def test_step_tells_what_the_hooks_cost():
    assert "us per parameter and step" in run("step.py", "--hook-cost", "--ranks", "1")
