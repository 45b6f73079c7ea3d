"""The state of a sharded optimizer in the format of the plain one: gathered from all ranks, or with
this rank's shards alone; and cut into this rank's pieces again.

A parameter's state holds tensors of its shape (exp_avg), which are cut as the parameter is, and
other things (step), which every owner has alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fastcomm.comm.objects import gather_objects, tellable
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError
from fastcomm.optim.tensor_shard import TensorShard
from fastcomm.reducer import validation
from fastcomm.reducer.features.shards import Piece
from fastcomm.reducer.layout import in_memory_order, strides_of

OptimizerState = dict[str, Any]
_NEVER_CUT = "step"  # a scalar, also for parameters that are scalars
_BEFORE_STEPS = {_NEVER_CUT: 0, "mu_product": 1}  # what a step of zeros changes; the latter: NAdam


class Part(NamedTuple):
    """A parameter, and what this rank steps of it.

    name: in messages. spans: by rank, which elements it steps: [begin, end).
    """

    name: str
    parameter: Parameter
    spans: Mapping[int, tuple[int, int]]
    piece: Piece | None


def pieces_of(
    parts: Mapping[Parameter, Part], parameters: Iterable[Parameter]
) -> dict[Parameter, Piece]:
    """What this rank steps of these parameters, in their order."""
    among = {parameter: parts.get(parameter) for parameter in parameters}
    return {p: part.piece for p, part in among.items() if part and part.piece}


# -- what the ranks have ---------------------------------------------------------------------------


@tellable
class _Cut(NamedTuple):
    """Stands for a tensor that is cut as the parameter is."""

    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype}"


def compare(
    comm: Transport, parts: Collection[Part], states: Mapping[Tensor, OptimizerState], call: str
) -> list[OptimizerState]:
    """By part, the state of the first rank that steps it, without what is cut. Collective. Raises
    MismatchError, on every rank, where ranks that step one parameter have states of different
    steps.

    parts: in the same order on all ranks. states: this rank's, by the pieces' parameters. call: the
    user's, for messages.
    """
    by_rank = gather_objects(comm, [_describe(part.piece, states) for part in parts], call)
    firsts = []
    for i, part in enumerate(parts):
        first, *others = part.spans
        firsts.append(by_rank[first][i])
        for rank in others:
            _refuse_mixture(part.name, first, by_rank[first][i], rank, by_rank[rank][i])
    return firsts


def _describe(piece: Piece | None, states: Mapping[Tensor, OptimizerState]) -> OptimizerState:
    """The piece's state, without what is cut."""
    if piece is None:
        return {}
    return {
        key: _Cut(value.dtype) if _is_cut(key, value, piece.parameter) else value
        for key, value in states.get(piece.parameter, {}).items()
    }


def _refuse_mixture(
    name: str, first: int, state: OptimizerState, rank: int, other: OptimizerState
) -> None:
    """Raises MismatchError unless two ranks' states of one parameter are of one step."""
    for key in {**state, **other}:
        expected, found = (
            validation.shown(one[key]) if key in one else None for one in (state, other)
        )
        if found != expected:
            raise MismatchError(
                f"the optimizer's {key} of parameter {name} is {expected} on rank {first} and "
                f"{found} on rank {rank}, and each steps a part of it: a step has failed, or "
                "different states were loaded. Load one whole state on every rank, or begin anew "
                "there by optimizer.state = {}"
            )


def sharded(
    comm: Transport, parts: Collection[Part], states: Mapping[Tensor, OptimizerState], call: str
) -> dict[Parameter, OptimizerState]:
    """The parameters' states, with a TensorShard for each tensor that is cut; none for a parameter
    that was never stepped. Collective. Takes and raises what compare() does.
    """
    shown: dict[Parameter, OptimizerState] = {}
    firsts = compare(comm, parts, states, call)
    for (_, parameter, _, piece), first in zip(parts, firsts, strict=True):
        mine = {} if piece is None else states.get(piece.parameter, {})
        begin = 0 if piece is None else piece.begin
        state = {**first, **mine}
        for key, value in first.items():
            if isinstance(value, _Cut):
                none = torch.empty(0, dtype=value.dtype, device=parameter.device)
                size, strides = parameter.size(), strides_of(parameter)
                state[key] = TensorShard(size, strides, begin, mine.get(key, none))
        if state:
            shown[parameter] = state
    return shown


