"""The state of a sharded optimizer in the format of the plain one: gathered from all ranks, or with
this rank's shards alone; and cut into this rank's pieces again.

A parameter's state holds tensors of its shape (exp_avg), which are cut as the parameter is, and
other things (step), which every owner has alike.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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

State = dict[str, Any]
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


@tellable
class _Cut(NamedTuple):
    """Stands for a tensor that is cut as the parameter is."""

    dtype: torch.dtype


def gather(
    comm: Transport, parts: Sequence[Part], states: Mapping[Tensor, State], call: str
) -> dict[int, State]:
    """Each part's whole state, by its index; none for a parameter that was never stepped.
    Collective. Raises as compare().

    states: this rank's, by the pieces' parameters. call: the user's, for messages.
    """
    by_rank = compare(comm, parts, states, call)
    whole: dict[int, State] = {}
    slices: dict[int, list[Tensor]] = {rank: [] for rank in range(comm.world_size)}
    for i, part in enumerate(parts):
        for rank, (begin, end) in part.spans.items():
            for key, value in by_rank[rank][i].items():
                state = whole.setdefault(i, {})
                if not isinstance(value, _Cut):
                    state.setdefault(key, value)
                    continue
                if key not in state:
                    state[key] = _empty_like(part.parameter, value.dtype)
                target = in_memory_order(state[key])[begin:end]
                slices[rank].append(target)
                if rank == comm.rank and part.piece is not None:
                    target.copy_(_flat(states[part.piece.parameter][key], part.piece.parameter))
    for rank, tensors in slices.items():
        if tensors:
            validation.broadcast(comm, tensors, rank)
    return whole


def sharded(
    comm: Transport, parts: Sequence[Part], states: Mapping[Tensor, State], call: str
) -> dict[int, State]:
    """Each part's state, by its index, with a TensorShard for each tensor that is cut; none for a
    parameter that was never stepped. Collective. Raises as compare().

    states, call: as gather().
    """
    by_rank = compare(comm, parts, states, call)
    shown: dict[int, State] = {}
    for i, (_, parameter, spans, piece) in enumerate(parts):
        for key, value in by_rank[min(spans)][i].items() if spans else ():
            mine = None if piece is None else states[piece.parameter][key]
            if isinstance(value, _Cut):
                begin = 0 if piece is None else piece.begin
                none = torch.empty(0, dtype=value.dtype, device=parameter.device)
                mine = TensorShard.of(parameter, begin, none if mine is None else mine)
            shown.setdefault(i, {})[key] = value if mine is None else mine
    return shown


def of_zeros(part: Part) -> Part:
    """A part as large, of zeros that have a zero gradient."""
    if part.piece is None:
        return part
    zeros = Parameter(torch.zeros_like(part.piece.parameter))
    zeros.grad = torch.zeros_like(zeros)
    return part._replace(piece=part.piece._replace(parameter=zeros))


def of_no_step(state: State) -> State:
    """The state of one step of zeros, as that of none."""
    started = {
        key: torch.full_like(state[key], start) if isinstance(state[key], Tensor) else start
        for key, start in _BEFORE_STEPS.items()
        if key in state
    }
    return {**state, **started}


def compare(
    comm: Transport, parts: Sequence[Part], states: Mapping[Tensor, State], call: str
) -> list[list[State]]:
    """By rank and part, the state of its piece, without what is cut. Collective. Raises
    MismatchError, on every rank, where ranks that step one parameter have states of different
    steps.

    states, call: as gather().
    """
    by_rank = gather_objects(comm, [_describe(part.piece, states) for part in parts], call)
    for i, part in enumerate(parts):
        first, *others = part.spans or [0]
        for rank in others:
            _refuse_mixture(part.name, first, by_rank[first][i], rank, by_rank[rank][i])
    return by_rank


def _refuse_mixture(name: str, first: int, state: State, rank: int, other: State) -> None:
    """Raises MismatchError unless two ranks' states of one parameter are of one step."""
    expected, found = _in_words(state), _in_words(other)
    for key in {**expected, **found}:
        if found.get(key) != expected.get(key):
            raise MismatchError(
                f"the optimizer's {key} of parameter {name} is {expected.get(key)} on rank {first} "
                f"and {found.get(key)} on rank {rank}, and each steps a part of it: a step has "
                "failed, or different states were loaded. Load one whole state on every rank, or "
                "begin anew there by optimizer.state = {}"
            )


