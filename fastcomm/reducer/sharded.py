"""ShardedOptimizer: each rank steps its share of every bucket, and the parameters come back to all.

The method is ZeRO's (arXiv 1910.02054, stage 2): gradients are reduced into the rank that steps
them, and only that rank has their optimizer state. An optimizer of the user's class steps the
rank's pieces; this one holds the parameter groups that users and schedulers see.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fastcomm.communicator import Communicator, Work, note_abandoned
from fastcomm.errors import FastcommError
from fastcomm.objects import called_by
from fastcomm.reducer import (
    agreement,
    arrivals,
    checkpoints,
    param_groups,
    shardable,
    torch_helpers,
)
from fastcomm.reducer.arrivals import Arrival, Arrivals
from fastcomm.reducer.checkpoints import Part, options_of
from fastcomm.reducer.owners import owner_of
from fastcomm.reducer.reducer import Reducer
from fastcomm.reducer.shares import Piece, RankShare, ShardedBucket, ShardedBy, Sharding

_MAKING = agreement.Call("ShardedOptimizer()", "optimizers", "cannot make its ShardedOptimizer")
_REFRESH = agreement.Call("refresh()", "optimizers", "cannot refresh its ShardedOptimizer")
_LOADING = agreement.Call("load_state_dict()", "states to load", "cannot load its state")


class ShardedOptimizer(Optimizer):
    """Steps the model of a reducer, each rank its share of every bucket: as optimizer_class would
    on every rank, in 1/world_size of the time and with 1/world_size of the optimizer's state.

        reducer = fastcomm.Reducer().attach(model)
        optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-3)

    Making it is collective. The parameters that it gives are those of the plain optimizer: the same
    bits where every element is stepped by itself and gradients are not clipped.

    reducer: attached to the model; reduces its gradients for this optimizer alone.
    optimizer_class: of torch.optim, or any class that steps each parameter by itself. LBFGS and
        SparseAdam are refused.
    params: parameter groups, as optimizer_class takes them, that hold every trainable parameter of
        the model. None: one group.
    keep_gradients: every rank gets all reduced gradients, in .grad, which costs what the reduction
        of shares saves. Else .grad is None after a backward: use reducer.grad_norm(),
        reducer.clip_grad_norm_() and reducer.nonfinite_count(), which every rank must call then.
        torch's clip_grad_norm_ raises FastcommError.
    elementwise: whether a parameter may be cut between ranks, because optimizer_class looks at each
        element by itself. None: known for the classes of torch.optim, no for others.
    share_parameters: over shared memory all ranks have one copy of the parameters: what one writes
        between two steps, the others see. Saves their memory, and the copying after a step.
    overlap_gather: over NCCL step() does not wait for the other ranks' parameters: a module does,
        before its forward, and so does what else uses a parameter through torch. Code in C++ that
        is handed a parameter outside its module's forward does not: call wait_for_parameters()
        before it. No effect elsewhere.
    defaults: for optimizer_class.

    Raises on every rank: ValueError for parameters that are missing or not the reducer's, and for
    a class or option that cannot be sharded; TypeError for anything but a class of optimizers;
    MismatchError if ranks give different options. After reducer.refresh() the state is where it
    was; after reducer.detach() step() raises FastcommError.
    """

    skips_itself = True  # see optimizer_steps.py: step() leaves out what the ranks drop

    def __init__(
        self,
        reducer: Reducer,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        keep_gradients: bool = False,
        elementwise: bool | None = None,
        share_parameters: bool = False,
        overlap_gather: bool = False,
        **defaults: Any,
    ) -> None:
        if not isinstance(reducer, Reducer):
            raise shardable.misuse(reducer)
        self.reducer, self._class, self._defaults = reducer, optimizer_class, defaults
        cuts = shardable.is_elementwise(optimizer_class) if elementwise is None else elementwise
        self.sharding = Sharding(keep_gradients, cuts, share_parameters)
        plain = self._make_plain(params, overlap_gather)
        super().__init__([dict(group) for group in plain.param_groups], plain.defaults)
        self.is_torn = False
        self._overlaps = overlap_gather and reducer.comm.has_streams
        self._arrivals: Arrivals | None = None
        # whole, on every rank: of parameters that no bucket has, because they are frozen now
        self._aside: dict[Parameter, checkpoints.State] = {}
        self._parts: dict[Parameter, Part] = {}
        self._buckets: Sequence[ShardedBucket] = []
        torch_helpers.watch(ShardedOptimizer, _is_held)
        reducer.sharded_by = ShardedBy(self)
        try:
            reducer.refresh()
        except BaseException:
            reducer.sharded_by = ShardedBy()  # of nothing that is half made
            raise

    def _make_plain(self, params: Iterable[Any] | None, overlap_gather: bool) -> Optimizer:
        """The plain optimizer, for its parameter groups and defaults. Collective: raises on every
        rank what one of them refuses, and MismatchError where they differ.
        """
        reducer = self.reducer
        model = reducer._attached_model()
        named = {name: p for name, p in reducer._named_parameters() if p.requires_grad}
        plain, problem = None, None
        try:
            shardable.refuse(self._class, self._defaults, reducer, self.sharding)
            if overlap_gather:
                arrivals.refuse(model)
            groups = list(named.values()) if params is None else param_groups.given(params)
            plain = self._class(groups, **self._defaults)
            param_groups.refuse(plain.param_groups, named)
            buffers = model.named_buffers() if isinstance(model, Module) else ()
            param_groups.refuse_shared_memory([*reducer._named_parameters(), *buffers])
        except Exception as error:  # whatever the class raises: the other ranks are to hear of it
            problem = error
        described = {
            "optimizer_class": getattr(self._class, "__qualname__", repr(self._class)),
            "keep_gradients": self.sharding.keeps_gradients,
            "elementwise": self.sharding.cuts,
            "share_parameters": self.sharding.shares_parameters,
            "overlap_gather": overlap_gather,
            **param_groups.described([] if plain is None else plain.param_groups, named),
        }
        agreement.compare(reducer.comm, problem, described, [], _MAKING)
        assert plain is not None  # for the type checker: compare() has raised
        return plain

    def __repr__(self) -> str:
        own = type(self).__name__
        return super().__repr__().replace(own, f"{own} of {self._class.__name__}", 1)

    def _refuse_hook(self, *_: Any, **__: Any) -> Any:
        """Raises FastcommError: a hook would see the pieces of one rank."""
        raise FastcommError(
            "a ShardedOptimizer calls no hooks when its state is saved or loaded: change what "
            "full_state_dict() returns, or what load_full_state_dict() gets"
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
        """As torch's. Parameters that the reducer does not know yet are stepped after
        reducer.refresh().
        """
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):
            self._make_inner(dict(self._inner.state))

    @property
    def state(self) -> Any:
        """This rank's pieces of it: see full_state_dict(). An empty one may be assigned: the
        optimizer begins anew. Raises FastcommError for another.
        """
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if not hasattr(self, "_inner"):
            return  # of Optimizer.__init__()
        if state:
            raise FastcommError(
                "the state of a ShardedOptimizer is of this rank's pieces: give the whole one to "
                "load_full_state_dict()"
            )
        self._inner.state, self._aside = state, {}

    # -- the buckets -------------------------------------------------------------------------------

    def set_state_aside(self) -> None:
        """See shares.Stepper."""
        if self._buckets:
            self._agree_on_refresh()
        parameters = self._parameters()
        whole = self._gather_state() if self._buckets else {}
        self._aside |= {parameters[i]: state for i, state in whole.items()}
        if self._arrivals is not None:
            self._arrivals.end()
        # their memory goes with them
        self._buckets, self._parts = [], {}
        self._make_inner({})

    def _agree_on_refresh(self) -> None:
        problem = None
        try:
            for bucket in self._buckets:
                _share_of(bucket).refuse_refresh(
                    bucket.names, bucket.parameters, bool(self._inner.state)
                )
        except FastcommError as error:
            problem = error
        agreement.compare(self.comm, problem, {}, [], _REFRESH)

    def take_buckets(self, buckets: Sequence[ShardedBucket]) -> None:
        """See shares.Stepper. Collective. Raises, on every rank, ValueError for a trainable
        parameter without a group, or of another shape than its state.
        """
        parts, problem = {}, None
        try:
            parts = self._parts_in(buckets)
        except ValueError as error:
            problem = error
        agreement.compare(self.comm, problem, {}, [], _REFRESH)
        self._buckets, self._parts, self.is_torn = buckets, parts, False
        model = self.reducer._attached_model()
        if self._overlaps and isinstance(model, Module):
            self._arrivals = Arrivals(model, [bucket.parameters for bucket in buckets])
        pieces = self._pieces_of(self._aside)
        states: dict[Tensor, checkpoints.State] = {
            piece.parameter: checkpoints.cut(parameter, piece, self._aside[parameter])
            for parameter, piece in pieces.items()
        }
        self._aside = {p: state for p, state in self._aside.items() if p not in self._parts}
        self._make_inner(states)

    def _parts_in(self, buckets: Sequence[ShardedBucket]) -> dict[Parameter, Part]:
        known, parts = set(self._parameters()), {}
        for bucket in buckets:
            share = _share_of(bucket)
            for i, (name, parameter) in enumerate(
                zip(bucket.names, bucket.parameters, strict=True)
            ):
                if parameter not in known:
                    raise ValueError(
                        f"parameter {name} is in no group of the ShardedOptimizer: call its "
                        "add_param_group() before refresh()"
                    )
                if self.sharding.cuts:
                    checkpoints.refuse_misfit(name, parameter, self._aside.get(parameter, {}))
                parts[parameter] = Part(parameter, share.spans(i), share.pieces[i])
        return parts

    def _make_inner(self, states: dict[Tensor, checkpoints.State]) -> None:
        """The optimizer of this rank's pieces."""
        groups = [
            {**options_of(group), "params": [piece.parameter for piece in pieces.values()]}
            for group in self.param_groups
            for pieces in [self._pieces_of(group["params"])]
        ]
        self._inner = self._class(groups, **self._defaults)
        self._inner.state.update(states)
        self._members = param_groups.members(self.param_groups)
        self._strangers = [p for p in self._parameters() if p not in self._parts]

    def _pieces_of(self, parameters: Iterable[Parameter]) -> dict[Parameter, Piece]:
        """What this rank steps of these parameters, in their order."""
        parts = {parameter: self._parts.get(parameter) for parameter in parameters}
        return {p: part.piece for p, part in parts.items() if part and part.piece}

    def _parameters(self) -> list[Parameter]:
        """In the order of a state_dict()."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's share, and returns when all ranks' parameters are here, or on their way
        with overlap_gather=True. Collective.

        closure: evaluated once, before the step; its value is returned. Raises FastcommError for
        gradients that no backward has reduced, naming the parameter, and after detach().
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.reducer.sharded_by.stepper() is not self:
            raise FastcommError(
                "the reducer was detached, and its ShardedOptimizer with it: make another one "
                "after attach()"
            )
        self.reducer.synchronize()
        if self.reducer.skipped:
            return loss
        try:
            self._follow_groups()
            param_groups.refuse_unreduced(self._strangers)
            for bucket in self._buckets:
                _share_of(bucket).begin_step(bucket.names, bucket.parameters, bucket.views)
            if not self.comm.has_streams:
                # no rank reads the parameters any more, and none has dropped the step
                self.comm.barrier()
            self.is_torn = True
            self._step_pieces()
            self._spread()
        except BaseException as error:
            if self.is_torn:
                self._drop()
            # the other ranks wait for this one's share
            with contextlib.suppress(FastcommError):
                self.comm.abandon()
            note_abandoned(error)
            raise
        self.is_torn = False
        return loss

    def _follow_groups(self) -> None:
        """Of parameters that were taken out of a group, or put into another one."""
        if not param_groups.have(self.param_groups, self._members):
            self._make_inner(dict(self._inner.state))

    def _step_pieces(self) -> None:
        pairs = list(zip(self.param_groups, self._inner.param_groups, strict=True))
        for group, inner in pairs:  # what schedulers have changed
            inner.update(options_of(group))
        self._inner.step()
        for group, inner in pairs:  # what the optimizer has changed
            group.update(options_of(inner))

    def _spread(self) -> None:
        under_way: dict[int, Work] = {}
        for i, bucket in reversed(list(enumerate(self._buckets))):  # as the next forward uses them
            _share_of(bucket).drop()
            work = _share_of(bucket).spread()
            if work is not None:
                under_way[i] = work
        if self._arrivals is not None:
            self._let_arrive(self._arrivals, under_way)
            return
        for work in under_way.values():
            work.wait()
        if self.sharding.shares_parameters:
            self.comm.barrier()  # all of them are new

    def _let_arrive(self, arrivals: Arrivals, under_way: dict[int, Work]) -> None:
        started = {
            i: Arrival(work, self._buckets[i].parameters, self) for i, work in under_way.items()
        }
        for i, arrival in started.items():
            _share_of(self._buckets[i]).arrival = arrival
        arrivals.begin(started)

    def wait_for_parameters(self) -> None:
        """Orders the current stream after the last step's gathers. There is something to wait for
        with overlap_gather=True alone. Raises the error that has ended a gather.
        """
        for bucket in self._buckets:
            _share_of(bucket).arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; drops the reduced gradients that this rank holds, too."""
        super().zero_grad(set_to_none)
        self._drop()

    def _drop(self) -> None:
        for bucket in self._buckets:
            _share_of(bucket).drop()

    def held(self) -> list[Tensor] | None:
        """See torch_helpers.Holder."""
        if self.sharding.keeps_gradients:
            return None
        return [piece.parameter for piece in self._pieces_of(self._parameters()).values()]

    @property
    def comm(self) -> Communicator:
        """The reducer's."""
        return self.reducer.comm

    # -- checkpoints -------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank, in the format of the plain optimizer, whose
        load_state_dict() takes it. Collective.
        """
        with called_by("full_state_dict()"):
            state = self._gather_state()
        return {"state": state, "param_groups": checkpoints.numbered(self.param_groups)}

    def _gather_state(self) -> dict[int, checkpoints.State]:
        parts = [self._parts.get(p, Part(p, {}, None)) for p in self._parameters()]
        return checkpoints.gather(self.comm, parts, self._inner.state) | self._aside_by_number()

    def _aside_by_number(self) -> dict[int, checkpoints.State]:
        numbered = enumerate(self._parameters())
        return {i: dict(self._aside[p]) for i, p in numbered if p in self._aside}

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of full_state_dict(), from any number of ranks, or of the plain
        optimizer. Collective: every rank gives the same. Raises on every rank: TypeError and
        ValueError for anything else, other groups than these, and a state of another shape, naming
        the parameter; MismatchError, naming what differs between the ranks.
        """
        self._load(state_dict, must_be_whole=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for this rank of as many: save one for each rank, or use
        full_state_dict().
        """
        number_of = {parameter: i for i, parameter in enumerate(self._parameters())}
        states = {
            number_of[parameter]: self._inner.state.get(piece.parameter)
            for parameter, piece in self._pieces_of(number_of).items()
        }
        return {
            "state": {i: dict(state) for i, state in states.items() if state}
            | self._aside_by_number(),
            "param_groups": checkpoints.numbered(self.param_groups),
            checkpoints.PLACE: self._place(),
        }

    def _place(self) -> tuple[int, int, list[int]]:
        pieces = self._pieces_of(self._parameters()).values()
        return self.comm.rank, self.comm.world_size, [piece.parameter.numel() for piece in pieces]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() has saved on this rank of as many ranks, or a whole state.
        Collective, and raises, as load_full_state_dict(); ValueError for another rank's part.
        """
        self._load(state_dict, must_be_whole=False)

    def _load(self, state_dict: dict[str, Any], *, must_be_whole: bool) -> None:
        self._follow_groups()
        saved, problem = checkpoints.Saved([], {}, None), None
        try:
            saved = checkpoints.read(state_dict, self.param_groups)
            self._refuse_saved(saved, must_be_whole)
        except Exception as error:  # the state may be anything, and the others are to hear of it
            problem = error
        kind = {"the kind of state": "the whole" if saved.place is None else "one rank's part"}
        agreement.compare(self.comm, problem, kind, [], _LOADING)
        common = saved.states
        if saved.place is not None:  # but for the pieces, which differ
            common = {p: state for p, state in common.items() if p not in self._parts}
        names = {parameter: name for name, parameter in self.reducer._named_parameters()}
        tensors, values = agreement.optimizer_contents(saved.groups, common, names)
        agreement.check_in_sync(
            self.comm, tensors, values, _LOADING.name, "load the same state on every rank"
        )
        self._take(saved)

    def _refuse_saved(self, saved: checkpoints.Saved, must_be_whole: bool) -> None:
        """Raises ValueError for a state that is not this rank's, or does not fit."""
        if saved.place is not None:
            if must_be_whole or list(saved.place) != list(self._place()):
                raise ValueError(
                    f"this is the state of rank {saved.place[0]} of {saved.place[1]}, or of other "
                    f"buckets; rank {self.comm.rank} of {self.comm.world_size} cannot take it: "
                    "save full_state_dict(), which any rank takes"
                )
            return
        for name, parameter in self.reducer._named_parameters() if self.sharding.cuts else ():
            if parameter in self._parts:
                checkpoints.refuse_misfit(name, parameter, saved.states.get(parameter, {}))

    def _take(self, saved: checkpoints.Saved) -> None:
        groups = zip(self.param_groups, self._inner.param_groups, saved.groups, strict=True)
        for mine, inner, theirs in groups:
            options = copy.deepcopy(options_of(theirs))  # a tensor would be shared with `saved`
            mine.update(options)
            inner.update(options)
        is_whole, states = saved.place is None, saved.states
        state = {
            i: checkpoints.cut(p, piece, states[p]) if is_whole else dict(states[p])
            for i, (p, piece) in enumerate(self._pieces_of(self._parameters()).items())
            if p in states
        }
        self._aside = {p: copy.deepcopy(states[p]) for p in states if p not in self._parts}
        packed = checkpoints.numbered(self._inner.param_groups)
        self._inner.load_state_dict({"state": state, "param_groups": packed})


def _share_of(bucket: ShardedBucket) -> RankShare:
    assert bucket.share is not None  # for the type checker: its reducer has this optimizer
    return bucket.share


def _is_held(parameter: Tensor) -> bool:
    """Whether a ShardedOptimizer takes the parameter's gradients."""
    reducer = owner_of(parameter)
    sharding = reducer.sharded_by.sharding() if isinstance(reducer, Reducer) else None
    return sharding is not None and not sharding.keeps_gradients
