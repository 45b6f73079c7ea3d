"""Hugging Face Accelerate over fastcomm, with its data loaders, its loop and its DDP. Needs `pip
install accelerate`.

    torchrun --standalone --nproc-per-node=2 examples/with_accelerate.py

Accelerate uses the process group that exists. `--fastcomm hook` keeps torch's group and uses
fastcomm as DDP's hook; `--fastcomm off` does not use fastcomm. The losses are the same.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import rows
from gpt import GPT, next_byte_loss
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
    dist.init_process_group("fastcomm" if options.fastcomm == "backend" else None)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    state = (
        fastcomm.HookState(fastcomm.init(group=dist.group.WORLD))
        if options.fastcomm == "hook"
        else None
    )
    train(accelerator, options.steps, state)
    if state is not None:
        state.comm.close()
    # DDP's model before its group: torch may end in an abort otherwise, whatever the backend
    accelerator.free_memory()
    accelerator.end_training()


def train(accelerator: Accelerator, steps: int, state: fastcomm.HookState | None) -> None:
    set_seed(0)
    model = GPT(2, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows(LENGTH + 1, 16 * steps), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if state is not None:
        model.register_comm_hook(state, fastcomm.all_reduce_hook)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = next_byte_loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean()
        if step % 10 == 9:
            accelerator.print(f"step {step + 1}: loss {mean.item():.4f}")


if __name__ == "__main__":
    main()
