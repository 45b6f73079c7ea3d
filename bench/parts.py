"""comm.gather, scatter, all_to_all_single, send and all_reduce_coalesced over shared memory, beside
those of torch.distributed over Gloo and of an MPI, in one run.

    python -m fastcomm bench parts                2 ranks, 1 KiB to 16 MiB
    python -m fastcomm bench parts --ranks 4
    python -m fastcomm bench parts --mpi openmpi --mpis FOLDER   see lib/allreduce_mpi.py

A size counts the tensor that is all ranks' parts: what the root of gather and scatter has, and what
each rank has in all_to_all_single. One of the parts is the rank's own and goes to nobody. send
takes a whole tensor from rank 0 to rank 1. "coalesced" cuts the size into up to 100 tensors, which
are reduced as one: torch's all_reduce inside a _coalescing_manager; "one by one" is a loop of
all_reduce over the same tensors, which is all that an MPI has. fastcomm takes part twice, with
tensors in comm.empty and with ordinary ones, which its peers have as well. With an MPI its mpiexec
starts the ranks.

Contenders take turns in random order in every round. Before every call each rank rewrites its
input, and the ranks meet, by fastcomm's barrier for all contenders. A call's time is that of the
slowest rank, and a turn has the median of its calls. A ratio is the median over rounds of a peer's
time over fastcomm's in the same round, with its quartiles. Where other programs want the same cores
medians tell how long a rank waits to run; the fastest calls, with their ratio, tell more of the
transport. Every result is checked once before it is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import harness, launch, machine, report, tables
from lib.allreduce_mpi import NAMES, NoMpiError, launcher_of, world
from lib.chart import size_text
from lib.tables import Column, Spread, Table, Times, three_digits, time_cell
from torch import Tensor

MOST_TENSORS = 100
OWN = ("fastcomm", "ordinary")  # in comm.empty, and in ordinary tensors
SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # bytes: 1 KiB to 16 MiB
ROOT = 0  # as all of them have it without being told; who sends
RECEIVER = 1
BYTES_PER_TURN = 32 << 20
CALLS = (3, 30)  # of a turn, at least and at most
WARM_UP_CALLS = 3
PRIME = 65_521  # no boundary of a part or a chunk falls on the same place of the pattern twice


def main() -> int:
    options = parse_options()
    peers = ["gloo", *([options.mpi] if options.mpi else [])]
    if harness.is_rank():
        if options.mpi is not None:
            os.environ["RANK"] = str(world().rank)
        with harness.joined(group="gloo") as comm:
            launch.serve(comm.rank, Methods(comm, peers, options.rounds))
        return 0
    launch.exit_on_sigterm()
    print(machine.summary())
    print(f"float32, {options.ranks} ranks; a ratio is a peer's time over fastcomm's")
    table = make_table(peers)
    table.print_head()
    rows = []
    sizes = [size for size in SIZES if size <= options.e]
    settings = [(collective, size) for collective in COLLECTIVES for size in sizes]
    with start(options) as ranks:
        for collective, nbytes in report.tracked(settings, "sizes"):
            answers = ranks.call("measure", collective=collective, nbytes=nbytes)
            rows.append(row_of(collective, nbytes, answers, peers))
            table.print_row(cells_of(rows[-1]))
            report.write_so_far("parts", {"ranks": options.ranks, "rows": rows}, options)
    if any(row["wide"] for row in rows):
        print(tables.WIDE_NOTE)
    report.write_results("parts", {"ranks": options.ranks, "rows": rows}, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="number of ranks, on this machine (2)"
    )
    report.add_largest_size(parser, SIZES)
    parser.add_argument("--mpi", choices=NAMES, help="that takes part (none)")
    parser.add_argument(
        "--mpis",
        type=Path,
        metavar="FOLDER",
        help="where the MPIs' virtual environments are (beside the one of this Python)",
    )
    options = report.parse(parser, rounds=16)
    if options.ranks < 2:
        parser.error("--ranks is at least 2: one rank has no peers")
    if options.mpi is not None and not harness.is_rank():
        try:
            launcher_of(options.mpi, "float", options.mpis)
        except NoMpiError as error:
            parser.error(f"--mpi {options.mpi}: {error}")
    return options


# ---- the parent ----------------------------------------------------------------------------------


def start(options: argparse.Namespace) -> contextlib.AbstractContextManager[launch.Ranks]:
    """Starts the ranks, under the MPI's mpiexec if one takes part."""
    if options.mpi is None:
        return harness.started(__file__, options.ranks)
    launcher = launcher_of(options.mpi, "float", options.mpis)
    return launcher.start(Path(__file__).resolve(), options.ranks, sys.argv[1:])


