"""How programs are drawn: hypothesis strategies that give the plain data of data.py.

What stands first in a choice is what a failing program is shrunk to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from fastcomm.comm.collective import OPS
from tests.programs.data import (
    Backward,
    Call,
    Clip,
    Collective,
    CollectiveProgram,
    Fail,
    Freeze,
    Grow,
    Layer,
    Leave,
    Look,
    Model,
    Options,
    Other,
    Reattach,
    Rebuild,
    Reduce,
    ReducerProgram,
    Round,
    Route,
    Step,
    SyncBuffers,
    Touch,
    Vote,
    Weigh,
    ZeroGrad,
)
from tests.programs.modules import MODULES

MAX_CALLS = 24
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8")
_MEMORY = ("plain", "odd", "shared", "shared odd", "inside")
# Below and above what goes inline, with an announcement, by one exchange, and through a staging
# area; from SMALL on, a call costs time.
_NBYTES = (8, 0, 24, 504, 512, 520, 1024, 1032, 4096, 4104, 8192, 8200, 70_000, 262_144, 262_152)
_MANY_NBYTES = 1_400_000

_bits = st.integers(0, 7)


def _one_of(*by_weight: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of them, each so often: made anew, as st.one_of() takes the same one only once."""
    anew = [one.map(lambda drawn: drawn) for weight, one in by_weight for _ in range(weight)]
    return st.one_of(anew)


# ---- models and reducers -------------------------------------------------------------------------


@functools.cache
def _layers(*dtypes: str) -> st.SearchStrategy[tuple[Layer, ...]]:
    one = st.builds(
        Layer,
        kind=st.sampled_from([*MODULES, "batch norm", *["heads"] * 6]),
        dtype=st.sampled_from(dtypes),
        bias=st.booleans(),
        frozen=st.sampled_from([False, False, False, False, True]),
        heads=st.integers(1, 3),
    )
    return st.lists(one, min_size=1, max_size=5).map(tuple)


_models = st.builds(
    Model,
    layers=_one_of(
        (3, _layers("float64")), (1, _layers("float64", "float32")), (1, _layers("float32"))
    ),
    width=st.sampled_from([3, 8, 46, 65]),
    gain_is_last=st.booleans(),
)


@functools.cache
def options(transport: str) -> st.SearchStrategy[Options]:
    wire = st.sampled_from(["float32", "float16", "bfloat16"])
    op = st.sampled_from(["sum", "min", "max", "prod"])
    plain: dict[str, Any] = {
        "cap": st.sampled_from([25, 0.0001, 0.0005, 0.02]),
        "overlap": st.booleans(),
        "streams": st.sampled_from([1, 1, 2] if transport == "nccl" else [1]),
    }
    special: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"wire": wire},
        {"wire": wire},
        {"op": op},
        {"op": op},
        {"skips_nonfinite": st.just(True)},
        {"is_named": st.just(True)},
    ]
    return st.one_of([st.builds(Options, **plain, **one) for one in special])


@functools.cache
def routes(n: int) -> st.SearchStrategy[tuple[Route, ...]]:
    gain = st.booleans().map(lambda drawn: not drawn)
    wrap = st.sampled_from(["", "checkpoint", "reentrant"])
    one = st.one_of(
        st.just(Route()),
        st.builds(Route, heads=_bits, gain=gain),
        st.builds(Route, heads=_bits, gain=gain, depth=st.integers(0, 4)),
        st.builds(Route, heads=_bits, gain=gain, wrap=wrap, wrapped=st.integers(0, 31)),
    )
    return st.one_of(one.map(lambda route: (route,) * n), st.tuples(*[one] * n))


_touch = st.builds(Touch, st.sampled_from(["own", "none", "strided", "scaled"]), st.integers(0, 12))


@functools.cache
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
    """A gradient of the user's own that this backward does not reduce is no more than a mistake; so
    is one that was scaled, where the parameter takes no part in the backward.
    """
    if operation.is_synced:
        return operation
    kept = [
        one if one and one.how == "scaled" and _uses_all(route) else None
        for one, route in zip(operation.touches, operation.routes, strict=False)
    ]
    touches = () if operation.how == "inputs" else tuple(kept)
    return Backward(operation.routes, operation.how, False, touches)


def _uses_all(route: Route) -> bool:
    return route == replace(route, heads=Route.heads, depth=Route.depth, gain=True)


@functools.cache
def failures(n: int) -> st.SearchStrategy[Fail]:
    return st.builds(
        Fail,
        routes(n),
        failing=st.integers(1, 2**n - 1),
        at=st.one_of(st.integers(0, 4), st.none()),
        is_synced=st.sampled_from([True, True, True, False]),
    ).map(_that_can_fail)


