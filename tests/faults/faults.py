"""One fault: where it strikes, the training it strikes, and whether the ranks came out of it as
they should.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

import fastcomm
from fastcomm.postmortem.whereabouts import answer_questions
from tests.support.bodies import Place, communicator, leave, noted
from tests.support.outcomes import Outcome
from tests.support.ranks import fresh_ranks
from tests.support.transports import environment_of

# What becomes of one rank, at any moment or after some step: see bodies.leave. The others lose it;
# but not one that merely stops for a while.
ANY_MOMENT = ("killed", "exits at once")
BETWEEN_STEPS = ("exits by an exception", "aborts", "closes")
STOPS = "stops"
KINDS = (*ANY_MOMENT, *BETWEEN_STEPS, STOPS)
# Those after which the others can go on at once: the process has ended.
ENDINGS = (*ANY_MOMENT, "exits by an exception")
MORE_STEPS = 20  # of those that go on
STEPS, STOP_STEP = 100, 20  # of a training that is only held up, and where that is
TIMEOUT_S = 30.0
# How long the others may take to hear of a lost rank, where the machine has nothing else to do.
LATEST_S = {"shm": 1.0, "nccl": 3.0, "group": 6.0, "hierarchical": 6.0}


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS. victim: the rank. delay_s: after its first step. pause_s: how long it
    stops. goes_on: the others do, in Reducer.elastic().
    """

    transport: str
    n_ranks: int
    kind: str
    victim: int
    delay_s: float
    pause_s: float
    goes_on: bool = False

    @staticmethod
    def drawn(seed: int, transport: str, kind: str, goes_on: bool = False) -> Fault:
        chance = random.Random(f"{seed} {transport} {kind}")
        n_ranks = chance.choice((2, 3, 4))
        delay_s = chance.choice((0.001, 0.01, 0.1)) * chance.random()
        victim = chance.randrange(n_ranks)
        pause_s = 0.05 + 0.3 * chance.random()
        return Fault(transport, n_ranks, kind, victim, delay_s, pause_s, goes_on)


@dataclass(frozen=True)
class Verdict:
    """trouble: what went wrong, or None. latency_s: until the last rank heard of the fault, or had
    made a step without the victim; late is no trouble by itself: other load may be the reason.
    """

    fault: Fault
    trouble: str | None
    latency_s: float | None

    @property
    def is_late(self) -> bool:
        return self.latency_s is not None and self.latency_s > LATEST_S[self.fault.transport]


class WrongResult(Exception):
    """A gradient is not the mean over the ranks."""


def strike(fault: Fault) -> Verdict:
    """Runs a training that the fault strikes, in new processes."""
    env = [environment_of(fault.transport, rank) for rank in range(fault.n_ranks)]
    outcomes = fresh_ranks(
        fault.n_ranks, _train, fault, transport=fault.transport, env=env, timeout=TIMEOUT_S
    )
    return judged(fault, outcomes)


def judged(fault: Fault, outcomes: list[Outcome]) -> Verdict:
    latency_s = 0.0
    for outcome in outcomes:
        trouble = None
        if outcome.kind == "hung":
            trouble = f"rank {outcome.rank} hung\n{outcome.stacks}"
        elif fault.kind != STOPS and outcome.rank == fault.victim:
            continue
        elif outcome.kind != "returned":
            trouble = str(outcome)
        else:
            trouble, latency = _trouble_of(fault, outcome.value)
            latency_s = max(latency_s, latency)
        if trouble is not None:
            return Verdict(fault, f"rank {outcome.rank}: {trouble}", None)
    return Verdict(fault, None, None if fault.kind == STOPS else latency_s)


def _trouble_of(fault: Fault, seen: dict[str, Any]) -> tuple[str | None, float]:
    """What a rank that outlived the fault should not have seen, and when it heard of the fault."""
    if seen["n_leaked"]:
        return f"{seen['n_leaked']} descriptors were left open", 0.0
    if fault.kind == STOPS:
        done = seen["error"] is None and seen["steps"] == STEPS
        return None if done else f"did not go on: {seen}", 0.0
    if fault.goes_on:
        done = seen["error"] is None and seen["n_ranks"] == fault.n_ranks - 1
        return None if done else f"did not go on: {seen}", seen.get("latency_s", 0.0)
    if seen["error"] != "PeerLostError":
        return f"raised {seen['error']}: {seen['message']}", 0.0
    if f"rank {fault.victim} " not in seen["message"]:
        return f"does not name rank {fault.victim}: {seen['message']}", 0.0
    return None, seen["latency_s"]