def row_of(
    collective: str,
    nbytes: int,
    answers: Sequence[dict[str, list[list[int]]]],
    peers: Sequence[str],
) -> dict[str, Any]:
    """answers: nanoseconds by rank, way, round and call."""
    calls = {
        way: [slowest(turn) for turn in zip(*(answer[way] for answer in answers), strict=True)]
        for way in (*OWN, *peers)
    }
    samples = {way: [statistics.median(turn) / 1e3 for turn in calls[way]] for way in calls}
    fastest = {way: min(map(min, calls[way])) / 1e3 for way in calls}
    pairs = [(peer, own) for peer in peers for own in OWN]
    times = Times.of(samples)
    return {
        "collective": collective,
        "nbytes": nbytes,
        "quartiles_us": times.rounded(),
        "fastest_us": harness.rounded(fastest),
        "ratios": {
            f"{peer}/{own}": Spread.quartiles(harness.ratios(samples, own, peer)).rounded()
            for peer, own in pairs
        },
        "fastest_ratios": harness.rounded(
            {f"{peer}/{own}": fastest[peer] / fastest[own] for peer, own in pairs}
        ),
        "wide": times.wide(),
    }


def slowest(turn: Sequence[Sequence[int]]) -> list[int]:
    """turn: nanoseconds by rank and call. Those of the slowest rank, by call."""
    return [max(call) for call in zip(*turn, strict=True)]


def make_table(peers: Sequence[str]) -> Table:
    columns = [Column(18, ("collective", ""), "<"), Column(9, ("size", ""))]
    columns += [Column(12, (title, "(us)")) for title in ("comm.empty", "torch.empty", *peers)]
    for peer in peers:
        for title in ("comm", "torch"):
            columns += [Column(22, (f"{peer}/{title}", "(quartiles)")), Column(8, ("fastest", ""))]
    return Table(columns)


def cells_of(row: dict[str, Any]) -> list[str]:
    cells = [row["collective"], size_text(row["nbytes"])]
    cells += [time_cell(times, 1) for times in row["quartiles_us"].values()]
    for name, (low, middle, high) in row["ratios"].items():
        cells.append(f"{three_digits(middle)} ({three_digits(low)} to {three_digits(high)})")
        cells.append(three_digits(row["fastest_ratios"][name]))
    return cells


# ---- a rank --------------------------------------------------------------------------------------


class Collective:
    """Calls one collective over each contender, on this rank. out, inp: where the results come, and
    what is sent; None on a rank that has none.
    """

    numels: tuple[int, int]  # of out and inp; 0: none
    out: Any
    inp: Any

    def __init__(self, comm: Any, part: int) -> None:
        self.comm, self.part, self.whole = comm, part, part * comm.world_size
        self.make()

    def make(self) -> None:
        """Sets numels."""
        raise NotImplementedError

    def allocate(self, empty: Callable[..., Tensor]) -> None:
        """Every page is touched."""
        self.out, self.inp = (
            empty(numel, dtype=torch.float32).fill_(-1) if numel else None for numel in self.numels
        )

    def over(self, way: str) -> Callable[[], object]:
        """The call of a contender."""
        if way in OWN:
            return self.over_fastcomm()
        return self.over_gloo() if way == "gloo" else self.over_mpi(world())

    def over_fastcomm(self) -> Callable[[], object]:
        raise NotImplementedError

    def over_gloo(self) -> Callable[[], object]:
        raise NotImplementedError

    def over_mpi(self, world: Any) -> Callable[[], object]:
        """world: MPI.COMM_WORLD."""
        raise NotImplementedError

    def expected(self) -> list[Tensor]:
        """What `out` has, in pieces, when each rank sends its contribution."""
        raise NotImplementedError

    def all_of(self, numel: int) -> list[Tensor]:
        return [contribution(rank, numel) for rank in range(self.comm.world_size)]

    def parts_of(self, whole: Tensor | None) -> list[Tensor] | None:
        return None if whole is None else list(whole.chunk(self.comm.world_size))


