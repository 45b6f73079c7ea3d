"""bench/paper.py: its figures run in their smallest form and write what they promise, their sums
are right, and what cannot run is refused in a sentence. Nothing here looks at a time.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.stand_ins import environment, stand_ins
from tests.support import namespaces
from tests.support.forked_python import pythons
from tests.support.small_models import BENCH

pytestmark = pytest.mark.thorough

NAMES = ("paper", "lib.paper_figures", "paper_rank", "lib.chart")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return {name: importlib.import_module(name) for name in NAMES}


def run(
    folder: Path, figures: list[list[str]], *, env: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The results of figures with their options, by the figure's name; each is drawn, too."""
    commands, paths = [], {}
    for name, *options in figures:
        paths[name] = path = folder / f"{name}.json"
        output = ["--json", path, "--plot", path.with_suffix(".png")]
        commands.append([BENCH / "paper.py", name, *options, "--rounds", "2", *output])
    imports = ["tests.support.small_paper", "matplotlib.backends.backend_agg", "paper_rank"]
    if env is not None:
        imports.insert(0, "tests.support.host_clock")
    for done in pythons(commands, env=env or {}, imports=imports):
        assert done.returncode == 0, done.stdout + done.stderr
    assert all(path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG" for path in paths.values())
    return {name: json.loads(path.read_text()) for name, path in paths.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("paper")
    return run(folder, [["fig2"], ["fig6", "--models", "mlp"], ["fig11"]])


def test_an_all_reduce_of_a_fixed_total_is_cut_into_tensors(
    results: dict[str, dict[str, Any]],
) -> None:
    rows = results["fig2"]["rows"]
    assert [(row["parameters"], row["calls"]) for row in rows] == [(20_000, 3), (60_000, 1)]
    assert all(set(row["ms"]) == {"fastcomm", "gloo"} for row in rows)


def test_a_step_is_split_into_its_parts(results: dict[str, dict[str, Any]]) -> None:
    rows = results["fig6"]["models"]["mlp"]["rows"]
    ways = [("local", True), ("fastcomm", False), ("fastcomm", True), ("ddp", False), ("ddp", True)]
    assert [(row["who"], row["overlap"]) for row in rows] == ways
    for row in rows:
        assert set(row["parts_ms"]) == {"forward", "backward", "optimizer"}
        assert ("over_local_ms" in row) == (row["who"] != "local")
        assert ("saved" in row) == (row["who"] != "local" and row["overlap"])


def test_losses_with_skipped_synchronisation_are_those_of_ddp(
    results: dict[str, dict[str, Any]],
) -> None:
    (setting,) = results["fig11"]["settings"]
    assert list(setting["curves"]) == ["1", "2", "4", "8"]
    assert setting["largest_difference_to_ddp"] < 1e-6
    # Not one training four times: what was skipped is missing.
    ends = {curve[-1][1] for curve in setting["curves"].values()}
    assert len(ends) > 1


@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_a_figure_runs_between_hosts(tmp_path: Path) -> None:
    result = run(tmp_path, [["fig2", "--wire", "network"]])["fig2"]
    assert result["wire"] == "network" and result["rate"] == "1gbit" and result["ranks"] == 2


@pytest.mark.skipif(namespaces.why_no_delay() is not None, reason=str(namespaces.why_no_delay()))
def test_the_network_of_a_figure_may_have_a_delay_and_other_hosts(tmp_path: Path) -> None:
    network = ["--wire", "network", "--rate", "10gbit", "--delay-ms", "1", "--hosts", "1,2"]
    result = run(tmp_path, [["fig2", *network]])["fig2"]
    assert result["rate"] == "10gbit" and result["delay_ms"] == 1 and result["hosts"] == [1, 2]
    assert result["ranks"] == 3


def test_communicators_take_turns_on_a_gpu(tmp_path: Path) -> None:
    options = ["fig12", "--device", "cuda", "--models", "mlp"]
    result = run(tmp_path, [options], env=environment(stand_ins()))["fig12"]
    rows = result["models"]["mlp"]["rows"]
    assert result["wire"] == "nccl"
    ways = ["local", "fastcomm", "fastcomm, 3 streams", "fastcomm, 5 streams", "ddp"]
    assert [row["way"] for row in rows] == ways


# What is computed of the times


def seconds_of(figure: Any, rounds: int) -> tuple[list[list[list[float]]], list[list[float]]]:
    """[round][way][part]: made up, each way slower than the one before, each round by a half. And
    the processor's, [round][way].
    """
    numbers = range(len(figure.ways))
    return (
        [[[0.1, 0.2 + 0.01 * number, 0.05] for number in numbers] for _ in range(rounds)],
        [[0.3 + 0.02 * number for number in numbers] for _ in range(rounds)],
    )


@pytest.mark.parametrize("name", ["fig6", "fig7", "fig10", "fig12", "wires", "hosts"])
def test_every_figure_of_steps_is_summarised_and_drawn(
    bench: dict[str, ModuleType], name: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figure = bench["lib.paper_figures"].FIGURES[name]
    model = bench["paper"].summarise(name, "mlp", *seconds_of(figure, 3))
    result = {
        "benchmark": "paper",
        "figure": name,
        "wire": "network",
        "rate": "1gbit",
        "ranks": 2,
        "title": figure.title,
        "paper": figure.paper(),
        "models": {"resnet": model},
        "machine": importlib.import_module("lib.machine").describe(),
    }
    assert [row["way"] for row in model["rows"]] == [way.name for way in figure.ways]
    path = tmp_path / "figure.png"
    bench["lib.chart"].draw(json.loads(json.dumps(result)), path)
    assert 0 < path.stat().st_size < 60_000


def test_differences_are_medians_over_rounds(bench: dict[str, ModuleType]) -> None:
    """Not differences of medians: a slow round counts on both sides."""
    ways = bench["lib.paper_figures"].FIGURES["fig6"].ways
    rounds = [[[base + 0.01 * number] for number in range(len(ways))] for base in (0.1, 0.9, 0.5)]
    processor = [[0.0] * len(ways)] * len(rounds)
    rows = bench["paper"].summarise("fig6", "mlp", rounds, processor)["rows"]
    assert [row["over_local_ms"][1] for row in rows[1:]] == pytest.approx([10, 20, 30, 40])
    assert rows[2]["saved"] == pytest.approx(1 - 0.52 / 0.51, abs=1e-4)
    assert rows[2]["saved_against"] == "fastcomm, 5 MB, no overlap"


def test_each_contender_is_compared_at_its_best_size(bench: dict[str, ModuleType]) -> None:
    """Each way is slower than the one before: the smallest of its sizes is each contender's."""
    figure = bench["lib.paper_figures"].FIGURES["hosts"]
    best = bench["paper"].summarise("hosts", "conv", *seconds_of(figure, 3))["best"]
    assert {name: row["of_ddp"] for name, row in best.items()} == {
        "ddp": 1,
        "fastcomm": 5,
        "fastcomm, bfloat16": 9,
        "fastcomm, int8": 12,
    }
    assert all(row["bucket_mb"] == 2 for row in best.values())
    assert best["fastcomm"]["processor_of_ddp"] == 5


def test_of_a_turn_the_rank_counts_that_took_most(bench: dict[str, ModuleType]) -> None:
    ranks = [{"parts": [1, 2], "processor": 2}, {"parts": [0, 4], "processor": 1}]
    assert bench["paper"].slowest([[ranks]]) == [[[0, 4]]]
    assert bench["paper"].busiest([[ranks]]) == [[2]]


def test_without_overlap_gradients_are_reduced_in_buckets(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other of two ranks has gradients three times as large, so the mean is twice ours."""
    rank, numels = bench["paper_rank"], []

    class Done:
        def wait(self) -> None:
            pass

    def all_reduce(flat: torch.Tensor, async_op: bool) -> Done:
        numels.append(flat.numel())
        flat.mul_(1 + 3)
        return Done()

    monkeypatch.setattr(rank.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(rank.dist, "get_world_size", lambda: 2)
    parameters = [nn.Parameter(torch.zeros(n, 8)) for n in (1, 2, 3, 4)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number))
    rank.reduce_gradients(parameters, 4 * 16 / rank.MIB)  # 16 elements
    assert numels == [8 + 16, 24, 32]
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None and bool((parameter.grad == 2.0 * number).all())


# What is refused


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "which figure?"),
        (["fig9"], "invalid choice"),
        (["fig7", "--models", "alexnet"], "has no model alexnet"),
        (["fig7", "--rounds", "1"], "at least 2"),
        (["fig7", "--hosts", "2"], "at least two hosts"),
        (["fig7", "--device", "cuda"], "--device cuda is for fig12"),
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
        bench["paper"].main()
    assert words in capsys.readouterr().err


def refusal(
    bench: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> str:
    """Of a figure that cannot be measured here."""
    monkeypatch.setattr(sys, "argv", ["paper.py", *arguments])
    assert bench["paper"].main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_several_communicators_need_a_gpu(
    bench: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--device cuda" in refusal(bench, monkeypatch, capsys, "fig12")
    if not torch.cuda.is_available():
        line = refusal(bench, monkeypatch, capsys, "fig12", "--device", "cuda")
        assert "fig12: needs a GPU" in line and "CUDA" in line


def test_the_network_is_the_source_trees(
    bench: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench["paper"], "namespaces", None)
    assert "source tree" in refusal(bench, monkeypatch, capsys, "fig7", "--wire", "network")
