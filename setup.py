"""Builds the extension modules of fastcomm and, where there is an nvcc, its CUDA kernels.
Everything else about the package is in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def extension(name: str) -> Extension:
    """fastcomm/<name>.pyx, with its part of the C core if it has one. Rebuilt when one of
    its sources or headers, or this file, is newer.
    """
    return Extension(
        f"fastcomm.{name}",
        sources=[
            f"fastcomm/{name.replace('.', '/')}.pyx",
            *(CORE if name == "transports.shm.ring" else ()),
            *(["kernels/wire/blocks.c"] if name == "transports.group.wire" else ()),
        ],
        depends=[
            *sorted(glob("kernels/*/*.h")),
            *(glob("kernels/shm/reduce*.c") if name == "transports.group.shards" else ()),
            *sorted(glob("fastcomm/**/*.pxd", recursive=True)),
            "setup.py",
        ],
        include_dirs=["kernels"],
        libraries=["dl"],  # part of libc since glibc 2.34
        # No -march: kernels choose their instructions at run time. No contraction to fused
        # multiply-add, which would make the bits of a result depend on the CPU it was computed on.
        # Hidden symbols: functions of the same name in two libraries do not mix. No warnings about
        # the C that Cython writes; `make lint` has the compiler check ours.
        extra_compile_args=[
            "-std=gnu11",
            "-O3",
            "-g0",  # debug symbols take a quarter of the compiler's time
            "-ffp-contract=off",
            "-fvisibility=hidden",
            "-Wno-array-bounds",
            "-Wno-sign-compare",
        ],
    )


CORE = sorted(glob("kernels/shm/*.c"))
EXTENSIONS = (
    *(
        "postmortem.flight_recorder",
        "comm.standing",
        "comm.flat_buffers",
        "comm.gradient_slot",
        "comm.gathering",
        "control.announcement",
        "control.collectives",
        "transports.group.wire",
        "transports.group.shards",
        "insight.recorder",
        "reducer.gradients",
        "reducer.hooks",
        "transports.shm.memory",
        "transports.shm.ring",
        "transports.shm.bucket",
        "transports.shm.communicator",
        "transports.cuda.clock",
        "transports.cuda.driver",
        "transports.cuda.multi_tensor",
        "transports.cuda.blocks",
    ),
    *(
        f"transports.nccl.{name}"
        for name in ("library", "calls", "memory", "lane", "link", "bucket", "communicator")
    ),
)


class BuildExtensionsAndKernels(build_ext):
    """Writes kernels/cuda/<family>.fatbin beside its source, and copies it into the package that is
    being built: it serves every Python and every machine.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.cython_c_in_temp = True  # the C that Cython writes goes to build/, not into fastcomm/
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        if self.editable_mode and os.environ.get("FASTCOMM_BUILD") == "later":
            return  # as make asks pip: it builds in place next, and pip would build all beside it
        nvcc = find_nvcc()
        with ThreadPoolExecutor() as pool:  # beside the extensions: each is one process
            families = ("flatten", "unflatten", "blocks") if nvcc is not None else ()
            compiling = [pool.submit(self.compile_kernels, nvcc, one) for one in families]
            super().run()
            fatbins = [compiled.result() for compiled in compiling]
        if not (self.inplace or self.editable_mode):
            package = os.path.join(self.build_lib, "fastcomm/kernels/cuda")
            os.makedirs(package, exist_ok=True)
            for fatbin in filter(None, fatbins):
                shutil.copy2(fatbin, package)

    def compile_kernels(self, nvcc: str, family: str) -> str | None:
        """Compiles a fatbin that is missing or older than its sources, and returns its path; None
        where nvcc fails. fastcomm works without it, too: CuPy then compiles the kernels at first
        use.
        """
        source, fatbin = f"kernels/cuda/{family}.cu", f"kernels/cuda/{family}.fatbin"
        ingredients = (
            source,
            *glob("kernels/cuda/*.*h"),
            "kernels/cuda/nvcc.options",
        )
        if os.path.exists(fatbin) and os.path.getmtime(fatbin) > max(
            map(os.path.getmtime, ingredients)
        ):
            return fatbin
        command = [nvcc, *kernel_options(nvcc), source, "-o", fatbin]
        self.announce(" ".join(command), level=2)
        if subprocess.run(command).returncode != 0:
            self.warn(f"{nvcc} could not compile {source}: building without")
            return None
        return fatbin


def kernel_options(nvcc: str) -> list[str]:
    """kernels/cuda/nvcc.options without the architectures that this nvcc does not know. The driver
    compiles for these from PTX.
    """
    listed = subprocess.run([nvcc, "--list-gpu-arch"], stdout=subprocess.PIPE, text=True)
    known = set(listed.stdout.split())
    with open("kernels/cuda/nvcc.options") as file:
        lines = [line for line in file if known.issuperset(re.findall(r"arch=(\w+)", line))]
    return "".join(lines).split()


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [
        *(f"{home}/bin" for home in homes),
        os.environ.get("PATH", os.defpath),
        "/usr/local/cuda/bin",
    ]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


setup(
    license="BSD-3-Clause",
    ext_modules=[extension(name) for name in EXTENSIONS],
    cmdclass={"build_ext": BuildExtensionsAndKernels},
)
