"""`python -m fastcomm info | demo | bench`: says what this machine offers, trains a small GPT on
two ranks, runs the benchmarks.

The demo and the benchmarks are scripts of their own, examples/train_gpt.py and bench/*.py; this
file finds them and gives them the process.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import NoReturn

import torch

import fastcomm
from fastcomm.cuda import driver as cuda_driver
from fastcomm.cuda import multi_tensor
from fastcomm.nccl import library as nccl_library

BENCHMARKS = ("allreduce", "step", "backend", "flatten")
USAGE = """\
commands:
  info                     versions, cores, and which transports work here
  demo [...]               trains a small GPT on two ranks; passes on what follows
  bench allreduce [...]    all-reduce against Gloo and MPI, by size; --device cuda: against NCCL
  bench step [...]         training steps: local, fastcomm, DDP; on the CPU, or with --device cuda
  bench backend [...]      backend "fastcomm" against Gloo: all-reduce, and steps under DDP
  bench flatten [...]      many tensors into one buffer and back, on a GPU, against torch and CuPy
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastcomm",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("info", "demo", "bench"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the command takes")
    options = parser.parse_args()
    arguments: list[str] = options.arguments

    if options.command == "demo":
        demo(arguments)
    if options.command == "bench":
        if not arguments or arguments[0] not in BENCHMARKS:
            parser.error(f"bench takes the name of a benchmark first: {', '.join(BENCHMARKS)}")
        become(str(script("bench", arguments[0])), *arguments[1:])
    if arguments:
        parser.error("info takes no arguments")
    print(info())
    return 0


def demo(arguments: list[str]) -> NoReturn:
    """Two ranks under torchrun, the cores divided between them."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // 2)))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    become(*launcher, str(script("examples", "train_gpt")), *arguments)


def script(folder: str, name: str) -> Path:
    """Where a script lies: inside the installed package, or beside the package in the source
    tree.
    """
    package = Path(__file__).resolve().parent
    candidates = [root / folder / f"{name}.py" for root in (package, package.parent)]
    for path in candidates:
        if path.is_file():
            return path
    sys.exit(
        f"{folder}/{name}.py was not found; looked for {' and '.join(map(str, candidates))}. "
        "Install fastcomm again."
    )


def become(*arguments: str) -> NoReturn:
    """Replaces this process by Python with `arguments`, so that signals and the exit status are the
    script's own.
    """
    # The script's own folder is what Python puts on its path: it must find this fastcomm, installed
    # or not.
    path = (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def info() -> str:
    facts = {
        "fastcomm": f"{fastcomm.__version__} in {Path(__file__).resolve().parent}",
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})"
        if torch.version.cuda
        else f"{torch.__version__} (CPU only)",
        "machine": f"{platform.machine()}, {cores()} cores for this process, SIMD "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "shm": shm_state(),
        "hosts": hosts_state(),
        "CUDA": cuda_state(),
        "kernels": kernels_state(),
        "NCCL": nccl_state(),
    }
    return "\n".join(f"{name:<10}{fact}" for name, fact in facts.items())


def cores() -> int:
    """The cores this process may run on, which in a container or under taskset are fewer than the
    machine's.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shm_state() -> str:
    try:
        importlib.import_module("fastcomm.shm.communicator")
    except ImportError as error:
        return (
            f"not available: {error}. Build it with `python setup.py build_ext --inplace`, or "
            "install a wheel"
        )
    return "ready"


def hosts_state() -> str:
    """Whether ranks of several hosts can meet on the CPU."""
    if not torch.distributed.is_gloo_available():
        return "not available: this torch was built without Gloo"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return (
        "hierarchical and group ready, over Gloo on "
        f"{interface or 'the interface of this host name (GLOO_SOCKET_IFNAME overrides it)'}"
    )


def cuda_state() -> str:
    """The driver's version and the devices, or what is missing."""
    try:
        major, minor = divmod(cuda_driver.load() // 10, 100)
    except fastcomm.FastcommError as error:
        return f"not available: {error}"
    driver = f"driver for CUDA {major}.{minor}"
    if not torch.version.cuda:
        return f"{driver}; but this torch was built without CUDA"
    if not torch.cuda.is_available():
        return f"{driver}; but torch finds no device"
    return (
        f"{driver}; {', '.join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))}"
    )


def nccl_state() -> str:
    """Which NCCL library fastcomm uses and its version, or what is missing."""
    try:
        version, path = nccl_library.load()
    except fastcomm.FastcommError as error:
        return f"not available: {error}"
    return f"{nccl_library.version_text(version)} in {path}"


def kernels_state() -> str:
    """Where the CUDA kernels come from."""
    binary = multi_tensor.kernel_file("flatten.fatbin")
    if binary is not None:
        return f"compiled by nvcc, in {binary.parent}"
    if importlib.util.find_spec("cupy") is not None:
        return "compiled by CuPy at first use"
    return (
        "not available: neither was nvcc there when fastcomm was built, nor is CuPy installed "
        "(fastcomm[cuda12], fastcomm[cuda13])"
    )


if __name__ == "__main__":
    sys.exit(main())