def _that_can_fail(operation: Fail) -> Fail:
    """A backward is heard of once a gradient is there, which that of `gain` is from the start. One
    that ends early recomputes only some layers, and only those update statistics."""
    plain = tuple(replace(route, wrap="", gain=True) for route in operation.routes)
    return replace(operation, routes=plain)


def _collectives(n: int) -> st.SearchStrategy[Collective]:
    kinds = st.sampled_from(["all_reduce", "broadcast", "all_gather_single"])
    return st.builds(Collective, kinds, st.sampled_from([0, 1, 65, 3000]), st.integers(0, n - 1))


def weighings(n: int) -> st.SearchStrategy[Weigh]:
    weight = st.sampled_from([0, 0.5, 1, 1, 3, 100])
    return st.builds(Weigh, routes(n), st.tuples(*[weight] * n))


def votes(n: int) -> st.SearchStrategy[Vote]:
    hows = st.sampled_from(["before", "instead", "inside", "raises"])
    return st.builds(Vote, routes(n), st.integers(1, 2**n - 1), hows, st.integers(0, 4))


@functools.cache
def sequences(n: int, transport: str, has_buffers: bool) -> st.SearchStrategy[list[Any]]:
    """Operations, most of them one by one."""
    by_weight: list[tuple[int, st.SearchStrategy[Any]]] = [
        (8, backwards(n)),
        (3, st.builds(ZeroGrad, st.booleans())),
        (3, st.just(Step())),
        (2, st.builds(Clip, st.sampled_from([0.1, 0.001, 1000.0]))),
        (1, st.just(Look())),
        (2, _collectives(n)),
        (2, st.builds(Freeze, st.lists(st.integers(0, 12), max_size=3).map(tuple))),
        (1, st.just(Grow())),
        (1, st.builds(Reattach, st.booleans(), st.booleans())),
        (2 if has_buffers else 0, st.builds(SyncBuffers, st.integers(0, n - 1))),
        (1 if transport == "nccl" else 3, failures(n)),
        (2, weighings(n)),
        (2, votes(n)),
        (1, st.just(Rebuild())),
    ]
    touches = st.lists(_touch, max_size=4).map(tuple)
    by_weight.append((3, st.builds(Reduce, st.tuples(*[touches] * n))))
    singles = [(weight, single.map(lambda one: [one])) for weight, single in by_weight]
    unsynced, synced = st.builds(Backward, routes(n), is_synced=st.just(False)), backwards(n)
    accumulation = st.tuples(unsynced, synced).map(list)
    step = st.tuples(st.builds(ZeroGrad, st.booleans()), backwards(n), st.just(Step())).map(list)
    return _one_of(*singles, (4, accumulation), (6, step))


@functools.cache
def _sequences_of_two(
    n: int, transport: str, *have_buffers: bool
) -> st.SearchStrategy[list[list[Any]]]:
    choices = [sequences(n, transport, have_buffers[0])]
    for has_buffers in have_buffers[1:]:
        other = sequences(n, transport, has_buffers)
        choices.append(other.map(lambda several: [*map(Other, several)]))
    return st.lists(st.one_of(choices), min_size=2, max_size=10)


def _leavers(n: int) -> st.SearchStrategy[int | None]:
    """Mostly none, as the others then wait for some time."""
    return st.sampled_from([*[None] * 20 * n, *range(n)])


@functools.cache  # drawing from a new strategy takes longer
@st.composite
def reducer_programs(draw: Any, n: int, transport: str) -> ReducerProgram:
    model = draw(_models)
    second = draw(st.one_of(st.none(), st.none(), st.none(), _models))
    have_buffers = [
        any(layer.kind == "batch norm" for layer in one.layers) for one in (model, second) if one
    ]
    chosen = draw(options(transport))
    fitting = _Fitting(transport, chosen)
    sequence = fitting.made_of_all(draw(_sequences_of_two(n, transport, *have_buffers)))
    leaver = draw(_leavers(n))
    if leaver is not None:
        fitting = _Fitting(transport, chosen, is_whole=False)
        rest = fitting.made_of_all(draw(_sequences_of_two(n - 1, transport, *have_buffers)))
        sequence = [*sequence, Leave(leaver), *rest]
    return ReducerProgram(
        n, model, tuple(sequence), chosen, draw(st.sampled_from([0.0, 0.9])), second
    )


@dataclass(frozen=True)
class _Fitting:
    """Makes of an operation what a program of its kind may contain. is_whole: no rank has left."""

    transport: str
    options: Options
    is_whole: bool = True

    def made_of_all(self, drawn: list[list[Any]]) -> list[Any]:
        return [each for several in drawn for one in several for each in self.made_of(one)]

    def made_of(self, operation: Any) -> list[Any]:
        if isinstance(operation, Other) and isinstance(operation.operation, Rebuild):
            return self.made_of(operation.operation)  # of both
        if isinstance(operation, Other):
            return [*map(Other, self.made_of(operation.operation))]
        if isinstance(operation, Fail) and self.transport == "nccl" and not self.is_whole:
            return []  # ranks cannot finish together first
        if isinstance(operation, Weigh) and self.options.op != "mean":
            return []
        if isinstance(operation, Vote) and self.transport == "nccl":
            return [operation] if self.options.skips_nonfinite else []  # else nobody hears of it
        if isinstance(operation, Backward) and operation.how == "sum" and self.options.overlap:
            # Then parameters under a reentrant checkpoint get two gradients, too late to be added.
            plain = (replace(route, wrap="") for route in operation.routes)
            return [replace(operation, routes=tuple(plain))]
        return [operation]


