"""All-reduce by size: fastcomm beside Gloo, MPI and the streaming bound of the machine, or beside
torch.distributed over NCCL, in one run.

    python bench/allreduce.py                     1 KiB to 256 MiB, 2 ranks, in shared memory
    python bench/allreduce.py --tensors ordinary     the same on ordinary tensors
    python bench/allreduce.py --ranks 4 -e 64M
    python bench/allreduce.py --device cuda          a rank for each GPU
    python bench/allreduce.py --device cuda --share --ranks 2    both on one GPU: no times, only
                                                                 whether results are right

Flags and table are those of nccl-tests (https://github.com/NVIDIA/nccl-tests), with columns for the
peers on the right; sizes are in bytes, algbw = bytes / time, busbw = algbw * 2 (n - 1) / n. A time
is the median over calls made one after the other from Python, host clock, on each rank, averaged
over the ranks. In place is all_reduce(tensor); out of place is out.copy_(inp), all_reduce(out), or
MPI's own two-buffer call.

Peers take turns within every size, ROUNDS times; those that are not measured sleep. The bound is
the time that all ranks at once need to read n private shards of 1 / n of the size, reduce them and
write the result into each: the memory traffic of an all-reduce, and nothing else.

On GPUs a time is what passes between two events around calls made back to back, the host's part
included where that is longer; fastcomm has its tensors in comm.empty and, as a peer of its own, in
torch.empty. One rank alone has nothing to reduce: what is left is the call.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_clock
import launch
import machine
import torch

RANK_SCRIPT = Path(__file__).resolve().with_name("allreduce_rank.py")
RESULTS = Path(__file__).resolve().with_name("results")

# Without -n: a peer's turn lasts about this long, in between these numbers of calls.
ROUNDS = 5
TURN_SECONDS = 0.1
FEWEST, MOST = 2, 2000

PEERS = ("gloo", "mpi", "ordinary", "nccl")
PLACEMENTS = ("out_of_place", "in_place")
# nccl-tests' names. MPI has no 16-bit floating-point types.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
}
NBYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
FLOATS = ("float", "double", "half", "bfloat16")
OPS = {"sum": "sum", "prod": "prod", "min": "min", "max": "max", "avg": "mean"}


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, and the quartiles over all calls of all ranks."""

    median: float
    quartiles: tuple[float, float]

    @staticmethod
    def of(per_rank: list[list[int]]) -> Timing:
        calls = sorted(nanoseconds / 1e3 for rank in per_rank for nanoseconds in rank)
        quartiles = statistics.quantiles(calls, n=4, method="inclusive")
        return Timing(
            statistics.fmean(statistics.median(rank) for rank in per_rank) / 1e3,
            (quartiles[0], quartiles[2]),
        )


@dataclass
class Row:
    """What was measured at one size. Keys are (peer, placement); `wrong` counts elements over all
    ranks and is empty without -c 1.
    """

    count: int
    nbytes: int
    timings: dict[tuple[str, str], Timing]
    wrong: dict[tuple[str, str], int]

    def time(self, peer: str, placement: str = "in_place") -> float:
        return self.timings[peer, placement].median

    def has(self, peer: str) -> bool:
        return (peer, "in_place") in self.timings

    def ratio(self, slower: str, faster: str) -> float:
        return self.time(slower) / self.time(faster)


