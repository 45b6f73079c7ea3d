"""A training script with what real ones have: a DistributedSampler, accumulation, autocast,
clipping, checkpoints and resuming, validation on rank 0, early stopping, a time limit and
torch.compile. docs/training_script.md explains it part by part.

    torchrun --standalone --nproc-per-node=2 examples/training_script.py --checkpoint run.pt
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fastcomm

MICRO_BATCHES = 2  # backwards for each step
PATIENCE = 3  # epochs without progress before it stops


def main() -> None:
    options = parse_options()
    # Ranks 1, 2, ... wait while rank 0 validates: give that the time it takes.
    with fastcomm.init(timeout=timedelta(minutes=30)) as comm:
        train(comm, options)


def train(comm: fastcomm.Communicator, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    data, held_out = make_data(1000), make_data(200)
    # Without a process group it has to be told how many ranks there are.
    sampler = DistributedSampler(data, num_replicas=comm.world_size, rank=comm.rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = make_model().to(comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    progress = {"epoch": 0, "best": float("inf"), "stale": 0}
    if options.checkpoint and os.path.exists(options.checkpoint):
        progress = load(options.checkpoint, model, optimizer, comm.device)  # on every rank
    reducer = fastcomm.Reducer(comm).attach(model)
    reducer.check_in_sync(optimizer)
    torch.manual_seed(1 + comm.rank)  # each rank draws different dropout and augmentation
    forward = reducer.compile(model, backend=options.compile) if options.compile else model

    deadline = time.monotonic() + 60 * options.minutes
    while progress["epoch"] < options.epochs and progress["stale"] < PATIENCE:
        sampler.set_epoch(progress["epoch"])  # another order in each epoch
        model.train()
        train_epoch(comm, reducer, forward, optimizer, loader)
        reducer.sync_buffers()  # rank 0's batch-norm statistics
        loss = validate(comm, model, held_out)
        note(progress, loss)
        if comm.rank == 0:
            print(f"epoch {progress['epoch']}: validation loss {loss:.3f}", flush=True)
            if options.checkpoint:
                save(options.checkpoint, model, optimizer, progress)
        if any_rank(comm, time.monotonic() > deadline):
            break


def train_epoch(
    comm: fastcomm.Communicator,
    reducer: fastcomm.Reducer,
    forward: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
) -> None:
    for i, (x, y) in enumerate(loader, 1):
        x, y = x.to(comm.device), y.to(comm.device)
        with torch.autocast(comm.device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(x), y) / MICRO_BATCHES
        is_step = i % MICRO_BATCHES == 0 or i == len(loader)
        with contextlib.nullcontext() if is_step else reducer.no_sync():
            loss.backward()  # outside no_sync(): reduces the sum of all since the last step
        if is_step:
            reducer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


def validate(comm: fastcomm.Communicator, model: nn.Module, held_out: TensorDataset) -> float:
    """On rank 0, while the others wait in broadcast(). The same figure on all ranks."""
    loss = torch.zeros((), device=comm.device)
    if comm.rank == 0:
        model.eval()
        x, y = (tensor.to(comm.device) for tensor in held_out.tensors)
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y)
    comm.broadcast(loss)
    return loss.item()


def note(progress: dict[str, float], loss: float) -> None:
    """All ranks hold the same loss, so they stop in the same epoch."""
    progress["epoch"] += 1
    progress["stale"] = 0 if loss < progress["best"] else progress["stale"] + 1
    progress["best"] = min(loss, progress["best"])


def any_rank(comm: fastcomm.Communicator, flag: bool) -> bool:
    """Whether the flag is set on any rank: a clock, a signal, a full disk is one rank's affair."""
    votes = torch.tensor(flag, dtype=torch.uint8, device=comm.device)  # bools are not reduced
    comm.all_reduce(votes, "max")
    return bool(votes)


def save(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, float]
) -> None:
    """On rank 0. The model is the plain one: no wrapper, no prefix in the keys."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # a run that is killed here leaves the old one


def load(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, float]:
    """On every rank: attach() copies rank 0's model to the others, but not its optimizer."""
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["progress"]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def make_data(n: int) -> TensorDataset:
    """Points in four classes, by the signs of two sums."""
    x = torch.randn(n, 16)
    return TensorDataset(x, 2 * (x[:, :8].sum(1) > 0).long() + (x[:, 8:].sum(1) > 0).long())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=60, help="end after so many")
    parser.add_argument("--checkpoint", metavar="FILE", help="go on from it if it is there")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
