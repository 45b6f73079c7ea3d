"""Generated trainings by Reducer.virtual(), in which ranks are killed and others take their place:
each has the bits of an undisturbed one on one rank.

python -m tests.programs.virtual --programs 500 --seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import fastcomm
from fastcomm import VirtualLoader
from fastcomm.reducer.features.virtual import ranges
from tests.support.bodies import communicator, leave, note, wait_for_note
from tests.support.models import Transformer, convnet, mlp, seed
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import EVERY_TRANSPORT, environment_of


def images(n):
    return torch.utils.data.TensorDataset(torch.randn(n, 3, 12, 12), torch.randint(0, 4, (n,)))


def rows(n, width=8):
    return torch.utils.data.TensorDataset(torch.randn(n, width), torch.randint(0, 4, (n,)))


class Sentences(torch.utils.data.Dataset):
    """Draws words at random, also from Python's generator."""

    def __len__(self):
        return 80

    def __getitem__(self, i):
        words = torch.randint(0, 31, (9,))
        words[0] = random.randrange(31)
        return words[:-1], words[1:]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, 2, dropout=0.2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.lstm(x.view(-1, 2, 4))[0][:, -1])


class Branches(nn.Module):
    """Which parameters it uses depends on the data."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        return self.branches[int(x.sum() * 10) % 3](x)


def spectral():
    seed(0)
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
    return nn.Sequential(layer, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


def transformer():
    model = Transformer()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TRAININGS = {
    "mlp": (mlp, rows, adamw, {}),
    "batch_norm": (convnet, images, momentum, {}),
    "batch_norm_first": (convnet, images, momentum, {"buffers": "first"}),
    "transformer": (transformer, lambda _: Sentences(), adamw, {}),
    "lstm": (Recurrent, rows, adamw, {}),
    "branches": (Branches, rows, momentum, {}),
    "spectral_norm": (spectral, rows, momentum, {}),
    "bfloat16": (lambda: mlp().bfloat16(), rows, momentum, {}),
}


def digest(tensors):
    raw = hashlib.sha1()
    for tensor in tensors:
        raw.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return raw.hexdigest()


def train(comm, name, virtual_ranks, *, until=6, resume=None, at=None, skips=0, **options):
    """Trains, from a checkpoint if there is one. Returns digests by step, and a checkpoint.

    until: how many steps, or tells of a reducer and a number of steps whether these are enough.
    at: called with the step, the microbatch and the moment where a rank may be lost.
    skips: of so many microbatches one votes to skip its step; 0: none does.
    """
    make, data, optimize, its_options = TRAININGS[name]
    seed(1)
    dataset = data(10 * virtual_ranks)
    model = make().to(comm.device)
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=1e-3).attach(model)
    optimizer = optimize(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = VirtualLoader(dataset, virtual_ranks=virtual_ranks, batch_size=3, seed=4)
    if resume is not None:
        for one, state in zip((model, optimizer, scheduler, loader), resume, strict=True):
            one.load_state_dict(state)
    if at is not None:
        options["state"] = [optimizer, scheduler]
        now = [0, 0]
        next(model.parameters()).register_hook(lambda _: at(reducer, *now, "in backward"))
    seed(100 + comm.rank)  # no random state of before counts
    digests = {}
    is_enough = until if callable(until) else lambda _, n_steps: n_steps == until
    is_over = False
    while not is_over:
        for step in reducer.virtual(loader, **its_options, **options):
            for i, (x, y) in enumerate(step):
                outputs = model(
                    x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
                )
                if at is not None:
                    now[:] = step.number, i
                    at(reducer, *now, "before backward")
                if skips and int(x.double().sum() * 1000) % skips == 0:
                    reducer.skip_step()
                functional.cross_entropy(outputs.flatten(0, -2).float(), y.flatten()).backward()
            norm = reducer.clip_grad_norm_(0.5)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            noise = torch.randn(2)  # the user's own, between two steps
            if at is not None:
                at(reducer, step.number, 0, "before step")
            optimizer.step()
            if not reducer.skipped:
                scheduler.step()
                tensors = [norm, noise, *gradients, *model.state_dict().values()]
                digests[step.number] = digest(tensors)
            is_over = is_enough(reducer, loader.step)
            if is_over:
                break
    checkpoint = [one.state_dict() for one in (model, optimizer, scheduler, loader)]
    reducer.detach()
    return digests, checkpoint


def by_rank(comm, *cases):
    """A case is a name, and a number of virtual ranks."""
    return [train(comm, *case)[0] for case in cases]


# ---- ranks are lost, and others come -------------------------------------------------------------


class Loss(NamedTuple):
    """From `step` on a process is killed, at the first microbatch, at this moment."""

    process: int
    step: int
    moment: str


class Program(NamedTuple):
    """A training. For each loss a process comes in its place. It ends two steps after the last one
    has come.
    """

    transport: str
    n_ranks: int
    name: str
    virtual_ranks: int
    skips: int
    losses: list[Loss]

    @staticmethod
    def generated(number, transport):
        rng = random.Random(number)
        n_ranks = 2 if transport in ("nccl", "hierarchical") else rng.choice([2, 3])
        names = [name for name in TRAININGS if name != "bfloat16" or n_ranks == 2]
        numbers = [n for n in range(n_ranks, 9) if all(ranges(range(n), n_ranks))]
        can_skip = transport != "nccl"  # without skip_nonfinite
        losses, processes = [], [*range(n_ranks)]
        for i in range(rng.choice([1, 2, 2, 3])):
            process = rng.choice(processes)
            processes[processes.index(process)] = n_ranks + i
            moment = rng.choice(["before backward", "in backward", "before step"])
            losses.append(Loss(process, 4 * i + rng.randrange(4), moment))
        skips = rng.choice([0, 0, 17]) if can_skip else 0
        return Program(transport, n_ranks, rng.choice(names), rng.choice(numbers), skips, losses)

    def rank_of(self, process):
        while process >= self.n_ranks:
            process = self.losses[process - self.n_ranks].process
        return process


def _run(place, program):
    n_ranks, losses, ends_at = program.n_ranks, program.losses, []
    if place.rank >= n_ranks:
        wait_for_note(place, f"lost {place.rank - n_ranks}")
    own = dataclasses.replace(place, rank=program.rank_of(place.rank), world_size=n_ranks)

    def at(reducer, step, microbatch, moment):
        for i, one in enumerate(losses):
            is_due = step >= one.step and microbatch == 0 and moment == one.moment
            if one.process == place.rank and is_due:
                note(place, **{f"lost {i}": os.getpid()})
                leave(place, reducer.comm, "killed")

    def is_enough(reducer, n_steps):
        pids = {str(one.pid) for one in reducer.comm.processes}
        lost = [Path(place.directory, f"lost {i}") for i in range(len(losses))]
        have_come = len(pids) == n_ranks and all(
            one.exists() and one.read_text() not in pids for one in lost
        )
        if have_come and not ends_at:
            ends_at.append(n_steps + 2)
        time.sleep(0.01)  # for those that come
        return n_steps in ends_at

    comm = communicator(own, timeout=timedelta(seconds=60))
    options = {"at": at, "until": is_enough, "skips": program.skips}
    return train(comm, program.name, program.virtual_ranks, **options)[0]


def _run_alone(comm, program, n_steps):
    return train(comm, program.name, program.virtual_ranks, until=n_steps, skips=program.skips)[0]


def check(program):
    """Raises AssertionError for a step that has other bits than that of one rank."""
    processes = range(program.n_ranks + len(program.losses))
    env = [environment_of(program.transport, program.rank_of(one)) for one in processes]
    outcomes = fresh_ranks(len(env), _run, program, transport=program.transport, env=env)
    ends = values_of(outcomes, *(one.process for one in program.losses))
    n_steps = max(max(digests, default=0) for digests in ends) + 1
    alone = fresh_ranks(1, _run_alone, program, n_steps, pass_comm=True)
    (expected,) = values_of(alone)
    for digests in ends:  # of the steps that this rank has made, and has not copied
        assert digests == {step: expected.get(step) for step in digests}, program


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.programs.virtual", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    transports = ["shm", "group", "hierarchical"]
    parser.add_argument("--transports", nargs="+", default=transports, choices=EVERY_TRANSPORT)
    options = parser.parse_args()
    for number in range(options.seed, options.seed + options.programs):
        check(Program.generated(number, options.transports[number % len(options.transports)]))
    print(f"{options.programs} programs from seed {options.seed} on: all steps have equal bits")


if __name__ == "__main__":
    main()