def main() -> int:
    options = parse_options()
    reason = cuda_clock.why_not() if options.device == "cuda" else None
    if reason is not None:
        print(f"bench/allreduce.py --device cuda needs a GPU, and {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    missing: dict[str, str] = {}
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        contenders = (start_on_gpus if options.device == "cuda" else start)(options, stack, missing)
        print_head(options, contenders, missing)
        for nbytes in sizes(options):
            row = measure_size(contenders, max(1, nbytes // NBYTES[options.d]), options)
            print(format_row(row, options, list(contenders)), flush=True)
            rows.append(row)
    print_tail(rows, options.ranks)
    write_results(rows, missing, options)
    if options.device == "cuda":
        print_headline(rows[-1])
    return 1 if any(sum(row.wrong.values()) for row in rows) else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-b",
        type=parse_size,
        default="1K",
        metavar="SIZE",
        help="smallest size, in bytes; K, M and G are binary (1K)",
    )
    parser.add_argument(
        "-e", type=parse_size, default="256M", metavar="SIZE", help="largest size (256M)"
    )
    parser.add_argument("-f", type=int, metavar="FACTOR", help="factor between sizes (4)")
    parser.add_argument(
        "-i", type=parse_size, metavar="SIZE", help="increment between sizes, instead of a factor"
    )
    parser.add_argument(
        "-n",
        type=int,
        metavar="CALLS",
        help="calls per size, peer and placement (default: as many as fit in half a second)",
    )
    parser.add_argument(
        "-w",
        type=int,
        default=5,
        metavar="CALLS",
        help="calls before each turn that are not counted (5; fewer where they are slow)",
    )
    parser.add_argument(
        "-c", type=int, choices=(0, 1), default=1, help="whether to check the results (1)"
    )
    parser.add_argument("-d", choices=tuple(DTYPES), default="float", help="dtype (float)")
    parser.add_argument("-o", choices=tuple(OPS), default="sum", help="operation (sum)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (cpu)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks, on this machine (2; on GPUs as many as there are)",
    )
    parser.add_argument(
        "--share",
        action="store_true",
        help="on a GPU: all ranks use the first one, to see that results are right",
    )
    parser.add_argument(
        "--peers",
        type=parse_peers,
        default="gloo,mpi",
        help='what to compare with: gloo, mpi, both separated by a comma, or "" (CPU)',
    )
    parser.add_argument(
        "--tensors",
        choices=("comm", "ordinary"),
        default="comm",
        help="fastcomm's tensors: comm.empty or torch.empty (comm)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the results (in the source tree: bench/results/)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time over size")
    options = parser.parse_args()
    if options.ranks is None:
        options.ranks = (
            max(1, cuda_clock.device_count())
            if options.device == "cuda" and not options.share
            else 2
        )
    if options.share and options.device != "cuda":
        parser.error("--share is for --device cuda")
    if (
        options.device == "cuda"
        and not options.share
        and options.ranks > max(1, cuda_clock.device_count())
    ):
        parser.error(
            f"there are {cuda_clock.device_count()} GPUs for {options.ranks} ranks; --share lets "
            "them use one, for correctness only"
        )
    if options.i is not None and options.f is not None:
        parser.error("sizes grow by a factor (-f) or by an increment (-i), not by both")
    if options.i is None and options.f is None:
        options.f = 4
    if (options.f is not None and options.f < 2) or options.i == 0:
        parser.error("sizes have to grow: -f is at least 2, -i at least 1")
    if options.b < 1 or options.e < options.b:
        parser.error("sizes go from -b, at least 1 byte, up to -e")
    if not 1 <= options.ranks <= 64:
        parser.error("--ranks is between 1 and 64")
    if options.w < 0 or (options.n is not None and options.n < 1):
        parser.error("-w is at least 0 and -n at least 1")
    if options.o == "avg" and options.d not in FLOATS:
        parser.error("-o avg needs a floating-point dtype")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def parse_size(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: a whole number of bytes, or of K, M or G"
        )
    return int(number) * unit


def parse_peers(text: str) -> list[str]:
    peers = [peer for peer in text.split(",") if peer]
    if not set(peers) <= {"gloo", "mpi"}:
        raise argparse.ArgumentTypeError(f"{text!r}: peers are gloo and mpi")
    return peers


def sizes(options: argparse.Namespace) -> Iterator[int]:
    nbytes = options.b
    while nbytes <= options.e:
        yield nbytes
        nbytes = nbytes + options.i if options.i else nbytes * options.f


def start(
    options: argparse.Namespace, stack: contextlib.ExitStack, missing: dict[str, str]
) -> dict[str, launch.Ranks]:
    """The ranks of each contender, in the order they take turns. A peer that cannot be had goes
    into `missing`, with the reason.
    """
    common = ["--dtype", DTYPES[options.d], "--op", OPS[options.o]]
    gloo = ["--gloo"] if "gloo" in options.peers else []
    arguments = ["torch", *common, "--tensors", options.tensors, *gloo]
    own = stack.enter_context(launch.Ranks(RANK_SCRIPT, options.ranks, arguments=arguments))
    contenders = {"fastcomm": own, "bound": own}
    if gloo:
        contenders["gloo"] = own
    if "mpi" in options.peers:
        reason = why_no_mpi(options.d)
        if not reason:
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(options.ranks)]
            try:
                contenders["mpi"] = stack.enter_context(
                    launch.Ranks(
                        RANK_SCRIPT, options.ranks, arguments=["mpi", *common], launcher=mpirun
                    )
                )
            except launch.RanksError as error:
                reason = str(error)
        if reason:
            missing["mpi"] = reason
    return contenders


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
    ranks = stack.enter_context(
        launch.Ranks(RANK_SCRIPT, options.ranks, arguments=arguments + ["--share"] * options.share)
    )
    return {"fastcomm": ranks, "ordinary": ranks, "nccl": ranks}


def why_no_mpi(dtype: str) -> str | None:
    if dtype in ("half", "bfloat16"):
        return f"MPI has no {dtype}"
    if shutil.which("mpirun") is None:
        return "mpirun was not found: apt-get install openmpi-bin libopenmpi-dev"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py"
    return None


def measure_size(
    contenders: dict[str, launch.Ranks], count: int, options: argparse.Namespace
) -> Row:
    """All peers at one size, taking turns so that a drift of the machine's speed meets all
    of them.
    """
    wrong: dict[tuple[str, str], int] = {}
    turns: dict[tuple[str, str], tuple[int, int]] = {}
    for peer, ranks in contenders.items():
        ranks.call("prepare", peer=peer, count=count)
        for placement in PLACEMENTS if peer != "bound" else ("in_place",):
            turns[peer, placement] = plan_turn(ranks, peer, placement, options)
    samples: dict[tuple[str, str], list[list[int]]] = {
        key: [[] for _ in range(options.ranks)] for key in turns
    }
    for _ in range(rounds(options)):
        for (peer, placement), (warmup, calls) in turns.items():
            measured = contenders[peer].call(
                "measure", peer=peer, placement=placement, warmup=warmup, iterations=calls
            )
            for all_of_rank, new in zip(samples[peer, placement], measured, strict=True):
                all_of_rank.extend(new)
    for peer, placement in turns:
        if options.c and peer != "bound":
            wrong[peer, placement] = sum(
                contenders[peer].call("check", peer=peer, placement=placement)
            )
    for peer, ranks in contenders.items():
        ranks.call("release", peer=peer)
    return Row(
        count,
        count * NBYTES[options.d],
        {key: Timing.of(per_rank) for key, per_rank in samples.items()},
        wrong,
    )


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
    warmup = min(options.w, max(1, fitting))
    if options.n is not None:
        return warmup, -(-options.n // rounds(options))
    return warmup, min(MOST, max(FEWEST, fitting))


def print_head(
    options: argparse.Namespace, contenders: dict[str, launch.Ranks], missing: dict[str, str]
) -> None:
    step = f"{options.i}(bytes)" if options.i else f"{options.f}(factor)"
    calls = options.n or f"{ROUNDS * FEWEST}-{ROUNDS * MOST}"
    print(f"# {machine.summary(machine.describe())}")
    print("# Collective test starting: all_reduce_perf")
    print(
        f"# nThread 1 nGpus {int(options.device == 'cuda')} minBytes {options.b} maxBytes "
        f"{options.e} step: {step} "
        f"warmup iters: {options.w} iters: {calls} agg iters: 1 validation: {options.c} graph: 0 "
        "unalign: 0"
    )
    print(
        f"# {options.ranks} ranks, tensors: "
        f"{'comm.empty' if options.tensors == 'comm' else 'torch.empty'}"
    )
    if options.device == "cuda":
        print(f"# NCCL {machine.nccl_version()}; torch was built with {torch_nccl_version()}")
    if options.share:
        print("# The ranks share one GPU: this is for correctness only, the times mean nothing.")
    if options.ranks > machine.cores():
        print(
            f"# More ranks than cores ({machine.cores()}): the ranks share cores, and times say "
            "how well they do."
        )
    for peer, reason in missing.items():
        print(f"# {peer} is not measured: {reason}")
    placement = f"{'out-of-place':^32}{'in-place':^32}"
    beside = [peer for peer in contenders if peer != "fastcomm"]
    print("#")
    print(
        f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  "
        f"{'':>6}{placement}{'in-place time, and times that of fastcomm' if beside else ''}"
    )
    names = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    units = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
    for _ in PLACEMENTS:
        names += f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
        units += f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
    print(names + "".join(f"  {peer:>8}  {'ratio':>6}" for peer in beside))
    print(units + "".join(f"  {'(us)':>8}  {'':>6}" for _ in beside), flush=True)


def torch_nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"


def format_row(row: Row, options: argparse.Namespace, contenders: list[str]) -> str:
    """A line of nccl-tests' table, and for each peer its time in place and how many times
    fastcomm's that is. For the bound it is fastcomm's time over the bound.
    """
    line = f"{row.nbytes:>12}  {row.count:>12}  {options.d:>8}  {options.o:>6}  {-1:>6}"
    for placement in PLACEMENTS:
        time = row.time("fastcomm", placement)
        algbw, busbw = bandwidths(row.nbytes, time, options.ranks)
        wrong = f"{row.wrong['fastcomm', placement]:>6g}" if options.c else f"{'N/A':>6}"
        line += f"  {fit(time, 7)}  {fit(algbw, 6)}  {fit(busbw, 6)}  {wrong}"
    for peer in contenders:
        if peer != "fastcomm":
            ratio = row.ratio("fastcomm", peer) if peer == "bound" else row.ratio(peer, "fastcomm")
            line += f"  {fit(row.time(peer), 8)}  {fit(ratio, 6)}"
    return line


def bandwidths(nbytes: int, microseconds: float, ranks: int) -> tuple[float, float]:
    """algbw and busbw in GB/s, decimal."""
    algbw = nbytes / microseconds / 1e3
    return algbw, algbw * 2 * (ranks - 1) / ranks


def fit(value: float, width: int) -> str:
    """As many decimals, two at most, as the width allows."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text.rjust(width)
    return f"{value:.0e}".rjust(width)


def print_tail(rows: list[Row], ranks: int) -> None:
    wrong = sum(
        count for row in rows for (peer, _), count in row.wrong.items() if peer == "fastcomm"
    )
    busbw = [
        bandwidths(row.nbytes, row.time("fastcomm", placement), ranks)[1]
        for row in rows
        for placement in PLACEMENTS
    ]
    print(f"# {'Out of bounds values':<20} : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    print(f"# {'Avg bus bandwidth':<20} : {statistics.fmean(busbw):g}")
    for peer in sorted(
        {
            peer
            for row in rows
            for (peer, _), count in row.wrong.items()
            if count and peer != "fastcomm"
        }
    ):
        print(f"# {peer} has wrong results as well: its times mean nothing")
    print("#\n# Collective test concluded: all_reduce_perf")


def print_headline(row: Row) -> None:
    times = ", ".join(
        f"{peer} {row.time(peer):.1f} us" for peer in ("fastcomm", "ordinary", "nccl")
    )
    print(f"# {short_size(row.nbytes)} in place: {times}")


def write_results(rows: list[Row], missing: dict[str, str], options: argparse.Namespace) -> None:
    path = options.json
    if path is None and RESULTS.is_dir():
        on = "cuda-" if options.device == "cuda" else ""
        path = RESULTS / f"allreduce-{on}{options.ranks}ranks-{options.tensors}.json"
    if path is not None:
        path.write_text(json.dumps(as_json(rows, missing, options), indent=1) + "\n")
        print(f"# Results: {os.path.relpath(path)}")
    if options.plot:
        plot(rows, options)
        print(f"# Plot: {os.path.relpath(options.plot)}")


def as_json(
    rows: list[Row], missing: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "benchmark": "allreduce",
        "machine": machine.describe(),
        "device": options.device,
        "ranks_share_a_gpu": options.share,
        "ranks": options.ranks,
        "tensors": options.tensors,
        "dtype": DTYPES[options.d],
        "op": OPS[options.o],
        "peers_not_measured": missing,
        "rows": [row_as_json(row, options.ranks) for row in rows],
    }


def row_as_json(row: Row, ranks: int) -> dict[str, Any]:
    peers: dict[str, dict[str, Any]] = {}
    for (peer, placement), timing in row.timings.items():
        algbw, busbw = bandwidths(row.nbytes, timing.median, ranks)
        peers.setdefault(peer, {})[placement] = {
            "time_us": round(timing.median, 3),
            "quartiles_us": [round(quartile, 3) for quartile in timing.quartiles],
            "algbw_gbs": round(algbw, 4),
            "busbw_gbs": round(busbw, 4),
            "wrong": row.wrong.get((peer, placement)),
        }
    ratios = {f"{peer}/fastcomm": row.ratio(peer, "fastcomm") for peer in PEERS if row.has(peer)}
    if row.has("bound"):
        ratios["fastcomm/bound"] = row.ratio("fastcomm", "bound")
    return {
        "nbytes": row.nbytes,
        "count": row.count,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        **peers,
    }


def plot(rows: list[Row], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    styles = {
        "gloo": ("Gloo", "tab:orange", "-"),
        "mpi": ("MPI", "tab:green", "-"),
        "fastcomm": ("fastcomm", "tab:blue", "-"),
    }
    styles |= {
        "ordinary": ("fastcomm, torch.empty", "tab:cyan", "-"),
        "nccl": ("torch.distributed NCCL", "tab:red", "-"),
    }
    styles["bound"] = ("streaming bound", "gray", ":")
    for peer, (label, color, line) in styles.items():
        if rows[0].has(peer):
            axes.plot(
                [row.nbytes for row in rows],
                [row.time(peer) for row in rows],
                line,
                color=color,
                label=label,
                marker="." if line == "-" else "",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        [row.nbytes for row in rows], [short_size(row.nbytes) for row in rows], rotation=45
    )
    axes.minorticks_off()
    axes.set_xlabel("bytes")
    axes.set_ylabel("time per call (us)")
    axes.set_title(f"all_reduce of {DTYPES[options.d]}, {options.ranks} ranks", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(options.plot, dpi=150)


def short_size(nbytes: int) -> str:
    """1048576 is 1M, as -b takes it."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


if __name__ == "__main__":
    sys.exit(main())
