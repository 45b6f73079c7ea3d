"""Hugging Face's Trainer over fastcomm. Needs `pip install 'transformers[torch]'`.

    torchrun --standalone --nproc-per-node=2 examples/with_trainer.py

The Trainer uses the process group that exists when its arguments are made. `--fastcomm hook` keeps
torch's group and uses fastcomm as DDP's hook; `--fastcomm off` does not use fastcomm. The losses
are the same.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from corpus import rows
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

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
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    dist.init_process_group("fastcomm" if options.fastcomm == "backend" else None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, options.steps)
        state = (
            fastcomm.HookState(fastcomm.init(group=dist.group.WORLD))
            if options.fastcomm == "hook"
            else None
        )
        if state is not None:
            trainer.add_callback(UseHook(trainer, state))
        loss = trainer.train().training_loss
        if state is not None:
            state.comm.close()
    if dist.get_rank() == 0:
        print(f"mean loss {loss:.6f}")
    del (
        trainer
    )  # DDP's model before its group: torch may end in an abort otherwise, whatever the backend
    gc.collect()
    dist.destroy_process_group()


def make_trainer(folder: str, steps: int) -> Trainer:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    arguments = TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows(LENGTH, 32 * steps)],
    )


class UseHook(TrainerCallback):
    """Gives the hook to the DDP module as soon as the Trainer has made it."""

    def __init__(self, trainer: Trainer, state: fastcomm.HookState) -> None:
        self._trainer, self._state = trainer, state

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.model_wrapped.register_comm_hook(self._state, fastcomm.all_reduce_hook)


if __name__ == "__main__":
    main()
