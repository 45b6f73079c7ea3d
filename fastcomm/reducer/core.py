"""Core: what a Reducer is inside. Its state, and what its parts, its features and the hooks around
optimizers' steps call.

Attaches and detaches the model, opens a round at the first gradient of a backward, ends it, and
decides whether gradients are reduced when an optimizer steps or a norm is asked for. What happens
in a round is round.py; what features do beside it are extensions. The method is that of "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", section 3.2; where it departs from
DistributedDataParallel, the departure is said in a comment.

The hooks on the model's parameters keep the core alive, and it goes with them. Nothing here keeps
the model alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.autograd_stack import enclosing_backward
from fastcomm.comm.collective import unpacked
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.insight.recorder import BACKWARD, OPTIMIZER, OTHER, WAITING, Phases
from fastcomm.insight.stragglers import Stragglers
from fastcomm.reducer import validation
from fastcomm.reducer.autograd import (
    call_when_outer_goes_on,
    free_failed_backwards,
    refuse_compiled_autograd,
)
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.defer_signals import all_or_none
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.guards import Guards
from fastcomm.reducer.hooks import CoreFlags, EndOfBackward
from fastcomm.reducer.observer import RoundObserver, is_profiled
from fastcomm.reducer.optimizer_hooks import (
    SteppedSlots,
    StepRecord,
    allow_steps,
    refuse_replaced,
    refuse_step,
    slots_in,
    was_attached,
    watch_steps,
)
from fastcomm.reducer.options import Options
from fastcomm.reducer.owners import disown, is_owned, next_number, take_over
from fastcomm.reducer.plan import Planner, make_buckets
from fastcomm.reducer.round import Round, State
from fastcomm.reducer.validation import Model, NamedParameters, named_parameters, reference_to

if TYPE_CHECKING:
    from fastcomm.insight.timeline import Timeline
    from fastcomm.reducer.features.audit import Audit
    from fastcomm.reducer.features.shards import Sharding
    from fastcomm.reducer.features.skip import Skipping

E = TypeVar("E", bound=RoundExtension)
_NO_MODEL = "the reducer has no model: attach(model) first, on every rank"
_FAILED_REFRESH = "refresh() failed: call it again, on every rank"


class Core(CoreFlags):
    """One reducer.

    round: the open one: a gradient is ready, or reduce() runs. Else None.
    n_rounds: how many reductions have ended as they should; equal on all ranks.
    number: among the reducers of the communicator.
    extensions: of the features that are used, in the order in which they came.
    error_in_backward: what was raised where nobody could catch it. The next call raises it.
    """

    def __init__(self, comm: Transport, options: Options, *, overlap: bool) -> None:
        self.options, self.overlap = options, overlap
        self.stragglers = Stragglers()
        self.phases: Phases = self.stragglers.phases
        self.extensions: list[RoundExtension] = []
        self.round: Round | None = None
        self.use(comm)
        self.n_rounds = 0
        self.data_exhausted = False
        self.buckets: list[Bucket] = []
        self.number = 0
        self.steps = StepRecord()
        self.reduces_backwards = True
        self.error_in_backward: BaseException | None = None
        self.guards = Guards(weakref.WeakMethod(self.named_parameters))
        self.timeline: Timeline | None = None
        self._model: Callable[[], Model | None] | None = None
        self._handles: list[RemovableHandle] = []
        if options.skip_nonfinite:
            self.skipping()

    def use(self, comm: Transport) -> None:
        """Reduce over this communicator, with buckets of a size for it."""
        self.comm = comm
        self.planner = Planner(self.options, comm)
        self._audit: Audit | None = None
        if self.options.audit is not None:
            from fastcomm.reducer.features.audit import Audit

            self._audit = Audit(comm, self.options.audit)
        self.stragglers.use(comm)

    # -- the model ---------------------------------------------------------------------------------

    def find_model(self) -> Model | None:
        """The attached model; None if there is none, or it is gone."""
        return None if self._model is None else self._model()

    def model(self) -> Model:
        model = self.find_model()
        if model is None:
            raise ValueError(_NO_MODEL)
        return model

    def require_model(self) -> None:
        """Raises ValueError where none is attached. One that is gone has been."""
        if self._model is None:
            raise ValueError(_NO_MODEL)

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Those of the model as it is now; none if it is gone."""
        model = self.find_model()
        return [] if model is None else named_parameters(model)

    def attach(self, source: Model) -> None:
        """See Reducer.attach."""
        free_failed_backwards()  # of a model, or of buckets, that this one replaces
        with torch.inference_mode(False):  # in which buckets could not be made for training
            named = named_parameters(source)
            model: validation.Described = []
            with validation.agreeing(self.comm, validation.ATTACH, model) as described:
                self._refuse(source, named)
                sparse = self.options.sparse_names(source, named)
                tensors = validation.named_tensors(source)
                described |= self.options.described()
                model += validation.signature(named, tensors, sparse)
            src = self._meet_again()
            validation.broadcast(self.comm, [tensor for _, tensor in tensors], src)
            # Over NCCL nobody compares, and the host would wait for the device.
            compares = not self.comm.has_streams and validation.is_arithmetic_alike(self.comm)
            self.number = next_number(self.comm)
            self.steps = StepRecord(compares)
            self.planner.begin(self.comm.world_size)
            self.stragglers.begin(self.n_rounds)
            self.hook_up(source)

    def _meet_again(self) -> int:
        """Returns the rank from which all copy the model: one that has come furthest."""
        membership = self.comm.membership
        if membership is None or not membership.is_rebuilt:  # None: in the backend of torch
            return 0
        from fastcomm.reducer.features.elastic import compare_ranks

        return compare_ranks(self)

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
        """Make the buckets, as they are planned now, and hook the parameters. Collective."""
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
        if self.timeline is not None:
            self.timeline.follow(self.buckets, source)
        self._remember(source)
        self.stragglers.follow(source)
        self.comm.flight.activities[f"reducer {self.number}"] = self.phases
        self.planner.buckets_made(self)
        was_attached(self)
        allow_steps(p for _, p in named)
        watch_steps()
        try:
            # what was prepared here is ready, whatever stream the first backward runs on
            self.comm.barrier()
        except BaseException:  # another rank could not attach
            self.release()
            raise

    def _remember(self, source: Model) -> None:
        """Keep a weak reference to the model, and guard its parameters that nobody reduces."""
        self._model = reference_to(source)
        self.guards.guard(source)

    def release(self) -> None:
        """Let go of the model and the buckets. Gradients stay, in memory of their own."""
        for handle in self._handles:
            handle.remove()
        if self.timeline is not None:
            self.timeline.release()
        self.stragglers.release()
        self.comm.flight.activities.pop(f"reducer {self.number}", None)
        self.planner.end_trace(self)
        for bucket in self.buckets:
            bucket.release()
        disown(self.buckets)
        allow_steps(p for _, p in self.named_parameters())
        self.guards.remove()
        self._handles, self.buckets, self._model = [], [], None
        self.round, self.error_in_backward = None, None
        for extension in self.extensions:
            extension.forget()
        watch_steps()

    def refresh(self) -> None:
        """See Reducer.refresh."""
        self.refuse_inside_backward("refresh()")
        membership = self.comm.membership
        successor = None if membership is None else membership.newest
        if successor is not None:
            self._follow(successor)
            return
        self._agree_on_refresh()
        model = self.model()
        before = [pair for bucket in self.buckets for pair in bucket.named_parameters()]
        now = self.named_parameters()
        if self.sharded_by is not None:
            self.sharded_by.gather_state()
        self.release()
        refuse_replaced(before, now)
        with self._refusing_on_error(model):
            self.attach(model)
            if self.sharded_by is not None:
                self.sharded_by.take_buckets(self.buckets)

    def _agree_on_refresh(self) -> None:
        """Raises, on every rank, the reason why one of them cannot refresh. Collective."""
        with validation.agreeing(self.comm, validation.REFRESH):
            if self.awaits_round:
                raise FastcommError(
                    f"rank {self.comm.rank}: refresh() would lose a set_weight() or skip_step() "
                    "whose reduction has not come: call it before those"
                )
            self.refuse_local_steps("refresh()")
            self.model()
            if self.sharded_by is not None:
                self.sharded_by.refuse_refresh()

    def _follow(self, successor: Transport) -> None:
        """Reduce over the ranks that have met again. Collective: new processes call attach()."""
        model = self.model()
        check(Feature.REBUILD, self.features())
        if self.round is not None:
            self.round.abandon()
        self.drop_step()
        self.release()
        self.use(self.options.checked(successor))
        for extension in self.extensions:
            extension.use(self.comm)
        with self._refusing_on_error(model):
            self.attach(model)

    @contextlib.contextmanager
    def _refusing_on_error(self, model: Model) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.refuse_until_refresh(model)
            raise

    def remake_buckets(self) -> None:
        """Make the buckets once more, as they are planned now. Collective."""
        model = self.model()
        self.release()
        with self._refusing_on_error(model), torch.inference_mode(False):
            self.hook_up(model)

    def refuse_until_refresh(self, model: Model, why: str = _FAILED_REFRESH) -> None:
        """Refuse every backward and step until refresh(). After a refresh() that failed, for
        example: without hooks a loop that survives it would train on, each rank for itself.
        """
        self.release()  # whatever attach() has left
        self._remember(model)
        self.guards.refusal = why
        for _, parameter in self.named_parameters():
            refuse_step(parameter, why)

    # -- features ----------------------------------------------------------------------------------

    def install(self, extension: E) -> E:
        """Let an extension take part in the rounds, from the open one on."""
        self.extensions.append(extension)
        if self.round is not None:
            self.round.extensions.append(extension)
        return extension

    def remove(self, extension: RoundExtension | None) -> None:
        """Let the extension, if there is one, take no part in the rounds to come."""
        self.extensions = [one for one in self.extensions if one is not extension]

    def find(self, kind: type[E]) -> E | None:
        for extension in self.extensions:
            if isinstance(extension, kind):
                return extension
        return None

    def skipping(self) -> Skipping:
        """The extension of skip_step(), installed now if need be."""
        from fastcomm.reducer.features.skip import Skipping

        return self.find(Skipping) or self.install(Skipping(self.comm, self.options))

    @property
    def sharded_by(self) -> Any:
        """The extension of a ShardedOptimizer; or None."""
        return next((one for one in self.extensions if one.shards), None)

    @property
    def local_steps(self) -> Any:
        """The extension of LocalSGD or DiLoCo; or None."""
        return next((one for one in self.extensions if one.steps_alone), None)

    def sharding(self) -> Sharding | None:
        """How the buckets are shared out; or None. Raises if the ShardedOptimizer is gone."""
        return None if self.sharded_by is None else self.sharded_by.sharding

    def end_local_steps(self) -> None:
        """Let the ranks step together again, without a sync."""
        self.remove(self.local_steps)
        self.steps_alone = False

    def refuse_local_steps(self, what: str) -> None:
        """Raise FastcommError while each rank steps by itself. what: the call."""
        if self.local_steps is not None:
            raise FastcommError(
                f"{what} was called while {self.local_steps.name} lets each rank step "
                "with its own gradients: call its finish() first, on every rank"
            )

    @property
    def awaits_round(self) -> bool:
        """Whether set_weight() or skip_step() was called for a round that has not come."""
        return any(extension.awaits_round for extension in self.extensions)

    @property
    def skipped(self) -> bool:
        """See Reducer.skipped."""
        if not self.extensions or self.steps_alone:
            return False
        return any(extension.skips_step for extension in self.extensions)

    @property
    def n_skipped(self) -> int:
        """How many steps all ranks have dropped so far."""
        return sum(extension.n_skipped for extension in self.extensions)

    def features(self) -> dict[Feature, str]:
        """What this reducer is used with now, and a word for each in messages."""
        present = self.options.features()
        wire = self.options.wire_dtype
        if any(wire not in (None, bucket.dtype) for bucket in self.buckets):
            present[Feature.ROUNDING] = f"wire_dtype={wire}"
        sparse = [name for b in self.buckets if b.waits_in_launch for name in b.names]
        if sparse:
            present[Feature.SPARSE] = f"the sparse gradient of parameter {sparse[0]}"
        if self.planner.is_measuring:
            present[Feature.MEASURING] = Feature.MEASURING.value
        if self.comm.open_join:
            present[Feature.JOIN] = Feature.JOIN.value
        for extension in self.extensions:
            present |= extension.features()
        return present

    # -- one round ---------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first gradient of a backward is ready: ask autograd to call back at the end."""
        refuse_compiled_autograd()
        if self.comm.standing.newest:
            self.refuse_abandoned_backward()
        # A backward that ends with an exception drops the callback uncalled; then the round must be
        # ended all the same.
        self.open().await_end_of_backward(
            EndOfBackward(self._end_of_backward, self._backward_was_dropped)
        )

    def refuse_abandoned_backward(self) -> None:
        """The first gradient is ready. Raise AbandonedError, and drop it, if a hook has abandoned
        the step and lets the backward go on.
        """
        error = self.comm.standing.error_in_backward()
        if error is not None:
            self.drop_step()
            raise error

    def open(self) -> Round:
        """The open round; a new one if there is none."""
        self.raise_from_backward()
        if self.round is None:
            if self.guards.refusal is not None:
                raise FastcommError(self.guards.refusal)
            opened = Round(
                self.comm,
                self.buckets,
                self.options.op,
                self.n_rounds + 1,
                self.steps.fingerprint(),
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
            self.skipping()  # by which this rank tells why; it may be the first that hears of it
        for extension in over.extensions:
            extension.after_round(over)
        if over.observer is not None:
            over.observer.after_round(over)
        if over.state is not State.ABANDONED:
            self.n_rounds = over.number
        self.n_unsynced = 0
        self.round = None
        self.phases.enter(OTHER)

    def drop_step(self) -> None:
        """Drop all gradients, and what was said of the next round. An open round does so itself."""
        if self.round is None:
            for bucket in self.buckets:
                bucket.drop_gradients()
                bucket.reset()
                if bucket.shard is not None:
                    bucket.shard.drop()
            self.n_unsynced = 0
            for extension in self.extensions:
                extension.forget()

    def _end_of_backward(self) -> None:
        ending = self.round
        if ending is not None:  # else detached in this backward
            ending.has_callback = False
        is_inside, node = enclosing_backward()
        if node is not None:
            call_when_outer_goes_on(node, self._go_on_with_outer)
        elif not is_inside or ending is None or ending.is_full:
            self.synchronize(is_between_steps=not is_inside)

    def _go_on_with_outer(self) -> None:
        """The backward around the one that has ended gives gradients to the same round."""
        if self.round is None or not self.round.has_callback:
            self.begin_backward()

    def synchronize(self, *, is_between_steps: bool = False) -> None:
        """End the open round: see Reducer.synchronize. is_between_steps: no other backward is under
        way, and no step of an optimizer.
        """
        self.raise_from_backward()
        if self.round is None and any(one.votes for one in self.extensions):
            self.open().count_all()  # no backward has taken this rank's part
        ending = self.round
        if ending is None:
            try:
                self.comm.check()
            except FastcommError as error:
                if not self._survives(error):
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
            ending.advance(is_end=True)
            if ending.state is not State.ABANDONED:
                self._compare_and_plan(can_replan=is_between_steps and not self.skipped)
        except BaseException as interruption:
            if ending.state is not State.ABANDONED and ending.is_over:  # as on the other ranks
                try:
                    self._compare_and_plan(can_replan=False)
                except FastcommError as trouble:
                    raise interruption from trouble
            raise

    def _compare_and_plan(self, *, can_replan: bool) -> None:
        """What the ranks do together after some rounds: compare parameters, tell who was late, plan
        other buckets. Called again, where an error or a signal handler's exception has come out of
        it, it does what is left.
        """
        audit, stragglers, planner = self._audit, self.stragglers, self.planner
        tells = self.n_rounds >= stragglers.due_at and not self.comm.open_join
        if audit is None and not tells and planner.looks_for is None:
            return
        steps: list[list[float]] = []
        try:
            if audit is not None:
                audit.compare(self)
            if tells:
                told = unpacked(self.steps.fingerprint())
                with all_or_none(self.comm):
                    steps = stragglers.tell(self.n_rounds, *told)
            if planner.looks_for is not None:
                planner.after_round(self, can_replan)
        except FastcommError as error:
            if not self._survives(error):
                raise
            # the round is over: the optimizer steps with its gradients, with buckets or without
            allow_steps(p for _, p in self.named_parameters())
            watch_steps()
        if tells:
            stragglers.warn()
            self.steps.compare(steps, self.comm.rank, self.buckets)  # over NCCL nothing else does
        if audit is not None:
            audit.raise_trouble()

    def _survives(self, error: FastcommError) -> bool:
        """Whether the training goes on though the communicator has failed after a round."""
        has_failed = self.comm.failure is not None
        return has_failed and any(extension.survives(error) for extension in self.extensions)

    def _backward_was_dropped(self) -> None:
        """Called by autograd while an exception propagates, where nothing may be raised."""
        try:
            if self.round is not None:
                self.round.backward_failed()
        except BaseException as error:
            self.error_in_backward = error

    def raise_from_backward(self) -> None:
        """Raise what could not be raised where it happened."""
        if self.error_in_backward is not None:
            error, self.error_in_backward = self.error_in_backward, None
            raise error

    def refuse_inside_backward(self, what: str) -> None:
        """Raise FastcommError inside a backward. what: the call that it refuses."""
        if self.round is not None and self.round.has_callback:
            raise FastcommError(
                f"{what} was called inside backward(), which reduces the gradients itself: call "
                "it afterwards"
            )

    # -- optimizers' steps -------------------------------------------------------------------------

    def slots_of(self, parameters: Sequence[Tensor]) -> list[SteppedSlots]:
        return slots_in(self.buckets, parameters)

    def before_step(self, optimizer: Optimizer, stepped: list[SteppedSlots]) -> None:
        """Leave the gradients in these slots reduced, or raise."""
        for extension in self.extensions:
            extension.before_step(optimizer)
        self.synchronize()
        if not self.skipped:
            self._require_reduced((self.buckets[n], slots) for n, slots in stepped)
        if self.recorder is not None:
            self.recorder.begin_optimizer()
        self.phases.enter(OPTIMIZER)

    def after_step(self, stepped: list[SteppedSlots] | None) -> None:
        """Note a step of these slots; None: of one that was left out."""
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
        compares = self.steps.compares and self.sharded_by is None
        for number, slots in stepped:
            self.buckets[number].gradients.note_stepped(slots)
            if compares and slots:
                self.buckets[number].note_step(self.n_rounds)

    def _require_reduced(self, chosen: Iterable[tuple[Bucket, list[int] | None]]) -> None:
        """Raises FastcommError naming a gradient in these slots (None: all of a bucket's) that no
        round has reduced. For parameters in no bucket see optimizer_hooks and guards.
        """
        if self.steps_alone:
            return  # each rank uses its own
        for bucket, slots in chosen:
            bucket.refuse_unreduced(slots)

    def require_all_reduced(self) -> None:
        """End the open round. Raise FastcommError naming a gradient that no round has reduced."""
        self.model()
        if self.guards.refusal is not None:
            raise FastcommError(self.guards.refusal)
        for extension in self.extensions:
            extension.before_norm()
        self.synchronize()
        self._require_reduced((bucket, None) for bucket in self.buckets)
