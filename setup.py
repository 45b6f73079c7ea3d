"""The extension modules of fastcomm. Everything else about the package stands in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup


def extension(name: str) -> Extension:
    """fastcomm/<name>.pyx with its kernels, kernels/<name>_*.c. Rebuilt when one of its sources or headers, or this file, is newer."""
    return Extension(
        f"fastcomm.{name}",
        sources=[f"fastcomm/{name}.pyx", *sorted(glob(f"kernels/{name}_*.c"))],
        depends=[*sorted(glob(f"kernels/{name}_*.h")), *sorted(glob("fastcomm/*.pxd")), "setup.py"],
        include_dirs=["kernels"],
        # No -march: kernels choose their instructions at run time. No contraction to fused multiply-add, which would make the bits of a
        # result depend on the CPU it was computed on.
        extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off"],
    )


setup(ext_modules=[extension("shm_memory"), extension("shm")])
