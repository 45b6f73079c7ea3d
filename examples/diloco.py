"""DiLoCo: every rank steps by itself, and the ranks sync every 20 steps. For links that are too
slow to reduce every gradient. The loop is that of any reducer.

    torchrun --standalone --nproc-per-node=2 examples/diloco.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import fastcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each rank (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps to a sync (%(default)s)")
    options = parser.parse_args()
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(comm.device)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(comm.device)
        torch.manual_seed(1 + comm.rank)  # from here on each rank has data of its own

        reducer = fastcomm.Reducer(comm, wire_dtype=torch.bfloat16).attach(model)  # half the bytes
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=options.every, **outer)
        with syncs:
            for step in range(1, options.steps + 1):
                x = torch.randn(32, 16, device=comm.device)
                loss = F.mse_loss(model(x), teacher(x).detach())
                optimizer.zero_grad()
                loss.backward()  # reduces nothing
                optimizer.step()  # syncs where a sync is due
                if step % (options.steps // 4) == 1 and comm.rank == 0:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
        reducer.check_in_sync()
        print(f"rank {comm.rank}: {syncs.n_syncs} syncs", flush=True)


if __name__ == "__main__":
    main()
