"""Ranks of a host reduce every gradient; hosts, whose link is slow, average their parameters every
16 steps. Each host has a communicator, and so has each local rank, with one rank per host.

    torchrun --nnodes=2 --nproc-per-node=8 ... examples/hosts_sync_seldom.py
    torchrun --standalone --nproc-per-node=4 examples/hosts_sync_seldom.py --per-host 2
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fastcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64, help="of each rank (%(default)s)")
    parser.add_argument("--every", type=int, default=16, help="steps to a sync (%(default)s)")
    of_launcher = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    parser.add_argument("--per-host", type=int, default=of_launcher, help="ranks (%(default)s)")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size, per_host = dist.get_rank(), dist.get_world_size(), options.per_host
    # every rank makes all groups, its own or not
    hosts = [
        dist.new_group(list(range(first, first + per_host)))
        for first in range(0, world_size, per_host)
    ]
    peers = [dist.new_group(list(range(i, world_size, per_host))) for i in range(per_host)]
    with (
        fastcomm.init(group=hosts[rank // per_host]) as inside,
        fastcomm.init(group=peers[rank % per_host]) as between,
    ):
        torch.manual_seed(0)  # one model, on all hosts
        teacher = nn.Linear(16, 4).to(inside.device)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(inside.device)
        torch.manual_seed(1 + rank)  # from here on each rank has data of its own
        reducer = fastcomm.Reducer(inside).attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(1, options.steps + 1):
            x = torch.randn(32, 16, device=inside.device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), teacher(x).detach())
            loss.backward()  # reduced over the ranks of this host
            optimizer.step()
            if step % options.every == 0:
                for parameter in model.parameters():
                    between.all_reduce(parameter.data, "mean")
        reducer.check_in_sync(optimizer)
        total = sum(parameter.detach().double().sum() for parameter in model.parameters())
        print(f"rank {rank}: loss {loss.item():.4f}, parameters {total:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
