"""The command line where pip has installed fastcomm without an extra: no matplotlib, no rich, no
tqdm.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastcomm.__main__ import BENCHMARKS
from tests.support.forked_python import python, pythons

NO_EXTRAS = ("tests.support.without_extras", "tests.support.small_models")


def test_the_demo_says_in_lines_how_far_it_is() -> None:
    small = ("--steps", "6", "--layers", "1", "--width", "64", "--rounds", "2")
    demo = python("-m", "fastcomm", "demo", *small, imports=NO_EXTRAS)
    assert demo.returncode == 0, demo.stderr
    assert re.search(r"^6/6 steps, loss \d+\.\d+, [\d,]+ tokens/s$", demo.stdout, re.MULTILINE)
    assert "DDP over Gloo" in demo.stdout


def test_a_benchmark_measures_and_prints_its_table(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    small = ("--models", "mlp", "--rounds", "2", "--steps", "1", "--json", file)
    done = python("-m", "fastcomm", "bench", "step", *small, imports=NO_EXTRAS)
    assert done.returncode == 0, done.stderr
    assert "fastcomm" in done.stdout and "mlp" in json.loads(file.read_text())["models"]


@pytest.mark.parametrize("option, file", [("--plot", "x.svg"), ("--report", "x.html")])
def test_a_picture_says_what_it_needs_before_anything_is_measured(
    option: str, file: str, tmp_path: Path
) -> None:
    command = ("-m", "fastcomm", "bench", "step", option, tmp_path / file)
    done = python(*command, imports=NO_EXTRAS)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option} needs matplotlib: pip install -e '.[bench]'" in done.stderr


def test_every_benchmark_starts() -> None:
    commands = [("-m", "fastcomm", "bench", name, "--help") for name in BENCHMARKS]
    for name, done in zip(BENCHMARKS, pythons(commands, imports=NO_EXTRAS), strict=True):
        assert done.returncode == 0 and "--plot" in done.stdout, f"{name}: {done.stderr}"
