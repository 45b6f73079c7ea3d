"""What a generated program is made of: plain data, which pickles, prints as Python and compares.

A ReducerProgram trains a model under a Reducer; a CollectiveProgram calls collectives. How they
run is the business of reducer_programs.py and collective_programs.py, how they are drawn that of
strategies.py. A tuple over ranks has one entry for each rank there is; world_size is how many there
are at first.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


class _Compact:
    """Prints only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


# ---- models --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Layer(_Compact):
    """kind: see models.MODULES. heads: how many a "heads" layer has."""

    kind: str = "linear"
    dtype: str = "float64"
    bias: bool = True
    frozen: bool = False
    heads: int = 2


@dataclass(frozen=True, repr=False)
class Model(_Compact):
    """Layers of one width, one after the other, and a factor of the loss, `gain`, that is always
    trained: registered first or last, so that its bucket is the last or the first to be full."""

    layers: tuple[Layer, ...]
    width: int = 3
    gain_is_last: bool = False


@dataclass(frozen=True, repr=False)
class Options(_Compact):
    """Of a Reducer. cap: bucket_cap_mb. is_named: attach() gets named parameters.
    skips_nonfinite: it looks for infinities and NaNs, of which there are none."""

    cap: float = 25
    overlap: bool = True
    op: str = "mean"
    wire: str = ""
    streams: int = 1
    is_named: bool = False
    skips_nonfinite: bool = False


# ---- operations of a reducer program -------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Route(_Compact):
    """One rank's forward.

    heads    a bit for each head that is used
    depth    how many layers; -1 is all of them
    wrap     "", or how layers are checkpointed: "checkpoint" or "reentrant"
    wrapped  a bit for each layer that is
    gain     whether the loss is multiplied by `gain`, as it is anyway when nothing else is trained
    """

    heads: int = 7
    depth: int = -1
    wrap: str = ""
    wrapped: int = 255
    gain: bool = True


@dataclass(frozen=True, repr=False)
class Touch(_Compact):
    """What a user does to a gradient just before a backward. how: "none", "own", "strided",
    "scaled". parameter: an index, modulo the number of parameters."""

    how: str
    parameter: int = 0


@dataclass(frozen=True, repr=False)
class Backward(_Compact):
    """how: "once", "twice" (retain_graph), "sum" (of two losses), "separately" (two backwards of
    two forwards), "inputs" (only every other parameter), "thread" (in another thread)."""

    routes: tuple[Route, ...]
    how: str = "once"
    is_synced: bool = True
    touches: tuple[Touch | None, ...] = ()


@dataclass(frozen=True, repr=False)
class Fail(_Compact):
    """A step that is no good on the ranks of `failing`, a bit each: backward raises there before it
    comes to layer `at`, or, with `at` None, the rank calls comm.abandon(). All ranks skip it. Under
    no_sync(), nobody else hears of it, and those ranks go on with the gradients they have.
    """

    routes: tuple[Route, ...]
    failing: int
    at: int | None = 0
    is_synced: bool = True


@dataclass(frozen=True, repr=False)
class Weigh(_Compact):
    """A step from zero_grad() on in which each rank's gradients count by its weight. 0: not."""

    routes: tuple[Route, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Vote(_Compact):
    """A step that the ranks of `voters`, a bit each, vote to drop, and which all drop. how: they
    do "before" the backward, "inside" it, at layer `at`, or "instead" of it; or it "raises" there,
    in a block of skip_step_on()."""

    routes: tuple[Route, ...]
    voters: int
    how: str = "before"
    at: int = 0


@dataclass(frozen=True, repr=False)
class Reduce(_Compact):
    """Gradients set by hand, on every rank others, and reducer.reduce()."""

    touches: tuple[tuple[Touch, ...], ...]


@dataclass(frozen=True, repr=False)
class ZeroGrad(_Compact):
    to_none: bool = True


@dataclass(frozen=True, repr=False)
class Step(_Compact):
    pass


@dataclass(frozen=True, repr=False)
class Clip(_Compact):
    max_norm: float = 0.1


@dataclass(frozen=True, repr=False)
class Look(_Compact):
    """Calls what changes nothing: grad_norm(), nonfinite_count(), synchronize()."""


@dataclass(frozen=True, repr=False)
class Collective(_Compact):
    """Calls a collective of the communicator's between two rounds. src: of a broadcast."""

    kind: str
    numel: int
    src: int = 0


@dataclass(frozen=True, repr=False)
class Freeze(_Compact):
    """Freezes these parameters, or unfreezes them, and calls refresh()."""

    parameters: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Grow(_Compact):
    """Adds a layer, and calls refresh()."""


@dataclass(frozen=True, repr=False)
class Reattach(_Compact):
    """Detaches, trains alone for a step if `alone`, and attaches again: the same reducer, or, if
    `renew`, another one."""

    alone: bool = False
    renew: bool = False


@dataclass(frozen=True, repr=False)
class SyncBuffers(_Compact):
    src: int = 0


@dataclass(frozen=True, repr=False)
class Rebuild(_Compact):
    """All ranks meet anew. Gradients are dropped."""


@dataclass(frozen=True, repr=False)
class Leave(_Compact):
    """A rank leaves the program, and the others meet anew: what follows is for so many. They hear
    of it in a step, which is dropped."""

    rank: int


@dataclass(frozen=True, repr=False)
class Other(_Compact):
    """An operation on the program's second model."""

    operation: object


@dataclass(frozen=True, repr=False)
class ReducerProgram(_Compact):
    """second: a model with a reducer and an optimizer of its own, on the same communicator."""

    world_size: int
    model: Model
    operations: tuple[object, ...]
    options: Options = Options()
    momentum: float = 0.0
    second: Model | None = None

    def run(self, comm: Any) -> list[dict[str, Any] | None]:
        from tests.programs.reducer_programs import run_reducer_program

        return run_reducer_program(comm, self)


# ---- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Call(_Compact):
    """A collective that all ranks call.

    numel   of the tensor or, where there is one for each rank, of a part
    src     the root
    memory  by rank: "plain", "odd" (an element off any alignment), or the same in memory of
            comm.empty, "shared" and "shared odd"; "inside": what is gathered lies in the output
    delay   by rank: how many calls later it is waited for; 0 is a blocking call
    poll    by rank: what it does with a work when that is posted, and before it is waited for:
            nothing, "once" or "until done" is_completed(), or "check" the communicator
    odd     a rank that calls something else, which all ranks hear of; -1 is none
    how_odd  what is different there: "kind", "op", "numel", "dtype" or "src", where that can be
    """

    kind: str
    memory: tuple[str, ...]
    delay: tuple[int, ...]
    poll: tuple[str, ...]
    dtype: str = "float64"
    op: str = "sum"
    numel: int = 1
    src: int = 0
    odd: int = -1
    how_odd: str = "kind"


@dataclass(frozen=True, repr=False)
class Round(_Compact):
    """Calls, and a barrier. leaves: by rank, before which call it abandons the round, or -1. The
    others hear of it by that barrier, and go on with the next round."""

    calls: tuple[Call, ...]
    leaves: tuple[int, ...]

    @property
    def is_abandoned(self) -> bool:
        return any(one >= 0 for one in self.leaves)


@dataclass(frozen=True, repr=False)
class CollectiveProgram(_Compact):
    """rounds: among them a Rebuild, or a Leave."""

    world_size: int
    rounds: tuple[object, ...]

    def run(self, comm: Any) -> list[dict[str, Any] | None]:
        from tests.programs.collective_programs import run_collective_program

        return run_collective_program(comm, self)
