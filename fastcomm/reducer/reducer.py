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
    from fastcomm.reducer.features.virtual import VirtualStep
    from fastcomm.reducer.features.virtual_loader import VirtualLoader

T = TypeVar("T")


class Reducer(ProcessBound):
    """Reduces gradients over all ranks during backward.

    comm: the communicator. Without it the reducer calls fastcomm.init().
    bucket_cap_mb: the size of a bucket in MiB. The first bucket is closed at 1 MiB at the latest,
        so that communication starts early. None: 25, and 10 between hosts over the CPU. "auto": the
        ranks measure a few sizes in the first steps, and keep None's unless another size is better.
    op: "mean", "sum" or another op of the communicator. It reduces everything that .grad holds. If
        op is not "mean", clear the gradients before every backward that is reduced; otherwise
        gradients that were reduced before are reduced again.
    wire_dtype: the dtype in which gradients travel; .grad keeps its dtype. torch.bfloat16 and
        torch.float16. Over NCCL also torch.float8_e4m3fn, in which infinities become 448, and
        torch.float8_e5m2. With a scale for every 256 elements torch.int8 over NCCL and between
        hosts, and torch.float8_e4m3fn between hosts.
    error_feedback: between hosts, add to the next round what wire_dtype rounded off in this one.
    streams: over NCCL, how many communicators, each with its stream, take turns with the buckets.
        No effect on the CPU.
    overlap: launch each bucket when it is full. False launches all of them at the end of backward:
        for models whose parameters get several gradients in one backward (reentrant checkpointing
        of shared layers).
    skip_nonfinite: if the reduced gradients have infinities or NaNs, all ranks skip the step, as
        after skip_step(). Rank 0 logs which rank's parameters had them. Over NCCL the end of
        backward then waits for the device.
    sparse_parameters: names of parameters whose gradients may be sparse. The weights of
        nn.Embedding and nn.EmbeddingBag with sparse=True are found without it. Rows of all ranks
        are gathered at the end of backward; there the host waits for the ranks' numbers of rows.
    audit: every `audit` rounds compare the bits of all trainable parameters over the ranks, before
        the gradients are used. MismatchError, on every rank, names the parameter and the rank that
        differs. Costs one pass over the parameters; over NCCL the host waits. None: never.
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
        """The communicator. After rebuild() and refresh() it is the new one."""
        return self.core.comm

    @property
    def n_rounds(self) -> int:
        """How many reductions have succeeded; equal on all ranks."""
        return self.core.n_rounds

    @property
    def data_exhausted(self) -> bool:
        """Whether this rank's data has ended, in the current or the last join()."""
        return self.core.data_exhausted

    # -- attaching ---------------------------------------------------------------------------------

    def attach(self, model: nn.Module | Iterable[tuple[str, Parameter]]) -> Reducer:
        """Reduces the gradients of `model` (a module, or named parameters) from now on. Collective:
        every rank calls it. Returns self.

        Checks that the reducers' options, and name, shape, dtype, strides and requires_grad of all
        parameters, are equal on all ranks. Then copies rank 0's parameters and buffers to the other
        ranks. Attach after you moved, copied or compiled the model, before or after you make the
        optimizer.

        Raises MismatchError on every rank, naming the first difference. Raises ValueError if there
        is nothing to train, if the model is on another device than the communicator or is attached
        already, and if a variable of yours refers to a gradient, which the reducer would replace.
        """
        self.core.attach(model_of(model))
        return self

    def detach(self) -> None:
        """Ends the reduction of this model. Gradients keep their values. A ShardedOptimizer cannot
        step any more. Raises FastcommError inside a backward.
        """
        core = self.core
        core.refuse_inside_backward("detach()")
        core.end_local_steps()
        for bucket in core.buckets:
            bucket.gradients.forget()  # they are the user's
        core.release()
        core.remove(core.sharded_by)

    def refresh(self) -> None:
        """Call it, on every rank, after you unfroze, added or removed parameters. It plans new
        buckets and copies rank 0's values. If you replaced parameters, make a new optimizer: the
        old one cannot step any more.

        After comm.rebuild() the reducer continues with the remaining ranks: it drops gradients and
        copies the values of a rank that made the most steps. New processes call attach() instead.
        If ranks made different numbers of steps, call catch_up() before an optimizer steps. Raises
        ValueError for a reducer with a ShardedOptimizer, LocalSGD or DiLoCo, and inside join().
        Raises FastcommError, on every rank, if the ranks that made the most steps are lost.

        Raises as attach(); then every backward raises FastcommError until refresh() succeeds.
        Raises FastcommError inside a backward.
        """
        self.core.refresh()

    # -- one round ---------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Ends the round: launches what is left and waits, so that every gradient is reduced. Does
        nothing if no round is open.

        The end of backward calls it, and so does every step of a torch.optim optimizer that holds
        parameters of this model. Raises FastcommError if the gradients are of no use, because a
        rank was lost or its backward raised, and inside a backward, where gradients are missing.

        If a signal handler raises here (Ctrl-C) after all buckets were launched, the exception
        comes when the round has ended, so that this rank has the gradients that the others have. A
        second exception aborts the communicator.
        """
        self.core.require_model()
        self.core.synchronize()

    def reduce(self) -> None:
        """Reduces what .grad holds now. Collective: every rank calls it.

        For gradients that no backward of this model computed: per-sample gradients by torch.func,
        evolution strategies. A parameter without a gradient here counts as zero, and gets the mean
        if another rank has a gradient. Raises as synchronize().
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
        """Backwards inside the block accumulate gradients on this rank only. The next backward
        outside reduces the sum. Every rank must use it for the same backwards.
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
        """Sets what this rank's gradients count in the next reduction: sum(w g) / sum(w) over the
        ranks. If weights are numbers of tokens, and losses are means over tokens, the result is the
        gradient of one process on all data. Call it on every rank or on none: otherwise the ranks
        raise MismatchError.

        weight: a number, or a tensor with one, for which the host waits. 0: this rank has no data,
            and even its NaNs are ignored. If all weights are 0, gradients are None.
        of: "sum" if losses are sums over the data: sum(g) / sum(w).

        Holds for one reduction: one backward outside no_sync() and those inside before it. After
        that all ranks count the same until the next call. If you accumulate in no_sync(), call it
        before the backward of each batch: each batch counts with its weight. After zero_grad() the
        next call starts again.

        Raises on this rank only: ValueError for a negative number, infinity and NaN, and for
        reducers with error_feedback or another op than "mean"; TypeError; FastcommError inside a
        backward, for gradients accumulated without a weight, and for gradients that an earlier
        reduction has left in .grad: call zero_grad() first.
        """
        from fastcomm.reducer.features.weights import Weighting

        core = self.core
        model = core.model()
        core.refuse_inside_backward("set_weight()")
        core.refuse_local_steps("set_weight()")
        check(Feature.WEIGHTS, core.features())
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
        """For ranks with different numbers of batches. Every rank enters the block, which holds for
        all reducers of the communicator. A rank whose data has ended takes part in the reductions
        of the other ranks, without data, until all are done. Means are over the ranks with data.

            with reducer.join(loader, state=[optimizer]) as batches:
                for batch in batches:
                    ...

        batches: the batches of this rank. None: put the block around any loop; the data of this
            rank has ended when the block ends.
        state: optimizers, schedulers and so on. Ranks that ended earlier load those of the others.

        At the end all ranks have the parameters and buffers of a rank that made the most steps. If
        some ranks ended earlier, gradients are None. An exception that leaves the block aborts the
        communicator.

        Raises ValueError for what does not go with it: docs/compatibility.md lists that;
        TypeError for a state without state_dict() and load_state_dict(). At the end of the block
        raises MismatchError if ranks pass different states, and FastcommError for gradients
        accumulated under no_sync() that were not reduced.
        """
        from fastcomm.reducer.features.join import Join

        return Join(self.core, batches, state)

    def elastic(self, batches: Iterable[T], *, state: Iterable[Stateful] = ()) -> Iterator[T]:
        """For a loop that continues when ranks are lost, and in which new processes take their
        place. Every rank runs the loop. It holds for all reducers of the communicator.

            for batch in reducer.elastic(loader, state=[optimizer]):
                ...

        If a rank is lost or abandons a step, all ranks skip the step: gradients are None,
        optimizers change nothing, and `skipped` is True. At the next batch the remaining ranks
        form a new communicator, reducer.comm, and all get the state of a rank that made the most
        steps. The batches of a step that no rank has made come again; with several models, only if
        none was stepped.

        state: everything that changes from step to step, such as optimizers and schedulers. Ranks
            that are behind load it.

        A process that replaces a lost one runs the same script, and joins before the next batch.
        The loop ends on all ranks as soon as one rank has no batch left.

        Raises ValueError for reducers with a ShardedOptimizer, LocalSGD or DiLoCo, and inside
        join(); TypeError for a state without state_dict() and load_state_dict(); FastcommError for
        ranks of a torch.distributed group, and inside another such loop. In the loop raises
        FastcommError if an optimizer has state that was not passed; as comm.rebuild() and
        refresh().
        """
        from fastcomm.reducer.features.elastic import elastic

        return elastic(self.core, list(state)).loop(iter(batches))

    def virtual(
        self,
        loader: VirtualLoader,
        *,
        buffers: Literal["mean", "first"] = "mean",
        state: Iterable[Stateful] | None = None,
    ) -> Iterator[VirtualStep]:
        """For a training whose steps have the same bits on any number of ranks. Goes through what
        is left of the loader's epoch. Every rank goes through it.

            for step in reducer.virtual(loader):
                for batch in step:
                    loss_of(model, batch).backward()
                optimizer.step()

        A step has loader.virtual_ranks microbatches, of which each rank gets its part. Each begins
        with .grad None, the buffers of the step's beginning, and generators seeded by its step and
        number. Make one backward for each, and others before it in no_sync(). Its gradients are
        added by a tree that is the same on any number of ranks. The backward of a rank's last
        microbatch reduces the sums. Clip and step after the loop over the step.

        buffers: after a step, those that a microbatch has changed are the mean over all, or those
            of the first one.
        state: everything that changes from step to step, such as optimizers and schedulers. With
            it the loop continues when ranks are lost, and with processes that take their place, as
            elastic() does: the lost step begins again, shared out among the ranks there are, and
            has the bits that it would have had. Processes that come call init(), attach() and
            virtual().

        The bits depend on the program, data, seed, number of virtual ranks, torch build, kind of
        processor and number of threads. loader.state_dict() keeps them in a checkpoint. The logger
        "fastcomm.virtual" tells of each step, at level DEBUG.

        If the loop over a step is left before its last backward ends, by an exception or a break,
        the other ranks raise AbandonedError, or begin the step again if they have given a state;
        without one the step begins again with the next call of virtual(). What comes later may
        not stop the others from making the step: load a checkpoint then.

        Raises ValueError for what does not go with it: docs/compatibility.md lists that;
        FastcommError for more than 2 ranks over NCCL, with gradients of 16 bits, or on hosts that
        have not 1, 2, 4, 8, ... ranks each, numbered host by host, for backwards outside a step
        and a second one in the last microbatch, for create_graph=True, and for optimizers that step
        inside a step's loop; MismatchError, on every rank, where ranks have
        different loaders, threads or kernels; with a state as elastic().
        """
        from fastcomm.reducer.features.virtual import Virtual

        return Virtual(self.core, self.reduce, loader, buffers, state).steps()

    # -- steps that the ranks drop -----------------------------------------------------------------

    def skip_step(self) -> None:
        """Makes all ranks skip this step, because of a bad batch or a NaN on this rank. Call it on
        this rank only, before the backward that is reduced, inside it, or instead of it.

        After the reduction gradients are None on all ranks, optimizers leave parameters and state
        as they are, and `skipped` is True. A rank that makes no backward takes part in its
        optimizer's step or in synchronize(), whichever comes first.

        Raises FastcommError if the reduction is over already, because other ranks may have stepped,
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
        """Catches exceptions of these types in the block and makes all ranks skip the step, as
        skip_step() does. Errors of fastcomm are not caught.

            with reducer.skip_step_on(torch.OutOfMemoryError):
                loss_of(model, batch).backward()

        If a backward raised, this rank takes part in the rest of the reduction. Other exceptions,
        and those outside the block, abandon the round as usual.
        """
        if not exceptions:
            raise TypeError("skip_step_on() takes the types of exceptions; got none")
        self.core.require_model()
        skipping = self.core.skipping()
        skipping.refuse_vote()
        return skipping.skip_on(exceptions, self.skip_step, self.synchronize)

    @property
    def skipped(self) -> bool:
        """Whether all ranks skip the last step: see skip_step() and skip_nonfinite. For schedulers.
        True once the ranks have decided, or this rank has called skip_step(), until the next
        reduction begins, detach() or refresh().
        """
        return self.core.skipped

    @property
    def n_skipped(self) -> int:
        """How many steps all ranks have skipped so far."""
        return self.core.n_skipped

    # -- reduced gradients -------------------------------------------------------------------------

    def grad_norm(self) -> Tensor:
        """Returns the 2-norm of all reduced gradients together: a scalar tensor, equal on all
        ranks, computed in float32 or wider. Raises FastcommError for gradients that were not
        reduced.

        Does not wait for the device. Writes to gradients that torch does not see (.data, NumPy) are
        noticed if they change all of a gradient.
        """
        self.core.require_all_reduced()
        return statistics.norm(self.core.buckets, self.core.comm)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before
        that, as torch.nn.utils.clip_grad_norm_ does. Raises as grad_norm().

        Every rank calls it with the same number, or none does. If ranks differ, the next reduction
        raises MismatchError; over NCCL a reduction within seconds.
        """
        if not max_norm > 0:  # NaN is none
            raise ValueError(f"max_norm must be positive; got {max_norm}")
        core = self.core
        core.require_all_reduced()
        if math.isfinite(max_norm) and not core.skipped and not core.steps_alone:
            core.steps.record += zlib.crc32(f"clip {float(max_norm)}".encode())
        return statistics.clip_(core.buckets, max_norm, core.comm)

    def nonfinite_count(self) -> Tensor:
        """Returns how many elements of the reduced gradients are infinite or NaN: an int64 scalar
        tensor, equal on all ranks. Parts of complex elements count. Raises as grad_norm().
        """
        self.core.require_all_reduced()
        return statistics.nonfinite_count(self.core.buckets, self.core.comm)

    def sync_buffers(self, src: int = 0) -> None:
        """Copies rank `src`'s buffers (batch-norm statistics) to the others. Collective. Raises
        MismatchError, on every rank, if the shape or dtype of a buffer differs between ranks; it
        names the buffer. Waits for the device.
        """
        buffers = validation.named_buffers(self.core.model())
        validation.copy_from(self.core.comm, src, buffers, "sync_buffers()")

    def check_in_sync(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares the bits of all parameters and buffers over the ranks, and those of the state
        and options of `optimizer`. Collective. Raises MismatchError, on every rank, naming the
        first difference and the ranks. Waits for the device.
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
        """Compiles as torch.compile(model, **options) does, but in pieces that end where a bucket
        is full, so that backward and communication overlap. One graph would give all gradients at
        its end. Compiles in the next forward, and again after the buckets have changed.

        model: the attached module, a part of it, or a module that contains it. You may call this
            before attach(); forwards before attach() are not cut.
        options: those of torch.compile.

        Returns what torch.compile returns. Raises TypeError for anything but a module, ValueError
        for a compiled module, FastcommError if this torch lacks what compile() needs.
        """
        from fastcomm.reducer.features.compiled import Compiled

        return Compiled(self.core, model, options).module

    def timeline(self, *, steps: int | None = None) -> Timeline:
        """Returns this reducer's Timeline. It records from the first call on when gradients were
        ready and buckets reduced, and how long forward, backward and the optimizer took.

        steps: how many of the newest steps it keeps. None: 100, or the number of the first call.
        Raises ValueError if a later call asks for another number.
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
        """Returns the ranks that the others waited for in the newest steps, the most costly first:
        each with the phase in which it was late, and the cost. Equal on all ranks. Empty if no rank
        is late by 5% of a step. Not collective.

        The ranks exchange times about every 2 s. Call it on every rank: from the first call on two
        hooks on the model tell forward from loading data.
        """
        self.core.stragglers.watch(self.core.model())
        return list(self.core.stragglers.newest)
