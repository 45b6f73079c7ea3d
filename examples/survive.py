"""A training run that loses a rank, continues with the others, and accepts a replacement process.

python -m fastcomm run --replace 1 --ranks 3 examples/survive.py

Rank 1 kills itself at step 20. At the end the ranks that were there all the time repeat the
training in one process, with as many shares of each batch as there were ranks. Over shared memory
the parameters have the same bits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import fastcomm

LOST_AT = 20  # this step
MORE = 10  # steps that all ranks make together in the end
ROWS = 12  # of a batch, which the ranks share out


def new_model(device: torch.device | str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, step: int, share: int, n_shares: int) -> Tensor:
    batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    rows = batch[share::n_shares].to(next(model.parameters()).device)
    return nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True))


def train(comm: fastcomm.Communicator) -> None:
    model, optimizer = new_model(comm.device)
    reducer = fastcomm.Reducer(comm).attach(model)
    n_ranks, is_lost_later = comm.world_size, comm.rank == 1
    sizes: list[int] = []  # how many ranks there were, by step

    def steps() -> Iterator[int]:
        n_together = 0
        while n_together < MORE:
            is_complete = reducer.n_rounds > LOST_AT and reducer.comm.world_size == n_ranks
            n_together = n_together + 1 if is_complete else 0
            yield reducer.n_rounds

    for _ in reducer.elastic(steps(), state=[optimizer]):
        step, comm = reducer.n_rounds, reducer.comm  # comm: of the ranks that are there now
        if step == len(sizes) == LOST_AT and is_lost_later:  # not the process in its place
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, step, comm.rank, comm.world_size).backward()
        optimizer.step()
        if not reducer.skipped:
            sizes.append(comm.world_size)
        time.sleep(0.05)  # a model that takes its time

    reducer.check_in_sync(optimizer)
    if len(sizes) == reducer.n_rounds:  # it has been there all the time
        compare(model, sizes)
    else:
        print(f"came at step {reducer.n_rounds - len(sizes)}", flush=True)
    reducer.comm.close()


def compare(model: nn.Module, sizes: list[int]) -> None:
    counts = {n_ranks: sizes.count(n_ranks) for n_ranks in sorted(set(sizes))}
    steps = ", ".join(f"{n} steps with {n_ranks} ranks" for n_ranks, n in counts.items())
    same = "the same bits as" if is_computed_alike(model, sizes) else "other bits than"
    print(f"{steps}: {same} one process", flush=True)


def is_computed_alike(model: nn.Module, sizes: list[int]) -> bool:
    """Whether one process comes to the same bits, with as many shares of each step's batch."""
    alone, optimizer = new_model(next(model.parameters()).device)
    for step, n_ranks in enumerate(sizes):
        gradients = []
        for share in range(n_ranks):
            alone.zero_grad()
            loss_of(alone, step, share, n_ranks).backward()
            gradients.append([p.grad for p in alone.parameters()])
        for parameter, *shares in zip(alone.parameters(), *gradients, strict=True):
            parameter.grad = sum(shares[1:], shares[0]) / n_ranks
        optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


if __name__ == "__main__":
    train(fastcomm.init())
