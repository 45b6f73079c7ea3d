"""Compiled: a module under torch.compile whose graphs are cut where a reducer's buckets are full,
so that backward and communication overlap.

The backward of a graph gives all its gradients at its end. So each graph is cut into pieces, which
the user's backend compiles one by one. Buckets are launched between the backwards of two pieces.
torch does the cutting; graph_split.py tells it where.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastcomm.errors import FastcommError
from fastcomm.reducer.bucket import Bucket

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

_INSTEAD = "compile the model's blocks one by one (block.compile()), which overlaps as well"


class Compiled:
    """One module under torch.compile. `module` is what torch.compile returns.

    options: those of torch.compile.
    """

    def __init__(self, core: Core, model: nn.Module, options: dict[str, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"compile(): expected a module; got {type(model).__name__}")
        if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
            raise ValueError(
                f"compile(): {type(model).__name__} is compiled as one graph already: compile the "
                "module itself, here only"
            )
        self._core = weakref.ref(core)
        self._model = model
        self._compile_piece, self._options = _own_options(**options)
        self._plan: list[list[str]] = []  # names by bucket, for which graphs are cut now
        self._first: Callable[[], Bucket | None] = lambda: None  # of the plan's buckets
        self.module: Any = self._compile()
        self._forward_as_planned = self.module.forward
        self.module.forward = self._forward

    def _compile(self) -> Any:
        # A new backend, so that torch reuses nothing that was compiled for another plan.
        backend = Backend(self._core, self._compile_piece)
        return torch.compile(self._model, backend=backend, **self._options)

    def _forward(self, *args: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            core = self._core()
            self._prepare([] if core is None else core.buckets)
        return self._forward_as_planned(*args, **named)

    def _prepare(self, buckets: Sequence[Bucket]) -> None:
        """Compiles graphs again if parameters lie in other buckets than before."""
        if not buckets or self._first() is buckets[0]:
            return
        self._refuse_unattached(buckets)
        plan = [bucket.names for bucket in buckets]
        if plan != self._plan:
            self._forward_as_planned = self._compile().forward
            self._plan = plan
        self._first = weakref.ref(buckets[0])

    def _refuse_unattached(self, buckets: Sequence[Bucket]) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        if own.isdisjoint(_bucket_of(buckets)):
            raise ValueError(
                f"{type(self._model).__name__} has no parameter that this reducer reduces: compile "
                "the attached model, a part of it, or a module that holds it"
            )


class Backend:
    """What torch calls with each graph. torch keeps it: it must not keep the model."""

    __name__ = "fastcomm"  # in torch's messages

    def __init__(self, core: Callable[[], Core | None], compile_piece: Callable[..., Any]) -> None:
        self._core = core
        self._compile_piece = compile_piece

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        core = self._core()
        buckets = [] if core is None or not core.overlap else core.buckets
        # Those of sparse gradients are launched at the end of backward, wherever graphs are cut.
        buckets = [bucket for bucket in buckets if not bucket.waits_in_launch]
        if len(buckets) < 2 or not torch.is_grad_enabled():
            return self._compile_piece(graph, inputs)
        bucket_of = _bucket_of(buckets)
        if any(id(parameter) in bucket_of for parameter in graph.parameters()):
            raise FastcommError(
                "torch._dynamo.config.inline_inbuilt_nn_modules is off, which hides from compile() "
                f"where parameters are used: leave it on, or {_INSTEAD}"
            )
        split = _graph_split().PlannedSplit(bucket_of, self._compile_piece)
        try:
            compiled = split.compile_fn(graph, inputs)
        except NotImplementedError as error:  # of an older torch, for a higher-order operation
            raise FastcommError(
                f"torch {torch.__version__} cannot cut this graph into pieces: {_INSTEAD}"
            ) from error
        for bucket in buckets:
            for name, parameter in bucket.named_parameters():
                if id(parameter) == split.whole_for:
                    _warn_of_whole(name)
        return compiled

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        if hasattr(self._compile_piece, "reset"):
            self._compile_piece.reset()


def _warn_of_whole(name: str) -> None:
    warnings.warn(
        f"compile(): a graph could not be cut into pieces, as parameter {name} is used first and "
        "is in the first bucket: gradients are reduced after its backward, without overlap. "
        "Register modules in the order in which they run; where one operation holds the whole "
        f"graph (a checkpoint, for example), {_INSTEAD}",
        stacklevel=2,
    )


def _bucket_of(buckets: Sequence[Bucket]) -> dict[int, int]:
    """The number of each parameter's bucket, by id of the parameter."""
    return {id(p): i for i, bucket in enumerate(buckets) for _, p in bucket.named_parameters()}


def _graph_split() -> Any:
    """The module. Imported late: it takes a second, and needs parts of torch that may change."""
    try:
        from fastcomm.reducer.features import graph_split
    except ImportError as error:
        raise FastcommError(
            f"compile() does not work with torch {torch.__version__} ({error}): {_INSTEAD}"
        ) from error
    return graph_split


def _own_options(
    *, backend: Any = None, mode: str | None = None, options: Any = None, **others: Any
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What compiles a piece, and the options that torch.compile has to see itself."""
    if mode is not None and options is not None:
        raise ValueError("compile() takes a mode or options, as torch.compile; got both")
    options = dict(options or {})
    if "guard_filter_fn" in options and torch.__version__ >= "2.8":  # or the backend refuses it
        others["options"] = {"guard_filter_fn": options.pop("guard_filter_fn")}
    return _graph_split().piece_compiler(backend, mode, options, others.get("dynamic")), others
