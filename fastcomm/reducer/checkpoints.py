"""The whole state of a sharded optimizer: gathered from all ranks into the format of the plain one,
and cut into this rank's pieces again.

A parameter's state holds tensors of its shape (exp_avg), which are cut as the parameter is, and
other things (step), which every owner has alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.communicator import Communicator
from fastcomm.objects import gather_objects
from fastcomm.reducer import agreement
from fastcomm.reducer.geometry import in_memory_order, strides_of
from fastcomm.reducer.shares import Piece

State = dict[str, Any]
PLACE = "fastcomm"  # a key of state_dict(), which is one rank's part
_NEVER_CUT = "step"  # a scalar, also for parameters that are scalars


class Part(NamedTuple):
    """A parameter, and what this rank steps of it.

    spans: by rank, which elements it steps: [begin, end).
    """

    parameter: Parameter
    spans: Mapping[int, tuple[int, int]]
    piece: Piece | None


class _Cut(NamedTuple):
    """Stands for a tensor that is cut as the parameter is."""

    dtype: torch.dtype


def gather(
    comm: Communicator, parts: Sequence[Part], states: Mapping[Tensor, State]
) -> dict[int, State]:
    """Each part's whole state, by its index; none for a parameter that was never stepped.
    Collective.

    states: this rank's, by the pieces' parameters.
    """
    mine = [_describe(part.piece, states) for part in parts]
    by_rank = gather_objects(comm, mine)
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
            agreement.broadcast(comm, tensors, rank)
    return whole


def cut(parameter: Parameter, piece: Piece, whole: State) -> State:
    """The piece's part of a parameter's whole state."""
    mine: State = {}
    for key, value in whole.items():
        if _is_cut(key, value, parameter):
            mine[key] = _empty_like(piece.parameter, value.dtype)
            in_memory_order(mine[key]).copy_(_flat(value, parameter)[piece.begin : piece.end])
        else:
            mine[key] = value.clone() if isinstance(value, Tensor) else value
    return mine


class Saved(NamedTuple):
    """A saved state, as the optimizer that loads it sees it.

    groups: the saved options, with this optimizer's parameters. states: none for a parameter that
    was never stepped. place: whose part it is; None of a whole state.
    """

    groups: list[dict[str, Any]]
    states: dict[Parameter, State]
    place: Sequence[Any] | None


def read(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Saved:
    """What state_dict(), full_state_dict() or a plain optimizer has saved, for an optimizer with
    these groups. Raises TypeError for anything else, and ValueError for other groups and for a
    state of no parameter.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
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
    parameter_of = {
        number: parameter
        for mine, group in pairs
        for number, parameter in zip(group["params"], mine["params"], strict=True)
    }
    states = states_by_number(saved, parameter_of)
    return Saved(
        [{**options_of(group), "params": mine["params"]} for mine, group in pairs],
        {parameter_of[number]: state for number, state in states.items()},
        saved.get(PLACE),
    )


def states_by_number(saved: Mapping[str, Any], numbers: Iterable[Any]) -> dict[Any, State]:
    """The parameters' states in a saved state whose groups hold these numbers.
    torch.distributed.checkpoint has made strings of them when it has written a file of torch.save.
    Raises ValueError for what belongs to no parameter.
    """
    known = {str(number): number for number in numbers}
    strangers = [key for key in saved["state"] if str(key) not in known]
    if strangers:
        raise ValueError(
            f"the state holds something under {strangers[0]!r}, which is no parameter of its own "
            "groups: give what full_state_dict(), or the plain optimizer, has saved"
        )
    return {known[str(key)]: state for key, state in saved["state"].items()}


def refuse_misfit(name: str, parameter: Parameter, whole: State) -> None:
    """Raises ValueError if the parameter's state cannot be cut as the parameter is."""
    for key, value in whole.items():
        is_tensor = isinstance(value, Tensor) and value.is_floating_point() and value.numel() != 1
        if is_tensor and value.shape != parameter.shape:
            raise ValueError(
                f"{key} of parameter {name} has shape {list(value.shape)} in this state, and the "
                f"parameter has {list(parameter.shape)}: the state is another model's, of another "
                "order of parameters, or one rank's part"
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