def _in_words(state: State) -> dict[str, str]:
    return {
        key: f"a tensor of {value.dtype}" if isinstance(value, _Cut) else validation.shown(value)
        for key, value in state.items()
    }


def cut(parameter: Parameter, piece: Piece, whole: State) -> State:
    """The piece's part of a parameter's state, which is whole, or of this rank's shards."""
    mine: State = {}
    for key, value in whole.items():
        if isinstance(value, TensorShard):
            mine[key] = value.to_local()
        elif _is_cut(key, value, parameter):
            mine[key] = _empty_like(piece.parameter, value.dtype)
            in_memory_order(mine[key]).copy_(_flat(value, parameter)[piece.begin : piece.end])
        else:
            mine[key] = value.clone() if isinstance(value, Tensor) else value
    return mine


def cut_all(
    whole: Mapping[Parameter, State], parts: Mapping[Parameter, Part]
) -> dict[Tensor, State]:
    """The states of this rank's pieces, by the pieces' parameters."""
    return {
        piece.parameter: cut(parameter, piece, whole[parameter])
        for parameter, piece in pieces_of(parts, whole).items()
    }


class Saved(NamedTuple):
    """A saved state, as the optimizer that loads it sees it.

    groups: the saved options, with this optimizer's parameters. states: none for a parameter that
    was never stepped.
    """

    groups: list[dict[str, Any]]
    states: dict[Parameter, State]

    @property
    def is_whole(self) -> bool:
        """Whether it is of all ranks, and not one rank's part."""
        values = (value for state in self.states.values() for value in state.values())
        return not any(isinstance(value, TensorShard) for value in values)

    def numbered(self) -> dict[str, Any]:
        """The state with numbers in place of the parameters, as an optimizer loads it."""
        parameters = [p for group in self.groups for p in group["params"]]
        states = {i: self.states[p] for i, p in enumerate(parameters) if p in self.states}
        return {"state": states, "param_groups": numbered(self.groups)}


def read(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Saved:
    """What state_dict(), full_state_dict() or a plain optimizer has saved, for an optimizer with
    these groups. Raises TypeError for anything else, and ValueError for other groups and for a
    state of no parameter.
    """
    is_state = isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()
    if not is_state or not all("params" in group for group in saved["param_groups"]):
        raise TypeError(
            "load_state_dict() and load_full_state_dict() take what full_state_dict() or "
            f"state_dict() has returned; got {type(saved).__name__}"
        )
    theirs = saved["param_groups"]
    if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in groups]:
        raise ValueError(
            "the state was saved with other parameter groups: give the optimizer the same ones, "
            "with as many parameters"
        )
    pairs = list(zip(groups, theirs, strict=True))
    parameter_of = {
        number: parameter
        for mine, group in pairs
        for number, parameter in zip(group["params"], mine["params"], strict=True)
    }
    states = states_by_number(saved, parameter_of)
    return Saved(
        [{**options_of(group), "params": mine["params"]} for mine, group in pairs],
        {parameter_of[number]: state for number, state in states.items()},
    )


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


def own_states(
    saved: Saved, pieces: Mapping[Parameter, Piece], *, keeps_new: bool
) -> dict[int, State]:
    """The states of this rank's pieces, by their place among them. keeps_new: also those of no
    step, which an optimizer of most classes makes in its first one.
    """
    return {
        i: cut(p, piece, saved.states[p])
        for i, (p, piece) in enumerate(pieces.items())
        if p in saved.states and (keeps_new or saved.states[p].get(_NEVER_CUT) != 0)
    }


def states_by_number(saved: Mapping[str, Any], numbers: Iterable[Any]) -> dict[Any, State]:
    """The parameters' states in a saved state whose groups hold these numbers.
    torch.distributed.checkpoint makes strings of them, beside the numbers if it has loaded what is
    no tensor. Raises ValueError for what belongs to no parameter.
    """
    known = {str(number): number for number in numbers}
    strangers = [key for key in saved["state"] if str(key) not in known]
    if strangers:
        raise ValueError(
            f"the state holds something under {strangers[0]!r}, which is no parameter of its own "
            "groups: give what full_state_dict(), or the plain optimizer, has saved"
        )
    states: dict[Any, State] = {}
    for key, state in saved["state"].items():
        number = known[str(key)]
        states[number] = states.get(number, {}) | state
    return states


Fits = Callable[[Tensor, Tensor], bool]  # of a state's tensor and the parameter


