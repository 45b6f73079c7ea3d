"""What nvcc has made of the CUDA kernels, checked in the machine code: no register is spilled, as
many loads are in flight as the source asks for, as many blocks fit on a multiprocessor as it counts
on, and numbers of 8 bits are converted by instructions where there are any. Facts about the code,
not its speed.

    python3 ci/sass.py <folder>      which has flatten.fatbin and unflatten.fatbin

Needs cuobjdump and nvdisasm: of the CUDA toolkit, or those that a torch for CUDA brings in Triton.
Says so and succeeds where there is no cuobjdump.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAMILIES = ("flatten", "unflatten")
NBYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}
# multi_tensor.cuh: packs that a lane loads before it stores the first, their size (of the wider
# dtype), and blocks per multiprocessor (MT_LAUNCH_BOUNDS).
LOADS_IN_FLIGHT, PACK_NBYTES, BLOCKS = 4, 16, 3
THREADS, REGISTERS, THREADS_OF_MULTIPROCESSOR = 256, 65536, 2048
LOADS = {16: "LDG.E.128", 8: "LDG.E.64", 4: "LDG.E"}
FIRST_WITH_BYTES = 89  # compute capability 8.9
TO_BYTES = {"e4m3": "F2FP.SATFINITE.E4M3", "e5m2": "F2FP.SATFINITE.E5M2"}
FROM_BYTES = {"e4m3": "F2FP.F16.E4M3.UNPACK"}  # e5m2 is the first byte of a half
INSTRUCTION = re.compile(r"^\s*/\*\w+\*/\s+(?:@!?U?P\d+ )?([\w.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel, for one architecture: 90 for sm_90. code: its instructions without operands."""

    name: str
    architecture: int
    registers: int
    local_nbytes: int
    code: tuple[str, ...]

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of what it reads and of what it writes."""
        _, *dtypes, _ = self.name.split("_")
        return dtypes[0], dtypes[-1]

    @property
    def blocks(self) -> int:
        """How many fit on a multiprocessor, by their registers, which come eight at a time."""
        of_block = -(-self.registers // 8) * 8 * THREADS
        return min(REGISTERS // of_block, THREADS_OF_MULTIPROCESSOR // THREADS)

    @property
    def load(self) -> str:
        """The instruction that loads a pack."""
        read, written = (NBYTES[dtype] for dtype in self.dtypes)
        return LOADS[PACK_NBYTES * read // max(read, written)]

    @property
    def loads_in_flight(self) -> int:
        """The most packs that are loaded with no store or jump between them."""
        most = run = 0
        for instruction in self.code:
            if instruction == self.load:
                run += 1
            elif instruction.startswith(("STG", "BRA", "BSYNC", "EXIT")):
                run = 0
            most = max(most, run)
        return most

    def problems(self) -> Iterator[str]:
        if self.local_nbytes or any(one.startswith(("LDL", "STL")) for one in self.code):
            yield "spills registers to local memory"
        if self.loads_in_flight < LOADS_IN_FLIGHT:
            yield f"has {self.loads_in_flight} loads in flight, not {LOADS_IN_FLIGHT}"
        if self.blocks < BLOCKS:
            yield f"takes {self.registers} registers: {self.blocks} blocks fit, not {BLOCKS}"
        if self.architecture >= FIRST_WITH_BYTES:
            read, written = self.dtypes
            for needed in (FROM_BYTES.get(read), TO_BYTES.get(written)):
                if needed and not any(one.startswith(needed) for one in self.code):
                    yield f"converts 8 bits without {needed}"


def kernels_of(listing: str, resources: str) -> list[Kernel]:
    """What cuobjdump says: with -sass and with -res-usage."""
    used = {
        (architecture, name): (int(registers), int(stack) + int(local))
        for architecture, part in _by_architecture(resources)
        for name, registers, stack, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", part
        )
    }
    kernels = []
    for architecture, part in _by_architecture(listing):
        for name, code in re.findall(r"Function : (\w+)(.*?)(?=Function : |\Z)", part, re.DOTALL):
            instructions = tuple(INSTRUCTION.findall(code))
            kernels.append(Kernel(name, architecture, *used[architecture, name], instructions))
    return kernels


def _by_architecture(text: str) -> list[tuple[int, str]]:
    parts = re.split(r"^arch = sm_(\d+)\w*$", text, flags=re.MULTILINE)[1:]
    return [(int(number), part) for number, part in zip(parts[::2], parts[1::2], strict=True)]


def summaries(kernels: list[Kernel]) -> Iterator[str]:
    """A line for each direction and architecture."""
    groups: dict[tuple[int, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.architecture, kernel.name.partition("_")[0]), []).append(kernel)
    for (architecture, family), group in sorted(groups.items()):
        registers = [kernel.registers for kernel in group]
        blocks = [kernel.blocks for kernel in group]
        yield (
            f"{family} for sm_{architecture}: {len(group)} kernels, {min(registers)} to "
            f"{max(registers)} registers, {min(blocks)} to {max(blocks)} blocks per "
            f"multiprocessor, {min(kernel.loads_in_flight for kernel in group)} loads in flight"
        )


def find_cuobjdump() -> str | None:
    triton = importlib.util.find_spec("triton")
    packages = [triton.submodule_search_locations[0]] if triton else []
    folders = [
        os.environ.get("PATH", os.defpath),
        *(str(Path(nvcc).resolve().parent) for nvcc in [shutil.which("nvcc")] if nvcc),
        "/usr/local/cuda/bin",
        *(f"{package}/backends/nvidia/bin" for package in packages),
        *(one for root in site.getsitepackages() for one in glob.glob(f"{root}/nvidia/*/bin")),
    ]
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def read(cuobjdump: str, fatbin: Path) -> list[Kernel]:
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", os.defpath)])
    texts = []
    for option in ("-sass", "-res-usage"):
        run = subprocess.run(
            [cuobjdump, option, fatbin],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path},  # of nvdisasm
        )
        if run.returncode != 0:
            sys.exit(f"{cuobjdump} {option} {fatbin} failed: {run.stderr.strip()}")
        texts.append(run.stdout)
    return kernels_of(*texts)


def main() -> int:
    folder = Path(sys.argv[1])
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("no cuobjdump here: the kernels' machine code is not checked")
        return 0
    kernels = [kernel for name in FAMILIES for kernel in read(cuobjdump, folder / f"{name}.fatbin")]
    if not kernels:
        sys.exit(f"ci/sass.py: no kernels in {folder}")
    print("\n".join(summaries(kernels)))
    problems = [
        f"{kernel.name} for sm_{kernel.architecture} {problem}"
        for kernel in kernels
        for problem in kernel.problems()
    ]
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
