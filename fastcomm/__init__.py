"""fastcomm: a communication backend for PyTorch data-parallel training. The public names, nothing else."""

from fastcomm.errors import FastcommError, InitError, MismatchError, NcclError, PeerLostError, TimeoutError
from fastcomm.reducer import Reducer
from fastcomm.rendezvous import init

__version__ = "0.1.0"

__all__ = ["FastcommError", "InitError", "MismatchError", "NcclError", "PeerLostError", "Reducer", "TimeoutError", "init"]
