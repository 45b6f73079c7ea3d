"""A training that has the same bits on any number of ranks, and through the loss of one.

python -m fastcomm run --threads 1 --ranks 4 --replace 1 examples/any_number_of_ranks.py
python -m fastcomm run --threads 1 --ranks 2 examples/any_number_of_ranks.py
python -m fastcomm run --threads 1 --ranks 1 examples/any_number_of_ranks.py

All print the same hashes, one for each epoch. Where there are 4 ranks, rank 3 kills itself in the
second epoch. The others continue, and a new process takes its place.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import fastcomm

LOST_AT = 30  # this step
LATEST_EPOCH = 1000  # until which the others wait for the new process


def train(comm: fastcomm.Communicator, least_epochs: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(640, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(
        nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1)
    ).to(comm.device)
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = fastcomm.VirtualLoader(data, virtual_ranks=8, batch_size=4)
    n_ranks, is_lost_later = comm.world_size, False

    def is_over() -> bool:
        """All ranks must say the same: those that are left wait for the new one, up to a point."""
        is_complete = reducer.comm.world_size == n_ranks
        return loader.epoch >= (least_epochs if is_complete else LATEST_EPOCH)

    while not is_over():
        for step in reducer.virtual(loader, state=[optimizer]):
            for x, y in step:
                predicted = model(x.to(comm.device))
                functional.mse_loss(predicted, y.to(comm.device)).backward()
            if step.number == 0:
                is_lost_later = reducer.comm.rank == 3  # not the process in its place
            if step.number == LOST_AT and is_lost_later:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        if reducer.comm.rank == 0:
            print(f"epoch {loader.epoch - 1}: {hash_of(model)}", flush=True)
    reducer.comm.close()


def hash_of(model: nn.Module) -> str:
    parameters = [value.detach().cpu().numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha1(b"".join(parameters)).hexdigest()[:12]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="at least so many")
    arguments = parser.parse_args()
    train(fastcomm.init(), arguments.epochs)
