"""Trainings as torchrun starts them, and starts them anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forked_python import python
from tests.support.scripts import printed_by

ROOT = Path(__file__).resolve().parent.parent.parent


TRAINING = ROOT / "tests/support/elastic_training.py"


def train(folder: Path, how: str) -> dict[str, Any]:
    """Trains under torchrun."""
    done = python(
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"],
        *[TRAINING, folder, how],
    )
    assert done.returncode == 0, done.stderr
    return left_in(folder)


def left_in(folder: Path) -> dict[str, Any]:
    """What the training has left at its end."""
    end: dict[str, Any] = torch.load(folder / "end.pt", weights_only=False)
    return end


@pytest.mark.thorough
def test_a_training_whose_rank_was_killed_goes_on_from_its_checkpoint_to_the_same_end(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    printed_by(TRAINING, str(folders[0]), "lives", is_for_cpus=True)
    undisturbed, killed = left_in(folders[0]), train(folders[1], "fails")
    assert (undisturbed["attempt"], undisturbed["first"]) == (0, 0)
    assert (killed["attempt"], killed["first"]) == (1, 2)
    for one, other in zip(undisturbed["parameters"], killed["parameters"], strict=True):
        assert torch.equal(one, other)
    # The checkpoint is one of the plain model.
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model.load_state_dict(torch.load(folders[1] / "checkpoint.pt")["model"], strict=True)
