"""Reducer: makes loss.backward() reduce the gradients of a model over all ranks. Changes no module:
it lives in hooks on the parameters.

Decides when a round begins and how it ends; what happens in between is round.py, what comes after
it reduced.py. The method is that of "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", section 3.2; where it departs from DistributedDataParallel, the departure is said in a
comment.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import Parameter
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.autograd_stack import enclosing_backward
from fastcomm.comm.collective import Op, canonical_op, steps_made
from fastcomm.comm.communicator import Communicator, note_abandoned
from fastcomm.errors import FastcommError
from fastcomm.insight.observer import observer_of
from fastcomm.insight.timeline import Timeline
from fastcomm.launching.rendezvous import init
from fastcomm.reducer import agreement, sparsity
from fastcomm.reducer.autograd import (
    call_when_outer_goes_on,
    free_failed_backwards,
    refuse_compiled_autograd,
)
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.compiled import Compiled
from fastcomm.reducer.ending import end, leave, skip_on
from fastcomm.reducer.gradient_hook import EndOfBackward
from fastcomm.reducer.hooked_bucket import Hook, hooks_of
from fastcomm.reducer.join import in_join
from fastcomm.reducer.local_steps import LocalSteps
from fastcomm.reducer.model import (
    Model,
    model_of,
    named_parameters,
    reference_to,
    renormalised_embedding,
    unsynced_batch_norm,
)
from fastcomm.reducer.optimizer_steps import (
    allow_steps,
    refuse_replaced,
    refuse_step,
    unreduced,
    watch_steps,
)
from fastcomm.reducer.options import Options, describe
from fastcomm.reducer.owners import (
    attached_names,
    is_owned,
    let_go,
    next_number,
    owner_of,
    take_over,
)
from fastcomm.reducer.round import Round
from fastcomm.reducer.shares import ShardedBy
from fastcomm.reducer.skipping import Skipping
from fastcomm.reducer.tripwires import Tripwires
from fastcomm.reducer.tuning import Tuning
from fastcomm.reducer.uneven_data import UnevenData
from fastcomm.reducer.weights import Weighting

_FAILED_REFRESH = "refresh() failed: call it again, on every rank"


class Reducer(UnevenData):
    """Reduces gradients over all ranks during backward.

    comm: the communicator; None means fastcomm.init().
    bucket_cap_mb, first_bucket_cap_mb: a bucket is closed when it holds so many MiB; the first one
        small, so that communication starts early. bucket_cap_mb="auto": the ranks measure the first
        steps and choose together; 25 stays where another size does not pay.
    op: "mean", "sum" or another op of the communicator. What is reduced is all that .grad holds:
        with another op than "mean", clear the gradients before every backward that is reduced, or
        what was reduced before is reduced once more.
    wire_dtype: reduce gradients in this dtype; they keep their own. torch.bfloat16, torch.float16;
        over NCCL also torch.float8_e4m3fn, in which infinities become 448, and torch.float8_e5m2;
        between hosts torch.int8 and torch.float8_e4m3fn, with a scale for every 256 elements.
    error_feedback: between hosts, add to the next round what wire_dtype has dropped in this one.
    streams: over NCCL, how many communicators, each with a stream of its own, take turns at the
        buckets. No effect on the CPU.
    hook: a communication hook written for DDP, as (state, function), which then reduces every
        bucket in place of the communicator, with a division of its own if any; a list of them is a
        chain, in which each gets what the one before has left. `op` has no effect then.
    overlap: launch buckets as they become full. False launches all of them at the end of backward:
        for models whose parameters get several gradients in one backward (reentrant checkpointing
        of shared layers).
    skip_nonfinite: when a backward leaves infinities or NaNs in the reduced gradients, all ranks
        drop the step, as after skip_step(). Rank 0 logs which rank's parameters had them. With it
        the end of backward waits for the device over NCCL.
    sparse_parameters: names of parameters whose gradients may be sparse, beside the weights of
        nn.Embedding and nn.EmbeddingBag with sparse=True, which are found. Their rows are gathered
        from all ranks at the end of backward, where the host waits for the ranks' numbers of rows.

    To be read:

    n_rounds: how many reductions have ended as they should; equal on all ranks.
    data_exhausted: whether this rank's data has ended, in the join() under way or the last one.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        *,
        bucket_cap_mb: float | Literal["auto"] = 25,
        first_bucket_cap_mb: float = 1,
        op: Op = "mean",
        wire_dtype: torch.dtype | None = None,
        streams: int = 1,
        hook: Hook | Sequence[Hook] | None = None,
        overlap: bool = True,
        error_feedback: bool = False,
        skip_nonfinite: bool = False,
        sparse_parameters: Sequence[str] = (),
    ) -> None:
        self.op = canonical_op(op)
        self._options = Options(
            bucket_cap_mb,
            first_bucket_cap_mb,
            self.op,
            wire_dtype,
            streams,
            hooks_of(hook),
            error_feedback,
            skip_nonfinite,
            tuple(sparse_parameters),
        )
        self.comm: Communicator = init() if comm is None else comm
        self._options.check_communicator(self.comm)
        self._overlap = overlap
        # Nothing here keeps the model alive: the hooks on its parameters keep the reducer, and both
        # go when it goes.
        self._model: Callable[[], Model | None] | None = None
        self._buckets: list[Bucket] = []
        self._handles: list[RemovableHandle] = []
        self._tripwires = Tripwires(is_owned, weakref.WeakMethod(self._named_parameters))
        self._is_synchronizing = True
        self._round: Round | None = None  # the open one: a gradient is ready, or reduce() runs
        # Raised where nobody could catch it; the next call raises it, when the round is over.
        self._deferred: BaseException | None = None
        self.number = 0  # among the reducers of the communicator
        self.n_rounds = 0  # that have ended as they should
        self._n_steps = 0  # of all optimizers, since attach(): the ranks compare them
        self.record = 0  # of what was stepped, and how gradients were clipped
        self._compares_steps = False  # a few elements of what they have made of the parameters
        self._last_stepped = []
        self._timeline: Timeline | None = None
        self._tuning = Tuning(self._options, self.comm.world_size)
        self.sharded_by = ShardedBy()
        self.local_steps = LocalSteps()
        self._weighting = Weighting()
        self.data_exhausted = False  # see UnevenData
        self._skipping = Skipping(self.comm, self._options)

    __repr__ = describe

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Reducer can be neither copied nor pickled, since it holds a communicator and hooks "
            "on its model: keep it out of what you copy or save, and attach another one to the "
            "copy, on every rank"
        )

    # -- attaching ---------------------------------------------------------------------------------

    def attach(self, model: nn.Module | Iterable[tuple[str, Parameter]]) -> Reducer:
        """Reduces the gradients of `model` (a module, or named parameters) from now on. Collective:
        every rank calls it. Returns self.

        Checks that the reducers' options, and name, shape, dtype, strides and requires_grad of all
        parameters, agree on all ranks, then copies rank 0's parameters and buffers to the others.
        Attach after moving, copying or compiling the model, and before or after making the
        optimizer.

        Raises MismatchError on every rank, naming the first difference; ValueError when there is
        nothing to train, when the model is on another device than the communicator, or attached
        already.
        """
        source = model_of(model)
        free_failed_backwards()  # of a model that this one may replace
        with torch.inference_mode(False):  # in which buckets could not be made for training
            self._attach(source)
        return self

    def _attach(self, source: Model) -> None:
        named = named_parameters(source)
        buffers = list(source.named_buffers()) if isinstance(source, nn.Module) else []
        problem = (
            agreement.find_problem(
                self._model is not None, named, buffers, self.comm.device, is_owned
            )
            or unsynced_batch_norm(source, self.comm.world_size)
            or renormalised_embedding(source, self.comm.world_size)
        )
        sparse: set[str] = set()
        if problem is None:
            sparse = sparsity.find(source, named, self._options.sparse_parameters)
            problem = sparsity.find_problem(
                sparse, named, self._options, self.sharded_by.sharding()
            ) or self._options.find_problem(named)
        model = [] if problem else agreement.signature(named, buffers, sparse)
        agreement.compare(self.comm, problem, self._options.described(), model)
        agreement.broadcast(self.comm, [tensor for _, tensor in (*named, *buffers)], 0)
        # Over NCCL nobody compares, and the host would wait for the device.
        self._compares_steps = not self.comm.has_streams and agreement.is_arithmetic_alike(
            self.comm
        )
        self.number = next_number(self.comm)
        self._n_steps = self.record = 0
        self._tuning.begin(self.n_rounds)
        self._make_buckets(source)

    def _make_buckets(self, source: Model) -> None:
        """Of the size that the tuning has now. Collective."""
        named = named_parameters(source)
        trainable = [(name, p) for name, p in named if p.requires_grad]
        options = self._tuning.options
        sparse = sparsity.find(source, named, options.sparse_parameters)
        try:
            sharding = self.sharded_by.sharding()
            self._buckets = sparsity.make_buckets(
                trainable, sparse, self.comm, options, self.number, self.n_rounds, sharding
            )
        except BaseException as error:
            # memory, for example: the other ranks are not to wait for this one
            with contextlib.suppress(FastcommError):
                self.comm.abandon()
            note_abandoned(error)
            raise
        self._last_stepped = []  # by the numbers of the buckets before
        self._handles = take_over(self, self._buckets, self.comm.has_streams)
        if self._timeline is not None:
            self._timeline.follow(self._buckets, source)
        self._remember(source)
        allow_steps(p for _, p in named)
        watch_steps(owner_of, attached_names)
        try:
            # what was prepared here is ready, whatever stream the first backward runs on
            self.comm.barrier()
        except BaseException:  # another rank could not attach
            self._release()
            raise

    def _remember(self, source: Model) -> None:
        """The model, whose parameters without a reducer must get no gradient."""
        self._model = reference_to(source)
        self._tripwires.guard(source)

    def detach(self) -> None:
        """Ends the reduction of this model. Gradients stay what they are, in memory of their
        own. A ShardedOptimizer cannot step any more. Raises FastcommError inside a backward.
        """
        self._refuse_inside_backward("detach()")
        self.local_steps.end()
        self._release()
        self.sharded_by = ShardedBy()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._timeline is not None:
            self._timeline.let_go()
        for bucket in self._buckets:
            bucket.release()
        let_go(self._buckets)
        allow_steps(p for _, p in self._named_parameters())
        self._tripwires.remove()
        self._handles, self._buckets, self._model = [], [], None
        self._round, self._deferred = None, None
        self._weighting.forget()
        self._skipping.forget()
        watch_steps(owner_of, attached_names)

    def _attached_model(self) -> Model:
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError("the reducer has no model (any more): attach(model) first")
        return model

    def _named_parameters(self) -> list[tuple[str, Parameter]]:
        """Of the model as it is now; none if it is gone."""
        model = None if self._model is None else self._model()
        return [] if model is None else named_parameters(model)

    def refresh(self) -> None:
        """Call it, on every rank, after parameters were unfrozen, added or removed. Plans anew, and
        copies rank 0's values. An optimizer that holds parameters others have replaced cannot step
        any more: make it anew.

        Raises as attach(); then every backward raises FastcommError, until refresh() was called
        again. Raises FastcommError inside a backward.
        """
        self._refuse_inside_backward("refresh()")
        self.local_steps.refuse("refresh()")
        if self._weighting.of_round() is not None or self._skipping.vote is not None:
            raise FastcommError(
                f"rank {self.comm.rank}: refresh() would lose a set_weight() or skip_step() whose "
                "reduction has not come: call it before those"
            )
        model = self._attached_model()
        before = [pair for bucket in self._buckets for pair in bucket.named_parameters()]
        now = self._named_parameters()
        self.sharded_by.set_state_aside()
        self._release()
        refuse_replaced(before, now)
        try:
            self.attach(model)
            self.sharded_by.take_buckets(self._buckets)
        except BaseException:
            self._stand_still(model)
            raise

    def _stand_still(self, model: Model, why: str = _FAILED_REFRESH) -> None:
        """Refuses every backward and step until refresh(). After a refresh() that failed, for
        example: without hooks a loop that survives it would train on, each rank for itself.
        """
        self._release()  # whatever attach() has left
        self._remember(model)
        self._tripwires.refusal = why
        for _, parameter in self._named_parameters():
            refuse_step(parameter, why)

    def _refuse_inside_backward(self, what: str) -> None:
        if self._round is not None and self._round.has_callback:
            raise FastcommError(
                f"{what} was called inside backward(), which reduces the gradients itself: call "
                "it afterwards"
            )

    # -- one round ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first gradient of a backward is ready: asks autograd to call back at the end."""
        refuse_compiled_autograd()
        # A backward that ends with an exception drops the callback uncalled; then the round must be
        # ended all the same.
        self._open().await_end_of_backward(
            EndOfBackward(self._end_of_backward, self._backward_was_dropped)
        )

    def _open(self) -> Round:
        self._raise_deferred()
        if self._round is None:
            self._tripwires.raise_refusal()
            self.sharded_by.before_round(self._buckets)
            observer = observer_of(self.recorder, self.number, self.op)
            number, weighted = self.n_rounds + 1, in_join(self, self._weighting.of_round())
            self._round = Round(
                self.comm,
                self._buckets,
                self.op,
                number,
                steps_made(self._n_steps, self.record),
                observer,
                weighted,
                self._skipping,
                self._last_in_words,
            )
        return self._round

    def _end_of_backward(self) -> None:
        ending = self._round
        if ending is not None:  # else detached in this backward
            ending.has_callback = False
        is_inside, node = enclosing_backward()
        if node is not None:
            call_when_outer_goes_on(node, self._go_on_with_outer)
        elif not is_inside or ending is None or ending.is_full:
            self._synchronize(is_between_steps=not is_inside)

    def _go_on_with_outer(self) -> None:
        """The backward around the one that has ended gives gradients to the same round."""
        if self._round is None or not self._round.has_callback:
            self._begin()

    def synchronize(self) -> None:
        """Ends the round: launches what is left, waits, and leaves every gradient reduced. Does
        nothing when no round is open.

        Called at the end of backward and before every step of a torch.optim optimizer that owns
        parameters of this model. Raises FastcommError when the gradients are of no use: a peer was
        lost, or another rank's backward ended with an exception; and inside a backward, whose
        gradients are not all there.

        What a signal handler raises here (Ctrl-C) is raised when the round has ended, if all of it
        is under way already: the other ranks will have this step's gradients, and so has this one.
        What it raises a second time aborts the communicator.
        """
        self._synchronize(is_between_steps=False)

    def _synchronize(self, *, is_between_steps: bool) -> None:
        """is_between_steps: no other backward is under way, and no step of an optimizer."""
        self._raise_deferred()
        if self._round is None and self._skipping.vote is not None:
            self._open().count_all()  # no backward has taken this rank's part
        ending = self._round
        if ending is None:
            self.comm.check()
            return
        if ending.has_callback:
            raise FastcommError(
                f"the gradient of parameter {self._buckets[0].names[0]} is not reduced yet: the "
                "reduction ends with backward(). Call synchronize(), and step the optimizer, after "
                "backward() and not in a hook inside it"
            )
        end(self, ending)
        if not self._tuning.is_over:  # however the round has ended here: it has on all ranks
            self._tuning.after_round(self, can_replan=is_between_steps and not self.skipped)

    def _backward_was_dropped(self) -> None:
        """Called by autograd while an exception propagates, where nothing may be raised: the next
        call raises what goes wrong here.
        """
        try:
            if self._skipping.n_blocks and self._round is not None:
                self._round.has_callback, self._round.was_dropped = False, True
            else:
                leave(self)
        except BaseException as error:
            self._deferred = error

    def _raise_deferred(self) -> None:
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise error

    def reduce(self) -> None:
        """Gathers and reduces what stands in .grad now. Collective: every rank calls it.

        For gradients that no backward of this model has made: per-sample gradients by torch.func,
        evolution strategies. A parameter without a gradient here counts as zero, and receives the
        mean if another rank has one. Raises as synchronize().
        """
        self._attached_model()
        self._refuse_inside_backward("reduce()")
        self.local_steps.refuse("reduce()")
        if self._round is not None:
            self.synchronize()
        stranger = self._tripwires.find_gradient()
        if stranger is not None:
            self._open()
            leave(self)  # the other ranks hear of it
            raise FastcommError(unreduced(stranger))
        self._open().count_all()
        self._synchronize(is_between_steps=True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on this rank only; the next one outside reduces the
        sum. Decided at backward. Use it on every rank alike.
        """
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def skip_step(self) -> None:
        """This rank's step is no good (a bad batch, a loss that is NaN): all ranks drop it. Call it
        before the backward that is reduced, inside it, or instead of it, on this rank alone.

        When the reduction is over, gradients are None on all ranks, optimizers leave parameters
        and state as they are, and `skipped` is True. A rank that makes no backward takes its part
        with its optimizer's step, or with synchronize(), whichever comes first.

        Raises FastcommError if the reduction is over already, since other ranks may have stepped,
        and over NCCL without skip_nonfinite=True.
        """
        self._attached_model()
        self.local_steps.refuse("skip_step()")
        self._raise_deferred()
        self._skipping.refuse_vote()
        self._refuse_late_vote()
        self._skipping.cast_vote("called skip_step()")

    def skip_step_on(
        self, *exceptions: type[BaseException]
    ) -> contextlib.AbstractContextManager[None]:
        """An exception of these types in the block makes all ranks drop the step, as skip_step()
        does, and goes no further; errors of fastcomm do.

            with reducer.skip_step_on(torch.OutOfMemoryError):
                loss_of(model, batch).backward()

        Where a backward has raised, this rank takes its part in what is left of the reduction.
        Other exceptions, and those outside, abandon the round as always.
        """
        if not exceptions:
            raise TypeError("skip_step_on() takes the types of exceptions; got none")
        self._skipping.refuse_vote()
        return skip_on(self, exceptions)

    def compile(self, model: nn.Module, **options: Any) -> Any:
        """torch.compile(model, **options), in pieces that end where this reducer's buckets are
        full, so that backward and communication overlap: one graph would give all gradients at its
        end. Pieces are compiled in the next forward, and anew when the buckets have changed.

        model: the attached module, a part of it, or a module that holds it. May be compiled before
            attach(); forwards before attach() are not cut.
        options: those of torch.compile.

        Returns what torch.compile returns. Raises TypeError for anything but a module, ValueError
        for one that is compiled already, FastcommError where torch lacks what this needs.
        """
        return Compiled(self, model, options).module

    def timeline(self, *, steps: int | None = None) -> Timeline:
        """This reducer's Timeline, which records from the first call on: when gradients were ready
        and buckets reduced, and how long forward, backward and the optimizer took.

        steps: how many of the newest are kept; None means 100, or as many as at the first call.
        Raises ValueError when a later call asks for another number.
        """
        if self._timeline is None:
            self._timeline = Timeline(self, 100 if steps is None else steps)
            if self._model is not None:
                self._timeline.follow(self._buckets, self._model())
            self._timeline.start()
        self._timeline.must_keep(steps)
        return self._timeline
