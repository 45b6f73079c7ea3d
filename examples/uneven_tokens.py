"""Uneven text: sequences of different lengths, ranks with different numbers of batches, and
sometimes a NaN. Gradients are means over tokens, as of one process that has all data.

    torchrun --standalone --nproc-per-node=2 examples/uneven_tokens.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastcomm

IGNORED = -100  # a target that does not count
N_BATCHES = (22, 37)  # of rank 0 and rank 1
PER_STEP = 4


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    closes_step: bool


def batches_of(rank: int, device: torch.device) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    n_batches = N_BATCHES[rank % 2]
    for i in range(1, n_batches + 1):
        length = int(torch.randint(8, 128, (), generator=generator))
        tokens = torch.randint(50, (length,), generator=generator)
        targets = (tokens * 7 + 3) % 50
        targets[: length // 4] = IGNORED
        # The last batch closes a step, full or not: else its gradients would be lost.
        closes_step = i % PER_STEP == 0 or i == n_batches
        yield Batch(tokens.to(device), targets.to(device), closes_step)


def main() -> None:
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)).to(comm.device)
        reducer = fastcomm.Reducer(comm, skip_nonfinite=True).attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        for epoch in range(3):
            loss_and_tokens = torch.zeros(2, device=comm.device)
            batches = batches_of(comm.rank, comm.device)
            with reducer.join(batches, state=[optimizer, scheduler]) as joined:
                for batch in joined:
                    n_tokens = (batch.targets != IGNORED).sum()
                    reducer.set_weight(n_tokens)
                    logits = model(batch.tokens)
                    if reducer.n_rounds == 5 and comm.rank == 1:
                        logits = logits * float("nan")  # as a bad batch would
                    loss = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED)
                    with contextlib.nullcontext() if batch.closes_step else reducer.no_sync():
                        loss.backward()
                    if loss.isfinite():
                        loss_and_tokens += torch.stack([loss.detach() * n_tokens, n_tokens])
                    if batch.closes_step:
                        reducer.clip_grad_norm_(1.0)
                        optimizer.step()  # does nothing where the ranks drop the step
                        if not reducer.skipped:
                            scheduler.step()
                        optimizer.zero_grad()
            # Collectives for the log come after the loop, in which ranks may have no data left.
            comm.all_reduce(loss_and_tokens)
            reducer.check_in_sync(optimizer)
            if comm.rank == 0:
                mean = (loss_and_tokens[0] / loss_and_tokens[1]).item()
                print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)
        print(f"rank {comm.rank}: {reducer.n_skipped} of {reducer.n_rounds} steps dropped")


if __name__ == "__main__":
    main()