def gather(
    comm: Transport, parts: Collection[Part], states: Mapping[Tensor, OptimizerState], call: str
) -> dict[Parameter, OptimizerState]:
    """The parameters' whole states; none for a parameter that was never stepped. Collective. Takes
    and raises what compare() does.
    """
    states_with_shards = sharded(comm, parts, states, call)
    slices: dict[int, list[Tensor]] = {rank: [] for rank in range(comm.world_size)}
    for part in parts:
        state = states_with_shards.get(part.parameter, {})
        for key, value in state.items():
            if isinstance(value, TensorShard):
                state[key] = _empty_like(part.parameter, value.dtype)
                flat = in_memory_order(state[key])
                for rank, (begin, end) in part.spans.items():
                    slices[rank].append(flat[begin:end])
                    if rank == comm.rank and part.piece is not None:
                        flat[begin:end] = _flat(value.to_local(), part.piece.parameter)
    for rank, tensors in slices.items():
        if tensors:
            validation.broadcast(comm, tensors, rank)
    return states_with_shards


def of_zeros(part: Part) -> Part:
    """A part as large, of zeros that have a zero gradient."""
    if part.piece is None:
        return part
    zeros = Parameter(torch.zeros_like(part.piece.parameter))
    zeros.grad = torch.zeros_like(zeros)
    return part._replace(piece=part.piece._replace(parameter=zeros))


def of_no_step(state: OptimizerState) -> OptimizerState:
    """The state of one step of zeros, as that of none."""
    started = {
        key: torch.full_like(state[key], start) if isinstance(state[key], Tensor) else start
        for key, start in _BEFORE_STEPS.items()
        if key in state
    }
    return {**state, **started}


# -- what this rank steps of it --------------------------------------------------------------------


def cut(
    whole: Mapping[Parameter, OptimizerState], parts: Mapping[Parameter, Part]
) -> dict[Tensor, OptimizerState]:
    """The states of this rank's pieces, by the pieces' parameters. whole: by parameter, each whole,
    or of this rank's shards.
    """
    return {
        piece.parameter: {
            key: _cut(key, value, parameter, piece) for key, value in whole[parameter].items()
        }
        for parameter, piece in pieces_of(parts, whole).items()
    }


def _cut(key: str, value: Any, parameter: Parameter, piece: Piece) -> Any:
    if isinstance(value, TensorShard):
        return value.to_local()
    if not _is_cut(key, value, parameter):
        return value.clone() if isinstance(value, Tensor) else value
    mine = _empty_like(piece.parameter, value.dtype)
    in_memory_order(mine).copy_(_flat(value, parameter)[piece.begin : piece.end])
    return mine


def _is_cut(key: str, value: object, parameter: Tensor) -> bool:
    return key != _NEVER_CUT and isinstance(value, Tensor) and value.shape == parameter.shape


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(
        parameter.size(), strides_of(parameter), dtype=dtype, device=parameter.device
    )


def _flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements in the order in which the parameter's lie."""
    return in_memory_order(_empty_like(parameter, tensor.dtype).copy_(tensor))


# -- a state that was saved ------------------------------------------------------------------------


class Saved(NamedTuple):
    """A saved state, as the optimizer that loads it sees it.

    groups: the saved options, with this optimizer's parameters. states: none for a parameter that
    was never stepped.
    """

    groups: Sequence[dict[str, Any]]
    states: Mapping[Any, OptimizerState]

    @property
    def is_whole(self) -> bool:
        """Whether it is of all ranks, and not one rank's part."""
        values = (value for state in self.states.values() for value in state.values())
        return not any(isinstance(value, TensorShard) for value in values)

    def numbered(self) -> dict[str, Any]:
        """As state_dict() has it: with numbers in place of the parameters."""
        states: dict[int, OptimizerState] = {}
        groups, n = [], 0
        for group in self.groups:
            numbered = dict(enumerate(group["params"], n))
            groups.append({**group, "params": list(numbered)})
            states |= {i: dict(self.states[p]) for i, p in numbered.items() if p in self.states}
            n += len(numbered)
        return {"state": states, "param_groups": groups}


