"""Counts the steps that a training run keeps while it loses ranks: every few seconds a rank is
killed, and another process takes its place. Compares with the same run undisturbed and, if torchft
is installed, with the same script over torchft.

    python -m fastcomm bench elastic                      4 ranks, 2 minutes each, a kill every 15 s
    python -m fastcomm bench elastic --seconds 600 --json elastic.json

A step is a small model's, and sleeps as long as a GPU would compute: --step-ms. Processes that come
need the cores for their imports, so without that sleep they would be what is measured. The runs
take place one after the other, in random order. At its end a run over fastcomm is repeated in one
process, with as many shares of each batch as there were ranks: the parameters must have the
same bits. torchft's lighthouse has the settings of torchft's own example.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lib import launch, machine, report
from lib.tables import Column, Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
from examples.survive import is_computed_alike, loss_of, new_model

GRACE_S = 60.0  # for the ranks to come to their end
PATIENCE = timedelta(seconds=30)  # of the ranks for each other


@dataclass(frozen=True)
class Task:
    """What a rank is to do. folder: where it leaves its pid and, in the end, what it has done."""

    way: str
    folder: str
    ranks: int
    seconds: float
    step_ms: float
    slot: int = 0  # torchft: which of the processes

    def start(self) -> None:
        self.leave(f"pid-{os.getpid()}", started_at(os.getpid()))

    def goes_on(self) -> bool:
        """Whether the time is not over, which begins with the first step of all."""
        first = Path(self.folder, "first")
        if not first.exists():
            first.touch()
        return time.time() - first.stat().st_mtime < self.seconds

    def end(self, **done: Any) -> None:
        self.leave(f"done-{os.getpid()}", json.dumps(done))

    def leave(self, name: str, text: str) -> None:
        beside = Path(self.folder, f"writing-{os.getpid()}")
        beside.write_text(text)
        beside.rename(Path(self.folder, name))

    def lighthouse(self) -> str:
        """Its address, once it is there."""
        path = Path(self.folder, "lighthouse")
        while not path.exists():
            time.sleep(0.1)
        return path.read_text()


class Sizes(list[int]):
    """How many ranks made each step. A process that comes gets it with the optimizer's state."""

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": list(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self[:] = state["sizes"]


def started_at(pid: int) -> str:
    """When the process was started, in ticks since the machine was; empty if it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else others[18]


# ---- the ranks -----------------------------------------------------------------------------------


def train(task: Task) -> None:
    model, optimizer = new_model()  # before init(), from which on the others wait for it
    reducer = fastcomm.Reducer(fastcomm.init(timeout=PATIENCE)).attach(model)
    task.start()
    sizes = Sizes()

    def steps() -> Iterator[None]:
        while task.goes_on():
            yield

    for _ in reducer.elastic(steps(), state=[optimizer, sizes]):
        time.sleep(task.step_ms / 1e3)
        optimizer.zero_grad()
        loss_of(model, reducer.n_rounds, reducer.comm.rank, reducer.comm.world_size).backward()
        optimizer.step()
        if not reducer.skipped:
            sizes.append(reducer.comm.world_size)
    reducer.check_in_sync(optimizer)
    if reducer.comm.rank == 0:
        task.end(steps=reducer.n_rounds, is_equal=is_computed_alike(model, sizes))
    reducer.comm.close()


def train_with_torchft(task: Task) -> None:
    import torchft

    model, inner = new_model()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: Mapping[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"slot{task.slot}_",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=PATIENCE,
        lighthouse_addr=task.lighthouse(),
    )
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    task.start()
    while task.goes_on():
        time.sleep(task.step_ms / 1e3)
        optimizer.zero_grad()
        loss_of(ddp, manager.current_step(), task.slot, task.ranks).backward()
        optimizer.step()
    task.end(steps=manager.current_step())
    os._exit(0)  # its threads wait for the other replicas


def serve_lighthouse(task: Task) -> None:
    """Until it is killed. In a process of its own, as it prints much."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="localhost:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
    )
    task.leave("lighthouse", lighthouse.address())
    signal.pause()


WAYS = ("fastcomm", "torchft")
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
AS_RANK = {
    "fastcomm": train,
    "torchft": train_with_torchft,
    "lighthouse": serve_lighthouse,
}


# ---- a run ---------------------------------------------------------------------------------------


