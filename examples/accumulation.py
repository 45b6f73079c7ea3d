"""Gradient accumulation with clipping: several backwards on this rank only, then one that is
reduced, then one step.

torchrun --standalone --nproc-per-node=2 examples/accumulation.py
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F

import fastcomm

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(comm.device)
        target = torch.randn(16, device=comm.device)
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        torch.manual_seed(1 + comm.rank)
        for step in range(options.steps):
            optimizer.zero_grad()
            for i in range(MICRO_BATCHES):
                x = torch.randn(32, 16, device=comm.device)
                loss = F.mse_loss(model(x).squeeze(1), (x @ target).tanh()) / MICRO_BATCHES
                is_last = i == MICRO_BATCHES - 1
                with contextlib.nullcontext() if is_last else reducer.no_sync():
                    loss.backward()  # the last one reduces the sum of all
            norm = reducer.clip_grad_norm_(1.0)
            optimizer.step()
            if comm.rank == 0 and (step + 1) % 50 == 0:
                print(
                    f"step {step + 1}: loss {loss.item() * MICRO_BATCHES:.3f}, gradient norm "
                    f"{norm.item():.2f}"
                )


if __name__ == "__main__":
    main()
