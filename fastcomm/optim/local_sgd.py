"""LocalSGD and DiLoCo: each rank steps by itself, and every so many steps the ranks sync. LocalSGD
averages the parameters (arXiv 1805.09767). DiLoCo lets an outer optimizer step with what the ranks
have done since the last sync (arXiv 2311.08105).

Between syncs the reducer that they are given reduces nothing: a step uses this rank's own
gradients, and ranks differ on purpose. Steps are counted by the hooks on all torch.optim
optimizers; the sync is a part of the step() that makes it due. A sync is a Round on the views of
the reducer's buckets, which hold no gradients meanwhile. So it travels as gradients do: in the
reducer's wire dtype, over any transport, abandoned and interrupted alike. It also compares how many
steps the ranks have made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from fastcomm.comm.communicator import ProcessBound
from fastcomm.comm.objects import gather_numbers, on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.optim import checkpoints
from fastcomm.reducer import validation
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.core import Core
from fastcomm.reducer.defer_signals import defer_signals
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.optimizer_hooks import SteppedSlots
from fastcomm.reducer.reducer import Reducer
from fastcomm.reducer.round import Round, State

_NOTE = "fastcomm: the ranks have synced; this one takes what they agreed on, as the others do"


class LocalSGD(ProcessBound):
    """Lets each rank step with its own gradients, and averages the parameters over all ranks every
    `every` steps.

        reducer = fastcomm.Reducer().attach(model)
        with fastcomm.LocalSGD(reducer, every=8):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()  # every eighth one averages

    Every rank must make it, and take part in every sync: the step() that makes it due, sync() and
    finish(). A step counts when all trainable parameters of the model were stepped once, by one or
    several optimizers of torch.optim. Optimizers' states and buffers are not averaged. After
    finish(), or the end of the block, the reducer reduces gradients again. If an exception leaves
    the block, there is no sync: every backward raises an error until reducer.refresh() has made the
    ranks equal.

    reducer: attached, with op "mean"; without wire_dtype, skip_nonfinite, sparse gradients or a
        ShardedOptimizer.
    every: the number of steps from one sync to the next: an int, at least 1.
    n_steps: an attribute: how many steps of this rank were counted.

    Between syncs norms and clipping see this rank's gradients only, and methods that reduce raise
    FastcommError.

    Raises ValueError or TypeError for a bad reducer or number, and FastcommError on the other ranks
    then. Raises MismatchError, on every rank, for options that differ.

    A sync raises, on every rank, MismatchError if the ranks made different numbers of steps;
    PeerLostError, TimeoutError or AbandonedError. Then no parameter has changed, and the next sync
    makes up for it, unless an exception kept a rank from applying one.
    """

    n_steps: int
    instead = ", and save its state_dict()"

    def __init__(self, reducer: Reducer, *, every: int) -> None:
        self._begin(reducer, every, self._refuse_rounding)

    def _begin(self, reducer: Reducer, every: int, prepare: Callable[[], dict[str, Any]]) -> None:
        """Compares the ranks' options, and lets this rank step alone. Collective. prepare: returns
        more options that the ranks compare, and raises for what it cannot take.
        """
        name = type(self).__name__
        if not isinstance(reducer, Reducer):
            raise TypeError(f"{name}() takes a Reducer; got {type(reducer).__name__}")
        self.reducer, self._core = reducer, reducer.core
        making = validation.CollectiveCall(
            f"{name}()", f"options of {name}", f"cannot begin its {name}"
        )
        self._names = {name for bucket in self._core.buckets for name in bucket.names}
        with validation.agreeing(self._core.comm, making) as described:
            _refuse(self._core, every)
            described |= {"every": every, **prepare()}
        for bucket in self._core.buckets:
            bucket.step_checksum = 0  # parameters may differ between the ranks from here on
        self.n_steps = 0  # of this rank, that were counted
        self.n_syncs = 0  # that are over
        self._every = every
        self._synced_at = 0  # after how many steps all ranks had equal parameters
        self._stepped: set[str] = set()  # parameters, since the last step was counted
        self._core.install(_LocalSteps(self))
        self._core.steps_alone = True

    def _refuse_rounding(self) -> dict[str, Any]:
        """Raises ValueError for a wire that rounds parameters."""
        check(Feature.LOCAL_SGD, self._core.features())
        return {}

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: every {self._every} steps; {self.n_steps} steps, "
            f"{self.n_syncs} syncs{'' if self._is_on else ', finished'}>"
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """finish(), unless an exception ends the block: then other ranks may not come, and the
        reducer reduces nothing until refresh().
        """
        if kind is None:
            self.finish()
        elif self._is_on:
            self._end()
            self._core.refuse_until_refresh(
                self._core.model(),
                f"a block of {type(self).__name__} was left by an exception, without a "
                "sync, and the ranks' parameters differ: call refresh() on every rank, "
                "which copies rank 0's",
            )

    @property
    def comm(self) -> Transport:
        """The reducer's."""
        return self._core.comm

    @property
    def _is_on(self) -> bool:
        """Whether ranks step by themselves: until finish(), or until the reducer was detached."""
        steps = self._core.local_steps
        return steps is not None and steps.syncs is self

    @property
    def _is_agreed(self) -> bool:
        """Whether all parameters are equal on all ranks: no step since a sync."""
        return self._synced_at == self.n_steps and not self._stepped

    # -- steps -------------------------------------------------------------------------------------

    def _count(self, stepped: list[SteppedSlots]) -> None:
        """Counts the step once all trainable parameters have been stepped."""
        buckets = self._core.buckets
        names = {buckets[number].names[slot] for number, slots in stepped for slot in slots}
        if self._stepped & names:
            left_out = min(self._names - self._stepped)
            raise FastcommError(
                f"parameter {left_out} was not stepped between two steps of others: its optimizer "
                f"steps less often, or it has none. {type(self).__name__} counts one step when "
                "every trainable parameter has been stepped: call count_step() after each where an "
                "optimizer is left out, or freeze the parameter before attach(). To freeze one "
                "midway, call finish(), freeze it, call refresh() and make another "
                f"{type(self).__name__}, on every rank"
            )
        self._stepped |= names
        if self._stepped == self._names:
            self.count_step()

    def count_step(self) -> None:
        """Counts a step that no optimizer of torch.optim made on this rank: one that GradScaler or
        you skipped, so that all ranks have the same count, or one that you made yourself. Syncs if
        a sync is due, and raises as a sync.
        """
        self._refuse_ended()
        self._stepped.clear()
        self.n_steps += 1
        if self.n_steps % self._every == 0:
            self._sync()

    def _before_step(self) -> None:
        """An optimizer is about to step."""

    def _refuse_ended(self) -> None:
        if not self._is_on:
            raise FastcommError(
                f"this {type(self).__name__} has ended, by finish() or with detach(): make another"
            )

    # -- syncs -------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Makes all parameters equal on all ranks now. Collective. Does nothing if the ranks have
        synced after this very step. The next syncs come when they would have come. Raises as a
        sync, and FastcommError after finish().
        """
        self._refuse_ended()
        self._sync()

    def finish(self) -> None:
        """Calls sync() and average_buffers(), and lets the reducer reduce gradients again.
        Collective. A second call does nothing.

        If plain steps follow and the optimizer has a state (momentum, Adam), make a new optimizer
        on every rank, or load one rank's state_dict() on all ranks.
        """
        if not self._is_on:
            return
        self.sync()
        self.average_buffers()
        self._end()

    def _end(self) -> None:
        """Lets the reducer reduce again, and no optimizer step with what this rank has made by
        itself: it is no accumulation.
        """
        self._core.end_local_steps()
        self._core.n_unsynced = 0
        for bucket in self._core.buckets:
            bucket.gradients.forget()

    def _sync(self) -> None:
        """What a signal handler raises meanwhile is raised afterwards, if the other ranks count on
        this one.
        """
        buckets = [] if self._synced_at == self.n_steps else self._core.buckets
        standing = self.n_steps, self.n_syncs
        interruption = _average(self.comm, buckets, self._fill, standing)
        if buckets:
            with defer_signals(), torch.no_grad():
                self._apply()
                self.n_syncs += 1
                self._synced_at = self.n_steps
        if interruption is not None:
            raise interruption

    @torch.no_grad()
    def _fill(self, bucket: Bucket) -> None:
        """Writes what is averaged into the bucket's views."""
        torch._foreach_copy_(*_views_and_parameters(bucket))

    def _apply(self) -> None:
        """Makes the parameters what the mean in the views asks for."""
        for bucket in self._core.buckets:
            views, parameters = _views_and_parameters(bucket)
            torch._foreach_copy_(parameters, views)

    def average_buffers(self) -> None:
        """Averages the model's floating-point buffers (batch-norm statistics) over all ranks, and
        copies rank 0's other buffers. Call it before an evaluation; finish() calls it, a sync does
        not. Collective.
        """
        buffers = validation.named_buffers(self._core.model())
        numbers = [buffer for _, buffer in buffers if buffer.is_floating_point()]
        others = [buffer for _, buffer in buffers if not buffer.is_floating_point()]
        validation.compare_named(self.comm, buffers, "average_buffers()")
        if numbers:
            # in float64 the mean of equal numbers has their bits
            flat = torch.cat([buffer.detach().double().reshape(-1) for buffer in numbers])
            self.comm.all_reduce(flat, "mean")
            for buffer, mean in zip(numbers, flat.split([b.numel() for b in numbers]), strict=True):
                buffer.detach().copy_(mean.view(buffer.shape))
        validation.broadcast(self.comm, others, 0)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters, equal on all ranks. To resume exactly, also save every rank's
        optimizers, and every rank's model; one rank's model is enough if all ranks have just
        synced.
        """
        return {"n_steps": self.n_steps, "n_syncs": self.n_syncs, "synced_at": self._synced_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict() returned. Collective: every rank loads the same. Raises
        ValueError if it belongs to another model, and FastcommError on the other ranks; raises
        MismatchError, on all ranks, naming the difference. Nothing is loaded then.
        """
        self._refuse_ended()
        call = f"load_state_dict() of {type(self).__name__}"
        loading = validation.CollectiveCall(call, "states to load", "cannot load its state")
        with validation.agreeing(self.comm, loading) as described:
            described |= self._described(state_dict)
        self._load(state_dict)

    def _described(self, state_dict: dict[str, Any]) -> dict[str, str]:
        """The state, as the ranks compare it. Raises ValueError for one that does not fit."""
        return {key: str(state_dict[key]) for key in ("n_steps", "n_syncs", "synced_at")}

    def _load(self, state_dict: dict[str, Any]) -> None:
        """What _described() has let pass."""
        self.n_steps, self.n_syncs = state_dict["n_steps"], state_dict["n_syncs"]
        self._synced_at = state_dict["synced_at"]
        self._stepped.clear()


