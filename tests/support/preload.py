"""What ranks find loaded when they start: the fork server imports it once, before it forks them.

Nothing here starts a thread or touches a GPU. What is loaded is left out of garbage collections
from then on: else each rank would begin by looking through all of torch, and copy the pages it lies
in.
"""

import contextlib
import gc
import importlib

from tests.support.huge_pages import gather_memory

gc.disable()  # which would look through all that has been loaded so far, again and again
for name in (
    "torch._dynamo",
    "torch._dynamo.backends.debugging",  # which looking up any backend imports
    "torch._inductor.compile_fx",  # which compiling imports
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "matplotlib.backends.backend_agg",  # which most benchmarks draw with
    "matplotlib.figure",
    "fastcomm",
    "tests.matrix",
    "tests.programs",
    "tests.support.collective_checks",
    "tests.support.process_groups",
    "tests.support.rank_process",
):
    with contextlib.suppress(ImportError):  # hypothesis may be missing where there is a GPU
        importlib.import_module(name)
reference = importlib.import_module("tests.support.reference")
for dtype in reference.DTYPES:
    reference.shards_of(dtype, 1, 1)  # which draws what all others are cut from
gc.collect()
gc.freeze()
gc.enable()
gather_memory()
