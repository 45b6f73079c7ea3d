"""Lightning Fabric over fastcomm, as the backend of its strategy. Needs `pip install
lightning-fabric`.

    python examples/with_fabric.py

Fabric starts the other rank. `--fastcomm hook` keeps torch's group and uses fastcomm as DDP's hook;
`--fastcomm off` does not use fastcomm. The losses are the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from corpus import rows
from gpt import GPT, next_byte_loss
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

import fastcomm

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fastcomm",
        choices=["backend", "hook", "off"],
        default="backend",
        help="how fastcomm takes part",
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    strategy = DDPStrategy(
        process_group_backend="fastcomm" if options.fastcomm == "backend" else None
    )
    fabric = Fabric(devices=2, strategy=strategy)
    fabric.launch()
    state = (
        fastcomm.HookState(fastcomm.init(group=dist.group.WORLD))
        if options.fastcomm == "hook"
        else None
    )
    train(fabric, options.steps, state)
    if state is not None:
        state.comm.close()
    dist.destroy_process_group()


def train(fabric: Fabric, steps: int, state: fastcomm.HookState | None) -> None:
    fabric.seed_everything(0)
    model = GPT(2, 64)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(
        DataLoader(rows(LENGTH + 1, 16 * steps), batch_size=8, shuffle=True)
    )
    if state is not None:
        model._forward_module.register_comm_hook(
            state, fastcomm.all_reduce_hook
        )  # what forward() goes through is the DDP module
    for step, batch in enumerate(loader):
        last_of_two = step % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last_of_two):
            loss = next_byte_loss(model, batch)
            fabric.backward(loss / 2)
        if last_of_two:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach())
        if step % 10 == 9:
            fabric.print(f"step {step + 1}: loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