class DiLoCo(LocalSGD):
    """Lets each rank step with its own gradients. Every `every` steps the ranks average how far
    their parameters have moved, and an outer optimizer steps with the average.

        reducer = fastcomm.Reducer(wire_dtype=torch.bfloat16).attach(model)
        outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        with fastcomm.DiLoCo(reducer, torch.optim.SGD, every=50, **outer):
            ...  # the loop as it is: see LocalSGD

    It has all methods and attributes of LocalSGD. Pseudo-gradients travel in the reducer's
    wire_dtype, with its error_feedback. Memory: one copy of the parameters, and the outer
    optimizer's state.

    reducer, every: see LocalSGD; any wire_dtype is possible.
    outer_optimizer: a class of torch.optim, or a function that makes an optimizer of a list of
        parameters and `defaults`; not LBFGS. The attribute with this name is the optimizer that was
        made, for schedulers.
    defaults: options of outer_optimizer, such as lr.

    Raises as LocalSGD, and TypeError if outer_optimizer makes no optimizer.
    """

    outer_optimizer: Optimizer

    def __init__(
        self,
        reducer: Reducer,
        outer_optimizer: Callable[..., Optimizer],
        *,
        every: int,
        **defaults: Any,
    ) -> None:
        self._begin(reducer, every, lambda: self._make_outer(outer_optimizer, defaults))

    def _make_outer(
        self, make: Callable[..., Optimizer], defaults: dict[str, Any]
    ) -> dict[str, Any]:
        """Copies the parameters, and makes the optimizer of the copies. Returns its options."""
        # in the model's order, which does not depend on the buckets
        reduced = ((n, p) for n, p in self._core.named_parameters() if n in self._names)
        # equal on all ranks: what a sync averages is how far this rank's are from them
        self._outer = {name: Parameter(p.detach().clone()) for name, p in reduced}
        self._has_stepped = False
        outer = make(list(self._outer.values()), **defaults)
        if not isinstance(outer, Optimizer):
            raise TypeError(f"outer_optimizer must make an optimizer of torch.optim; got {outer!r}")
        if isinstance(outer, LBFGS):
            raise ValueError("LBFGS asks for losses, and an outer step has none: use another")
        self.outer_optimizer = outer
        options = checkpoints.options_in_words(outer.param_groups)
        options = {f"{key} of the outer optimizer": value for key, value in options.items()}
        return {"outer_optimizer": type(outer).__qualname__, **options}

    def _before_step(self) -> None:
        """Raises FastcommError before the first step if a parameter is not what
        was copied.
        """
        named = () if self._has_stepped else self._core.named_parameters()
        for name, parameter in named:
            if name in self._outer and not torch.equal(parameter, self._outer[name]):
                raise FastcommError(
                    f"parameter {name} was changed after DiLoCo() had copied it, and syncs "
                    "would pull it back: load or change parameters first, and then make the "
                    "DiLoCo, on every rank; or load a checkpoint of both"
                )
        self._has_stepped = True

    @torch.no_grad()
    def _fill(self, bucket: Bucket) -> None:
        """Writes the pseudo-gradients into the bucket's views."""
        views, parameters = _views_and_parameters(bucket)
        torch._foreach_copy_(views, self._outer_of(bucket))
        torch._foreach_sub_(views, parameters)

    def _outer_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._outer[name] for name, _ in bucket.named_parameters()]

    def _apply(self) -> None:
        for bucket in self._core.buckets:
            views, _ = _views_and_parameters(bucket)
            for outer, view in zip(self._outer_of(bucket), views, strict=True):
                outer.grad = view
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for bucket in self._core.buckets:
            _, parameters = _views_and_parameters(bucket)
            torch._foreach_copy_(parameters, self._outer_of(bucket))

    def state_dict(self) -> dict[str, Any]:
        """Returns LocalSGD's state, with the outer parameters and the outer optimizer's state,
        which are equal on all ranks.
        """
        outer = {name: parameter.detach() for name, parameter in self._outer.items()}
        return super().state_dict() | {
            "outer_parameters": outer,
            "outer_optimizer": self.outer_optimizer.state_dict(),
        }

    def _read(self, state_dict: dict[str, Any]) -> checkpoints.Saved:
        return checkpoints.read(state_dict["outer_optimizer"], self.outer_optimizer.param_groups)

    def _described(self, state_dict: dict[str, Any]) -> dict[str, str]:
        saved: dict[str, Tensor] = state_dict["outer_parameters"]
        for name in {**self._outer, **saved}:
            was, has = (
                tuple(tensors[name].shape) if name in tensors else None
                for tensors in (saved, self._outer)
            )
            if was != has:
                raise ValueError(
                    f"outer parameter {name} has shape {was} in the state, and {has} in the model: "
                    "load the state of the same model, with the same frozen parameters"
                )
        outer = [(f"outer parameter {name}", tensor) for name, tensor in saved.items()]
        names = {parameter: name for name, parameter in self._outer.items()}
        described = super()._described(state_dict) | validation.contents_in_words(outer, [])
        return described | checkpoints.described(self._read(state_dict), {}, names)

    def _load(self, state_dict: dict[str, Any]) -> None:
        super()._load(state_dict)
        self._has_stepped = True
        self.outer_optimizer.load_state_dict(self._read(state_dict).numbered())
        with torch.no_grad():
            for name, outer in self._outer.items():
                outer.copy_(state_dict["outer_parameters"][name])


