"""The errors fastcomm raises. Every one is a FastcommError; bad arguments raise ValueError or
TypeError at the call that made them.
"""

import builtins
from collections.abc import Iterable


class FastcommError(RuntimeError):
    """Base of all errors that come from communication rather than from a bad argument."""


class InitError(FastcommError):
    """The ranks could not be connected: there is no launcher, a rank is missing or appears twice,
    or the backend is "shm" and the ranks are on several hosts.
    """


class MismatchError(FastcommError):
    """The ranks disagree about the model, or about which collective comes next. Every rank raises
    it, and it names both sides.
    """

    differs = ""  # which advice is good: see comm/words.py


class AbandonedError(FastcommError):
    """Another rank abandoned the step: its backward raised, or it called abandon(). Names the rank.
    Skip the step, too, and continue. A Work that this rank has abandoned raises it as well.
    """


class PeerLostError(FastcommError):
    """Another rank ended, died, aborted or closed its communicator. Names its rank, its pid and the
    last collective it joined.

    ranks: the ranks that ended or cannot be reached, numbered as in the message. Empty if they are
    not known, or if a living rank aborted or closed its communicator.
    """

    ranks: tuple[int, ...]

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TimeoutError(FastcommError, builtins.TimeoutError):
    """A rank did not arrive in time. Names the collective and the missing ranks, and says what they
    are doing and where their main threads stand.
    """


class NcclError(FastcommError):
    """A call into NCCL failed. Names the call, the code and its text, ncclGetLastError and the NCCL
    version.
    """


def add_to_first_line(message: str, addition: str) -> str:
    """Of the message of a TimeoutError, whose further lines say where ranks stand."""
    first, newline, others = message.partition("\n")
    return f"{first}{addition}{newline}{others}"


# Errors that another rank's failure causes. A rank that raises anything else has failed by itself.
OF_ANOTHER_RANK = (PeerLostError, AbandonedError, TimeoutError, InitError)
