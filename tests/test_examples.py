"""The examples run under torchrun and learn what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(example: str, *arguments: str) -> str:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / example), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_gan_learns_the_circle() -> None:
    radius = re.search(r"draws: ([\d.]+)", run("gan.py"))
    assert radius is not None and float(radius[1]) == pytest.approx(1, abs=0.2)


def test_accumulation_with_clipping_learns() -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("accumulation.py"))]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2


def test_reinforce_learns_though_ranks_play_different_numbers_of_episodes() -> None:
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", run("reinforce.py", "--steps", "200"))]
    assert rewards[-1] > 0.9


def test_a_reducer_and_ddp_converge_to_the_same_parameters() -> None:
    assert re.search(r"after 50 steps: 0$", run("converge.py", "--steps", "50"), re.MULTILINE)
