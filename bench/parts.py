"""comm.gather, scatter, all_to_all_single, send and all_reduce_coalesced over shared memory, beside
those of torch.distributed over Gloo, in one run.

    python -m fastcomm bench parts                2 ranks, 1 KiB to 16 MiB
    python -m fastcomm bench parts --ranks 4

A size counts the tensor that is all ranks' parts: what the root of gather and scatter has, and what
each rank has in all_to_all_single. One of the parts is the rank's own and goes to nobody. send
takes a whole tensor from rank 0 to rank 1. "coalesced" cuts the size into up to 100 tensors, which
are reduced as one: torch's all_reduce inside a _coalescing_manager; "one by one" is a loop of
all_reduce over the same tensors, for both. fastcomm takes part twice, with tensors in comm.empty
and with ordinary ones, which Gloo has as well.

Contenders take turns in random order in every round. Before every call each rank rewrites its
input, and the ranks meet, by fastcomm's barrier for all contenders. A call's time is that of the
slowest rank, and a turn has the median of its calls. A ratio is the median over rounds of Gloo's
time over fastcomm's in the same round, with its quartiles. Where other programs want the same cores
medians tell how long a rank waits to run; the fastest calls, with their ratio, tell more of the
transport. Every result is checked once before it is timed.

Predicted before the first run, times as fast as Gloo, 2 ranks on 2 cores, at 1 KiB, 64 KiB, 1 MiB
and 16 MiB. Gloo's all-reduce takes some 300 us at 1 KiB and sends twice as often as a gather, so
120 us beside 3; from 1 MiB on TCP moves 1.5 GB/s, and staging copies twice at 6 to 8 GB/s. Ordinary
tensors: gather 40, 12, 5 and 5, where Gloo copies all it gets once more; scatter 40, 10, 4 and 3;
all_to_all_single 40, 12, 4 and 3. In comm.empty gather and all_to_all_single are 1.5 times as fast
as in ordinary tensors from 64 KiB on, and scatter is the same, for it is staged in both. 4 ranks on
2 cores: 15 at 1 KiB, 3 from 1 MiB on. send, predicted later: 10, 5, 3 and 2, and the same in
comm.empty, for a channel has memory of its own.

Coalesced, predicted before it was measured, 100 tensors of 1 KiB, 20 of 64 KiB and 4 of 4 MiB: 110
us, 350 us and 6.5 ms, which is 3.6, 1.1 and 0.9 times as fast as one by one, and 5, 5 and 3 times
as fast as Gloo's. That was for a flat copy of the tensors; they are reduced where they lie instead.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import launch, machine, report, tables, turns
from lib.chart import size_text
from lib.tables import Column, Spread, Table, Times, three_digits, time_cell
from torch import Tensor

import fastcomm

COLLECTIVES = ("gather", "scatter", "all_to_all_single", "send", "coalesced", "one by one")
SEVERAL = ("coalesced", "one by one")  # whose size is that of several tensors
MOST_TENSORS = 100
OWN = ("fastcomm", "ordinary")  # in comm.empty, and in ordinary tensors
WAYS = (*OWN, "gloo")
SIZES = tuple(1 << exponent for exponent in range(10, 25, 2))  # bytes: 1 KiB to 16 MiB
ROOT = 0  # as all of them have it without being told; who sends
RECEIVER = 1
BYTES_PER_TURN = 32 << 20
CALLS = (3, 30)  # of a turn, at least and at most
WARM_UP_CALLS = 3
PRIME = 65_521  # no boundary of a part or a chunk falls on the same place of the pattern twice


def main() -> int:
    options = parse_options()
    if launch.SOCKET_VARIABLE in os.environ:
        serve()
        return 0
    launch.exit_on_sigterm()
    print(f"{machine.summary()}\nfloat32, {options.ranks} ranks; a ratio is Gloo's time over it")
    table = make_table()
    table.print_head()
    rows = []
    sizes = [size for size in SIZES if size <= options.e]
    settings = [(collective, size) for collective in COLLECTIVES for size in sizes]
    with launch.Ranks(Path(__file__).resolve(), options.ranks) as ranks:
        for collective, nbytes in report.tracked(settings, "sizes"):
            answers = ranks.call(
                "measure", collective=collective, nbytes=nbytes, rounds=options.rounds
            )
            rows.append(row_of(collective, nbytes, answers))
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
    options = report.parse(parser, rounds=16)
    if options.ranks < 2:
        parser.error("--ranks is at least 2: one rank has no peers")
    return options


# ---- the parent ----------------------------------------------------------------------------------


def row_of(
    collective: str, nbytes: int, answers: Sequence[dict[str, list[list[int]]]]
) -> dict[str, Any]:
    """answers: nanoseconds by rank, way, round and call."""
    calls = {way: turns.slowest([answer[way] for answer in answers]) for way in WAYS}
    samples = {way: [statistics.median(turn) / 1e3 for turn in calls[way]] for way in WAYS}
    fastest = {way: min(map(min, calls[way])) / 1e3 for way in WAYS}
    ratios = {
        f"gloo/{way}": Spread.quartiles(
            [gloo / own for gloo, own in zip(samples["gloo"], samples[way], strict=True)]
        ).rounded()
        for way in OWN
    }
    times = Times.of(samples)
    return {
        "collective": collective,
        "nbytes": nbytes,
        "quartiles_us": times.rounded(),
        "fastest_us": report.rounded(fastest),
        "ratios": ratios,
        "fastest_ratios": report.rounded({f"gloo/{o}": fastest["gloo"] / fastest[o] for o in OWN}),
        "wide": times.wide(),
    }


def make_table() -> Table:
    columns = [Column(18, ("collective", ""), "<"), Column(9, ("size", ""))]
    columns += [Column(12, (title, "(us)")) for title in ("comm.empty", "torch.empty", "Gloo")]
    for title in ("comm", "torch"):
        columns += [Column(22, (f"{title}: ratio", "(quartiles)")), Column(8, ("fastest", ""))]
    return Table(columns)


def cells_of(row: dict[str, Any]) -> list[str]:
    cells = [row["collective"], size_text(row["nbytes"])]
    cells += [time_cell(row["quartiles_us"][way], 1) for way in WAYS]
    for name, (low, middle, high) in row["ratios"].items():
        cells.append(f"{three_digits(middle)} ({three_digits(low)} to {three_digits(high)})")
        cells.append(three_digits(row["fastest_ratios"][name]))
    return cells


# ---- a rank --------------------------------------------------------------------------------------


class Methods:
    """What the parent calls, on all ranks at once."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def measure(self, collective: str, nbytes: int, rounds: int) -> dict[str, list[list[int]]]:
        """Nanoseconds of this rank's calls, by way and round."""
        part = max(1, nbytes // 4 // self.comm.world_size)
        contenders = {way: self.prepare(collective, way, part) for way in WAYS}
        n_calls = max(CALLS[0], min(CALLS[1], BYTES_PER_TURN // nbytes))
        order = random.Random(nbytes)  # the same on every rank
        times: dict[str, list[list[int]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            for way in order.sample(WAYS, len(WAYS)):
                call, rewrite = contenders[way]
                for _ in range(WARM_UP_CALLS):
                    call()
                times[way].append(turns.time_fresh_calls(call, rewrite, n_calls))
            gc.enable()
        return times

    def prepare(
        self, collective: str, way: str, part: int
    ) -> tuple[Callable[[], object], Callable[[], None]]:
        """The call, once it has given the right result, and what comes before each."""
        out, inp = self.tensors(collective, way, part)
        call = self.call_of(collective, way, out, inp)
        self.check(collective, call, out, inp, part)

        def rewrite() -> None:
            if inp is not None:
                inp.fill_(self.comm.rank)
            self.comm.barrier()

        return call, rewrite

    def tensors(self, collective: str, way: str, part: int) -> tuple[Tensor | None, Tensor | None]:
        """out and inp; None where this rank has none. Every page of them is touched."""
        empty = self.comm.empty if way == "fastcomm" else torch.empty
        whole, rank = part * self.comm.world_size, self.comm.rank
        out = inp = None
        if collective in SEVERAL:
            out = empty(whole, dtype=torch.float32).fill_(-1)
            return out, out
        if rank == {"gather": ROOT, "send": RECEIVER}.get(collective, rank):
            out = empty(part if collective == "scatter" else whole, dtype=torch.float32).fill_(-1)
        if collective not in ("scatter", "send") or rank == ROOT:
            inp = empty(part if collective == "gather" else whole, dtype=torch.float32).fill_(-1)
        return out, inp

    def call_of(
        self, collective: str, way: str, out: Tensor | None, inp: Tensor | None
    ) -> Callable[[], object]:
        if collective == "send":
            return self.message_of(self.comm if way in OWN else dist, out, inp)
        if collective in SEVERAL and out is not None:
            return self.reduction_of(collective, way, list(out.tensor_split(MOST_TENSORS)))
        if way in OWN:
            return functools.partial(getattr(self.comm, collective), out, inp)
        theirs = getattr(dist, collective)
        if collective == "gather":
            return functools.partial(theirs, inp, self.parts_of(out))
        if collective == "scatter":
            return functools.partial(theirs, out, self.parts_of(inp))
        return functools.partial(theirs, out, inp)

    def message_of(
        self, through: Any, out: Tensor | None, inp: Tensor | None
    ) -> Callable[[], object]:
        """through: a communicator, or torch.distributed."""
        if inp is not None:
            return functools.partial(through.send, inp, RECEIVER)
        if out is not None:
            return functools.partial(through.recv, out, ROOT)
        return lambda: None

    def reduction_of(
        self, collective: str, way: str, tensors: list[Tensor]
    ) -> Callable[[], object]:
        tensors = [tensor for tensor in tensors if tensor.numel()]
        all_reduce = self.comm.all_reduce if way in OWN else dist.all_reduce
        if collective == "coalesced" and way in OWN:
            return functools.partial(self.comm.all_reduce_coalesced, tensors)

        def reduce_each() -> None:
            for tensor in tensors:
                all_reduce(tensor)

        def reduce_together() -> None:
            with dist.distributed_c10d._coalescing_manager():
                reduce_each()

        return reduce_each if collective == "one by one" else reduce_together

    def parts_of(self, whole: Tensor | None) -> list[Tensor] | None:
        return None if whole is None else list(whole.chunk(self.comm.world_size))

    def check(
        self,
        collective: str,
        call: Callable[[], object],
        out: Tensor | None,
        inp: Tensor | None,
        part: int,
    ) -> None:
        """Calls it once. What is measured has to be right."""
        rank, world_size = self.comm.rank, self.comm.world_size
        if inp is not None:
            inp.copy_(contribution(rank, inp.numel()))
        call()
        if out is None:
            return
        if collective == "gather":
            expected = [contribution(r, part) for r in range(world_size)]
        elif collective in SEVERAL:
            shares = [contribution(r, part * world_size) for r in range(world_size)]
            expected = [torch.stack(shares).sum(0)]
        elif collective == "send":
            expected = [contribution(ROOT, part * world_size)]
        else:
            sources = (ROOT,) if collective == "scatter" else range(world_size)
            expected = [contribution(r, part * world_size).chunk(world_size)[rank] for r in sources]
        if not torch.equal(out, torch.cat(expected)):
            raise RuntimeError(f"rank {rank}: {collective} in parts of {part} floats is wrong")


def contribution(rank: int, numel: int) -> Tensor:
    """Whole numbers that float32 holds."""
    return (torch.arange(numel) % PRIME + (rank << 16)).float()


def serve() -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{launch.scratch()}"
    dist.init_process_group("gloo", init_method=f"{meeting}/gloo", rank=rank, world_size=world_size)
    with fastcomm.init(
        "shm", init_method=f"{meeting}/fastcomm", rank=rank, world_size=world_size
    ) as comm:
        launch.serve(rank, Methods(comm))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
