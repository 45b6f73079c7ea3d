"""Ranks with different numbers of batches: all ranks take part until the last one is done.

torchrun --standalone --nproc-per-node=2 examples/uneven_data.py
"""

from __future__ import annotations

import torch
from torch import nn

import fastcomm


def main() -> None:
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(comm.device)
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = [torch.randn(8, 4, device=comm.device) for _ in range(5 + 3 * comm.rank)]
        n_steps = 0
        with reducer.join(batches, state=[optimizer]) as joined:
            for batch in joined:
                optimizer.zero_grad()
                model(batch).square().mean().backward()  # the mean over the ranks with data
                optimizer.step()
                n_steps += 1
        reducer.check_in_sync(optimizer)
        print(f"rank {comm.rank}: {n_steps} of {reducer.n_rounds} steps", flush=True)


if __name__ == "__main__":
    main()
