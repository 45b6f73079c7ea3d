"""How programs are drawn: hypothesis strategies that give the plain data of data.py.

What stands first in a choice is what a failing program is shrunk to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from programs.data import (
    Backward,
    Call,
    Clip,
    CollectiveProgram,
    Fail,
    Freeze,
    Grow,
    Interrupt,
    Layer,
    Look,
    Model,
    Options,
    Reattach,
    Reduce,
    ReducerProgram,
    Round,
    Route,
    Step,
    SyncBuffers,
    Touch,
    ZeroGrad,
)
from programs.modules import MODULES

# What programs may use. REDUCE: reducer.reduce(). INTERRUPT: a signal handler that raises while
# backward waits, after which the round is finished all the same. POLL: is_completed() in rounds
# that are abandoned; it must not use up the error. STEP_AFTER_ATTACH: an optimizer's step with
# gradients that were reduced before refresh(), or before detach() and attach(). ABANDON_AGAIN: a
# step that is skipped by abandon() right after another one that failed, over NCCL, too.
REDUCE = True
INTERRUPT = True
POLL = True
STEP_AFTER_ATTACH = True
ABANDON_AGAIN = True

MAX_CALLS = 24
_KINDS = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "barrier")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8")
_OPS = ("sum", "mean", "min", "max", "prod")
_MEMORY = ("plain", "odd", "shared", "shared odd", "inside")
# Below and above what goes inline, with an announcement, by one exchange, and through a staging
# area; from SMALL on, a call costs time.
_NBYTES = (8, 0, 24, 504, 512, 520, 1024, 1032, 8192, 8200, 16392, 70_000, 262_144, 262_152)
_MANY_NBYTES = 1_400_000

_bits = st.integers(0, 7)


# ---- models and reducers -------------------------------------------------------------------------


@st.composite
def models(draw: Any) -> Model:
    dtypes = draw(st.sampled_from([("float64",)] * 3 + [("float64", "float32"), ("float32",)]))
    layers = st.builds(
        Layer,
        kind=st.sampled_from([*MODULES, "heads", "heads"]),
        dtype=st.sampled_from(dtypes),
        bias=st.booleans(),
        frozen=st.sampled_from([False, False, False, False, True]),
        heads=st.integers(1, 3),
    )
    return Model(
        layers=tuple(draw(st.lists(layers, min_size=1, max_size=5))),
        width=draw(st.sampled_from([3, 8, 46, 65])),
        gain_is_last=draw(st.booleans()),
    )


@st.composite
def options(draw: Any, transport: str) -> Options:
    special = draw(st.sampled_from(["", "", "", "wire", "wire", "op", "op", "hook", "named"]))
    caps = draw(st.sampled_from([(25, 1), (0.0001, 0.0001), (0.0005, 0.0001), (0.02, 0.004)]))
    return Options(
        caps=caps,
        overlap=draw(st.booleans()),
        op=draw(st.sampled_from(["sum", "min", "max", "prod"])) if special == "op" else "mean",
        wire=draw(st.sampled_from(["float32", "float16", "bfloat16"])) if special == "wire" else "",
        streams=draw(st.sampled_from([1, 1, 2])) if transport == "nccl" else 1,
        is_hooked=special == "hook",
        is_named=special == "named",
    )


def routes(n: int) -> st.SearchStrategy[tuple[Route, ...]]:
    one = st.one_of(
        st.just(Route()),
        st.builds(Route, heads=_bits),
        st.builds(Route, heads=_bits, depth=st.integers(0, 4)),
        st.builds(Route, heads=_bits, wrap=st.sampled_from(["", "checkpoint", "reentrant"])),
    )
    return st.tuples(*[one] * n)


_touch = st.builds(Touch, st.sampled_from(["own", "none", "strided", "scaled"]), st.integers(0, 12))


def backwards(n: int) -> st.SearchStrategy[Backward]:
    hows = ["once", "once", "once", "twice", "sum", "separately", "inputs", "thread"]
    touched = st.tuples(*[st.one_of(st.none(), _touch)] * n)
    return st.builds(
        Backward,
        routes(n),
        how=st.sampled_from(hows),
        is_synced=st.sampled_from([True, True, True, False]),
        touches=st.one_of(st.just(()), touched),
    ).map(_only_in_place_when_unsynced)


def _only_in_place_when_unsynced(operation: Backward) -> Backward:
    """A gradient of the user's own that this backward does not reduce is no more than a mistake."""
    if operation.is_synced:
        return operation
    kept = (one if one and one.how == "scaled" else None for one in operation.touches)
    return Backward(operation.routes, operation.how, False, tuple(kept))


def failures(n: int) -> st.SearchStrategy[Fail]:
    return st.builds(
        Fail,
        routes(n),
        failing=st.integers(1, 2**n - 1),
        at=st.one_of(st.integers(0, 4), st.none()),
    ).map(_without_checkpoints)


def _without_checkpoints(operation: Fail) -> Fail:
    """A backward that ends early recomputes only some layers, and only those update statistics."""
    plain = (Route(route.heads, route.depth) for route in operation.routes)
    return Fail(tuple(plain), operation.failing, operation.at)


@st.composite
def interrupts(draw: Any, n: int) -> Interrupt:
    rank = draw(st.integers(0, n - 1))
    holder = (rank + draw(st.integers(1, n - 1))) % n
    return Interrupt(draw(routes(n)), rank, holder)


