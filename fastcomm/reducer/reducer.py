"""Reducer: makes loss.backward() reduce the gradients of a model over all ranks. Changes no module:
it lives in hooks on the parameters.

Attaches and detaches the model, opens rounds and hands them what autograd tells, and decides
whether gradients are reduced when an optimizer steps or a norm is asked for. What happens in a
round is round.py; what features do beside it are extensions. The method is that of "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", section 3.2; where it departs from
DistributedDataParallel, the departure is said in a comment.
"""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.autograd_stack import enclosing_backward
from fastcomm.comm.collective import Op, canonical_op, unpacked
from fastcomm.comm.communicator import Communicator, ProcessBound
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.insight.recorder import BACKWARD, OPTIMIZER, OTHER, WAITING, Phases
from fastcomm.insight.stragglers import Straggler, Stragglers
from fastcomm.insight.timeline import Timeline
from fastcomm.launching.rendezvous import init
from fastcomm.reducer import statistics, validation
from fastcomm.reducer.autograd import (
    call_when_outer_goes_on,
    free_failed_backwards,
    refuse_compiled_autograd,
)
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import LocalSteps, RoundExtension
from fastcomm.reducer.features.audit import Audit
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.features.compiled import Compiled
from fastcomm.reducer.features.defer_signals import all_or_none
from fastcomm.reducer.features.elastic import Behind, Elastic, compare_ranks, elastic
from fastcomm.reducer.features.join import Join, T
from fastcomm.reducer.features.observer import RoundObserver, is_profiled
from fastcomm.reducer.features.progress import Stateful
from fastcomm.reducer.features.shards import ShardedBy, Sharding
from fastcomm.reducer.features.skip import Skipping
from fastcomm.reducer.features.weights import Weighting
from fastcomm.reducer.guards import Guards
from fastcomm.reducer.hooks import EndOfBackward, ReducerFlags
from fastcomm.reducer.optimizer_hooks import (
    SteppedSlots,
    StepRecord,
    allow_steps,
    expect_attach,
    refuse_replaced,
    refuse_step,
    slots_in,
    unreduced,
    was_attached,
    watch_steps,
)
from fastcomm.reducer.options import Options, describe
from fastcomm.reducer.owners import (
    is_owned,
    let_go,
    next_number,
    take_over,
)
from fastcomm.reducer.plan import Planner, make_buckets
from fastcomm.reducer.round import Round, State
from fastcomm.reducer.validation import (
    Model,
    NamedParameters,
    model_of,
    named_parameters,
    reference_to,
)

E = TypeVar("E", bound=RoundExtension)
_NO_MODEL = "the reducer has no model: attach(model) first, on every rank"
_FAILED_REFRESH = "refresh() failed: call it again, on every rank"


