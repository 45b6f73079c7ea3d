"""What ranks find loaded when they start: the fork server imports it once, before it forks them.

Nothing here starts a thread, or CUDA, which a forked process could not start again. What is loaded
is left out of garbage collections from then on: else each rank would begin by looking through all
of torch, and copy the pages it lies in.
"""

import contextlib
import gc
import importlib
import os

import torch

from tests.support.huge_pages import gather_memory

# Else the import of torch's compiler asks for GPUs (built for CUDA, before torch 2.13).
os.environ["TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER"] = "0"
gc.disable()  # which would look through all that has been loaded so far, again and again
MUCH = (
    "torch._dynamo",
    "torch._dynamo.backends.debugging",  # which looking up any backend imports
    "torch._inductor.compile_fx",  # which compiling imports
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "matplotlib.backends.backend_agg",  # which most benchmarks draw with
    "matplotlib.figure",
    "tests.matrix",
    "tests.programs",
)
LITTLE = (
    "torch.distributed",
    "fastcomm",
    "tests.support.collective_checks",
    "tests.support.process_groups",
    "tests.support.rank_process",
)
for name in LITTLE if os.environ.get("FASTCOMM_TESTS_PRELOAD") == "little" else MUCH + LITTLE:
    with contextlib.suppress(ImportError):  # hypothesis may be missing where there is a GPU
        importlib.import_module(name)
del os.environ["TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER"]
reference = importlib.import_module("tests.support.reference")
for dtype in reference.DTYPES:
    reference.shards_of(dtype, 1, 1)  # which draws what all others are cut from
gc.collect()
gc.freeze()
gc.enable()
gather_memory()

child = os.fork()
if child == 0:
    os._exit(torch.cuda._is_in_bad_fork())
if os.waitpid(child, 0)[1] != 0:
    raise AssertionError("what the fork server imports has started CUDA: ranks could not use a GPU")
