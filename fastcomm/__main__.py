"""`python -m fastcomm run | info | demo | bench | tune | diagnose`, or `fastcomm run` and so on:
starts a script on several ranks, shows what works on this machine, trains a small GPT on two ranks,
runs the benchmarks, measures sizes of buckets, shows what a job hangs in.

The demo and the benchmarks are scripts of their own, examples/train_gpt.py and bench/; this
file finds them and gives them the process.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

import torch

import fastcomm
from fastcomm.launching import runner
from fastcomm.launching.cores import cores
from fastcomm.postmortem import diagnosis
from fastcomm.transports.cuda import driver as cuda_driver
from fastcomm.transports.cuda import multi_tensor
from fastcomm.transports.nccl import library as nccl_library

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# By name: what `python -m fastcomm bench --help` says of it.
BENCHMARKS = {
    "all": "allreduce and step in three minutes, on one page; runs without a name, too",
    "allreduce": "all-reduce against Gloo and MPI, by size; --device cuda: against NCCL",
    "step": "training steps: local, fastcomm, DDP, and DDP over the backend; also on GPUs",
    "parts": "gather, scatter and all_to_all_single against Gloo, by size",
    "network": "between hosts, which are network namespaces: all-reduce, LocalSGD and DiLoCo",
    "compiled": "compiled models: when buckets are launched, and what cutting graphs costs",
    "flatten": "many tensors into one buffer and back, on a GPU, against torch",
    "elastic": "steps that a training keeps while ranks are killed; torchft, too, if installed",
    "paper": "the experiments of the paper on torch DDP, fastcomm and DDP side by side",
}


ABSENT = "not available: "  # and then why


def main() -> int:
    parser = make_parser()
    options, rest = parser.parse_known_args(with_name(sys.argv[1:]))
    if rest and options.command in ("run", "info", "diagnose"):
        parser.error(f"{options.command} does not take {' '.join(rest)}")
    if options.command == "run":
        return run(options)
    if options.command == "demo":
        demo(rest)
    if options.command == "bench":
        folder = "bench/lab" if options.benchmark == "paper" else "bench"
        become(str(script(folder, options.benchmark)), *rest)
    if options.command == "tune":
        become(str(script("bench", "tune")), *rest)
    if options.command == "diagnose":
        return diagnose(options.folder)
    facts = info()
    if options.json:
        print(json.dumps({"version": fastcomm.__version__, **facts}, indent=1))
    else:
        print("\n".join(f"{name:<10}{fact}" for name, fact in facts.items()))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """What follows `demo` and the name of a benchmark, --help included, is their scripts'."""
    called_by = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog="python -m fastcomm" if called_by == "__main__.py" else called_by,
        description="Runs scripts on several ranks, shows what works here, and measures how fast.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastcomm {fastcomm.__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{run,info,demo,bench,tune,diagnose}"
    )
    add_run(commands)
    says = "prints versions, cores, and which transports work on this machine"
    of_info = commands.add_parser("info", help=says, description=f"P{says[1:]}.")
    of_info.add_argument("--json", action="store_true", help="as JSON")
    says = "trains a small GPT on two ranks, compared with DDP; demo --help lists its options"
    commands.add_parser("demo", help=says, add_help=False, allow_abbrev=False)
    add_bench(commands)
    says = "measures a step with several sizes of buckets; tune --help lists its options"
    commands.add_parser("tune", help=says, add_help=False, allow_abbrev=False)
    add_diagnose(commands)
    return parser


def add_run(commands: Commands) -> None:
    says = "starts a Python script on several ranks of this machine, and ends all when one fails"
    of_run = commands.add_parser("run", help=says, description=f"S{says[1:]}.", allow_abbrev=False)
    of_run.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="default: one for each GPU, else one for each physical core, but at most 64",
    )
    of_run.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each rank; default: OMP_NUM_THREADS, else its share of the cores",
    )
    of_run.add_argument(
        "--replace",
        type=int,
        default=0,
        metavar="N",
        help="replace a rank that fails by a new process, up to N times, while the others continue "
        "in reducer.elastic(); default: end all",
    )
    of_run.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)  # for demo, bench
    of_run.add_argument("script", help="a Python file")
    own = of_run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    own.required = False  # else argparse asks for them, too, where there is no script


