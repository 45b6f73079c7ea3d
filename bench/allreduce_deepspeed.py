"""DeepSpeed's shared-memory all-reduce as a peer of bench/allreduce.py: where DeepSpeed is, its op
built by DeepSpeed's own builder, and the end of the shared memory that the op would leave behind.

DeepSpeed is taken from a virtual environment beside those of the MPIs (allreduce_mpi.py), or else
from this Python (pip install deepspeed):

    python -m venv FOLDER/deepspeed
    FOLDER/deepspeed/bin/pip install --no-deps deepspeed einops hjson msgpack ninja packaging psutil
        py-cpuinfo pydantic pydantic-core annotated-types typing-extensions typing-inspection tqdm

torch is the one of this Python in either case, so the environment needs none. A C++ compiler builds
the op, once; torch keeps it where it keeps all extensions.

As a script it builds the op and tries it alone: in a process of its own, because an op that was
built for another CPU ends its process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "deepspeed"
REQUIREMENTS = (
    "einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic pydantic-core annotated-types "
    "typing-extensions typing-inspection tqdm"
)
DTYPES = ("float", "half", "bfloat16")
OPS = ("sum", "avg")

BUILD_LIMIT = 300.0
SHARED_MEMORY = Path("/dev/shm")
BYTES_PER_RANK = 69 * 2**20


class NoDeepSpeedError(Exception):
    """Why DeepSpeed's op cannot be had."""


def library_of(dtype: str, op: str, folder: Path | None) -> Path:
    """The op, built and tried. dtype and op as nccl-tests call them; folder: where the environments
    are, by default beside the one of this Python. Raises NoDeepSpeedError.
    """
    if dtype not in DTYPES:
        raise NoDeepSpeedError(f"its op has no {dtype}")
    if op not in OPS:
        raise NoDeepSpeedError(f"its op has no {op}")
    environment = (folder or Path(sys.prefix).parent).resolve() / NAME
    packages = find(environment)
    with shared_memory(1) as variables:
        command = [sys.executable, __file__, dtype, *packages]
        path = f"{environment / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **variables, "PATH": path, "DS_ACCELERATOR": "cpu"},
                capture_output=True,
                text=True,
                timeout=BUILD_LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise NoDeepSpeedError(f"its op was not built in {BUILD_LIMIT:.0f} s") from None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise NoDeepSpeedError(f"its op for {dtype} ends in {name} on this CPU")
    if done.returncode > 0:
        sys.stderr.write(done.stderr)
        raise NoDeepSpeedError(
            f"its op cannot be built; it needs a C++ compiler: {done.stderr.splitlines()[-1]}"
        )
    return Path(done.stdout.splitlines()[-1])


def find(environment: Path) -> list[str]:
    """Where to look for DeepSpeed before this Python does."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    if (packages / NAME).exists():
        return [str(packages)]
    if importlib.util.find_spec(NAME) is not None:
        return []
    raise NoDeepSpeedError(
        f"it is not installed: pip install {NAME}, or {version} -m venv {environment} && "
        f"{environment}/bin/pip install --no-deps {NAME} {REQUIREMENTS}"
    )


@contextlib.contextmanager
def shared_memory(ranks: int) -> Iterator[dict[str, str]]:
    """The variables by which the op names the files that its ranks share. Every rank leaves its
    own; at the end they have no name any more, and live on only in the ranks that have opened
    them. Raises NoDeepSpeedError where there is too little memory, which the op does not notice.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < ranks * BYTES_PER_RANK:
        raise NoDeepSpeedError(
            f"its op takes {ranks * BYTES_PER_RANK >> 20} MiB in {SHARED_MEMORY}, which has "
            f"{free >> 20} MiB: mount -o remount,size=2G {SHARED_MEMORY}"
        )
    # It does not connect to the address: both are mere parts of the name.
    address, port = f"fastcomm-bench-{secrets.token_hex(8)}", "0"
    try:
        yield {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
    finally:
        for rank in range(ranks):
            name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def load(library: Path) -> Any:
    """The rank's side: the module of the op, without the rest of DeepSpeed."""
    spec = importlib.util.spec_from_file_location(library.name.partition(".")[0], library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Any:
    """The module of the op, from DeepSpeed's own builder."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


def try_alone(module: Any, dtype: torch.dtype) -> None:
    """Raises an error if a rank alone does not get its own elements back."""
    module.initialize(1, 0)
    given = torch.arange(1000).to(dtype)
    reduced = torch.ops.deepspeed.inference_all_reduce_(given.clone())
    if not torch.equal(given, reduced):
        raise RuntimeError(f"the op is wrong for {dtype}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", type=lambda name: getattr(torch, name))
    parser.add_argument("packages", nargs="?")
    options = parser.parse_args()
    if options.packages is not None:
        sys.path.insert(0, options.packages)  # torch is there already
    try:
        module = build()
        try_alone(module, options.dtype)
    except Exception as error:
        traceback.print_exc()
        # The last line says why: a compiler's error is long.
        print(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 1
    print(module.__file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