def _views_and_parameters(bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """The views of a bucket, and the parameters that belong to them; those that are gone are left
    out. Raises FastcommError naming a parameter that does not fit its view any more.
    """
    views: list[Tensor] = []
    parameters: list[Tensor] = []
    for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
        if parameter is None:
            continue
        kinds = [(tensor.dtype, list(tensor.shape), tensor.device) for tensor in (view, parameter)]
        if kinds[0] != kinds[1]:
            was, now = (f"{dtype} {shape} on {device}" for dtype, shape, device in kinds)
            raise FastcommError(
                f"parameter {name} is {now}, and was {was} at attach(), or its gradients are: "
                "change the model before attach(), or after finish()"
            )
        views.append(view)
        parameters.append(parameter)
    return views, parameters


# -- what a sync reduces ---------------------------------------------------------------------------


def _average(
    comm: Transport,
    buckets: Sequence[Bucket],
    fill: Callable[[Bucket], None],
    standing: tuple[int, int],
) -> BaseException | None:
    """Compares how many steps the ranks have made and how many syncs are over, and leaves the mean
    of what `fill` writes into the views of the buckets there. Without buckets it only compares.
    Returns what a signal handler has raised meanwhile, if the other ranks have the mean, too.

    Raises what ends the sync, of which the other ranks learn: MismatchError, on every rank, for
    standings that differ.
    """
    reduction = Round(comm, buckets, "mean", 1, standing[0], note=_NOTE)
    trouble = interruption = None
    try:
        reduction.begin()
        with _gradients_aside(buckets):  # an abandonment, heard of anywhere in here, drops them
            trouble = _compare(comm, standing)
            if trouble is None and buckets:
                for bucket in buckets:
                    fill(bucket)
                    bucket.take_views()
                reduction.count_all()
                reduction.advance(is_end=True)
    except BaseException as error:
        if not buckets or reduction.state is not State.SETTLED:
            with _gradients_aside(buckets):
                reduction.abandon(error)
            raise
        interruption = error
    if trouble is not None:
        raise trouble
    if buckets and comm.has_streams:
        interruption = _await_device(comm, buckets) or interruption
    for bucket in buckets:
        bucket.gradients.forget()
    return interruption


def _compare(comm: Transport, standing: tuple[int, int]) -> FastcommError | None:
    """Returns an error that every rank gets, so that none has to tell the others: how the standings
    differ, or what has ended the comparison. Waits for the device.
    """
    try:
        rows = gather_numbers(comm, standing)
    except FastcommError as error:
        return error
    if all(row == rows[0] for row in rows):
        return None
    if any(n_syncs != rows[0][1] for _, n_syncs in rows):
        remedy = "Some rank has not applied a sync, as an exception came: load a checkpoint on all"
    else:
        remedy = (
            "Let all ranks make as many steps; count_step() counts one that a rank leaves out. No "
            "parameter was changed"
        )
    places = "; ".join(
        f"rank {rank}: after {n_steps} steps and {n_syncs} syncs"
        for rank, (n_steps, n_syncs) in enumerate(rows)
    )
    return MismatchError(f"the ranks do not sync at the same step: {places}. {remedy}")


def _await_device(comm: Transport, buckets: Sequence[Bucket]) -> BaseException | None:
    """Over NCCL a rank may abandon what the host has long finished, and parameters would take half
    of a sum for the mean. Raises and returns as _average().
    """
    is_here = False
    try:
        with defer_signals(), _gradients_aside(buckets):
            on_host(comm, buckets[-1].flat[:1])  # the copy waits for what was ordered before it
            is_here = True
    except BaseException as error:
        if not is_here:
            raise
        return error
    return None


@contextlib.contextmanager
def _gradients_aside(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Gives all parameters their gradients back at the end, whatever becomes of .grad inside the
    block. Gradients that lie in the buckets' views are moved out of them first.
    """
    kept: list[tuple[Tensor, Tensor | None]] = []
    for bucket in buckets:
        bucket.vacate()
        kept += [(parameter, parameter.grad) for _, parameter in bucket.named_parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            # torch refuses one that does not fit its parameter any more
            with contextlib.suppress(RuntimeError):
                parameter.grad = gradient


class _LocalSteps(RoundExtension):
    """Installed while each rank steps by itself. syncs: a LocalSGD or DiLoCo."""

    steps_alone = True

    def __init__(self, syncs: LocalSGD) -> None:
        self.syncs, self.name = syncs, type(syncs).__name__

    def features(self) -> Mapping[Feature, str]:
        return {Feature.LOCAL_STEPS: self.name}

    def before_step(self, optimizer: Optimizer) -> None:
        self.syncs._before_step()

    def after_step(self, stepped: list[SteppedSlots]) -> None:
        self.syncs._count(stepped)

    def refuse_unsynced(self) -> None:
        if not self.syncs._is_agreed:
            raise FastcommError(
                "it has made steps of its own since the ranks synced: call sync() of "
                f"{self.name} before you compare the ranks"
            )


# -- what is refused -------------------------------------------------------------------------------


def _refuse(core: Core, every: int) -> None:
    """Raises TypeError or ValueError for what no sync can be made of."""
    core.model()
    if not isinstance(every, int):
        raise TypeError(f"every must be an int; got {every!r}")
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}")
    check(Feature.LOCAL_STEPS, core.features())
    is_between_steps = core.round is None and core.reduces_backwards
    if not is_between_steps or core.awaits_round:
        raise ValueError(
            "ranks begin to step alone between two steps: outside backward() and no_sync(), and "
            "not after a set_weight() or skip_step() whose reduction has not come"
        )
    for bucket in core.buckets:
        _views_and_parameters(bucket)  # raises for gradients of another dtype