def is_shaped_as(value: Tensor, parameter: Tensor) -> bool:
    return value.shape == parameter.shape


def is_factor_of(value: Tensor, parameter: Tensor) -> bool:
    """Whether it is shaped as the parameter, or averaged over some of its dimensions."""
    return value.dim() == parameter.dim() and all(
        n in (1, whole) for n, whole in zip(value.shape, parameter.shape, strict=True)
    )


def refuse(
    saved: Saved,
    parts: Mapping[Parameter, Part],
    names: Mapping[Parameter, str],
    fits: Fits | None,
) -> None:
    """Raises ValueError for another rank's part, and for a state that does not fit. names: of the
    model's parameters. fits: None if the state's tensors are shaped as the class likes.
    """
    for parameter, state in saved.states.items():
        part = parts.get(parameter)
        for key, value in state.items():
            if isinstance(value, TensorShard):
                what = f"{key} of parameter {names.get(parameter)}"
                _refuse_other_shard(what, value, part and part.piece)
    if fits is None:
        return
    tensors = [pair for state in saved.states.values() for pair in state.items()]
    large = {key for key, value in tensors if isinstance(value, Tensor) and value.numel() > 1}
    for parameter, part in parts.items():
        refuse_misfit(part.name, parameter, saved.states.get(parameter, {}), large, fits)


def _refuse_other_shard(what: str, shard: TensorShard, piece: Piece | None) -> None:
    """Raises ValueError unless the shard has the elements that this rank steps."""
    begin, end = shard.begin, shard.begin + shard.to_local().numel()
    mine = (0, 0) if piece is None else (piece.begin, piece.end)
    if (begin, end) != mine:
        raise ValueError(
            f"the {what} has elements [{begin}, {end}) in this state, and this rank steps "
            f"[{mine[0]}, {mine[1]}): it is another rank's part, or of other buckets. What "
            "torch.distributed.checkpoint or full_state_dict() has saved any rank can take"
        )


def refuse_misfit(
    name: str,
    parameter: Tensor,
    state: State,
    large: Container[str] = (),
    fits: Fits = is_shaped_as,
) -> None:
    """Raises ValueError if the state cannot be the parameter's, or cut as the parameter is. large:
    keys of what has more than one element for a parameter that has.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        may_be_scalar = key not in large or parameter.numel() == 1
        if not fits(value, parameter) and not (may_be_scalar and value.numel() == 1):
            raise ValueError(
                f"{key} of parameter {name} has shape {list(value.shape)} in this state, and the "
                f"parameter has {list(parameter.shape)}: the state is another model's, of another "
                "order of parameters, or one rank's part"
            )


def refuse_missing_options(optimizer: Optimizer, saved: Saved) -> None:
    """Raises ValueError if the saved groups lack an option of the optimizer's, which it does not
    add by itself, as torch's classes do to a state of an older version. Loads those groups.
    """
    packed = numbered(optimizer.param_groups)
    groups = [
        {**options_of(theirs), "params": mine["params"]}
        for mine, theirs in zip(packed, saved.groups, strict=True)
    ]
    needed = list(optimizer.defaults)  # to which torch adds some when it loads a state
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    for i, group in enumerate(optimizer.param_groups):
        for key in needed:
            if key not in group:
                raise ValueError(
                    f"group {i} of the state has no option {key}: it is of another class than "
                    f"{type(optimizer).__name__}, and only what that has saved can be loaded"
                )


def _describe(piece: Piece | None, states: Mapping[Tensor, State]) -> State:
    """The piece's state, without what is cut."""
    if piece is None:
        return {}
    return {
        key: _Cut(value.dtype) if _is_cut(key, value, piece.parameter) else value
        for key, value in states.get(piece.parameter, {}).items()
    }


def _is_cut(key: str, value: object, parameter: Tensor) -> bool:
    return key != _NEVER_CUT and isinstance(value, Tensor) and value.shape == parameter.shape


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(
        parameter.size(), strides_of(parameter), dtype=dtype, device=parameter.device
    )


def _flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements in the order in which the parameter's lie."""
    return in_memory_order(_empty_like(parameter, tensor.dtype).copy_(tensor))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: group[key] for key in group if key not in ("params", "param_names")}


def numbered(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups as state_dict() has them: with numbers in place of the parameters."""
    packed, n = [], 0
    for group in groups:
        numbers = list(range(n, n + len(group["params"])))
        packed.append({**group, "params": numbers})
        n += len(numbers)
    return packed
