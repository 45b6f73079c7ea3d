"""Reinforcement learning with uneven work: every rank plays as many episodes as it can, and every
episode counts the same in the gradient.

    torchrun --standalone --nproc-per-node=2 examples/reinforce.py

REINFORCE plays a bandit with contexts. Ranks play different numbers of episodes in each step,
sometimes none. The reducer sums (op="sum"), and every rank divides by the number of episodes of all
ranks. So the gradient is that of one process that plays all episodes.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fastcomm
from fastcomm import Communicator

N_CONTEXTS, N_ACTIONS = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(N_CONTEXTS, 32), nn.Tanh(), nn.Linear(32, N_ACTIONS)).to(
            comm.device
        )
        fastcomm.Reducer(comm, op="sum").attach(policy)
        optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
        torch.manual_seed(1 + comm.rank)
        for step in range(options.steps):
            optimizer.zero_grad()
            n_episodes = int(torch.randint(0, 64, ()).item())  # what this rank got done
            reward, total = train_step(comm, policy, n_episodes)
            optimizer.step()
            if comm.rank == 0 and (step + 1) % 100 == 0:
                print(
                    f"step {step + 1}: mean reward {reward / max(total, 1):.2f} of {total} episodes"
                )


def train_step(comm: Communicator, policy: nn.Module, n_episodes: int) -> tuple[float, int]:
    """Leaves the gradient of the mean over the episodes of all ranks. Returns the sum of rewards
    and the number of these episodes.
    """
    context = torch.randint(N_CONTEXTS, (n_episodes,), device=comm.device)
    logits = policy(nn.functional.one_hot(context, N_CONTEXTS).float())
    played = torch.distributions.Categorical(
        logits=logits, validate_args=False
    )  # the check does not bear an empty batch
    action = played.sample()
    reward = reward_of(context, action)
    counts = torch.tensor([reward.sum().item(), float(n_episodes)], device=comm.device)
    comm.all_reduce(counts)
    baseline, total = (counts[0] / counts[1].clamp(min=1)).item(), int(counts[1].item())
    # With no episodes the sum is empty, its gradient zero, and the rank takes part all the same.
    loss = -(played.log_prob(action) * (reward - baseline)).sum() / max(total, 1)
    loss.backward()
    return counts[0].item(), total


def reward_of(context: Tensor, action: Tensor) -> Tensor:
    """1 for the one action that is right in a context."""
    return (action == context % N_ACTIONS).float()


if __name__ == "__main__":
    main()