def read(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Saved:
    """What state_dict(), full_state_dict() or a plain optimizer has saved, for an optimizer with
    these groups. Raises TypeError for anything else, and ValueError for other groups and for a
    state of no parameter.
    """
    is_state = isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()
    if not is_state or not all("params" in group for group in saved["param_groups"]):
        raise TypeError(
            "load_state_dict() takes what full_state_dict() or state_dict() has returned; got "
            f"{type(saved).__name__}"
        )
    theirs = saved["param_groups"]
    if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in groups]:
        raise ValueError(
            "the state was saved with other parameter groups: give the optimizer the same ones, "
            "with as many parameters"
        )
    pairs = list(zip(groups, theirs, strict=True))
    # torch.distributed.checkpoint makes strings of the numbers, beside the numbers if it has loaded
    # what is no tensor
    parameter_of = {
        str(number): parameter
        for mine, group in pairs
        for number, parameter in zip(group["params"], mine["params"], strict=True)
    }
    states: dict[Parameter, OptimizerState] = {}
    for key, state in saved["state"].items():
        if str(key) not in parameter_of:
            raise ValueError(
                f"the state holds something under {key!r}, which is no parameter of its own "
                "groups: give what full_state_dict(), or the plain optimizer, has saved"
            )
        parameter = parameter_of[str(key)]
        states[parameter] = states.get(parameter, {}) | state
    return Saved([{**options_of(group), "params": mine["params"]} for mine, group in pairs], states)


def described(
    saved: Saved, parts: Mapping[Parameter, Part], names: Mapping[Parameter, str]
) -> dict[str, str]:
    """What every rank must have been given alike: all of a whole state; of a part the options, and
    the states of parameters that no rank steps. names: of the model's parameters.
    """
    states = {p: s for p, s in saved.states.items() if saved.is_whole or p not in parts}
    kind = {"the kind of state": "the whole" if saved.is_whole else "one rank's part"}
    contents = validation.optimizer_contents(saved.groups, states, names)
    return kind | validation.contents_in_words(*contents)


def refuse_other_shards(
    saved: Saved, parts: Mapping[Parameter, Part], names: Mapping[Parameter, str]
) -> None:
    """Raises ValueError for another rank's part. names: of the model's parameters."""
    for parameter, state in saved.states.items():
        piece = parts[parameter].piece if parameter in parts else None
        mine = (0, 0) if piece is None else (piece.begin, piece.end)
        for key, value in state.items():
            if isinstance(value, TensorShard) and value.span != mine:
                raise ValueError(
                    f"the {key} of parameter {names.get(parameter)} is another rank's part, or of "
                    "other buckets: load what torch.distributed.checkpoint or full_state_dict() "
                    "has saved"
                )


def refuse_misfits(states: Mapping[Parameter, OptimizerState], parts: Iterable[Part]) -> None:
    """Raises ValueError naming a parameter whose state cannot be cut as it is."""
    for name, parameter, _, _ in parts:
        for key, value in states.get(parameter, {}).items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.numel() > 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{key} of parameter {name} has shape {list(value.shape)} in this state, and "
                    f"the parameter has {list(parameter.shape)}: the state is another model's, of "
                    "another order of parameters, or one rank's part"
                )


def load(optimizer: Optimizer, saved: Saved, parts: Mapping[Parameter, Part]) -> None:
    """Lets an optimizer of this rank's pieces, which has made no step, load what is theirs. Raises
    ValueError if the saved groups lack an option of the optimizer's, which it does not add by
    itself, as torch's classes do to a state of an older version.
    """
    begins_with_state = bool(optimizer.state)  # as Adagrad does; most make it in their first step
    states = {
        parameter: state
        for parameter, state in saved.states.items()
        if begins_with_state or state.get(_NEVER_CUT) != 0
    }
    groups = [
        {**options_of(theirs), "params": mine["params"]}
        for mine, theirs in zip(optimizer.param_groups, saved.groups, strict=True)
    ]
    needed = list(optimizer.defaults)  # to which torch adds some when it loads a state
    optimizer.load_state_dict(Saved(groups, cut(states, parts)).numbered())
    lacking = [key for group in optimizer.param_groups for key in needed if key not in group]
    if lacking:
        raise ValueError(
            f"the state has no option {lacking[0]}: it is of another class than "
            f"{type(optimizer).__name__}"
        )


# -- parameter groups ------------------------------------------------------------------------------


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: group[key] for key in group if key not in ("params", "param_names")}


def options_in_words(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The groups' options, as ranks compare them."""
    return {
        f"{key} of group {i}": validation.shown(value)
        for i, group in enumerate(groups)
        for key, value in options_of(group).items()
    }
