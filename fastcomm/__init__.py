"""fastcomm: a communication backend for PyTorch data-parallel training. The public names, nothing
else.
"""

try:
    from fastcomm.comm.communicator import Communicator, Work
    from fastcomm.launching.rendezvous import init  # which needs what is compiled
    from fastcomm.postmortem.dump import dump
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("fastcomm."):
        raise
    raise ImportError(
        f"fastcomm in {__path__[0]} is not built. After `pip install .`, start Python in another "
        "folder: in this one it finds the sources. Or build in place, by `pip install -e .` or "
        "`python setup.py build_ext --inplace`"
    ) from error
from fastcomm.errors import (
    AbandonedError,
    FastcommError,
    InitError,
    MismatchError,
    NcclError,
    PeerLostError,
    TimeoutError,
)
from fastcomm.launching.runner import launch
from fastcomm.optim.local_sgd import DiLoCo, LocalSGD
from fastcomm.optim.sharded import ShardedOptimizer
from fastcomm.reducer.features.elastic import catch_up
from fastcomm.reducer.features.virtual_loader import VirtualLoader
from fastcomm.reducer.reducer import Reducer
from fastcomm.torch_backend import process_group as process_group  # registers the backend
from fastcomm.torch_backend.ddp_hook import HookState, all_reduce_hook

__version__ = "0.2.0"

__all__ = [
    "AbandonedError",
    "Communicator",
    "DiLoCo",
    "FastcommError",
    "HookState",
    "InitError",
    "LocalSGD",
    "MismatchError",
    "NcclError",
    "PeerLostError",
    "Reducer",
    "ShardedOptimizer",
    "TimeoutError",
    "VirtualLoader",
    "Work",
    "all_reduce_hook",
    "catch_up",
    "dump",
    "init",
    "launch",
]