def operations(n: int, transport: str) -> st.SearchStrategy[Any]:
    by_weight: list[tuple[int, st.SearchStrategy[Any]]] = [
        (8, backwards(n)),
        (3, st.builds(ZeroGrad, st.booleans())),
        (3, st.just(Step())),
        (2, st.builds(Clip, st.sampled_from([0.1, 0.001, 1000.0]))),
        (1, st.just(Look())),
        (2, st.builds(Freeze, st.lists(st.integers(0, 12), max_size=3).map(tuple))),
        (1, st.just(Grow())),
        (1, st.builds(Reattach, st.booleans(), st.booleans())),
        (1, st.builds(SyncBuffers, st.integers(0, n - 1))),
        (1 if transport == "nccl" else 3, failures(n)),
    ]
    if REDUCE:
        touches = st.lists(_touch, max_size=4).map(tuple)
        by_weight.append((3, st.builds(Reduce, st.tuples(*[touches] * n))))
    if INTERRUPT and transport != "nccl":  # over NCCL the host does not wait
        by_weight.append((1, interrupts(n)))
    return st.one_of([strategy for weight, strategy in by_weight for _ in range(weight)])


@st.composite
def reducer_programs(draw: Any, n: int, transport: str) -> ReducerProgram:
    drawn = draw(st.lists(operations(n, transport), min_size=1, max_size=10))
    attaching = () if STEP_AFTER_ATTACH else (Freeze, Grow, Reattach)
    sequence: list[Any] = []
    for operation in drawn:
        sequence.append(operation)
        if isinstance(operation, attaching):
            sequence.append(ZeroGrad())
        elif isinstance(operation, Fail) and transport == "nccl" and not ABANDON_AGAIN:
            sequence.append(Backward((Route(),) * n))
    return ReducerProgram(
        n,
        draw(models()),
        tuple(sequence),
        draw(options(transport)),
        momentum=draw(st.sampled_from([0.0, 0.9])),
    )


# ---- collectives ---------------------------------------------------------------------------------


@st.composite
def calls(draw: Any, n: int, transport: str) -> Call:
    kind = draw(st.sampled_from([*_KINDS, "all_reduce", "all_reduce"]))
    dtype = draw(st.sampled_from(_DTYPES))
    nbytes = draw(st.sampled_from(_NBYTES))
    if nbytes == _NBYTES[-1] and transport == "shm" and draw(st.booleans()):
        nbytes = _MANY_NBYTES
    if nbytes > 100_000 and kind in ("all_gather_single", "reduce_scatter_single"):
        nbytes //= n
    is_reduced = kind in ("all_reduce", "reduce_scatter_single")
    memory = st.sampled_from(_MEMORY if kind == "all_gather_single" else _MEMORY[:4])
    delay = st.sampled_from([0, 1, 2, 3, 5, 8, 20])
    poll = st.sampled_from(["", "", "once", "until done", "check"])
    return Call(
        kind,
        memory=draw(st.tuples(*[memory] * n)),
        delay=draw(st.one_of(st.just((0,) * n), st.just((20,) * n), st.tuples(*[delay] * n))),
        poll=draw(st.one_of(st.just(("",) * n), st.tuples(*[poll] * n))),
        dtype=dtype,
        op=draw(st.sampled_from(_OPS)) if is_reduced else "sum",
        numel=0 if kind == "barrier" else nbytes // getattr(torch, dtype).itemsize,
        src=draw(st.integers(0, n - 1)) if kind == "broadcast" else 0,
        odd=draw(st.sampled_from([-1] * 12 + [0, n - 1])) if transport != "nccl" else -1,
    )


@st.composite
def rounds(draw: Any, n: int, transport: str) -> Round:
    size = draw(st.sampled_from([2, 4, MAX_CALLS]))
    drawn = draw(st.lists(calls(n, transport), min_size=1, max_size=size))
    one = st.sampled_from([-1, *range(len(drawn) + 1)])
    stays = st.just((-1,) * n)
    share = 5 if transport == "nccl" else 1
    leaves = draw(st.one_of([stays] * share + [st.tuples(*[one] * n)]))
    if all(index < 0 for index in leaves):
        return Round(tuple(drawn), leaves)
    # Which error comes first, of those who disagree or of those who leave, is left open.
    poll = None if POLL else ("",) * n
    tamed = [replace(call, odd=-1, poll=poll or call.poll) for call in drawn]
    return Round(tuple(tamed), leaves)


def collective_programs(n: int, transport: str) -> st.SearchStrategy[CollectiveProgram]:
    several = st.lists(rounds(n, transport), min_size=1, max_size=4)
    if transport == "nccl" and not ABANDON_AGAIN:
        several = several.map(_with_meetings)
    return st.builds(CollectiveProgram, st.just(n), several.map(tuple))


def _with_meetings(several: list[Round]) -> list[Round]:
    """Puts a barrier behind every round that is abandoned."""
    n = len(several[0].leaves)
    barrier = Call("barrier", ("plain",) * n, (0,) * n, ("",) * n, numel=0)
    meeting = Round((barrier,), (-1,) * n)
    return [one for each in several for one in (each, meeting)[: 1 + each.is_abandoned]]