# ---- on the ranks --------------------------------------------------------------------------------


def _train(place: Place, fault: Fault) -> dict[str, Any]:
    answer_questions()  # opens a socket, once in a process
    n_open = _n_descriptors()
    seen = _trained(place, fault)
    gc.collect()
    if place.transport == "shm":  # torch's stores and Gloo close theirs when they like
        seen["n_leaked"] = max(0, _n_descriptors() - n_open)
    return seen


def _n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _trained(place: Place, fault: Fault) -> dict[str, Any]:
    """Trains until the fault is heard of, or for STEPS steps where it only holds up."""
    seen: dict[str, Any] = {"error": None, "steps": 0, "n_leaked": 0}
    comm = communicator(place, timeout=timedelta(seconds=20))
    if fault.goes_on:
        return _gone_on(place, fault, comm, seen)
    model = torch.nn.Sequential(torch.nn.Linear(3, 50), torch.nn.Linear(50, 2))
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=1e-5).attach(model)
    comm.barrier()
    try:
        _set_off(place, fault, comm)
        due = time.monotonic() + fault.delay_s
        while fault.kind != STOPS or seen["steps"] < STEPS:
            _step(comm, reducer, model, seen["steps"])
            seen["steps"] += 1
            if fault.kind == STOPS and seen["steps"] == STOP_STEP:
                _stop(place, fault, comm)
            if (
                place.rank == fault.victim
                and fault.kind in BETWEEN_STEPS
                and time.monotonic() > due
            ):
                leave(place, comm, fault.kind)
                return seen
    except fastcomm.FastcommError as error:
        heard_at = time.monotonic()
        seen |= {"error": type(error).__name__, "message": str(error)}
        seen["latency_s"] = heard_at - float(noted(place, "left_at"))
    if fault.kind == STOPS:
        comm.barrier()
    with contextlib.suppress(fastcomm.FastcommError):
        comm.close()
    return seen


def _gone_on(place: Place, fault: Fault, comm: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Trains until a few steps after the fault."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 50), torch.nn.Linear(50, 2))
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=1e-5).attach(model)
    comm.barrier()
    _set_off(place, fault, comm)
    due = time.monotonic() + fault.delay_s
    steps = iter(lambda: seen["steps"] < MORE_STEPS, False)
    for _ in reducer.elastic(steps):
        is_over = place.rank == fault.victim and time.monotonic() > due
        if is_over and fault.kind in BETWEEN_STEPS:
            leave(place, comm, fault.kind)
        _step(reducer.comm, reducer, model, reducer.n_rounds)
        if reducer.comm is not comm and not reducer.skipped:
            seen["steps"] += 1
            left_at = float(noted(place, "left_at"))
            seen.setdefault("latency_s", time.monotonic() - left_at)
    seen["n_ranks"] = reducer.comm.world_size
    reducer.check_in_sync()
    reducer.comm.close()
    return seen


def _step(comm: Any, reducer: Any, model: torch.nn.Module, step: int) -> None:
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model(torch.full((1, 3), float(comm.rank + step))).sum().backward()
    reducer.synchronize()
    if (
        comm.backend != "nccl" and not reducer.skipped
    ):  # where the host does not wait for the gradients
        mean = step + (comm.world_size - 1) / 2
        grad = next(model.parameters()).grad
        if grad is None or not torch.allclose(grad, torch.tensor(2 * mean)):
            raise WrongResult(f"step {step}: {grad} in place of {2 * mean}")


def _set_off(place: Place, fault: Fault, comm: Any) -> None:
    """Lets the fault come at any moment, on a thread of its own."""
    if place.rank == fault.victim and fault.kind in ANY_MOMENT:
        threading.Thread(target=_end, args=(place, fault, comm), daemon=True).start()


def _stop(place: Place, fault: Fault, comm: Any) -> None:
    """Another rank stops the victim, which goes on later. No training ends meanwhile."""
    if place.rank == (fault.victim + 1) % fault.n_ranks:
        victim = comm.processes[fault.victim].pid
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(fault.pause_s, os.kill, (victim, signal.SIGCONT)).start()


def _end(place: Place, fault: Fault, comm: Any) -> None:
    time.sleep(fault.delay_s)
    leave(place, comm, fault.kind)
