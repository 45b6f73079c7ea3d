"""ShardedOptimizer: each rank steps its shard of every bucket, and the parameters come back to all.

The method is ZeRO's (arXiv 1910.02054, stage 2): gradients are reduced into the rank that steps
them, and only that rank has their optimizer state. An optimizer of the user's class steps the
rank's pieces; this one holds the parameter groups that users and schedulers see.

A step, in order. The backward has reduced each bucket into its shards, which have taken the
gradients (BucketShard.take_round). step() gives the pieces their gradients (begin_step), waits
until no rank reads parameters any more, lets the inner optimizer step this rank's pieces, sends
each bucket's shard to the other ranks and receives theirs (spread).
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.insight.recorder import OPTIMIZER, OTHER, WAITING
from fastcomm.optim import checkpoints, shardable
from fastcomm.optim.checkpoints import OptimizerState, Part, Saved, options_of, pieces_of
from fastcomm.reducer import validation
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features import shards, torch_helpers
from fastcomm.reducer.features.compatibility import Feature
from fastcomm.reducer.features.shards import BucketShard, Sharding
from fastcomm.reducer.owners import owner_of
from fastcomm.reducer.reducer import Reducer
from fastcomm.reducer.round import Round, State

_MAKING = validation.CollectiveCall(
    "ShardedOptimizer()", "optimizers", "cannot make its ShardedOptimizer"
)
_TAKING = validation.CollectiveCall(
    "ShardedOptimizer() or refresh()", validation.GROUPS, "cannot take buckets"
)
_SAVING = validation.CollectiveCall("state_dict()", "states", "cannot make its state")
_LOADING = validation.CollectiveCall("load_state_dict()", "states to load", "cannot load its state")


class ShardedOptimizer(Optimizer):
    """Steps the model of a reducer. Each rank steps 1/world_size of the elements and keeps that
    share of the state.

        reducer = fastcomm.Reducer().attach(model)
        optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-3)

    Every rank must make it. It computes the parameters of the plain optimizer: the same bits, if
    the optimizer steps each element by itself and you do not clip.

    reducer: attached to the model; it reduces gradients for this optimizer only.
    optimizer_class: of torch.optim, or any class that steps each parameter by itself. LBFGS and
        SparseAdam are refused.
    params: parameter groups, as optimizer_class takes them, with every trainable parameter of the
        model. None: one group.
    keep_gradients: every rank gets all reduced gradients in .grad, which costs what sharding the
        reduction saves. False: .grad is None after a backward. Then use reducer.grad_norm(),
        reducer.clip_grad_norm_() and reducer.nonfinite_count(), on every rank; torch's
        clip_grad_norm_ raises FastcommError.
    elementwise: whether a parameter may be cut between ranks, because optimizer_class steps each
        element by itself. None: known for the classes of torch.optim, no for others.
    defaults: options of optimizer_class, such as lr.

    Raises on every rank: ValueError for parameters that are missing or not the reducer's, and for
    a class or option that cannot be sharded; TypeError for anything but a class of optimizers;
    MismatchError if ranks pass different options. reducer.refresh() keeps the state. After
    reducer.detach() step() raises FastcommError.
    """

    skips_itself = True  # see optimizer_hooks.py: step() leaves out what the ranks drop

    def __init__(
        self,
        reducer: Reducer,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        keep_gradients: bool = False,
        elementwise: bool | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(reducer, Reducer):
            raise shardable.misuse(reducer)
        self.reducer, self._core = reducer, reducer.core
        self._class, self._defaults = optimizer_class, defaults
        cuts = optimizer_class in shardable.ELEMENTWISE if elementwise is None else elementwise
        self.sharding = Sharding(keep_gradients, cuts)
        plain = self._make_plain(params)
        super().__init__([dict(group) for group in plain.param_groups], plain.defaults)
        self._inner = plain  # of this rank's pieces, once there are some
        # A step that fails on the way sets both. Replacing the state clears the second, and
        # refresh() then the first.
        self.is_torn = False  # the ranks' parameters may differ
        self._is_mixed = False  # the state may be of two steps
        # States that every rank has whole: of frozen parameters, which no bucket has; of all while
        # buckets change. Adagrad makes some before the first step, of frozen ones, too.
        self._whole: dict[Any, OptimizerState] = dict(plain.state)
        self._parts: dict[Parameter, Part] = {}
        self._buckets: Sequence[Bucket] = []
        torch_helpers.refuse_clipping(_is_held)
        core = self._core
        core.remove(core.sharded_by)  # of an optimizer that is gone
        core.install(_ShardedBy(self))
        try:
            core.refresh()
        except BaseException:
            core.remove(core.sharded_by)  # of what is half made
            raise

    def _make_plain(self, params: Iterable[Any] | None) -> Optimizer:
        """The plain optimizer, for its parameter groups and defaults. Collective: raises on every
        rank what one of them refuses, and MismatchError where they differ.
        """
        reducer = self._core
        model = reducer.model()
        named = {name: p for name, p in reducer.named_parameters() if p.requires_grad}
        with validation.agreeing(reducer.comm, _MAKING) as described:
            described |= {
                "optimizer_class": getattr(self._class, "__qualname__", repr(self._class)),
                "keep_gradients": self.sharding.keeps_gradients,
                "elementwise": self.sharding.cuts,
            }
            shardable.refuse(self._class, self._defaults, reducer)
            groups = list(named.values()) if params is None else params
            plain = self._class(groups, **self._defaults)
            shardable.refuse_groups(plain.param_groups, named)
            buffers = model.named_buffers() if isinstance(model, Module) else ()
            shardable.refuse_shared_memory([*reducer.named_parameters(), *buffers])
            described |= shardable.places(plain.param_groups, reducer.named_parameters())
            described |= checkpoints.options_in_words(plain.param_groups)
        return plain

    def __repr__(self) -> str:
        own = type(self).__name__
        return super().__repr__().replace(own, f"{own} of {self._class.__name__}", 1)

    def _refuse_hook(self, *_: Any, **__: Any) -> Any:
        """Raises FastcommError: a hook would see the pieces of one rank."""
        raise FastcommError(
            "a ShardedOptimizer calls no hooks when its state is saved or loaded: change what "
            "full_state_dict() returns, or what load_state_dict() gets"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __getstate__(self) -> dict[str, Any]:
        """A copy would have neither the reducer nor the other ranks' state."""
        raise TypeError(
            "a ShardedOptimizer cannot be copied or pickled: save its full_state_dict(), and load "
            "that into one made by the same call"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's optimizers do. New parameters are stepped after
        reducer.refresh().
        """
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):
            self._remake_inner()

    @property
    def state(self) -> Any:
        """This rank's shard of the state: see state_dict() and full_state_dict(). Assign an empty
        dict to start again without a state; anything else raises FastcommError.
        """
        return _Pieces(self._inner.state)

    @state.setter
    def state(self, state: Any) -> None:
        if not hasattr(self, "_inner"):
            return  # of Optimizer.__init__()
        if state:
            raise FastcommError(
                "the state of a ShardedOptimizer is of this rank's pieces: give the whole one to "
                "load_state_dict()"
            )
        self._whole, self._is_mixed = {}, False
        self._use(self._inner_of(self.param_groups, self._parts, {}))

    # -- the buckets -------------------------------------------------------------------------------

    def _refuse_refresh(self) -> None:
        """Raises FastcommError for what this rank would lose, or mix."""
        has_state = any(self._inner.state.values())
        if self._is_mixed and has_state:
            raise FastcommError(
                "a step of the ShardedOptimizer has failed on the way, and its state is of two "
                "steps: load one whole state on every rank, or begin anew there by "
                "optimizer.state = {}; then call refresh()"
            )
        for bucket in self._buckets:
            _shard_of(bucket).refuse_refresh(bucket, has_state)

    def _gather_state(self) -> None:
        """Gathers the state before the buckets go. Collective."""
        if self._buckets:
            self._whole = self._full_state("refresh()")
        # refuse_refresh() has refused a state that is mixed
        self._buckets, self._parts, self._is_mixed = [], {}, False
        for group in self._inner.param_groups:
            group["params"] = []  # whose memory goes with the buckets
        self._inner.state.clear()

    def _take_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Takes back the state, in these buckets. Collective."""
        with validation.agreeing(self.comm, _TAKING) as described:
            described |= self._places()
            parts = self._parts_in(buckets)
            states = checkpoints.cut(self._whole, parts)
            inner = self._inner_of(self.param_groups, parts, states)
        self._buckets, self._parts, self.is_torn = buckets, parts, False
        self._whole = {p: state for p, state in self._whole.items() if p not in self._parts}
        self._use(inner)
        self._barrier = shards.StepBarrier(self.comm)
        self.comm.barrier()  # as at the end of attach(): the state may be used on any stream

    def _parts_in(self, buckets: Sequence[Bucket]) -> dict[Parameter, Part]:
        known, parts = set(self._parameters()), {}
        for bucket in buckets:
            shard = _shard_of(bucket)
            for i, (name, parameter) in enumerate(
                zip(bucket.names, bucket.parameters, strict=True)
            ):
                if parameter not in known:
                    raise ValueError(
                        f"parameter {name} is in no group of the ShardedOptimizer: call its "
                        "add_param_group() before refresh()"
                    )
                parts[parameter] = Part(name, parameter, shard.spans(i), shard.pieces[i])
        if self.sharding.cuts:
            checkpoints.refuse_misfits(self._whole, parts.values())
        return parts

    def _inner_of(
        self,
        groups: Sequence[dict[str, Any]],
        parts: dict[Parameter, Part],
        states: dict[Tensor, OptimizerState],
    ) -> Optimizer:
        """An optimizer of this rank's pieces of the groups' parameters."""
        pieces = [pieces_of(parts, group["params"]).values() for group in groups]
        own = [
            {**options_of(group), "params": [piece.parameter for piece in those]}
            for group, those in zip(groups, pieces, strict=True)
        ]
        inner = self._class(own, **self._defaults)
        inner.state.update(states)
        return inner

    def _use(self, inner: Optimizer) -> None:
        """inner: of the groups as they are now."""
        self._inner = inner
        self._members = shardable.identities(self.param_groups)
        self._unowned = [p for p in self._parameters() if p not in self._parts]

    def _remake_inner(self) -> None:
        """The groups have changed."""
        self._use(self._inner_of(self.param_groups, self._parts, dict(self._inner.state)))

    def _parameters(self) -> list[Parameter]:
        """In the order of a state_dict()."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's shard, and returns when all ranks' parameters are here. Collective.
        Raises FastcommError for gradients that were not reduced, and after detach().

        closure: evaluated once, before the step; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharded_by = self._core.sharded_by
        if sharded_by is None or sharded_by.optimizer() is not self:
            raise FastcommError(
                "the reducer was detached, and its ShardedOptimizer with it: make another one "
                "after attach()"
            )
        self._core.synchronize()
        if self._core.skipped:
            return loss
        try:
            if shardable.identities(self.param_groups) != self._members:  # edited by hand
                self._remake_inner()
            shardable.refuse_unreduced(self._unowned)
            for bucket in self._buckets:
                _shard_of(bucket).begin_step(bucket)
            if not self.comm.has_streams:
                self._core.phases.enter(WAITING)
                self._barrier.wait()  # no rank reads parameters, and none has dropped the step
            self.is_torn = self._is_mixed = True
            self._core.phases.enter(OPTIMIZER)
            self._step_pieces()
            self._core.phases.enter(WAITING)
            self._spread()
            self._core.phases.enter(OTHER)
        except BaseException as error:
            self._core.phases.enter(OTHER)
            self._abandon(error)
            raise
        self.is_torn = self._is_mixed = False
        return loss

    def _abandon(self, error: BaseException) -> None:
        """Ends a failed step, in which the other ranks may wait for this one's shard."""
        if self.is_torn:
            self._drop()
        elif isinstance(error, MismatchError):
            return  # they have all heard of it
        with contextlib.suppress(FastcommError):
            self.comm.abandon()
        self.comm.standing.mark(error)

    def _step_pieces(self) -> None:
        pairs = list(zip(self.param_groups, self._inner.param_groups, strict=True))
        for group, inner in pairs:  # what schedulers have changed
            inner.update(options_of(group))
        self._inner.step()
        for group, inner in pairs:  # what the optimizer has changed
            group.update(options_of(inner))

    def _spread(self) -> None:
        self._drop()
        under_way = [_shard_of(bucket).spread() for bucket in self._buckets]
        for work in under_way:
            work.wait()
        for bucket in self._buckets:
            _shard_of(bucket).end_step(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, also the reduced ones that this rank holds."""
        super().zero_grad(set_to_none)
        self._drop()

    def _drop(self) -> None:
        for bucket in self._buckets:
            _shard_of(bucket).drop()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() asks for it. Raises FastcommError where the scaler would find no
        gradients.
        """
        if not self.sharding.keeps_gradients:
            raise FastcommError(
                "GradScaler finds no gradients: a ShardedOptimizer holds them, each rank its "
                "shard. Make the optimizer with keep_gradients=True, or train in bfloat16, without "
                "a scaler"
            )
        return False

    @property
    def comm(self) -> Transport:
        """The reducer's."""
        return self._core.comm

    # -- checkpoints -------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the whole state, on every rank, in the format of the plain optimizer, whose
        load_state_dict() takes it. Collective.
        """
        self._compare_places("full_state_dict()")
        return Saved(self.param_groups, self._full_state("full_state_dict()")).numbered()

    def _full_state(self, call: str) -> dict[Parameter, OptimizerState]:
        parts, states = self._parts.values(), self._inner.state
        return checkpoints.gather(self.comm, parts, states, call) | self._whole

    def _compare_state(self) -> None:
        """Compares the state over the ranks. Collective."""
        self._compare_places("check_in_sync()")
        checkpoints.compare(self.comm, self._parts.values(), self._inner.state, "check_in_sync()")

    def _compare_places(self, call: str) -> None:
        validation.compare(self.comm, None, self._places(), validation.REFRESH._replace(name=call))

    def _places(self) -> dict[str, Any]:
        return shardable.places(self.param_groups, self._core.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the format of the plain optimizer. A tensor that is cut between
        ranks is a TensorShard, with this rank's elements. torch.distributed.checkpoint writes and
        reads these for any number of ranks; torch.save only for this rank and number of ranks.
        Before the first step it is the state of no step, for loading. Collective.
        """
        self._compare_places(_SAVING.name)
        shown = self._with_shards(self._parts, self._inner.state)
        if self._parts and not shown:  # no rank has made a step
            shown = self._with_shards(*self._state_of_no_step())
        return Saved(self.param_groups, shown | self._whole).numbered()

    def _with_shards(
        self, parts: Mapping[Parameter, Part], states: Mapping[Tensor, OptimizerState]
    ) -> dict[Parameter, OptimizerState]:
        return checkpoints.sharded(self.comm, parts.values(), states, _SAVING.name)

    @torch.no_grad()
    def _state_of_no_step(self) -> tuple[dict[Parameter, Part], dict[Tensor, OptimizerState]]:
        """As the class makes it for zeros in place of the parameters, each of a zero gradient."""
        with validation.agreeing(self.comm, _SAVING):
            parts = {p: checkpoints.of_zeros(part) for p, part in self._parts.items()}
            groups = [
                copy.deepcopy(options_of(group)) | {"params": group["params"]}
                for group in self.param_groups
            ]
            scratch = self._inner_of(groups, parts, {})
            scratch.step()
            states = {p: checkpoints.of_no_step(s) for p, s in scratch.state.items()}
        return parts, states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state: of full_state_dict(), from any number of ranks, or of the plain
        optimizer; every rank passes the same one. Or loads what state_dict() returned on this rank
        of as many ranks, such as after torch.distributed.checkpoint loaded into it. Collective.

        Raises TypeError for anything but a state; ValueError for other groups than these, for
        another rank's part, and for a state of another shape, naming the parameter; FastcommError
        on the other ranks; MismatchError, on all ranks, naming the difference. Nothing is loaded
        then.
        """
        self._compare_places(_LOADING.name)
        with validation.agreeing(self.comm, _LOADING) as described:
            saved = checkpoints.read(state_dict, self.param_groups)
            names = {parameter: name for name, parameter in self._core.named_parameters()}
            checkpoints.refuse_other_shards(saved, self._parts, names)
            if self.sharding.cuts:
                checkpoints.refuse_misfits(saved.states, self._parts.values())
            described |= checkpoints.described(saved, self._parts, names)
            inner = self._inner_of(self.param_groups, self._parts, {})
            checkpoints.load(inner, saved, self._parts)
            whole = {p: copy.deepcopy(s) for p, s in saved.states.items() if p not in self._parts}
        checkpoints.compare(self.comm, self._parts.values(), inner.state, _LOADING.name)
        self._whole, self._is_mixed = whole, False
        for mine, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            mine.update(options_of(theirs))
        self._use(inner)


class _ShardedBy(RoundExtension):
    """The optimizer, to its reducer. The optimizer holds the reducer, and so is not held here."""

    shards = True

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._reference = weakref.ref(optimizer)

    def optimizer(self) -> ShardedOptimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise FastcommError(
                "the ShardedOptimizer of this model is gone: keep it, or call detach() and "
                "attach(model), on every rank, before you make another optimizer"
            )
        return optimizer

    @property
    def sharding(self) -> Sharding:
        return self.optimizer().sharding

    def features(self) -> Mapping[Feature, str]:
        is_gone = self._reference() is None
        return {} if is_gone else {Feature.SHARDED: Feature.SHARDED.value}

    def before_round(self, round: Round) -> None:
        """Raises FastcommError where a round would overwrite gradients, or its gradients be of
        different parameters.
        """
        if self.optimizer().is_torn:
            raise FastcommError(
                "a step of the ShardedOptimizer has failed, after which the ranks' parameters "
                "differ: call refresh() on every rank, which copies rank 0's"
            )
        for bucket in round.buckets:
            if bucket.shard is not None:
                bucket.shard.refuse_pending()

    def after_round(self, round: Round) -> None:
        """Lets the shards take the reduced gradients, or drop those they hold."""
        for bucket in round.buckets:
            if bucket.shard is None:
                continue
            if round.state is State.SETTLED:
                bucket.shard.take_round(bucket)
            else:
                bucket.shard.drop()

    def before_step(self, optimizer: object) -> None:
        if optimizer is not self.optimizer():
            raise FastcommError(
                f"this {type(optimizer).__name__} has parameters that a ShardedOptimizer steps: "
                "give each parameter to one optimizer"
            )

    # -- refresh() and check_in_sync() -------------------------------------------------------------

    def refuse_refresh(self) -> None:
        self.optimizer()._refuse_refresh()

    def gather_state(self) -> None:
        self.optimizer()._gather_state()

    def take_buckets(self, buckets: Sequence[Bucket]) -> None:
        self.optimizer()._take_buckets(buckets)

    def described(self, optimizer: object) -> str:
        """Returns the optimizer in words that ranks compare, as compare_state() is collective for
        this one alone.
        """
        kind = type(optimizer).__qualname__
        return f"this model's {kind}" if self._is_mine(optimizer) else kind

    def compare_state(self, optimizer: object) -> None:
        """Compares the state over the ranks; does nothing for another optimizer."""
        if self._is_mine(optimizer):
            self.optimizer()._compare_state()

    def _is_mine(self, optimizer: object) -> bool:
        return optimizer is not None and optimizer is self._reference()


def _shard_of(bucket: Bucket) -> BucketShard:
    assert bucket.shard is not None  # for the type checker: its reducer has this optimizer
    return bucket.shard


class _Pieces(dict[Tensor, OptimizerState]):
    """A state by pieces, to be read. The functions of torch.distributed.checkpoint.state_dict ask
    first whether there is one. They would look for the model's parameters in it, take shards for
    whole tensors, and step an optimizer that has none.
    """

    def __bool__(self) -> bool:
        raise FastcommError(
            "get_state_dict() and set_state_dict() of torch.distributed.checkpoint do not know a "
            "ShardedOptimizer: save and load its state_dict(), or its full_state_dict(). To ask "
            "whether it has a state, use len(optimizer.state)"
        )


def _is_held(parameter: Tensor) -> bool:
    """Whether a ShardedOptimizer takes the parameter's gradients."""
    reducer = owner_of(parameter)
    sharding = None if reducer is None else reducer.sharding()
    return sharding is not None and not sharding.keeps_gradients