class Run:
    """A training of one way, from which a rank is killed every `kill_every_s`, or none at 0."""

    def __init__(self, task: Task, kill_every_s: float) -> None:
        self.task, self.kill_every_s = task, kill_every_s
        self.n_kills = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def measure(self) -> dict[str, Any]:
        """What the ranks have done. Raises RanksError where they leave nothing."""
        with open(Path(self.task.folder, "output"), "wb") as self._output:
            try:
                self._start()
                self._watch()
            finally:
                for process in self._processes:
                    process.kill()
                    process.wait()
        done = [json.loads(path.read_text()) for path in self._files("done-*")]
        if not done:
            output = Path(self.task.folder, "output").read_text(errors="replace")
            raise launch.RanksError(f"{self.task.way} has made no step:\n{output[-3000:]}")
        furthest: dict[str, Any] = max(done, key=lambda one: one["steps"])
        return furthest | {"kills": self.n_kills}

    def _files(self, pattern: str) -> list[Path]:
        return list(Path(self.task.folder).glob(pattern))

    def _start(self) -> None:
        if self.task.way == "fastcomm":
            ranks = ["--ranks", str(self.task.ranks), "--threads", "1", "--replace", "1000"]
            self._open([sys.executable, "-m", "fastcomm", "run", *ranks], self.task, os.environ)
            return
        for slot in range(self.task.ranks):
            self._open_replica(slot)
        lighthouse = Task(**{**asdict(self.task), "way": "lighthouse"})
        self._open([sys.executable], lighthouse, os.environ)

    def _open_replica(self, slot: int) -> None:
        task = Task(**{**asdict(self.task), "slot": slot})
        self._open([sys.executable], task, os.environ | {"OMP_NUM_THREADS": "1"})

    def _open(self, launcher: list[str], task: Task, environment: Mapping[str, str]) -> None:
        command = [*launcher, __file__, "--as-rank", json.dumps(asdict(task))]
        self._processes.append(
            subprocess.Popen(
                command, env=environment, stdout=self._output, stderr=subprocess.STDOUT
            )
        )

    def _watch(self) -> None:
        """Kills, and starts other replicas, until all have come to their end."""
        first = Path(self.task.folder, "first")
        due = None
        while any(process.poll() is None for process in self._processes[: self.task.ranks]):
            time.sleep(0.05)
            if not first.exists():
                continue
            age = time.time() - first.stat().st_mtime
            if age > self.task.seconds + GRACE_S:
                return
            due = due or self.kill_every_s * random.uniform(0.5, 1)
            if self.kill_every_s and due < age < self.task.seconds - self.kill_every_s / 2:
                self._kill_one()
                due += self.kill_every_s
            if self.task.way == "torchft" and age < self.task.seconds:
                self._replace()

    def _kill_one(self) -> None:
        ranks = {int(path.name[4:]): path.read_text() for path in self._files("pid-*")}
        # another process may have the pid by now
        living = [pid for pid, started in ranks.items() if started_at(pid) == started]
        if living:
            os.kill(random.choice(living), signal.SIGKILL)
            self.n_kills += 1

    def _replace(self) -> None:
        for slot, process in enumerate(self._processes[: self.task.ranks]):
            if process.poll() is not None:
                self._open_replica(slot)
                self._processes[slot] = self._processes.pop()


# ---- the benchmark -------------------------------------------------------------------------------


def main() -> int:
    options = parse_options()
    if options.as_rank is not None:
        task = Task(**json.loads(options.as_rank))
        AS_RANK[task.way](task)
        return 0
    launch.exit_on_sigterm()
    ways = options.ways
    runs = [(way, every) for way in ways for every in (0.0, options.kill_every)]
    random.shuffle(runs)
    done: dict[tuple[str, float], dict[str, Any]] = {}
    for way, every in report.tracked(runs, "trainings"):
        with tempfile.TemporaryDirectory() as folder:
            task = Task(way, folder, options.ranks, options.seconds, options.step_ms)
            done[way, every] = Run(task, every).measure()
    rows = [row_of(way, done[way, 0.0], done[way, options.kill_every]) for way in ways]
    print_rows(rows, options)
    report.write_results("elastic", {"rows": rows}, options)
    own = [one for (way, _), one in done.items() if way == "fastcomm"]
    return report_wrong(own) if own else 0


def row_of(way: str, undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> dict[str, Any]:
    return {
        "way": way,
        "undisturbed": undisturbed["steps"],
        "disturbed": disturbed["steps"],
        "kills": disturbed["kills"],
        "kept": round(disturbed["steps"] / undisturbed["steps"], 4),
    }


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=WAYS if HAS_TORCHFT else ["fastcomm"],
        metavar="WAY",
        help=f"of {', '.join(WAYS)} (all; torchft if it is installed)",
    )
    parser.add_argument("--ranks", type=report.several, default=4, metavar="N", help="ranks (4)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="length of each training, from its first step"
    )
    parser.add_argument(
        "--kill-every", type=float, default=15.0, metavar="S", help="seconds between kills (15)"
    )
    parser.add_argument("--step-ms", type=float, default=50.0, help="how long a step sleeps (50)")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = report.parse(parser)
    if "torchft" in options.ways and not HAS_TORCHFT:
        parser.error("--ways torchft: it is not installed (pip install torchft-nightly)")
    return options


def print_rows(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    print(machine.summary())
    titles = ("undisturbed", "disturbed", "kills", "kept")
    columns = [Column(12, ("way",), "<"), *(Column(12, (title,)) for title in titles)]
    table = Table(columns, title=f"steps in {options.seconds:g} s, {options.ranks} ranks")
    for row in rows:
        counts = [str(row[title]) for title in titles[:-1]]
        table.rows.append([row["way"], *counts, f"{row['kept']:.1%}"])
    table.print()


def report_wrong(done: Sequence[Mapping[str, Any]]) -> int:
    """Says whether one process computes the same; returns the exit status."""
    if all(one["is_equal"] and one["steps"] for one in done):
        print("one process computes the same bits")
        return 0
    print(
        "bench/elastic.py: one process computes another model, or a kill has taken the last "
        "process that had the parameters (more ranks, or fewer kills)",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
