"""Reducer: makes loss.backward() reduce the gradients of a model over all ranks. Changes no module:
it lives in hooks on the parameters.

This is the public face: what users call, and what each call promises. How it is done is core.py,
which begins with the first gradient of a backward. A feature is imported by the call that asks for
it.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from fastcomm.comm.collective import Op, canonical_op
from fastcomm.comm.communicator import Communicator, ProcessBound
from fastcomm.errors import FastcommError
from fastcomm.insight.stragglers import Straggler
from fastcomm.insight.timeline import Timeline
from fastcomm.launching.rendezvous import init
from fastcomm.reducer import statistics, validation
from fastcomm.reducer.core import Core
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.optimizer_hooks import expect_attach, unreduced
from fastcomm.reducer.options import Options, describe
from fastcomm.reducer.validation import model_of

if TYPE_CHECKING:
    from fastcomm.reducer.features.progress import Stateful

T = TypeVar("T")


class Reducer(ProcessBound):
    """Reduces gradients over all ranks during backward.

    comm: the communicator; left out, fastcomm.init().
    bucket_cap_mb: a bucket is closed when it holds so many MiB; the first one at 1 MiB at the
        latest, so that communication starts early. None: 25, and 10 where the CPU moves data
        between hosts. "auto": the ranks measure the first steps and choose together; that default
        stays where another size does not pay.
    op: "mean", "sum" or another op of the communicator. What is reduced is all that .grad holds:
        with another op than "mean", clear the gradients before every backward that is reduced, or
        what was reduced before is reduced once more.
    wire_dtype: reduce gradients in this dtype; they keep their own. torch.bfloat16, torch.float16;
        over NCCL also torch.float8_e4m3fn, in which infinities become 448, and torch.float8_e5m2;
        with a scale for every 256 elements, over NCCL and between hosts torch.int8, and between
        hosts torch.float8_e4m3fn.
    error_feedback: between hosts, add to the next round what wire_dtype has dropped in this one.
    streams: over NCCL, how many communicators, each with a stream of its own, take turns at the
        buckets. No effect on the CPU.
    overlap: launch buckets as they become full. False launches all of them at the end of backward:
        for models whose parameters get several gradients in one backward (reentrant checkpointing
        of shared layers).
    skip_nonfinite: when a backward leaves infinities or NaNs in the reduced gradients, all ranks
        drop the step, as after skip_step(). Rank 0 logs which rank's parameters had them. With it
        the end of backward waits for the device over NCCL.
    sparse_parameters: names of parameters whose gradients may be sparse, beside the weights of
        nn.Embedding and nn.EmbeddingBag with sparse=True, which are found. Their rows are gathered
        from all ranks at the end of backward, where the host waits for the ranks' numbers of rows.
    audit: every so many rounds compare the bits of all trainable parameters over the ranks, before
        the gradients are used: MismatchError, on every rank, names the parameter and the rank that
        differs. One pass over the parameters; over NCCL the host waits for it. None: never.
    """

    instead = ", and attach another one to the copy, on every rank"

    def __init__(
        self,
        comm: Communicator | EllipsisType = ...,
        *,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        op: Op = "mean",
        wire_dtype: torch.dtype | None = None,
        streams: int = 1,
        overlap: bool = True,
        error_feedback: bool = False,
        skip_nonfinite: bool = False,
        sparse_parameters: Sequence[str] = (),
        audit: int | None = None,
    ) -> None:
        options = Options(
            bucket_cap_mb=bucket_cap_mb,
            op=canonical_op(op),
            wire_dtype=wire_dtype,
            streams=streams,
            error_feedback=error_feedback,
            skip_nonfinite=skip_nonfinite,
            sparse_parameters=tuple(sparse_parameters),
            audit=audit,
        )
        checked = options.checked(init() if comm is ... else comm)
        self.core = Core(checked, options, overlap=overlap)  # for the parts of fastcomm
        expect_attach(self.core)

    def __repr__(self) -> str:
        return describe(self.core)

    @property
    def comm(self) -> Communicator:
        """The communicator; once refresh() has followed a rebuild(), the new one."""
        return self.core.comm

    @property
    def n_rounds(self) -> int:
        """How many reductions have ended as they should; equal on all ranks."""
        return self.core.n_rounds

    @property
    def data_exhausted(self) -> bool:
        """Whether this rank's data has ended, in the join() under way or the last one."""
        return self.core.data_exhausted

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
        already, and when you hold a gradient, too, which the reducer would replace.
        """
        self.core.attach(model_of(model))
        return self

    def detach(self) -> None:
        """Ends the reduction of this model. Gradients stay what they are, in memory of their
        own. A ShardedOptimizer cannot step any more. Raises FastcommError inside a backward.
        """
        core = self.core
        core.refuse_inside_backward("detach()")
        core.end_local_steps()
        for bucket in core.buckets:
            bucket.gradients.forget()  # they are the user's
        core.release()
        core.remove(core.sharded_by)

    def refresh(self) -> None:
        """Call it, on every rank, after parameters were unfrozen, added or removed. Plans other
        buckets, and copies rank 0's values. An optimizer that holds parameters others have replaced
        cannot step any more: make a new one.

        After comm.rebuild() the reducer goes on with the remaining ranks: it drops gradients, and
        copies the values of one that has made most steps. New processes call attach() instead. If
        ranks have made different numbers of steps, no optimizer steps before catch_up(). Raises
        ValueError for a reducer with a ShardedOptimizer, LocalSGD or DiLoCo, and inside join(); on
        every rank FastcommError where the ranks that had made most steps were lost meanwhile.

        Raises as attach(); then every backward raises FastcommError, until refresh() was called
        again. Raises FastcommError inside a backward.
        """
        self.core.refresh()

    # -- one round ---------------------------------------------------------------------------------

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
        self.core.require_model()
        self.core.synchronize()

    def reduce(self) -> None:
        """Gathers and reduces what stands in .grad now. Collective: every rank calls it.

        For gradients that no backward of this model has made: per-sample gradients by torch.func,
        evolution strategies. A parameter without a gradient here counts as zero, and receives the
        mean if another rank has one. Raises as synchronize().
        """
        core = self.core
        core.model()
        core.refuse_inside_backward("reduce()")
        core.refuse_local_steps("reduce()")
        if core.round is not None:
            core.synchronize()
        name = core.guards.find_gradient()
        if name is not None:
            core.open().abandon()  # the other ranks hear of it
            raise FastcommError(unreduced(name))
        core.open().count_all()
        core.synchronize(is_between_steps=True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on this rank only; the next one outside reduces the
        sum. Decided at backward. Use it on every rank alike.
        """
        core = self.core
        core.require_model()
        before, core.reduces_backwards = core.reduces_backwards, False
        try:
            yield
        finally:
            core.reduces_backwards = before

    # -- ranks with different data -----------------------------------------------------------------

    def set_weight(self, weight: float | Tensor, *, of: Literal["mean", "sum"] = "mean") -> None:
        """What this rank's gradients count in the next reduction, which becomes sum(w g) / sum(w)
        over the ranks. If weights are numbers of tokens, and losses are means over tokens, these
        are the gradients of one process on all ranks' data. Call it on every rank, or on none: else
        MismatchError.

        weight: a number, or a tensor of one, which is waited for. 0: a rank without data, whose
            gradients count nothing, not even NaNs. If all are 0, gradients are None.
        of: "sum" if losses are sums over the data: sum(g) / sum(w).

        Holds until the reduction is over: for one backward outside no_sync(), and for those inside
        before it. After that ranks count alike until the next call. With several calls in one
        reduction, each before the backwards of its data in no_sync(), weights add up and each batch
        counts with its own. After zero_grad() the next call begins again.

        Raises before any rank is involved: ValueError for a negative or infinite number, NaN, and
        reducers with error_feedback, or with another op than "mean"; TypeError;
        FastcommError inside a backward, for gradients accumulated without a weight, and for those
        that an earlier reduction has left in .grad: call zero_grad() first.
        """
        from fastcomm.reducer.features.weights import Weighting

        core = self.core
        model = core.model()
        core.refuse_inside_backward("set_weight()")
        core.refuse_local_steps("set_weight()")
        check(Feature.WEIGHTS, core.options.features())
        weighting = core.find(Weighting) or core.install(Weighting())
        weighting.follow(model)
        weighting.set(weight, of, core.buckets, core.n_unsynced)

    @overload
    def join(
        self, batches: None = None, *, state: Iterable[Stateful] = ()
    ) -> contextlib.AbstractContextManager[None]: ...
    @overload
    def join(
        self, batches: Iterable[T], *, state: Iterable[Stateful] = ()
    ) -> contextlib.AbstractContextManager[Iterator[T]]: ...
    def join(self, batches: Iterable[T] | None = None, *, state: Iterable[Stateful] = ()) -> Any:
        """For ranks with different numbers of batches. Every rank enters the block. It is for all
        reducers of the communicator. A rank whose data has ended takes part in the others'
        reductions without any, until all are done. Means are over the ranks with data.

            with reducer.join(loader, state=[optimizer]) as batches:
                for batch in batches:
                    ...

        batches: what the loop goes through. None: the block is put around any loop, and the data of
            this rank has ended when the block ends.
        state: optimizers, schedulers and the like: ranks that ended earlier load the others'.

        In the end all ranks have the parameters and buffers of a rank that went furthest; if some
        have ended earlier, gradients are None. An exception that leaves the block aborts the
        communicator.

        Raises ValueError for reducers with error_feedback, another op than "mean", sparse
        gradients, sizes still being tuned, a ShardedOptimizer, LocalSGD or DiLoCo; TypeError for a
        state without state_dict() and load_state_dict(). At the end of the block MismatchError if
        ranks give different states, and FastcommError for gradients accumulated under no_sync()
        that nothing has reduced.
        """
        from fastcomm.reducer.features.join import Join

        return Join(self.core, batches, state)

    def elastic(self, batches: Iterable[T], *, state: Iterable[Stateful] = ()) -> Iterator[T]:
        """For a loop that goes on when ranks are lost, and takes in processes that come in their
        place. Every rank goes through it. It is for all reducers of the communicator.

            for batch in reducer.elastic(loader, state=[optimizer]):
                ...

        When a rank is lost, or abandons a step, the step is dropped on all ranks: gradients are
        None, optimizers leave parameters and state as they are, and `skipped` is True. At the next
        batch the remaining ranks meet again, as reducer.comm, and all get what one of them has that
        has made most steps. The batches of a step that none of them has made come again; of several
        models, only if none was stepped.

        state: optimizers, schedulers and the like, which ranks load that are behind. All that
            keeps something from step to step.

        A process that is started in place of a lost one, with its rank, calls fastcomm.init(),
        attach() and elastic() as the first ones did; the others take it in before their next batch.
        n_rounds, reducer.comm.rank and world_size say where it stands. The loop ends on all ranks
        with the first that has no batch left.

        An error of a collective of the caller's own in the loop is raised as ever.

        Raises ValueError for reducers with a ShardedOptimizer, LocalSGD or DiLoCo, and inside
        join(); TypeError for a state without state_dict() and load_state_dict(); FastcommError for
        ranks of a torch.distributed group, and inside another such loop. While it runs:
        FastcommError where an optimizer keeps state that was not given; as comm.rebuild() and
        refresh().
        """
        from fastcomm.reducer.features.elastic import elastic

        return elastic(self.core, iter(batches), list(state))

    # -- steps that the ranks drop -----------------------------------------------------------------

    def skip_step(self) -> None:
        """This rank's step is no good (a bad batch, a loss that is NaN): all ranks drop it. Call it
        before the backward that is reduced, inside it, or instead of it, on this rank alone.

        When the reduction is over, gradients are None on all ranks, optimizers leave parameters
        and state as they are, and `skipped` is True. A rank that makes no backward takes its part
        with its optimizer's step, or with synchronize(), whichever comes first.

        Raises FastcommError if the reduction is over already, since other ranks may have stepped,
        and over NCCL without skip_nonfinite=True.
        """
        core = self.core
        core.model()
        core.refuse_local_steps("skip_step()")
        core.raise_from_backward()
        core.skipping().skip_step(core)

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
        self.core.require_model()
        skipping = self.core.skipping()
        skipping.refuse_vote()
        return skipping.skip_on(exceptions, self.skip_step, self.synchronize)

    @property
    def skipped(self) -> bool:
        """Whether all ranks drop the last step: see skip_step() and skip_nonfinite. For schedulers.
        True from the verdict, or from this rank's vote, until the next reduction begins, detach()
        or refresh().
        """
        return self.core.skipped

    @property
    def n_skipped(self) -> int:
        """How many steps all ranks have dropped so far."""
        return self.core.n_skipped

    # -- reduced gradients -------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """The 2-norm of all reduced gradients together, as they are now: a scalar tensor, equal on
        all ranks. Of 16-bit gradients it is taken in float32, or wider. Raises FastcommError for
        gradients that nothing has reduced.

        Does not synchronise with the device: over NCCL it is one pass over each bucket, as
        GradScaler and others change gradients unseen. Over shared memory, from the round after the
        first call on, it comes out of the reduction, unless gradients were written since; writes
        past torch (.data, NumPy) are noticed if they change all of a gradient.
        """
        self.core.require_all_reduced()
        return statistics.norm(self.core.buckets, self.core.comm)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before,
        as torch.nn.utils.clip_grad_norm_. Raises as grad_norm().

        Every rank calls it, with the same number, or none: where ranks differ, the next reduction
        raises MismatchError; over NCCL one within seconds.
        """
        if not max_norm > 0:  # NaN is none
            raise ValueError(f"max_norm must be positive; got {max_norm}")
        core = self.core
        core.require_all_reduced()
        if math.isfinite(max_norm) and not core.skipped and not core.steps_alone:
            core.steps.record += zlib.crc32(f"clip {float(max_norm)}".encode())
        return statistics.clip_(core.buckets, max_norm, core.comm)

    def nonfinite_count(self) -> Tensor:
        """How many elements of the reduced gradients are infinite or NaN: an int64 scalar tensor,
        equal on all ranks. Of a complex element, each part counts. Raises as grad_norm().
        """
        self.core.require_all_reduced()
        return statistics.nonfinite_count(self.core.buckets, self.core.comm)

    def sync_buffers(self, src: int = 0) -> None:
        """Copies rank `src`'s buffers (batch-norm statistics) to the others. Collective. Raises
        MismatchError, on every rank, naming a buffer of which the ranks have not all the same
        shape and dtype. Waits for the device.
        """
        buffers = validation.named_buffers(self.core.model())
        validation.copy_from(self.core.comm, src, buffers, "sync_buffers()")

    def check_in_sync(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares the bits of all parameters and buffers over the ranks, and of an optimizer's
        state and options if it is given. Collective. Raises MismatchError, on every rank, naming
        the first that differs and the ranks. Waits for the device.
        """
        core = self.core
        if core.local_steps is not None:
            with validation.agreeing(core.comm, validation.CHECK_IN_SYNC):
                core.local_steps.refuse_unsynced()
        kind = type(optimizer).__qualname__
        if core.sharded_by is not None:
            kind = core.sharded_by.described(optimizer)
        validation.check_model_in_sync(core.comm, core.model(), optimizer, kind)
        if core.sharded_by is not None:
            core.sharded_by.compare_state(optimizer)

    # -- compiling and watching --------------------------------------------------------------------

    def compile(self, model: nn.Module, **options: Any) -> Any:
        """torch.compile(model, **options), in pieces that end where this reducer's buckets are
        full, so that backward and communication overlap: one graph would give all gradients at its
        end. Pieces are compiled in the next forward, and again when the buckets have changed.

        model: the attached module, a part of it, or a module that holds it. May be compiled before
            attach(); forwards before attach() are not cut.
        options: those of torch.compile.

        Returns what torch.compile returns. Raises TypeError for anything but a module, ValueError
        for one that is compiled already, FastcommError where torch lacks what this needs.
        """
        from fastcomm.reducer.features.compiled import Compiled

        return Compiled(self.core, model, options).module

    def timeline(self, *, steps: int | None = None) -> Timeline:
        """This reducer's Timeline, which records from the first call on: when gradients were ready
        and buckets reduced, and how long forward, backward and the optimizer took.

        steps: how many of the newest are kept; None means 100, or as many as at the first call.
        Raises ValueError when a later call asks for another number.
        """
        core = self.core
        if core.timeline is None:
            core.timeline = Timeline(core, 100 if steps is None else steps)
            if core.buckets:
                core.timeline.follow(core.buckets, core.find_model())
            core.timeline.start()
        core.timeline.must_keep(steps)
        return core.timeline

    def stragglers(self) -> list[Straggler]:
        """The ranks that the others have waited for in the newest steps, what costs most first:
        each with the phase in which it was late, and its cost. Equal on all ranks. Empty where none
        is late by 5% of a step. Not collective.

        The ranks tell each other about every 2 s, after a round. From the first call on the forward
        of the model is watched, by two hooks on it, which tells it from the data; call it on every
        rank. Rank 0 warns by itself, by logging, of a rank that costs all ranks a tenth of their
        time, three times in a row. Over NCCL it is the device's time of 16 rounds; nothing is said
        once a CUDA graph was captured.
        """
        self.core.stragglers.watch(self.core.model())
        return list(self.core.stragglers.newest)
