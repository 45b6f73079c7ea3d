"""What ranks find loaded when they start: the fork server imports it once, before it forks them.

Nothing here starts a thread or touches a GPU. What is loaded is left out of garbage collections
from then on: else each rank would begin by looking through all of torch, and copy the pages it lies
in.
"""

import contextlib
import gc
import importlib

from tests.support.reference import DTYPES, shards_of

for name in (
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "fastcomm",
    "tests.matrix",
    "tests.programs",
    "tests.support.collective_checks",
    "tests.support.process_groups",
    "tests.support.rank_process",
):
    with contextlib.suppress(ImportError):  # hypothesis may be missing where there is a GPU
        importlib.import_module(name)
for dtype in DTYPES:
    shards_of(dtype, 1, 1)  # which draws what all others are cut from
gc.collect()
gc.freeze()
