"""A training that loses a rank, under a launcher of another project. Each rank leaves a file named
after the rank it was started as. Run by test_lost_ranks.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import fastcomm

STEPS, LOST_AT = 30, 10


def main(folder: Path, victim: int, awaits_another: bool) -> None:
    """awaits_another: goes on until a process has come in place of the victim."""
    comm = fastcomm.init()
    started_as, n_ranks = comm.rank, comm.world_size
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = fastcomm.Reducer(comm).attach(model)
    n_made = 0

    def batches() -> Iterator[int]:
        while reducer.n_rounds < STEPS or (awaits_another and reducer.comm.world_size < n_ranks):
            yield reducer.n_rounds

    for _ in reducer.elastic(batches(), state=[optimizer]):
        lost = folder / "lost"
        if started_as == victim and reducer.n_rounds == LOST_AT and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        n_made += not reducer.skipped

    reducer.check_in_sync(optimizer)
    end = {"made": n_made, "steps": reducer.n_rounds, "ranks": reducer.comm.world_size}
    (folder / f"rank {started_as}").write_text(json.dumps(end))
    reducer.comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "another comes")
