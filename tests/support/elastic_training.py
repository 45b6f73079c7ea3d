"""A training that torchrun starts again after a failure: with checkpoints and a DistributedSampler.
Run by test_torchrun.py.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fastcomm

EPOCHS = 4


def main(folder: Path, fails: bool) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with fastcomm.init("shm", timeout=timedelta(seconds=20)) as comm:
        torch.manual_seed(attempt * 100 + comm.rank)  # attach() must make the ranks agree
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoint = folder / "checkpoint.pt"
        first = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["epoch"] + 1
        else:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.01)
            nn.init.eye_(model[0].weight)
        fastcomm.Reducer(comm).attach(model)
        data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        dataset = TensorDataset(data, data.sum(1, keepdim=True))
        sampler = DistributedSampler(dataset, num_replicas=comm.world_size, rank=comm.rank)
        for epoch in range(first, EPOCHS):
            if fails and attempt == 0 and epoch == 2 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_size=8, sampler=sampler):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            if comm.rank == 0:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "epoch": epoch,
                    },
                    checkpoint,
                )
            comm.barrier()
        if comm.rank == 0:
            torch.save(
                {"parameters": list(model.parameters()), "attempt": attempt, "first": first},
                folder / "end.pt",
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "fails")
