"""Hooks around the steps of all torch.optim optimizers. Before a step, the reducers that own the
parameters end their rounds, or refuse the step; a parameter that must not be stepped refuses it,
too. After a step, the reducers note which gradients it used.

No hook can leave out a step that the ranks drop, so the optimizer's code runs on a copy without
parameters instead. Where the step has a closure, the gradients that the closure makes are dropped.
"""

from __future__ import annotations

import collections
import functools
import itertools
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.comm.collective import fingerprint_of
from fastcomm.comm.words import BEGINNINGS, RECORDS, STEPS, advice_on_bucket
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.gradients import is_of_this_rank
from fastcomm.reducer.hooks import Untraced
from fastcomm.reducer.owners import attached_names, owner_of

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core


class SteppedSlots(NamedTuple):
    """An optimizer's parameters in one bucket of a reducer, by slot. Holds the bucket's number, so
    that it keeps nothing alive.
    """

    bucket: int
    slots: list[int]


def slots_in(buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> list[SteppedSlots]:
    """For each bucket, the slots that belong to these parameters."""
    wanted = {id(p) for p in parameters}
    return [
        SteppedSlots(number, [i for i, p in enumerate(bucket.parameters) if id(p) in wanted])
        for number, bucket in enumerate(buckets)
    ]


class StepRecord:
    """What this rank's optimizers have made of the model since attach(). The ranks compare it.

    compares: buckets compare a few elements of what a step has made of the parameters, too.
    n: how many steps.
    record: of what was stepped, and how gradients were clipped.
    last: the slots of the last step.
    """

    def __init__(self, compares: bool = False) -> None:
        self.compares = compares
        self.n = self.record = 0
        self.last: list[SteppedSlots] = []

    def fingerprint(self) -> int:
        """As it travels with each bucket: see collective.fingerprint_of."""
        return fingerprint_of(self.n, self.record)

    def compare(self, ranks: list[list[float]], rank: int, buckets: Sequence[Bucket]) -> None:
        """Raises MismatchError, on every rank, where they differ. ranks: record and number of steps
        of each, or none.
        """
        if len({tuple(one) for one in ranks}) > 1:
            differs = STEPS if len({n for _, n in ranks}) > 1 else RECORDS
            made = "; ".join(
                f"rank {number} after {n:.0f} steps (record {int(record):08x})"
                for number, (record, n) in enumerate(ranks)
            )
            last = f"; {self.last_in_words(rank, buckets)}" if differs == RECORDS else ""
            raise MismatchError(f"{BEGINNINGS[differs]}: {made}{last}{advice_on_bucket(differs)}")

    def note(self, stepped: list[SteppedSlots], buckets: Sequence[Bucket]) -> None:
        """Count a step. Add to the record which parameters were stepped, unless all were: in any
        order.
        """
        self.n += 1
        self.last = stepped
        n_all = sum([len(bucket.names) for bucket in buckets])
        if sum([len(slots) for _, slots in stepped]) != n_all:
            self.record += zlib.crc32(str([tuple(one) for one in stepped]).encode())

    def last_in_words(self, rank: int, buckets: Sequence[Bucket]) -> str:
        """For messages: what this rank has stepped last, and why records may differ."""
        names = [buckets[number].names[i] for number, held in self.last for i in held]
        return (
            f"rank {rank} has last stepped "
            f"{f'{len(names)} parameters, {names[0]} ... {names[-1]}' if names else 'none'}"
            "\nWhere records differ, the ranks have"
            "\n- stepped different parameters (two optimizers, of which each rank chooses its own);"
            "\n- not called clip_grad_norm_() alike: on every rank, with the same max_norm;"
            "\n- different parameters: one has stepped gradients that no round has reduced (of "
            "no_sync()), has another learning rate or scale of a GradScaler, or has changed "
            "gradients after backward or parameters by itself. check_in_sync() names the first "
            "that differs; refresh() copies rank 0's; or"
            "\n- optimizers whose states differ, as after LocalSGD: check_in_sync(optimizer) names "
            "what differs. Make a new optimizer on every rank, or load one rank's state_dict() "
            "on all, and call refresh()"
        )


class _Known:
    """What is known of one optimizer.

    ids: of its parameters, by which a change is noticed.
    by_reducer: the reducers that own them, and which slots of their buckets it has.
    refusal: why it must not step, or None.
    unowned: the parameters that nobody reduces, which must have no gradient, and their names.
    before: by reducer, its n_rounds and its record when the step under way began.
    left_out: by reducer, how many rounds it had dropped at the last step that was left out.
    """

    def __init__(self, ids: tuple[int, ...], parameters: list[Tensor]) -> None:
        self.ids, self.epoch = ids, _epoch
        owners = [owner_of(parameter) for parameter in parameters]
        reducers = sorted({one for one in owners if one is not None}, key=lambda r: r.number)
        unowned = [p for p, one in zip(parameters, owners, strict=True) if one is None]
        self.unowned = _name_unowned(unowned, is_mixed=bool(reducers))
        if unowned and not reducers and not self.unowned:
            _warn_of_unattached()
        self.refusal = _refusal_of(parameters)
        self.by_reducer = [(weakref.ref(r), r.slots_of(parameters)) for r in reducers]
        self.before: weakref.WeakKeyDictionary[Core, tuple[int, int]]
        self.before = weakref.WeakKeyDictionary()
        self.left_out: weakref.WeakKeyDictionary[Core, int] = weakref.WeakKeyDictionary()


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
# Parameters that must not be stepped: why, and the successor. An optimizer that holds the
# successor, too, may step.
_refusals: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Reducers of several ranks to which no model was attached yet.
_unattached: weakref.WeakSet[Core] = weakref.WeakSet()
_epoch = 0  # grows when a model is attached or detached, which changes the owners
_is_watching = False


def watch_steps() -> None:
    """Installs the hooks at the first call. Call again whenever a parameter gains or loses its
    reducer.
    """
    global _epoch, _is_watching
    _epoch += 1
    if not _is_watching:
        register_optimizer_step_pre_hook(Untraced(_before_step))
        register_optimizer_step_post_hook(Untraced(_after_step))
        _is_watching = True


def expect_attach(core: Core) -> None:
    """Warns at the first step of parameters that nobody reduces, if attach() comes later."""
    if core.comm.world_size > 1:
        _unattached.add(core)
        watch_steps()


def was_attached(core: Core) -> None:
    """There is nothing to warn of any more."""
    _unattached.discard(core)


def _warn_of_unattached() -> None:
    for reducer in list(_unattached):
        _unattached.discard(reducer)
        warnings.warn(
            f"rank {reducer.comm.rank} steps parameters that no reducer reduces, and has made a "
            "Reducer that has no model: the ranks train each for itself. Call "
            "reducer.attach(model) on every rank, before the first backward",
            stacklevel=6,  # the line that calls step()
        )


def refuse_step(parameter: Tensor, why: str, successor: Tensor | None = None) -> None:
    """Lets no optimizer step the parameter, unless it holds the parameter's successor, too."""
    global _epoch
    _epoch += 1
    _refusals[parameter] = why, None if successor is None else weakref.ref(successor)


def refuse_replaced(
    before: Iterable[tuple[str, Tensor]], now: Sequence[tuple[str, Tensor]]
) -> None:
    """Refuses steps of parameters that have left the model and whose names other parameters have
    now: an optimizer that holds the old ones would train nothing.
    """
    by_name, present = dict(now), {id(parameter) for _, parameter in now}
    for name, parameter in before:
        if name in by_name and id(parameter) not in present:
            why = f"parameter {name} is not in the model any more: make a new optimizer"
            refuse_step(parameter, why, by_name[name])


def allow_steps(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _refusals.pop(parameter, None)


def known_optimizers(reducers: Iterable[Core]) -> list[Optimizer]:
    """Those that have stepped parameters of these reducers, in the order of their first steps."""
    wanted = {id(reducer) for reducer in reducers}
    return [
        optimizer
        for optimizer, known in _known.items()
        if any(id(reference()) in wanted for reference, _ in known.by_reducer)
    ]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments with which the step goes on, the first of which is the optimizer; None:
    those that it has.
    """
    known = _known_of(optimizer)
    if known.refusal is not None:
        raise FastcommError(known.refusal)
    skips_itself = getattr(optimizer, "skips_itself", False)
    if not skips_itself:  # else it refuses them itself
        _refuse_unowned(known)
    for reference, slots in known.by_reducer:
        reducer = reference()
        if reducer is not None:
            reducer.before_step(optimizer, slots)
            known.before[reducer] = reducer.n_rounds, reducer.steps.record
    if skips_itself:
        return None
    return _without_skipped(optimizer, known, args, kwargs)


def _without_skipped(
    optimizer: Optimizer, known: _Known, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns as _before_step(), for a step that changes nothing if the ranks drop it."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):
        if not known.by_reducer and not known.unowned:
            return None
        dropping = functools.partial(_drop_where_skipped, optimizer, known, closure)
        if len(args) > 1:
            return (args[0], dropping, *args[2:]), kwargs
        return args, {**kwargs, "closure": dropping}
    if _skipping(known):
        return (_idle(optimizer), *args[1:]), kwargs
    return None


def _skipping(known: _Known) -> list[Core]:
    """Lists the reducers for which the next step is left out. Each dropped round counts once: else
    an optimizer of two models could not step one while nothing of the other is reduced.
    """
    reducers = [reference() for reference, _ in known.by_reducer]
    found = [one for one in reducers if one is not None and one.skipped]
    if len(found) == len(reducers):
        return found
    return [one for one in found if known.left_out.get(one) != one.n_skipped]


def _drop_where_skipped(optimizer: Optimizer, known: _Known, closure: Callable[[], Any]) -> Any:
    """The closure, after which no parameter has a gradient if the ranks drop the step."""
    result = closure()
    _refuse_unowned(known)
    if _skipping(known):
        if isinstance(optimizer, LBFGS):
            raise FastcommError(
                "the ranks skip a step in a closure of LBFGS, which has moved the parameters in "
                "between: load a checkpoint, or use an optimizer that evaluates its closure once"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    return result


def _idle(optimizer: Optimizer) -> Optimizer:
    """A copy without parameters, and so without a state: its step changes neither.

    copy.copy() would ask Optimizer.__getstate__, which leaves out what a class of the user's own
    keeps. And the optimizer itself cannot be emptied for its step: nobody would fill it again when
    that raises.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__ = {
        **optimizer.__dict__,
        "param_groups": [{**group, "params": []} for group in optimizer.param_groups],
        "state": collections.defaultdict(dict),
    }
    return copy


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], _: object) -> None:
    known = _known.get(optimizer)
    if known is None or known.epoch != _epoch:
        return  # a closure has attached or detached a model
    is_left_out = args[0] is not optimizer
    for reference, slots in known.by_reducer:
        reducer = reference()
        if reducer is None or reducer not in known.before:
            continue
        if is_left_out:
            known.left_out[reducer] = reducer.n_skipped
            reducer.after_step(None)
            continue
        n_rounds, record = known.before[reducer]
        # A closure may have ended rounds: then the gradients are not those from before the step.
        is_of_one_round = reducer.n_rounds == n_rounds
        if is_of_one_round:  # a step within this one, as ZeRO's of a rank's own part, is part of it
            reducer.steps.record = record
        reducer.after_step(slots if is_of_one_round else [])