def add_bench(commands: Commands) -> None:
    says = "runs a benchmark; bench --help lists them, bench NAME --help its options"
    of_bench = commands.add_parser(
        "bench",
        help=says,
        usage="%(prog)s [NAME] [option ...]",
        description="Measures fastcomm and other libraries in turns, in one run, and prints how "
        "many times fastcomm's time they take.",
    )
    names = of_bench.add_subparsers(
        dest="benchmark", required=True, metavar="NAME", title="benchmarks", prog="bench"
    )
    for name, says in BENCHMARKS.items():
        names.add_parser(name, help=says, add_help=False, allow_abbrev=False)


def add_diagnose(commands: Commands) -> None:
    says = "shows what a job hangs in, or failed in: which rank is missing, and where it stood"
    of_diagnose = commands.add_parser(
        "diagnose",
        help=says,
        description=f"S{says[1:]}. Ranks that run with FASTCOMM_DUMP=FOLDER write there when they "
        "fail, and when somebody touches FOLDER/ask.",
        allow_abbrev=False,
    )
    of_diagnose.add_argument("folder", type=Path, help="the folder with the ranks' dumps")


def with_name(arguments: list[str]) -> list[str]:
    """`bench` with options and no name is `bench all`."""
    is_option = arguments[1:2] and arguments[1].startswith("-")
    if arguments[:1] == ["bench"] and is_option and arguments[1] not in ("-h", "--help"):
        return ["bench", "all", *arguments[1:]]
    return arguments


def run(options: argparse.Namespace) -> int:
    find_this_package()
    command = [options.script, *options.arguments]
    how = options.ranks, options.threads, options.replace, options.plain
    try:
        failure = runner.run(command, *how)
    except (fastcomm.FastcommError, ValueError) as error:  # before a rank was started
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if failure is None:
        return 0
    print(failure.text, file=sys.stderr)
    return failure.exit_code


def diagnose(folder: Path) -> int:
    try:
        print("\n".join(diagnosis.diagnose(folder)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def demo(arguments: list[str]) -> NoReturn:
    path = script("examples", "train_gpt")
    sys.path.insert(0, str(path.parent))
    # What is wrong with the arguments is said once, not by each rank.
    importlib.import_module("train_gpt").parse_options(arguments)
    if "RANK" in os.environ:  # as a rank that a launcher has started
        become(str(path), *arguments)
    become("-m", "fastcomm", "run", "--plain", "--ranks", "2", str(path), *arguments)


def script(folder: str, name: str) -> Path:
    """Where a script lies: inside the installed package, or beside it in the source tree."""
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
    """Replaces this process by Python, so that signals and the exit status are the script's own."""
    find_this_package()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])


def find_this_package() -> None:
    """Puts this package, installed or not, on the path of the processes to come."""
    path = (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def info() -> dict[str, str]:
    interface = os.environ.get(
        "GLOO_SOCKET_IFNAME", "the interface of this host name (GLOO_SOCKET_IFNAME overrides it)"
    )
    facts = {
        "fastcomm": f"{fastcomm.__version__} in {Path(__file__).resolve().parent}",
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})"
        if torch.version.cuda
        else f"{torch.__version__} (CPU only)",
        "machine": f"{platform.machine()}, {cores()} cores for this process, SIMD "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "shm": "ready",  # else fastcomm could not be imported
        "hosts": f"hierarchical and group ready, over Gloo on {interface}",
        "CUDA": cuda_state(),
        "kernels": kernels_state(),
        "NCCL": nccl_state(),
    }
    if facts["CUDA"].startswith(ABSENT):
        for name in ("CUDA", "kernels", "NCCL"):
            facts[name] = f"not needed on the CPU: {facts[name].removeprefix(ABSENT)}"
    return facts


def cuda_state() -> str:
    """The driver's version and the devices, or what is missing."""
    try:
        major, minor = divmod(cuda_driver.load() // 10, 100)
    except fastcomm.FastcommError as error:
        return f"{ABSENT}{error}"
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
        return f"{ABSENT}{error}"
    return f"{nccl_library.version_text(version)} in {path}"


def kernels_state() -> str:
    """Where the CUDA kernels come from."""
    binary = multi_tensor.kernel_file("flatten.fatbin")
    if binary is not None:
        return f"compiled by nvcc, in {binary.parent}"
    if importlib.util.find_spec("cupy") is not None:
        return "compiled by CuPy at first use"
    major = (torch.version.cuda or "13").partition(".")[0]
    return (
        f"{ABSENT}fastcomm was built without nvcc, and there is no CuPy to compile them: "
        f"pip install cupy-cuda{major}x"
    )


if __name__ == "__main__":
    sys.exit(main())