# ---- collectives ---------------------------------------------------------------------------------


@functools.cache
def calls(n: int, transport: str) -> st.SearchStrategy[Call]:
    delay = st.sampled_from([0, 1, 2, 3, 5, 8, 20])
    poll = st.sampled_from(["", "", "once", "until done", "check"])
    many = [(_MANY_NBYTES)] if transport == "shm" else []
    may_differ = transport != "nccl" and n > 1

    def of(kind: str, **more: Any) -> st.SearchStrategy[Call]:
        memory = st.sampled_from(_MEMORY if kind == "all_gather_single" else _MEMORY[:4])
        return st.builds(
            Call,
            st.just(kind),
            memory=st.tuples(*[memory] * n),
            delay=st.one_of(st.just((0,) * n), st.just((20,) * n), st.tuples(*[delay] * n)),
            poll=st.one_of(st.just(("",) * n), st.tuples(*[poll] * n)),
            dtype=st.sampled_from(_DTYPES),
            numel=st.just(0) if kind == "barrier" else st.sampled_from([*_NBYTES, *many]),
            odd=st.sampled_from([-1] * 12 + [0, n - 1]) if may_differ else st.just(-1),
            how_odd=st.sampled_from(["kind", "op", "numel", "dtype", "src"]),
            **more,
        ).map(_in_elements)

    op, src = st.sampled_from(OPS), st.integers(0, n - 1)
    return st.one_of(
        of("all_reduce", op=op),
        of("all_reduce", op=op),
        of("all_reduce", op=op),
        of("broadcast", src=src),
        of("all_gather_single"),
        of("reduce_scatter_single", op=op),
        of("gather", src=src),
        of("scatter", src=src),
        of("all_to_all_single"),
        of("barrier"),
    )


def _in_elements(call: Call) -> Call:
    """From a `numel` in bytes; large outputs or inputs are shared by the ranks."""
    nbytes, is_whole = call.numel, call.kind in ("all_reduce", "broadcast")
    nbytes = nbytes if is_whole or nbytes < 100_000 else nbytes // len(call.memory)
    how_odd = call.how_odd if call.odd >= 0 else "kind"
    return replace(call, numel=nbytes // getattr(torch, call.dtype).itemsize, how_odd=how_odd)


@functools.cache
def _lists_of_calls(n: int, transport: str) -> st.SearchStrategy[list[Call]]:
    one = calls(n, transport)
    return st.one_of([st.lists(one, min_size=1, max_size=size) for size in (2, 4, MAX_CALLS)])


@functools.cache
def _leaves(n: int, transport: str) -> st.SearchStrategy[tuple[int, ...]]:
    share = 5 if transport == "nccl" else 1
    one = st.sampled_from([-1, 0, 1, 2, 3, 5, 8, MAX_CALLS])
    return _one_of((share, st.just((-1,) * n)), (1, st.tuples(*[one] * n)))


@st.composite
def rounds(draw: Any, n: int, transport: str) -> Round:
    drawn = draw(_lists_of_calls(n, transport))
    leaves = draw(_leaves(n, transport))
    leaves = tuple(min(index, len(drawn)) for index in leaves)
    if all(index < 0 for index in leaves):
        return Round(tuple(drawn), leaves)
    # Which error comes first, of those who disagree or of those who leave, is left open.
    tamed = [replace(call, odd=-1) for call in drawn]
    return Round(tuple(tamed), leaves)


@functools.cache
def _lists_of_rounds(n: int, transport: str) -> st.SearchStrategy[list[Any]]:
    one = rounds(n, transport)
    return st.lists(_one_of((9, one), (1, st.just(Rebuild()))), min_size=1, max_size=4)


@functools.cache  # drawing from a new strategy takes longer
@st.composite
def collective_programs(draw: Any, n: int, transport: str) -> CollectiveProgram:
    several = draw(_lists_of_rounds(n, transport))
    leaver = draw(_leavers(n))
    if leaver is not None:
        rest = draw(_lists_of_rounds(n - 1, transport))
        if transport == "nccl":  # ranks cannot finish together first
            rest = [one for one in rest if not (isinstance(one, Round) and one.is_abandoned)]
        several = [*several, Leave(leaver), *rest]
    return CollectiveProgram(n, tuple(several))
