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

from tests.support import namespaces
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


@pytest.mark.thorough
@pytest.mark.skipif(namespaces.why_no_delay() is not None, reason=str(namespaces.why_no_delay()))
def test_a_figure_runs_between_hosts(tmp_path: Path) -> None:
    network = ["--wire", "network", "--rate", "10gbit", "--delay-ms", "1", "--hosts", "1,2"]
    result = run(tmp_path, [["fig2", *network]])["fig2"]
    assert result["wire"] == "network" and result["ranks"] == 3
    assert result["rate"] == "10gbit" and result["delay_ms"] == 1 and result["hosts"] == [1, 2]


# What is computed of the times


def seconds_of(figure: Any, rounds: int) -> tuple[list[list[list[float]]], list[list[float]]]:
    """[round][way][part]: made up, each way slower than the one before. And the processor's,
    [round][way].
    """
    numbers = range(len(figure.ways))
    return (
        [[[0.1, 0.2 + 0.01 * number, 0.05] for number in numbers] for _ in range(rounds)],
        [[0.3 + 0.02 * number for number in numbers] for _ in range(rounds)],
    )


@pytest.mark.parametrize("name", ["fig6", "fig7", "fig10", "wires", "hosts"])
def test_every_figure_of_steps_is_summarised(bench: dict[str, ModuleType], name: str) -> None:
    figure = bench["lab.figures"].FIGURES[name]
    model = bench["lab.paper"].summarise(name, "mlp", *seconds_of(figure, 3))
    assert [row["way"] for row in model["rows"]] == [way.name for way in figure.ways]


def test_differences_are_medians_over_rounds(bench: dict[str, ModuleType]) -> None:
    """Not differences of medians: a slow round counts on both sides."""
    ways = bench["lab.figures"].FIGURES["fig6"].ways
    rounds = [[[base + 0.01 * number] for number in range(len(ways))] for base in (0.1, 0.9, 0.5)]
    processor = [[0.0] * len(ways)] * len(rounds)
    rows = bench["lab.paper"].summarise("fig6", "mlp", rounds, processor)["rows"]
    assert [row["over_local_ms"][1] for row in rows[1:]] == pytest.approx([10, 20, 30, 40])
    assert rows[2]["saved"] == pytest.approx(1 - 0.52 / 0.51, abs=1e-4)
    assert rows[2]["saved_against"] == "fastcomm, 5 MB, no overlap"


def test_each_contender_is_compared_at_its_best_size(bench: dict[str, ModuleType]) -> None:
    """Each way is slower than the one before: the smallest of its sizes is each contender's."""
    figure = bench["lab.figures"].FIGURES["hosts"]
    best = bench["lab.paper"].summarise("hosts", "conv", *seconds_of(figure, 3))["best"]
    assert {name: row["of_ddp"] for name, row in best.items()} == {
        "ddp": 1,
        "fastcomm": 5,
        "fastcomm, bfloat16": 9,
        "fastcomm, int8": 12,
    }
    assert all(row["bucket_mb"] == 2 for row in best.values())
    assert best["fastcomm"]["processor_of_ddp"] == 5


# What is refused


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "which figure?"),
        (["fig9"], "invalid choice"),
        (["fig7", "--models", "alexnet"], "has no model alexnet"),
        (["fig7", "--hosts", "2"], "at least two hosts"),
    ],
)
def test_what_makes_no_sense_is_refused(
    bench: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["paper.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench["lab.paper"].main()
    assert words in capsys.readouterr().err