class Reducer(ProcessBound, ReducerFlags):
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

    To be read:

    comm: the communicator; once refresh() has followed a rebuild(), the new one.
    n_rounds: how many reductions have ended as they should; equal on all ranks.
    data_exhausted: whether this rank's data has ended, in the join() under way or the last one.
    """

    instead = ", and attach another one to the copy, on every rank"

    comm: Transport  # to users, a Communicator
    n_rounds: int
    data_exhausted: bool

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
        self.op = canonical_op(op)
        self.options = Options(
            bucket_cap_mb,
            self.op,
            wire_dtype,
            streams,
            error_feedback,
            skip_nonfinite,
            tuple(sparse_parameters),
            audit,
        )
        self._stragglers = Stragglers()
        self.phases: Phases = self._stragglers.phases
        self.extensions: list[RoundExtension] = []
        self.round: Round | None = None  # the open one: a gradient is ready, or reduce() runs
        self._use(self.options.checked(init() if comm is ... else comm))
        self.overlap = overlap
        self.n_rounds = 0
        self.data_exhausted = False
        # What follows is for the parts of fastcomm, and may change. Nothing here keeps the model
        # alive: the hooks on its parameters keep the reducer, and both go when it goes.
        self._model: Callable[[], Model | None] | None = None
        self.buckets: list[Bucket] = []
        self.number = 0  # among the reducers of the communicator
        self.steps = StepRecord()
        self.reduces_backwards = True
        # Raised where nobody could catch it; the next call raises it, when the round is over.
        self.deferred: BaseException | None = None
        self._handles: list[RemovableHandle] = []
        self._guards = Guards(weakref.WeakMethod(self.named_parameters))
        self._timeline: Timeline | None = None
        if skip_nonfinite:
            self.install(Skipping(self.comm, self.options))
        expect_attach(self)

    def _use(self, comm: Transport) -> None:
        """Reduce over this communicator, with buckets of a size for it."""
        self.comm = comm
        self.planner = Planner(self.options, comm)
        audit = self.options.audit
        self._audit = None if audit is None else Audit(comm, audit)
        self._stragglers.use(comm)

    def __repr__(self) -> str:
        return describe(self, None if self._model is None else self._model())

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
        source = model_of(model)
        free_failed_backwards()  # of a model that this one may replace
        with torch.inference_mode(False):  # in which buckets could not be made for training
            self._attach(source)
        return self

    def _attach(self, source: Model) -> None:
        named = named_parameters(source)
        model: validation.Described = []
        with validation.agreeing(self.comm, validation.ATTACH, model) as described:
            self._refuse(source, named)
            sparse = self.options.sparse_names(source, named)
            tensors = validation.named_tensors(source)
            described |= self.options.described()
            model += validation.signature(named, tensors, sparse)
        src = 0
        behind = compare_ranks(self)
        self.extensions = [one for one in self.extensions if not isinstance(one, Behind)]
        if behind is not None:
            self.install(behind)
            src, self.n_rounds = behind.src, behind.n_rounds
        validation.broadcast(self.comm, [tensor for _, tensor in tensors], src)
        # Over NCCL nobody compares, and the host would wait for the device.
        compares = not self.comm.has_streams and validation.is_arithmetic_alike(self.comm)
        self.number = next_number(self.comm)
        self.steps = StepRecord(compares)
        self.planner.begin(self.comm.world_size)
        self._stragglers.begin(self.n_rounds)
        self.hook_up(source)

    def _refuse(self, source: Model, named: NamedParameters) -> None:
        """Raises ValueError for what this rank alone can find wrong with attaching the model."""
        if self._model is not None:
            raise ValueError(
                "this reducer is attached already; detach() it first, or make one reducer for each "
                "model"
            )
        validation.refuse_model(source, named, self.comm, is_owned)
        is_sharded = self.sharding() is not None
        self.options.refuse_parameters(source, named, is_sharded=is_sharded)

    def hook_up(self, source: Model) -> None:
        """For the reducer: make the buckets, as they are planned now, and hook the parameters.
        Collective.
        """
        named = named_parameters(source)
        trainable = [(name, p) for name, p in named if p.requires_grad]
        sparse = self.options.sparse_names(source, named)
        try:
            self.buckets = make_buckets(self, trainable, sparse)
        except BaseException as error:
            # memory, for example: the other ranks are not to wait for this one
            with contextlib.suppress(FastcommError):
                self.comm.abandon()
            self.comm.standing.mark(error)
            raise
        self.steps.last = []  # by the numbers of the buckets before
        self._handles = take_over(self, self.buckets)
        if self._timeline is not None:
            self._timeline.follow(self.buckets, source)
        self._remember(source)
        self._stragglers.follow(source)
        self.comm.flight.activities[f"reducer {self.number}"] = self.phases
        self.planner.buckets_made(self)
        was_attached(self)
        allow_steps(p for _, p in named)
        watch_steps()
        try:
            # what was prepared here is ready, whatever stream the first backward runs on
            self.comm.barrier()
        except BaseException:  # another rank could not attach
            self._release()
            raise

    def _remember(self, source: Model) -> None:
        """Keep a weak reference to the model, and guard its parameters that nobody reduces."""
        self._model = reference_to(source)
        self._guards.guard(source)

    def detach(self) -> None:
        """Ends the reduction of this model. Gradients stay what they are, in memory of their
        own. A ShardedOptimizer cannot step any more. Raises FastcommError inside a backward.
        """
        self.refuse_inside_backward("detach()")
        self.end_local_steps()
        self._release()
        sharded_by = self.find(ShardedBy)
        if sharded_by is not None:
            self.remove(sharded_by)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._timeline is not None:
            self._timeline.let_go()
        self._stragglers.let_go()
        self.comm.flight.activities.pop(f"reducer {self.number}", None)
        self.planner.end_trace(self)
        for bucket in self.buckets:
            bucket.release()
        let_go(self.buckets)
        allow_steps(p for _, p in self.named_parameters())
        self._guards.remove()
        self._handles, self.buckets, self._model = [], [], None
        self.round, self.deferred = None, None
        for extension in self.extensions:
            extension.dropped()
        watch_steps()

    def attached_model(self) -> Model:
        """For the reducer: the model. Raises ValueError if there is none."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ValueError(_NO_MODEL)
        return model

    def _require_model(self) -> None:
        """Raises ValueError where none is attached. One that is gone has been."""
        if self._model is None:
            raise ValueError(_NO_MODEL)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """For the reducer: those of the model as it is now; none if it is gone."""
        model = None if self._model is None else self._model()
        return [] if model is None else named_parameters(model)

    def _agree_on_refresh(self) -> None:
        """Raises, on every rank, the reason why one of them cannot refresh. Collective."""
        with validation.agreeing(self.comm, validation.REFRESH):
            if self.awaits_round:
                raise FastcommError(
                    f"rank {self.comm.rank}: refresh() would lose a set_weight() or skip_step() "
                    "whose reduction has not come: call it before those"
                )
            self._refuse_local_steps("refresh()")
            self.attached_model()
            stepper = self.stepper()
            if stepper is not None:
                stepper.refuse_refresh()

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
        self.refuse_inside_backward("refresh()")
        successor = None if self.comm.membership is None else self.comm.membership.newest
        if successor is not None:
            self._follow(successor)
            return
        self._agree_on_refresh()
        model = self.attached_model()
        before = [pair for bucket in self.buckets for pair in bucket.named_parameters()]
        now = self.named_parameters()
        stepper = self.stepper()
        if stepper is not None:
            stepper.gather_state()
        self._release()
        refuse_replaced(before, now)
        try:
            self.attach(model)
            if stepper is not None:
                stepper.take_buckets(self.buckets)
        except BaseException:
            self.stand_still(model)
            raise

    def _follow(self, successor: Transport) -> None:
        """Reduce over the ranks that have met again. Collective: new processes call attach()."""
        model = self.attached_model()
        check(Feature.REBUILD, self.features())
        if self.round is not None:
            self.round.abort()
        self.drop_step()
        self._release()
        self._use(self.options.checked(successor))
        skipping = self.find(Skipping)
        if skipping is not None:
            skipping.use(self.comm, self.options)
        try:
            self.attach(model)
        except BaseException:
            self.stand_still(model)
            raise

    def stand_still(self, model: Model, why: str = _FAILED_REFRESH) -> None:
        """For the reducer: refuse every backward and step until refresh(). After a refresh() that
        failed, for example: without hooks a loop that survives it would train on, each rank for
        itself.
        """
        self._release()  # whatever attach() has left
        self._remember(model)
        self._guards.refusal = why
        for _, parameter in self.named_parameters():
            refuse_step(parameter, why)

    # -- features ----------------------------------------------------------------------------------

    def install(self, extension: E) -> E:
        """For the reducer: let an extension take part in the rounds, from the open one on."""
        self.extensions.append(extension)
        if self.round is not None:
            self.round.extensions.append(extension)
        return extension

    def remove(self, extension: RoundExtension) -> None:
        """For the reducer: let the extension take no part in the rounds to come."""
        self.extensions = [one for one in self.extensions if one is not extension]

    def find(self, kind: type[E]) -> E | None:
        """For the reducer: the extension of this kind that is installed; or None."""
        for extension in self.extensions:
            if isinstance(extension, kind):
                return extension
        return None

    def _skipping(self) -> Skipping:
        return self.find(Skipping) or self.install(Skipping(self.comm, self.options))

    def stepper(self) -> Any:
        """For the reducer: the ShardedOptimizer that steps the model; or None. Raises FastcommError
        if it is gone.
        """
        sharded_by = self.find(ShardedBy)
        return None if sharded_by is None else sharded_by.stepper()

    def sharding(self) -> Sharding | None:
        """For the reducer: how the model's buckets are shared out; None: not at all. Raises as
        stepper().
        """
        stepper = self.stepper()
        return None if stepper is None else stepper.sharding

    def end_local_steps(self) -> None:
        """For the reducer: let the ranks step together again, without a sync."""
        local_steps = self.find(LocalSteps)
        if local_steps is not None:
            self.remove(local_steps)
            self.steps_alone = False

    def _refuse_local_steps(self, what: str) -> None:
        local_steps = self.find(LocalSteps)
        if local_steps is not None:
            raise FastcommError(
                f"{what} was called while {type(local_steps).__name__} lets each rank step with "
                "its own gradients: call its finish() first, on every rank"
            )

    @property
    def awaits_round(self) -> bool:
        """For the reducer: whether set_weight() or skip_step() was called for a round that has not
        come.
        """
        weighting = self.find(Weighting)
        return self._votes or (weighting is not None and weighting.is_set)

    def features(self) -> dict[Feature, str]:
        """For the reducer: what this reducer is used with now, and a word for each in messages."""
        present = self.options.features()
        sparse = [name for b in self.buckets if b.waits_in_launch for name in b.names]
        sharded_by, local_steps = self.find(ShardedBy), self.find(LocalSteps)
        if sparse:
            present[Feature.SPARSE] = f"the sparse gradient of parameter {sparse[0]}"
        if sharded_by is not None and not sharded_by.is_gone:
            present[Feature.SHARDED] = Feature.SHARDED.value
        if local_steps is not None:
            present[Feature.LOCAL_STEPS] = type(local_steps).__name__
        if self.planner.is_measuring:
            present[Feature.MEASURING] = Feature.MEASURING.value
        if self.comm.open_join:
            present[Feature.JOIN] = Feature.JOIN.value
        if self.find(Elastic) or self.find(Behind):
            present[Feature.REBUILD] = "elastic()"
        return present

    # -- one round ---------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """For the reducer: the first gradient of a backward is ready: ask autograd to call back at
        the end.
        """
        refuse_compiled_autograd()
        if self.comm.standing.newest:
            self.refuse_abandoned_backward()
        # A backward that ends with an exception drops the callback uncalled; then the round must be
        # ended all the same.
        self._open().await_end_of_backward(
            EndOfBackward(self._end_of_backward, self._backward_was_dropped)
        )

    def refuse_abandoned_backward(self) -> None:
        """For the reducer: the first gradient is ready. Raise AbandonedError, and drop it, if a
        hook has abandoned the step and lets the backward go on.
        """
        error = self.comm.standing.error_in_backward()
        if error is not None:
            self.drop_step()
            raise error

    def _open(self) -> Round:
        if self.deferred is not None:
            self._raise_deferred()
        if self.round is None:
            if self._guards.refusal is not None:
                raise FastcommError(self._guards.refusal)
            opened = Round(
                self.comm,
                self.buckets,
                self.op,
                self.n_rounds + 1,
                self.steps.packed(),
                reducer=self.number,
                phases=None if self.comm.has_streams else self.phases,
                extensions=self.extensions,
                when_over=self._close_round,
                last_in_words=lambda: self.steps.last_in_words(self.comm.rank, self.buckets),
            )
            for extension in opened.extensions:
                extension.before_round(opened)
            # asked once for a round, as launches must cost nothing where nobody looks
            if self.recorder is not None or is_profiled():
                opened.observer = RoundObserver(self.recorder, self.number, opened)
            self.round = opened
            self.phases.enter(BACKWARD)
        return self.round

    def _close_round(self, over: Round) -> None:
        if over.state is State.SKIPPED:
            self._skipping()  # by which this rank tells why; it may be the first that hears of it
        for extension in over.extensions:
            extension.after_round(over)
        if over.observer is not None:
            over.observer.after_round(over)
        if over.state is not State.DROPPED:
            self.n_rounds = over.number
        self.n_unsynced = 0
        self.round = None
        self.phases.enter(OTHER)

    def drop_step(self) -> None:
        """For the reducer: drop all gradients, and what was said of the next round. An open round
        does so itself.
        """
        if self.round is None:
            for bucket in self.buckets:
                bucket.drop_gradients()
                bucket.reset()
                if bucket.shard is not None:
                    bucket.shard.drop()
            self.n_unsynced = 0
            for extension in self.extensions:
                extension.dropped()

    def _end_of_backward(self) -> None:
        ending = self.round
        if ending is not None:  # else detached in this backward
            ending.has_callback = False
        is_inside, node = enclosing_backward()
        if node is not None:
            call_when_outer_goes_on(node, self._go_on_with_outer)
        elif not is_inside or ending is None or ending.is_full:
            self._synchronize(is_between_steps=not is_inside)

    def _go_on_with_outer(self) -> None:
        """The backward around the one that has ended gives gradients to the same round."""
        if self.round is None or not self.round.has_callback:
            self.begin_round()

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
        self._require_model()
        self._synchronize(is_between_steps=False)

    def _synchronize(self, *, is_between_steps: bool) -> None:
        """is_between_steps: no other backward is under way, and no step of an optimizer."""
        if self.deferred is not None:
            self._raise_deferred()
        if self.round is None and self._votes:
            self._open().count_all()  # no backward has taken this rank's part
        ending = self.round
        if ending is None:
            try:
                self.comm.check()
            except FastcommError as error:
                if not self._outlives(error):
                    raise
            return
        if ending.has_callback:
            raise FastcommError(
                f"the gradient of parameter {self.buckets[0].names[0]} is not reduced yet: the "
                "reduction ends with backward(). Call synchronize(), and step the optimizer, after "
                "backward() and not in a hook inside it"
            )
        self.phases.enter(WAITING)
        try:
            ending.finish()
            if ending.state is not State.DROPPED:
                self._audit_and_tell()
        except BaseException as interruption:
            if ending.state in (State.SETTLED, State.SKIPPED):  # as on the other ranks
                self._confer_in_spite_of(interruption)
            raise
        if ending.state is not State.DROPPED:
            self._replan(can_replan=is_between_steps and not self.skipped)

    def _confer_in_spite_of(self, interruption: BaseException) -> None:
        """Do what the other ranks do together after the round."""
        try:
            try:
                self._audit_and_tell()
            finally:
                self._replan(can_replan=False)
        except FastcommError as trouble:
            raise interruption from trouble

    def _audit_and_tell(self) -> None:
        """Some rounds: whether the ranks still agree, and who was late. Called again, where a
        signal handler has raised, it does what is left.
        """
        if self._audit is None and self.n_rounds < self._stragglers.due_at:
            return
        steps: list[list[float]] = []
        with self._outliving():
            if self._audit is not None:
                self._audit.compare(self)
            if self.n_rounds >= self._stragglers.due_at and not self.comm.open_join:
                told = unpacked(self.steps.packed())
                with all_or_none(self.comm):
                    steps = self._stragglers.tell(self.n_rounds, *told)
            if self._audit is not None:
                self._audit.raise_trouble()
        self._stragglers.warn()
        self.steps.compare(steps, self.comm.rank, self.buckets)  # over NCCL nothing else does

    def _replan(self, *, can_replan: bool) -> None:
        """See Planner.after_round."""
        if self.planner.looks_for is not None:
            with self._outliving():
                self.planner.after_round(self, can_replan)

    def forget_phases(self) -> None:
        """For the reducer: on all ranks, the time that has gone by was not that of steps."""
        self._stragglers.begin(self.n_rounds)

    @contextlib.contextmanager
    def _outliving(self) -> Iterator[None]:
        """Around what the ranks do together after a round."""
        try:
            yield
        except FastcommError as error:
            if not self._outlives(error):
                raise
            # the round is over: the optimizer steps with its gradients, with buckets or without
            allow_steps(p for _, p in self.named_parameters())
            watch_steps()

    def _outlives(self, error: FastcommError) -> bool:
        """Whether the training goes on though the communicator has failed after a round: who has
        its gradients steps with them.
        """
        has_failed = self.comm.failure is not None
        return has_failed and any(extension.outlives(error) for extension in self.extensions)

    def _backward_was_dropped(self) -> None:
        """Called by autograd while an exception propagates, where nothing may be raised: the next
        call raises what goes wrong here.
        """
        try:
            if self.round is not None:
                self.round.fail()
        except BaseException as error:
            self.deferred = error

    def _raise_deferred(self) -> NoReturn:
        error, self.deferred = self.deferred, None
        assert error is not None  # for the type checker
        raise error

    def refuse_inside_backward(self, what: str) -> None:
        """For the reducer: raise FastcommError inside a backward. what: what it refuses."""
        if self.round is not None and self.round.has_callback:
            raise FastcommError(
                f"{what} was called inside backward(), which reduces the gradients itself: call "
                "it afterwards"
            )

    def reduce(self) -> None:
        """Gathers and reduces what stands in .grad now. Collective: every rank calls it.

        For gradients that no backward of this model has made: per-sample gradients by torch.func,
        evolution strategies. A parameter without a gradient here counts as zero, and receives the
        mean if another rank has one. Raises as synchronize().
        """
        self.attached_model()
        self.refuse_inside_backward("reduce()")
        self._refuse_local_steps("reduce()")
        if self.round is not None:
            self.synchronize()
        stranger = self._guards.find_gradient()
        if stranger is not None:
            self._open().abort()  # the other ranks hear of it
            raise FastcommError(unreduced(stranger))
        self._open().count_all()
        self._synchronize(is_between_steps=True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients on this rank only; the next one outside reduces the
        sum. Decided at backward. Use it on every rank alike.
        """
        self._require_model()
        before, self.reduces_backwards = self.reduces_backwards, False
        try:
            yield
        finally:
            self.reduces_backwards = before

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
        model = self.attached_model()
        self.refuse_inside_backward("set_weight()")
        self._refuse_local_steps("set_weight()")
        check(Feature.WEIGHTS, self.options.features())
        weighting = self.find(Weighting) or self.install(Weighting())
        weighting.follow(model)
        weighting.set(weight, of, self.buckets, self.n_unsynced)

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
        return Join(self, batches, state)

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
        return elastic(self, iter(batches), list(state))

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
        self.attached_model()
        self._refuse_local_steps("skip_step()")
        if self.deferred is not None:
            self._raise_deferred()
        skipping = self._skipping()
        self.comm.refuse_vote(self.options.op, self.options.skip_nonfinite)
        self._refuse_late_vote()
        skipping.vote = skipping.vote or "called skip_step()"
        if self.round is not None:
            self.round.vote()

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
        self._require_model()
        skipping = self._skipping()
        self.comm.refuse_vote(self.options.op, self.options.skip_nonfinite)
        return skipping.skip_on(exceptions, self.skip_step, self.synchronize)

    @property
    def _votes(self) -> bool:
        skipping = self.find(Skipping)
        return skipping is not None and skipping.vote is not None

    @property
    def skipped(self) -> bool:
        """Whether all ranks drop the last step: see skip_step() and skip_nonfinite. For schedulers.
        True from the verdict, or from this rank's vote, until the next reduction begins, detach()
        or refresh().
        """
        if not self.extensions:
            return False
        elastic, skipping = self.find(Elastic), self.find(Skipping)
        if elastic is not None and elastic.outlived is not None:
            return True
        if skipping is None or self.steps_alone:
            return False
        return skipping.is_skipped or skipping.vote is not None

    @property
    def n_skipped(self) -> int:
        """How many steps all ranks have dropped so far."""
        skipping = self.find(Skipping)
        return 0 if skipping is None else skipping.n_skipped

    def _refuse_late_vote(self) -> None:
        """Raises FastcommError if other ranks may step already."""
        if self.round is None:
            # once there are steps, a parameter without any has no optimizer
            is_late = any(bucket.has_unstepped(not self.steps.n) for bucket in self.buckets)
        else:
            is_late = self.round.is_committed
        if is_late:
            raise FastcommError(
                f"skip_step() came too late on rank {self.comm.rank}: the gradients are reduced, "
                "and other ranks may step with them. Call it before backward() ends; to drop what "
                "is reduced, by a number that is equal on all ranks (grad_norm()), leave out the "
                "optimizer's step on every rank, and call zero_grad(). If they are left from the "
                "backward of another model's loss (a GAN's generator), call zero_grad() first, and "
                "skip_step() then"
            )

    # -- reduced gradients -------------------------------------------------------------------------

    def slots_of(self, parameters: Sequence[Tensor]) -> list[SteppedSlots]:
        """For optimizers' hooks: the parameters' slots in each bucket."""
        return slots_in(self.buckets, parameters)

    def before_step(
        self, optimizer: Optimizer, stepped: list[SteppedSlots], since: int | None
    ) -> None:
        """For optimizers' hooks: leaves the gradients in these slots reduced, or raises. since:
        n_rounds before this optimizer's last step, if it has made one.
        """
        for extension in self.extensions:
            extension.before_step(optimizer)
        self._synchronize(is_between_steps=False)
        if not self.skipped:
            self._require_reduced(((self.buckets[n], slots) for n, slots in stepped), since)
        if self.recorder is not None:
            self.recorder.begin_optimizer()
        self.phases.enter(OPTIMIZER)

    def after_step(self, stepped: list[SteppedSlots] | None) -> None:
        """For optimizers' hooks: notes a step of these slots; None: of one that was left out."""
        self.phases.enter(OTHER)
        if self.recorder is not None:
            self.recorder.end_optimizer()
        if stepped is None or self.skipped:
            return  # nor does a rank count it that leaves out its optimizer's step
        for extension in self.extensions:
            extension.after_step(stepped)
        if self.steps_alone:
            return
        self.steps.note(stepped, self.buckets)
        compares = self.steps.compares and self.find(ShardedBy) is None
        for number, slots in stepped:
            self.buckets[number].gradient_state.note_stepped(slots, self.n_rounds)
            if compares and slots:
                self.buckets[number].note_step(self.n_rounds)

    def _require_reduced(
        self, chosen: Iterable[tuple[Bucket, list[int] | None]], since: int | None = None
    ) -> None:
        """Raises FastcommError naming a gradient in these slots (None: all of a bucket's) that no
        round has reduced: the one place that decides it.
        """
        if self.steps_alone:
            return  # each rank uses its own
        for bucket, slots in chosen:
            bucket.refuse_unreduced(slots, since)

    def _require_all_reduced(self) -> None:
        self.attached_model()
        if self._guards.refusal is not None:
            raise FastcommError(self._guards.refusal)
        self.synchronize()
        self._require_reduced((bucket, None) for bucket in self.buckets)

    def grad_norm(self) -> Tensor:
        """The 2-norm of all reduced gradients together, as they are now: a scalar tensor, equal on
        all ranks. Of 16-bit gradients it is taken in float32, or wider. Raises FastcommError for
        gradients that nothing has reduced.

        Does not synchronise with the device: over NCCL it is one pass over each bucket, as
        GradScaler and others change gradients unseen. Over shared memory, from the round after the
        first call on, it comes out of the reduction, unless gradients were written since; writes
        past torch (.data, NumPy) are noticed if they change all of a gradient.
        """
        self._require_all_reduced()
        return statistics.norm(self.buckets, self.comm)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before,
        as torch.nn.utils.clip_grad_norm_. Raises as grad_norm().

        Every rank calls it, with the same number, or none: where ranks differ, the next reduction
        raises MismatchError; over NCCL one within seconds.
        """
        if not max_norm > 0:  # NaN is none
            raise ValueError(f"max_norm must be positive; got {max_norm}")
        self._require_all_reduced()
        if math.isfinite(max_norm) and not self.skipped and not self.steps_alone:
            self.steps.record += zlib.crc32(f"clip {float(max_norm)}".encode())
        return statistics.clip_(self.buckets, max_norm, self.comm)

    def nonfinite_count(self) -> Tensor:
        """How many elements of the reduced gradients are infinite or NaN: an int64 scalar tensor,
        equal on all ranks. Of a complex element, each part counts. Raises as grad_norm().
        """
        self._require_all_reduced()
        return statistics.nonfinite_count(self.buckets, self.comm)

    def sync_buffers(self, src: int = 0) -> None:
        """Copies rank `src`'s buffers (batch-norm statistics) to the others. Collective. Raises
        MismatchError, on every rank, naming a buffer of which the ranks have not all the same
        shape and dtype. Waits for the device.
        """
        buffers = validation.named_buffers(self.attached_model())
        validation.copy_from(self.comm, src, buffers, "sync_buffers()")

    def check_in_sync(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares the bits of all parameters and buffers over the ranks, and of an optimizer's
        state and options if it is given. Collective. Raises MismatchError, on every rank, naming
        the first that differs and the ranks. Waits for the device.
        """
        local_steps, sharded_by = self.find(LocalSteps), self.find(ShardedBy)
        if local_steps is not None:
            with validation.agreeing(self.comm, validation.CHECK_IN_SYNC):
                if not local_steps.is_agreed:
                    raise FastcommError(
                        "it has made steps of its own since the ranks synced: call sync() of "
                        f"{type(local_steps).__name__} before you compare the ranks"
                    )
        kind = type(optimizer).__qualname__
        if sharded_by is not None:
            kind = sharded_by.described(optimizer)
        validation.check_model_in_sync(self.comm, self.attached_model(), optimizer, kind)
        if sharded_by is not None:
            sharded_by.compare_state(optimizer)

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
                self._timeline.follow(self.buckets, self._model())
            self._timeline.start()
        self._timeline.must_keep(steps)
        return self._timeline

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
        self._stragglers.watch(self.attached_model())
        return list(self._stragglers.newest)
