"""LocalSGD: each rank steps by itself, and every so many steps the ranks sync and average their
parameters (arXiv 1805.09767). Base class of DiLoCo, which averages otherwise.

Between syncs the reducer that they are given reduces nothing: a step uses this rank's own
gradients, and ranks differ on purpose. Steps are counted by the hooks on all torch.optim
optimizers; the sync is a part of the step() that makes it due. What is averaged lies in the
flat buffers of the reducer's buckets, which hold no gradients meanwhile. See sync.py for what
travels, and for what ends a sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.optim.schedule import (
    Schedule,
    fragments_of,
    refuse,
    refuse_rounding,
    require_reducer,
)
from fastcomm.optim.sync import ALL, Standing, Sync
from fastcomm.reducer import validation
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.local_steps import LocalSteps
from fastcomm.reducer.optimizer_hooks import SteppedSlots
from fastcomm.reducer.reducer import Reducer


class LocalSGD(LocalSteps):
    """Lets each rank of a reducer step with its own gradients, and averages the parameters over all
    ranks every `every` steps.

        reducer = fastcomm.Reducer().attach(model)
        with fastcomm.LocalSGD(reducer, every=8):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()              # every eighth one averages

    Making it is collective, and so is every sync: the step() that makes it due, sync() and
    finish(). A step is counted when optimizers of torch.optim that together hold all trainable
    parameters of the model have stepped, each once. Optimizers' states and buffers stay each
    rank's own. From finish(), or the end of the block, on, the reducer reduces gradients again. An
    exception that leaves the block ends it without a sync: every backward is an error then,
    until reducer.refresh() has made the ranks equal.

    reducer: attached, with op "mean"; without wire_dtype, skip_nonfinite, sparse gradients or a
        ShardedOptimizer.
    every: how many steps there are from one sync to the next: an int, at least 1.
    n_steps: to be read: how many steps of this rank were counted.

    Between syncs reducer.reduce(), set_weight(), skip_step(), join() and refresh() are refused;
    grad_norm(), clip_grad_norm_() and nonfinite_count() are of this rank's own gradients;
    check_in_sync() raises FastcommError unless all ranks have just synced.

    Raises ValueError or TypeError for a reducer or numbers that it cannot take, and FastcommError
    on the other ranks then; MismatchError, on every rank, for options that differ.

    A sync raises, on every rank, MismatchError if the ranks have made different numbers of
    steps; PeerLostError, TimeoutError or AbandonedError. Then no parameter was changed, and the
    next sync makes up for it.
    """

    n_steps: int

    def __init__(self, reducer: Reducer, *, every: int) -> None:
        require_reducer(type(self), reducer)
        schedule = Schedule(every)
        problem = None
        try:
            refuse(reducer, schedule)
            refuse_rounding(reducer)
        except (TypeError, ValueError) as error:
            problem = error
        self._begin(reducer, schedule, problem, {})

    def _begin(
        self,
        reducer: Reducer,
        schedule: Schedule,
        problem: Exception | None,
        options: dict[str, Any],
    ) -> None:
        """Compares the ranks' options, and lets this rank step alone. Collective."""
        name = type(self).__name__
        making = validation.Call(f"{name}()", f"options of {name}", f"cannot begin its {name}")
        described = {"every": schedule.every, "fragments": schedule.n_fragments, **options}
        validation.compare(reducer.comm, problem, described, making)
        for bucket in reducer.buckets:
            bucket.step_checksum = 0  # parameters may differ between the ranks from here on
        self.reducer = reducer
        self.n_steps = 0  # of this rank, that were counted
        self.n_syncs = 0  # that are over
        self._schedule = schedule
        self._fragments = fragments_of(reducer.buckets, schedule.n_fragments)
        # by fragment, after how many steps all ranks had equal ones
        self._synced_at = [0] * schedule.n_fragments
        self._stepped: set[tuple[int, int]] = set()  # slots, since the last step was counted
        self._n_parameters = sum(len(bucket.names) for bucket in reducer.buckets)
        self._is_torn = False  # this rank alone has not applied a sync
        reducer.install(self)
        reducer.steps_alone = True

    def __repr__(self) -> str:
        schedule = self._schedule
        n = schedule.n_fragments
        return (
            f"<{type(self).__name__}: every {schedule.every} steps"
            f"{f', {n} fragments' if n > 1 else ''}; {self.n_steps} steps, "
            f"{self.n_syncs} syncs{'' if self.is_on else ', finished'}>"
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
        elif self.is_on:
            try:
                self.reducer.end_local_steps()
            finally:
                self._forget_own_gradients()
                self.reducer.stand_still(
                    self.reducer.attached_model(),
                    f"a block of {type(self).__name__} was left by an exception, without a "
                    "sync, and the ranks' parameters differ: call refresh() on every rank, "
                    "which copies rank 0's",
                )

    @property
    def comm(self) -> Transport:
        """The reducer's."""
        return self.reducer.comm

    @property
    def is_on(self) -> bool:
        """For the reducer: whether ranks step by themselves: until finish(), or until the reducer
        was detached.
        """
        return self.reducer.find(LocalSteps) is self

    @property
    def is_agreed(self) -> bool:
        """For the reducer: whether all parameters are equal on all ranks: no step since a sync of
        all of them.
        """
        return all(n_steps == self.n_steps for n_steps in self._synced_at) and not self._stepped

    # -- steps -------------------------------------------------------------------------------------

    def after_step(self, stepped: list[SteppedSlots]) -> None:
        """For the reducer: count the step once all trainable parameters have been stepped."""
        slots = {(bucket, slot) for bucket, held in stepped for slot in held}
        if self._stepped & slots:
            raise FastcommError(
                f"parameter {self._left_out()} was not stepped between two steps of others: its "
                f"optimizer steps less often, or it has none. {type(self).__name__} counts one "
                "step when every trainable parameter has been stepped: call count_step() after "
                "each where an optimizer is left out, or freeze the parameter before attach(). To "
                "freeze one midway, call finish(), freeze it, call refresh() and make another "
                f"{type(self).__name__}, on every rank"
            )
        self._stepped |= slots
        if len(self._stepped) == self._n_parameters:
            self.count_step()

    def _left_out(self) -> str:
        """The name of a parameter that was not stepped since the last step was counted."""
        return next(
            name
            for number, bucket in enumerate(self.reducer.buckets)
            for slot, name in enumerate(bucket.names)
            if (number, slot) not in self._stepped
        )

    def count_step(self) -> None:
        """Counts a step that no optimizer of torch.optim has made on this rank: one that GradScaler
        or you have left out, so that all ranks count alike, or one made by hand. Syncs if the step
        makes a sync due, and raises as a sync.
        """
        self._refuse_torn()
        self._stepped.clear()
        self.n_steps += 1
        fragment = self._schedule.fragment_at(self.n_steps)
        if fragment is not None:
            self._sync(fragment, self._fragments[fragment])

    def _refuse_ended(self) -> None:
        if not self.is_on:
            raise FastcommError(
                f"this {type(self).__name__} has ended, by finish() or with detach(): make another"
            )

    def _refuse_torn(self) -> None:
        self._refuse_ended()
        if self._is_torn:
            raise FastcommError(
                "what a sync has agreed on was not applied on this rank, because an exception "
                "came in between, and the ranks differ: load a checkpoint, or call detach() and "
                "attach(model), on every rank"
            )

    # -- syncs -------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Agrees on all parameters now: they are equal on all ranks when it returns. Collective.
        Fragments that have synced at this very step do not sync again. Does not move the syncs to
        come. Raises as a sync, and FastcommError after finish().
        """
        self._refuse_torn()
        left = [i for i, n_steps in enumerate(self._synced_at) if n_steps != self.n_steps]
        self._sync(ALL, [bucket for i in left for bucket in self._fragments[i]])

    def finish(self) -> None:
        """Agrees on all parameters and buffers, as sync() and average_buffers(), and lets the
        reducer reduce gradients again. Collective. Does nothing when called again.

        Before plain steps that follow, make an optimizer that has a state (momentum, Adam) anew on
        every rank, or load one rank's state_dict() on all.
        """
        if not self.is_on:
            return
        self.sync()
        self.average_buffers()
        self.reducer.remove(self)
        self.reducer.steps_alone = False
        self._forget_own_gradients()

    def _forget_own_gradients(self) -> None:
        """Lets no optimizer step with what this rank has made by itself: it is no accumulation."""
        self.reducer.n_unsynced = 0
        for bucket in self.reducer.buckets:
            bucket.gradient_state.begin_period()

    def let_go(self) -> None:
        """For the reducer: lets the ranks step together again, without a sync."""
        self.reducer.steps_alone = False

    def _sync(self, fragment: int, buckets: list[Bucket]) -> None:
        """Agrees on these buckets. What a signal handler raises meanwhile is raised afterwards, if
        the other ranks count on this one.
        """
        sync = Sync(self.comm, buckets, Standing(self.n_steps, self.n_syncs, fragment))
        try:
            sync.launch(self._fill)
            interruption = sync.finish()
        except BaseException as error:
            if sync.is_over and not sync.is_reduced:
                raise
            interruption = sync.finish() or error
        if buckets:
            self._is_torn = True
            with torch.no_grad():
                self._apply(buckets)
            self.n_syncs += 1
            for i in range(len(self._synced_at)):
                if fragment in (i, ALL):
                    self._synced_at[i] = self.n_steps
            self._is_torn = False
        if interruption is not None:
            raise interruption

    def _fill(self, bucket: Bucket) -> None:
        """Writes what is averaged into the bucket's views."""
        with torch.no_grad():
            views, parameters = views_and_parameters(bucket)
            torch._foreach_copy_(views, parameters)

    def _apply(self, buckets: Sequence[Bucket]) -> None:
        """Makes the parameters what the mean in the views asks for."""
        for bucket in buckets:
            views, parameters = views_and_parameters(bucket)
            torch._foreach_copy_(parameters, views)

    def average_buffers(self) -> None:
        """Averages the model's floating-point buffers (batch-norm statistics) over all ranks, and
        copies rank 0's others: before an evaluation, say. finish() does it, too; a sync does
        not. Collective.
        """
        buffers = validation.named_buffers(self.reducer.attached_model())
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
        """The counters, equal on all ranks. Training goes on as if nothing had happened with this,
        every rank's optimizers and every rank's model, or one rank's model if all ranks have just
        synced.
        """
        return {
            "n_steps": self.n_steps,
            "n_syncs": self.n_syncs,
            "synced_at": list(self._synced_at),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() has given. Collective: every rank loads the same. Raises
        ValueError if it was saved with other fragments, or of another model, and FastcommError on
        the other ranks; MismatchError, on all, naming what differs. Nothing is loaded then.
        """
        self._refuse_ended()
        call = f"load_state_dict() of {type(self).__name__}"
        loading = validation.Call(call, "states to load", "cannot load its state")
        with validation.agreeing(self.comm, loading) as described:
            described |= self._described(state_dict)
        self._load(state_dict)

    def _described(self, state_dict: dict[str, Any]) -> dict[str, str]:
        """The state, as the ranks compare it. Raises ValueError for one that does not fit."""
        if len(state_dict["synced_at"]) != len(self._fragments):
            raise ValueError(
                f"the state was saved with {len(state_dict['synced_at'])} fragments, and there are "
                f"{len(self._fragments)}"
            )
        numbers = ("n_steps", "n_syncs", "synced_at")
        values = [(key, validation.shown(state_dict[key])) for key in numbers]
        return validation.contents_in_words([], values)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """What _described() has let pass."""
        self.n_steps, self.n_syncs = state_dict["n_steps"], state_dict["n_syncs"]
        self._synced_at = list(state_dict["synced_at"])
        self._stepped.clear()
        self._is_torn = False


def views_and_parameters(bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """The views of a bucket, and the parameters that belong to them; those that are gone are left
    out. Raises FastcommError naming a parameter that does not fit its view any more.
    """
    views: list[Tensor] = []
    parameters: list[Tensor] = []
    for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
        if parameter is None:
            continue
        if (parameter.shape, parameter.dtype, parameter.device) != (
            view.shape,
            view.dtype,
            view.device,
        ):
            raise FastcommError(
                f"parameter {name} is {parameter.dtype} {list(parameter.shape)} on "
                f"{parameter.device}, and was {view.dtype} {list(view.shape)} on {view.device} at "
                "attach(): change the model before attach(), or after finish()"
            )
        views.append(view)
        parameters.append(parameter)
    return views, parameters