class Gather(Collective):
    def make(self) -> None:
        self.numels = self.whole * (self.comm.rank == ROOT), self.part

    def over_fastcomm(self) -> Callable[[], object]:
        return functools.partial(self.comm.gather, self.out, self.inp)

    def over_gloo(self) -> Callable[[], object]:
        return functools.partial(dist.gather, self.inp, self.parts_of(self.out))

    def over_mpi(self, world: Any) -> Callable[[], object]:
        return functools.partial(world.Gather, in_numpy(self.inp), in_numpy(self.out), ROOT)

    def expected(self) -> list[Tensor]:
        return self.all_of(self.part)


class Scatter(Collective):
    def make(self) -> None:
        self.numels = self.part, self.whole * (self.comm.rank == ROOT)

    def over_fastcomm(self) -> Callable[[], object]:
        return functools.partial(self.comm.scatter, self.out, self.inp)

    def over_gloo(self) -> Callable[[], object]:
        return functools.partial(dist.scatter, self.out, self.parts_of(self.inp))

    def over_mpi(self, world: Any) -> Callable[[], object]:
        return functools.partial(world.Scatter, in_numpy(self.inp), in_numpy(self.out), ROOT)

    def expected(self) -> list[Tensor]:
        return [contribution(ROOT, self.whole).chunk(self.comm.world_size)[self.comm.rank]]


class AllToAll(Collective):
    def make(self) -> None:
        self.numels = self.whole, self.whole

    def over_fastcomm(self) -> Callable[[], object]:
        return functools.partial(self.comm.all_to_all_single, self.out, self.inp)

    def over_gloo(self) -> Callable[[], object]:
        return functools.partial(dist.all_to_all_single, self.out, self.inp)

    def over_mpi(self, world: Any) -> Callable[[], object]:
        return functools.partial(world.Alltoall, in_numpy(self.inp), in_numpy(self.out))

    def expected(self) -> list[Tensor]:
        n, rank = self.comm.world_size, self.comm.rank
        return [one.chunk(n)[rank] for one in self.all_of(self.whole)]


class Send(Collective):
    """From rank 0 to rank 1."""

    def make(self) -> None:
        rank = self.comm.rank
        self.numels = self.whole * (rank == RECEIVER), self.whole * (rank == ROOT)

    def over_fastcomm(self) -> Callable[[], object]:
        return self._through(self.comm.send, self.comm.recv, self.inp, self.out)

    def over_gloo(self) -> Callable[[], object]:
        return self._through(dist.send, dist.recv, self.inp, self.out)

    def over_mpi(self, world: Any) -> Callable[[], object]:
        return self._through(world.Send, world.Recv, in_numpy(self.inp), in_numpy(self.out))

    def _through(
        self, send: Callable[..., Any], recv: Callable[..., Any], inp: Any, out: Any
    ) -> Callable[[], object]:
        if self.comm.rank == ROOT:
            return functools.partial(send, inp, RECEIVER)
        if self.comm.rank == RECEIVER:
            return functools.partial(recv, out, ROOT)
        return lambda: None

    def expected(self) -> list[Tensor]:
        return [contribution(ROOT, self.whole)]


