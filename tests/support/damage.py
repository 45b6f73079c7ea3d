"""Damaged messages: what a peer, the store or a file may hold in place of a real one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

# In place of a part of a message. Also what JSON as Python reads it knows, and JSON does not.
ODD = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 2**200, 0.5, 1e308),
    *(float("nan"), float("inf"), "", "0", "\ud800", "x" * 5000, [], {}, [[]], {"": None}),
)
_DEEP = [f"{'[' * 100_000}", f"{'[' * 100_000}{']' * 100_000}", '{"a":' * 100_000]
_NO_JSON = [b"", b"\x00", b"\xff\xfe", b"\xf0\x28\x8c\x28", b"nul", b"9" * 5000, b"{]", b"1 1"]


def damaged_bytes(message: bytes) -> st.SearchStrategy[bytes]:
    """Cut off, with bytes changed, lost or added, or none of it."""
    place = st.integers(0, max(len(message) - 1, 0))
    return st.one_of(
        place.map(lambda at: message[:at]),
        st.tuples(place, st.integers(1, 255)).map(lambda one: _flipped(message, *one)),
        st.tuples(place, st.integers(1, 40)).map(
            lambda one: message[: one[0]] + message[one[0] + one[1] :]
        ),
        st.tuples(place, st.binary(min_size=1, max_size=9)).map(
            lambda one: message[: one[0]] + one[1] + message[one[0] :]
        ),
        st.binary(max_size=40),
        st.sampled_from(_NO_JSON),
    )


def _flipped(message: bytes, at: int, mask: int) -> bytes:
    if not message:
        return bytes([mask])
    return message[:at] + bytes([message[at] ^ mask]) + message[at + 1 :]


def damaged_json(value: Any) -> st.SearchStrategy[bytes]:
    """The JSON of a value in which one part is another, is missing or comes twice; or damaged in
    its bytes, or nested without an end.
    """
    text = json.dumps(value).encode()
    return st.one_of(
        damaged_values(value).map(lambda one: json.dumps(one).encode()),
        damaged_bytes(text),
        st.sampled_from(_DEEP).map(str.encode),
    )


@st.composite
def damaged_values(draw: Any, value: Any) -> Any:
    """The value, with one part that is another, is missing or comes twice."""
    path = draw(st.sampled_from([*_paths(value)]))
    how = draw(st.sampled_from(["odd", "odd", "missing", "twice"]))
    return _changed(value, path, how, draw(st.sampled_from(ODD)))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        parts = enumerate(value)
    for key, part in parts:
        yield from _paths(part, (*path, key))


def _changed(value: Any, path: tuple[Any, ...], how: str, odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) > 1 or how == "odd":
        copy[path[0]] = _changed(value[path[0]], path[1:], how, odd)
    elif how == "missing":
        del copy[path[0]]
    elif isinstance(copy, list):
        copy.insert(path[0], copy[path[0]])
    return copy