def _known_of(optimizer: Optimizer) -> _Known:
    """What is known of the optimizer, kept from an earlier step if neither the optimizer nor the
    reducers have changed since.
    """
    groups = optimizer.param_groups
    ids = tuple(map(id, itertools.chain.from_iterable(group["params"] for group in groups)))
    known = _known.get(optimizer)
    if known is None or known.ids != ids or known.epoch != _epoch:
        parameters = [parameter for group in groups for parameter in group["params"]]
        before = known
        known = _known[optimizer] = _Known(ids, parameters)
        if before is not None:
            known.left_out.update(before.left_out)
    return known


def _refuse_unowned(known: _Known) -> None:
    for name, parameter in known.unowned:
        if is_of_this_rank(parameter):
            raise FastcommError(unreduced(name))


def unreduced(name: str) -> str:
    """Why a parameter that no reducer has must have no gradient."""
    return (
        f"parameter {name} has a gradient, and no reducer reduces it: the ranks would drift apart. "
        "Call refresh() on every rank after unfreezing, adding or replacing parameters of an "
        "attached model, or attach() the module that holds it, too. One that is frozen must have "
        "no gradient: set it to None. Parameters outside the attached model that each rank is to "
        "train by itself belong in an optimizer of their own"
    )


def _name_unowned(unowned: Sequence[Tensor], *, is_mixed: bool) -> list[tuple[str, Tensor]]:
    """Those that no reducer has, and should: what belongs to an attached model, and all that is
    stepped along with parameters that are reduced (is_mixed).
    """
    if not unowned:
        return []
    names = attached_names()
    found = []
    for parameter in unowned:
        name = names.get(parameter)
        if name is None and is_mixed:
            name = f"of shape {tuple(parameter.shape)}, which is outside the attached model,"
        if name is not None:
            found.append((name, parameter))
    return found


def _refusal_of(held: list[Tensor]) -> str | None:
    """Why an optimizer of these parameters must not step, or None."""
    ids = {id(parameter) for parameter in held}
    for parameter in held:
        refusal: tuple[str, weakref.ref[Tensor] | None] | None = _refusals.get(parameter)
        if refusal is not None and (refusal[1] is None or id(refusal[1]()) not in ids):
            return refusal[0]
    return None