class OneByOne(Collective):
    """An all-reduce of each of up to MOST_TENSORS tensors."""

    def make(self) -> None:
        self.numels = self.whole, 0

    def allocate(self, empty: Callable[..., Tensor]) -> None:
        super().allocate(empty)
        self.inp = self.out
        self.tensors = [one for one in self.out.tensor_split(MOST_TENSORS) if one.numel()]

    def over_fastcomm(self) -> Callable[[], object]:
        return functools.partial(for_each, self.comm.all_reduce, self.tensors)

    def over_gloo(self) -> Callable[[], object]:
        return functools.partial(for_each, dist.all_reduce, self.tensors)

    def over_mpi(self, world: Any) -> Callable[[], object]:
        from mpi4py import MPI

        reduce = functools.partial(world.Allreduce, MPI.IN_PLACE)
        return functools.partial(for_each, reduce, [in_numpy(one) for one in self.tensors])

    def expected(self) -> list[Tensor]:
        return [torch.stack(self.all_of(self.whole)).sum(0)]


class Coalesced(OneByOne):
    def over_fastcomm(self) -> Callable[[], object]:
        return functools.partial(self.comm.all_reduce_coalesced, self.tensors)

    def over_gloo(self) -> Callable[[], object]:
        def reduce_together() -> None:
            with dist.distributed_c10d._coalescing_manager():
                for_each(dist.all_reduce, self.tensors)

        return reduce_together


COLLECTIVES: dict[str, type[Collective]] = {
    "gather": Gather,
    "scatter": Scatter,
    "all_to_all_single": AllToAll,
    "send": Send,
    "coalesced": Coalesced,
    "one by one": OneByOne,
}


def for_each(reduce: Callable[[Any], object], tensors: Sequence[Any]) -> None:
    for tensor in tensors:
        reduce(tensor)


def in_numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy()


class Methods:
    """The parent calls these methods on all ranks at once. peers: of fastcomm."""

    def __init__(self, comm: Any, peers: Sequence[str], rounds: int) -> None:
        self.comm, self.ways, self.rounds = comm, [*OWN, *peers], rounds

    def measure(self, collective: str, nbytes: int) -> dict[str, list[list[int]]]:
        """Nanoseconds of this rank's calls, by way and round."""
        part = max(1, nbytes // 4 // self.comm.world_size)
        n_calls = max(CALLS[0], min(CALLS[1], BYTES_PER_TURN // nbytes))
        turns = {
            way: functools.partial(
                take_turn, n_calls, *self.prepare(COLLECTIVES[collective], way, part)
            )
            for way in self.ways
        }
        return harness.take_turns(turns, self.rounds, self.comm.barrier)

    def prepare(
        self, kind: type[Collective], way: str, part: int
    ) -> tuple[Callable[[], object], Callable[[], None]]:
        """The call, once it has given the right result, and what comes before each."""
        one = kind(self.comm, part)
        one.allocate(self.comm.empty if way == "fastcomm" else torch.empty)
        call, inp = one.over(way), one.inp
        if inp is not None:
            inp.copy_(contribution(self.comm.rank, inp.numel()))
        call()
        if one.out is not None and not torch.equal(one.out, torch.cat(one.expected())):
            raise RuntimeError(
                f"rank {self.comm.rank}: {kind.__name__} over {way} in parts of {part} floats is "
                "wrong"
            )

        def rewrite() -> None:
            if inp is not None:
                inp.fill_(self.comm.rank)
            self.comm.barrier()

        return call, rewrite


def take_turn(n_calls: int, call: Callable[[], object], rewrite: Callable[[], None]) -> list[int]:
    """Nanoseconds of each call."""
    for _ in range(WARM_UP_CALLS):
        call()
    return harness.time_fresh_calls(call, rewrite, n_calls)


def contribution(rank: int, numel: int) -> Tensor:
    """Whole numbers that float32 holds."""
    return (torch.arange(numel) % PRIME + (rank << 16)).float()


if __name__ == "__main__":
    sys.exit(main())
