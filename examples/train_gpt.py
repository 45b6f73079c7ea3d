"""Trains a small GPT on the source code of Python's standard library, on all ranks: a training loop
as a user of fastcomm writes it.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py

`python -m fastcomm demo` does the same. main() and train() use fastcomm. The rest is the model
(gpt.py), or shows afterwards that the ranks agree, that their gradient is that of one process, and
what communication costs compared with torch's DDP (compare_ddp.py).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from functools import partial

import torch
from compare_ddp import report, step_times
from corpus import standard_library
from gpt import GPT, next_byte_loss
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import fastcomm
from fastcomm import Communicator

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None  # then lines say how far the training has come, in place of a bar

# Per rank and step. A step of the default model then takes about 0.4 s on one core.
BATCH, LENGTH = 4, 128


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastcomm demo",
        description="Trains a small GPT with fastcomm, on two ranks.",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="blocks of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=448,
        help="width of the model, a multiple of 64 (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="rounds of the comparison with DDP (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.width < 64 or options.width % 64:
        parser.error(f"--width is a multiple of 64; got {options.width}")
    return options


def main() -> None:
    options = parse_options()
    with fastcomm.init("shm") as comm:  # on the CPU, GPU or not: it is compared with DDP there
        text = standard_library()
        torch.manual_seed(0)
        make_model = partial(GPT, options.layers, options.width)
        model = make_model()
        if comm.rank == 0:
            size = sum(p.numel() for p in model.parameters()) / 1e6
            print(
                f"{comm.world_size} ranks, {size:.1f} M parameters, {len(text) / 1e6:.1f} MB of "
                "Python\n",
                flush=True,
            )

        # Every rank reads the same text at places of its own.
        generator = torch.Generator().manual_seed(1 + comm.rank)
        reducer = fastcomm.Reducer(comm).attach(model)
        losses = train(reducer, model, text, generator, options.steps)
        if comm.rank == 0:
            print_sample(model)

        batch = random_batch(text, generator)
        parameters_apart = parameter_difference(comm, model)
        gradients_apart = gradient_difference(comm, model, batch)
        reducer.detach()
        seconds = step_times(comm, make_model, next_byte_loss, batch, options.rounds)
        if comm.rank == 0:
            last = losses[-10:]
            print(
                f"loss             {losses[0]:.2f} at first, {sum(last) / len(last):.2f} in the "
                f"last {len(last)} of {len(losses)} steps"
            )
            print(f"parameters       largest difference between ranks: {parameters_apart:g}")
            print(
                "gradient         largest difference from one process on the whole batch: "
                f"{gradients_apart:.1e} of the largest element"
            )
            print(report(seconds))


def train(
    reducer: fastcomm.Reducer, model: GPT, text: Tensor, generator: torch.Generator, steps: int
) -> list[float]:
    """Trains `model`, to which `reducer` is attached, in place. Returns the loss of every step,
    averaged over the ranks.
    """
    comm = reducer.comm
    optimizer = torch.optim.AdamW(
        [
            {"params": model.blocks.parameters(), "lr": 1e-3},
            # What maps bytes in and out learns from few examples of each, and bears larger steps.
            {
                "params": [
                    *model.embedding.parameters(),
                    *model.norm.parameters(),
                    *model.head.parameters(),
                ],
                "lr": 8e-3,
            },
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
    )

    losses = []
    bar = tqdm(total=steps, unit="step") if tqdm is not None and comm.rank == 0 else None
    start = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = next_byte_loss(model, random_batch(text, generator))
        loss.backward()  # the gradients are reduced when this returns
        reducer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()

        loss = loss.detach()
        comm.all_reduce(loss, "mean")
        losses.append(loss.item())
        speed = (step + 1) * comm.world_size * BATCH * LENGTH / (time.perf_counter() - start)
        reached = f"loss {losses[-1]:.2f}, {speed:,.0f} tokens/s"
        if bar is not None:
            bar.set_postfix_str(reached, refresh=False)
            bar.update()
        elif comm.rank == 0 and (step + 1) % max(1, steps // 10) == 0:
            print(f"{step + 1}/{steps} steps, {reached}", flush=True)
    if bar is not None:
        bar.close()
    return losses


def random_batch(text: Tensor, generator: torch.Generator) -> Tensor:
    """Bytes [BATCH, LENGTH + 1] from random places: inputs, and in each row one more for the target
    of the last.
    """
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def print_sample(model: GPT) -> None:
    prompt = torch.tensor([list(b"class Reader:\n\tdef ")])
    sample = (
        bytes(model.generate(prompt, 250)[0].tolist())
        .decode("ascii", errors="replace")
        .expandtabs(4)
    )
    # A model that has learned little may write what a terminal takes for a command.
    sample = "".join(c if c.isprintable() or c == "\n" else "?" for c in sample)
    print(f"\nA sample of what it writes:\n{sample}\n", flush=True)


def parameter_difference(comm: Communicator, model: GPT) -> float:
    """The largest difference of a parameter between any two ranks."""
    smallest = parameters_to_vector(model.parameters()).detach()
    largest = smallest.clone()
    comm.all_reduce(smallest, "min")
    comm.all_reduce(largest, "max")
    return (largest - smallest).max().item()


def gradient_difference(comm: Communicator, model: GPT, batch: Tensor) -> float:
    """The reduced gradient against the one this process computes alone on the batches of all ranks,
    relative to its largest element.
    """
    model.zero_grad()
    next_byte_loss(model, batch).backward()
    reduced = parameters_to_vector([p.grad for p in model.parameters()])

    whole_batch = batch.new_empty(comm.world_size * BATCH, LENGTH + 1)
    comm.all_gather_single(whole_batch, batch)
    # Unlike backward(), grad() accumulates nothing, so the reducer does not see it.
    alone = parameters_to_vector(
        torch.autograd.grad(next_byte_loss(model, whole_batch), list(model.parameters()))
    )
    return ((reduced - alone).abs().max() / alone.abs().max()).item()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
