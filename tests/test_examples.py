"""The examples run under torchrun and learn what they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(example: str, *arguments: str, launcher: tuple[str, ...] = TORCHRUN) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
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


# Frameworks. Their own DDP over torch's own Gloo gives the same figures; its processes sometimes abort at their end (torch's issue 190489).


def test_accelerate_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("accelerate")
    losses = {how: re.findall(r"step \d+: loss ([\d.]+)", run("with_accelerate.py", "--fastcomm", how)) for how in ("backend", "hook")}
    assert losses["backend"] == losses["hook"] and len(losses["hook"]) == 6
    assert float(losses["hook"][-1]) < 0.8 * float(losses["hook"][0])


def test_fabric_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("lightning_fabric")
    launchers = {"backend": (), "hook": TORCHRUN}  # Fabric starts ranks itself, if nobody has
    runs = {how: run("with_fabric.py", "--fastcomm", how, launcher=launcher) for how, launcher in launchers.items()}
    losses = {how: re.findall(r"step \d+: loss ([\d.]+)", text) for how, text in runs.items()}
    assert losses["backend"] == losses["hook"] and len(losses["hook"]) == 6
    assert float(losses["hook"][-1]) < 0.8 * float(losses["hook"][0])


def test_the_trainer_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("transformers")
    runs = {how: run("with_trainer.py", "--fastcomm", how) for how in ("backend", "hook")}
    losses = {how: re.search(r"mean loss ([\d.]+)", text)[1] for how, text in runs.items()}
    assert losses["backend"] == losses["hook"] and float(losses["hook"]) < 4.5
