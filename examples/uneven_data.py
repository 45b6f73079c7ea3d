"""Ranks with different numbers of batches: all of them take part until the last one is done.

torchrun --standalone --nproc-per-node=2 examples/uneven_data.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

import fastcomm


def together(comm: fastcomm.Communicator, batches: Iterable[Tensor]) -> Iterator[Tensor | None]:
    """This rank's batches, and then None as long as another rank has some left."""
    own = iter(batches)
    while True:
        batch = next(own, None)
        has_more = torch.tensor(batch is not None, dtype=torch.uint8, device=comm.device)
        comm.all_reduce(has_more, "max")
        if not has_more:
            return
        yield batch


def main() -> None:
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        model = nn.Linear(4, 1).to(comm.device)
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(8, 4, device=comm.device) for _ in range(5 + 3 * comm.rank)]
        n_steps = 0
        for batch in together(comm, batches):
            optimizer.zero_grad()
            if batch is None:
                reducer.reduce()  # nothing from this rank: counts as zero, and receives the mean
            else:
                model(batch).square().mean().backward()
            optimizer.step()
            n_steps += 1
        reducer.check_in_sync()
        print(f"rank {comm.rank}: {len(batches)} batches, {n_steps} steps", flush=True)


if __name__ == "__main__":
    main()
