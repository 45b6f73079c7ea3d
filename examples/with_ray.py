"""Ray Train over fastcomm: a worker group on this machine, Ray's data loader, and your training
loop. Needs `pip install 'ray[train]'`, 2.60 or newer.

    python examples/with_ray.py

Ray makes the process group over fastcomm, and DDP runs on it. `--fastcomm reducer` keeps torch's
group: each worker calls fastcomm.init(), and a Reducer replaces DDP. The losses are the same.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import ray.train
import torch
from corpus import rows
from gpt import GPT, next_byte_loss
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fastcomm",
        choices=["backend", "reducer"],
        default="backend",
        help="how fastcomm takes part",
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    is_backend = options.fastcomm == "backend"
    ray.init()
    trainer = TorchTrainer(
        train_with_ddp if is_backend else train_with_reducer,
        train_loop_config={"steps": options.steps},
        torch_config=TorchConfig(backend="fastcomm" if is_backend else None),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
    )
    for step, loss in trainer.fit().return_value:  # of rank 0
        print(f"step {step}: loss {loss:.4f}")


def train_with_ddp(config: dict[str, Any]) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    return train(prepare_model(GPT(2, 64)), config["steps"])


def train_with_reducer(config: dict[str, Any]) -> list[tuple[int, float]]:
    import fastcomm  # in the workers; the other way needs no import at all

    torch.manual_seed(0)
    with fastcomm.init() as comm:
        model = GPT(2, 64).to(comm.device)
        reducer = fastcomm.Reducer(comm).attach(model)
        losses = train(model, config["steps"])
        reducer.detach()
    return losses


def train(model: nn.Module, steps: int) -> list[tuple[int, float]]:
    """Returns some steps with their losses."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = prepare_data_loader(DataLoader(rows(LENGTH + 1, 16 * steps), batch_size=8))
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = next_byte_loss(model, batch.to(next(model.parameters()).device))
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            losses.append((step + 1, loss.item()))
            ray.train.report({"loss": loss.item()})
    return losses


if __name__ == "__main__":
    main()
