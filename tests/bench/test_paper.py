"""bench/lab/paper.py: its figures run in their smallest form and write what they promise, their
sums are right, and what cannot run is refused in a sentence. Nothing here looks at a time.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.forked_python import pythons
from tests.support.small_models import BENCH

NAMES = ("lab.paper", "lab.figures", "lib.chart", "lib.harness")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return {name: importlib.import_module(name) for name in NAMES}


def run(folder: Path, figures: list[list[str]]) -> dict[str, dict[str, Any]]:
    """The results of figures with their options, by the figure's name; each is drawn, too."""
    commands, paths = [], {}
    for name, *options in figures:
        paths[name] = path = folder / f"{name}.json"
        output = ["--json", path, "--plot", path.with_suffix(".png")]
        commands.append([BENCH / "lab" / "paper.py", name, *options, "--rounds", "2", *output])
    imports = ["tests.support.small_paper", "matplotlib.backends.backend_agg", "lab.paper"]
    for done in pythons(commands, imports=imports):
        assert done.returncode == 0, done.stdout + done.stderr
    assert all(path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG" for path in paths.values())
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.mark.thorough
def test_figures_are_measured_on_one_host(tmp_path: Path) -> None:
    results = run(tmp_path, [["fig2"], ["fig6", "--models", "mlp"]])
    rows = results["fig2"]["rows"]
    assert [(row["parameters"], row["calls"]) for row in rows] == [(20_000, 3), (60_000, 1)]
    assert all(set(row["ms"]) == {"fastcomm", "gloo"} for row in rows)
    rows = results["fig6"]["models"]["mlp"]["rows"]
    ways = [("local", True), ("fastcomm", False), ("fastcomm", True), ("ddp", False), ("ddp", True)]
    assert [(row["who"], row["overlap"]) for row in rows] == ways
    for row in rows:
        assert set(row["parts_ms"]) == {"forward", "backward", "optimizer"}
        assert ("over_local_ms" in row) == (row["who"] != "local")
        assert ("saved" in row) == (row["who"] != "local" and row["overlap"])


# What is computed of the times


def test_differences_are_medians_over_rounds(bench: dict[str, ModuleType]) -> None:
    """Not differences of medians: a slow round counts on both sides."""
    ways = bench["lab.figures"].FIGURES["fig6"].ways
    rounds = [[[base + 0.01 * number] for number in range(len(ways))] for base in (0.1, 0.9, 0.5)]
    processor = [[0.0] * len(ways)] * len(rounds)
    rows = bench["lab.paper"].summarise("fig6", "mlp", rounds, processor)["rows"]
    assert [row["over_local_ms"][1] for row in rows[1:]] == pytest.approx([10, 20, 30, 40])
    assert rows[2]["saved"] == pytest.approx(1 - 0.52 / 0.51, abs=1e-4)
    assert rows[2]["saved_against"] == "fastcomm, 5 MB, no overlap"


# What is refused
