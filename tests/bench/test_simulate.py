"""bench/simulate.py and bench/tune.py: what a rank measures, on real ranks; what the parent makes
of it, from answers that are made up. Nothing here looks at a time.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import on_ranks

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
SIZES = [1 << 20, 1 << 10] * 8  # of a model that has several buckets of 1 MB
LOCAL_S = 0.05


@on_ranks(2)
def test_a_rank_profiles_and_measures(comm):
    importlib.import_module("tests.support.small_models")  # puts bench/ on the path
    script = importlib.import_module("simulate_rank")
    script.BUDGET_S, script.LOCAL_ROUNDS = 0.0, 1  # the smallest sizes only
    methods = script.Methods(comm)
    costs = methods.costs()
    assert [nbytes for nbytes, _ in costs] == [1 << 12, 1 << 16]
    profile = methods.profile("mlp", 2)
    assert 0 < max(profile.ready_s) <= profile.backward_s
    assert profile.step().nbytes == 4 * sum(profile.sizes)
    seconds = methods.steps("mlp", [1, "auto"], 2, 1)
    assert len(seconds) == 2 and all(len(row) == 3 for row in seconds)


class MadeUpRanks:
    """In place of launch.Ranks."""

    def __init__(self, script: Path, world_size: int, **_: Any) -> None:
        assert script.is_file()
        self.world_size = world_size

    def __enter__(self) -> MadeUpRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, name: str, **arguments: Any) -> list[Any]:
        return [getattr(self, name)(**arguments)] * self.world_size

    def costs(self) -> list[Any]:
        return [[4096, [1e-5, 1e-5]], [1 << 24, [1e-2, 1e-2]]]

    def profile(self, model: str, steps: int) -> list[Any]:
        ready = [0.03 * (len(SIZES) - i) / len(SIZES) for i in range(len(SIZES))]
        return [0.015, 0.03, 0.005, ready, SIZES]

    def steps(self, model: str, caps: list[float], rounds: int, steps: int) -> list[Any]:
        return [[LOCAL_S, *(1.2 * LOCAL_S for _ in caps)]] * rounds

    def chosen(self) -> float:
        return 10.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs a benchmark's main(); returns what it printed and what it wrote."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(importlib.import_module("lib.launch"), "Ranks", MadeUpRanks)
    monkeypatch.setattr(importlib.import_module("lib.launch"), "exit_on_sigterm", lambda: None)
    path = tmp_path / "results.json"

    def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        command = [name, *arguments, "--json", str(path), "--plot", str(tmp_path / "x.png")]
        monkeypatch.setattr(sys, "argv", command)
        assert importlib.import_module(name).main() == 0
        assert (tmp_path / "x.png").stat().st_size > 0
        return capsys.readouterr().out, json.loads(path.read_text())

    return run


def test_predictions_are_printed_before_they_are_measured(run: Any) -> None:
    pytest.importorskip("matplotlib")
    printed, results = run("simulate", "--wire", "shm", "--models", "mlp", "--ranks", "2", "4")
    rows = [line.split() for line in printed.splitlines() if line.startswith("  mlp ")]
    assert [len(row) for row in rows] == 2 * (4 * [5] + 4 * [8])
    validation = results["validation"]
    assert {(row["ranks"], row["cap_mb"]) for row in validation} == {
        (ranks, cap) for ranks in (2, 4) for cap in (1, 5, 25, 100)
    }
    assert all(row["measured_ms"] == pytest.approx(60) for row in validation)
    assert set(results["errors"]) == {"shm", "all"}
    assert "goal 15%" in printed and "mlp, 4 ranks, shm, chose 10 MB: 1 MB: 1.00" in printed


def test_the_scaling_goes_to_1024_ranks_beside_what_was_published(run: Any) -> None:
    pytest.importorskip("matplotlib")
    printed, results = run("simulate", "--only", "scaling")
    rows = results["scaling"]["rows"]
    assert [row["ranks"] for row in rows] == [1 << n for n in range(11)]
    assert {row["ranks"]: row["published"] for row in rows}[16] == 0.104
    assert "README.md" in printed and "none could be verified" in printed
    assert results["scaling"]["advice"]["every"] >= 1


def test_tune_prints_the_sweep_and_the_advice(run: Any) -> None:
    pytest.importorskip("matplotlib")
    printed, results = run("tune", "--model", "mlp", "--measure")
    caps = [row["cap_mb"] for row in results["rows"]]
    assert 25 in caps and len(caps) > 1
    assert all(row["measured_ms"] == pytest.approx(60) for row in results["rows"])
    for words in ("bucket_cap_mb=", "synchronise every", "wire: "):
        assert words in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--machine", "nowhere.toml"), "--machine nowhere.toml: "),
        (("--machine", str(BENCH / "machines" / "v100.toml"), "--measure"), "leave --machine out"),
        (("--ranks", "0"), "--ranks is at least 1"),
        (("--rounds", "0", "--measure"), "--rounds is at least 1"),
    ],
)
def test_what_tune_cannot_do_is_refused(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit):
        run("tune", *arguments)
    assert words in capsys.readouterr().err
