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


def start(
    example: str, *arguments: str, launcher: tuple[str, ...] = TORCHRUN
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """What it has printed."""
    try:
        printed, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return printed


def run(example: str, *arguments: str) -> str:
    return end(start(example, *arguments))


def test_the_gan_learns_the_circle() -> None:
    radius = re.search(r"draws: ([\d.]+)", run("gan.py"))
    assert radius is not None and float(radius[1]) == pytest.approx(1, abs=0.2)


def test_accumulation_with_clipping_learns() -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run("accumulation.py"))]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2


def test_reinforce_learns_though_ranks_play_different_numbers_of_episodes() -> None:
    rewards = [
        float(reward)
        for reward in re.findall(r"reward ([\d.]+)", run("reinforce.py", "--steps", "200"))
    ]
    assert rewards[-1] > 0.9


def test_a_reducer_and_ddp_converge_to_the_same_parameters() -> None:
    assert re.search(r"after 50 steps: 0$", run("converge.py", "--steps", "50"), re.MULTILINE)


# Frameworks. Their own DDP over torch's own Gloo gives the same figures; its processes sometimes
# abort at their end (torch's issue 190489).


def both_ways(example: str, pattern: str, launcher: tuple[str, ...] = TORCHRUN) -> list[float]:
    """The losses that an example prints, alike over the backend and over the hook. launcher: for
    the former.
    """
    launchers = {"backend": launcher, "hook": TORCHRUN}
    started = {how: start(example, "--fastcomm", how, launcher=launchers[how]) for how in launchers}
    losses = {how: re.findall(pattern, end(process)) for how, process in started.items()}
    assert losses["backend"] == losses["hook"]
    return [float(loss) for loss in losses["hook"]]


def test_accelerate_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("accelerate")
    losses = both_ways("with_accelerate.py", r"step \d+: loss ([\d.]+)")
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


def test_fabric_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("lightning_fabric")
    losses = both_ways(
        "with_fabric.py", r"step \d+: loss ([\d.]+)", launcher=()
    )  # Fabric starts ranks itself, if nobody has
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]


def test_the_trainer_trains_alike_over_the_backend_and_the_hook() -> None:
    pytest.importorskip("transformers")
    (loss,) = both_ways("with_trainer.py", r"mean loss ([\d.]+)")
    assert loss < 4.5
