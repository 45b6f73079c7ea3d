"""The forms of messages: what has one is read, and all else is one error that says where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from fastcomm import FastcommError
from fastcomm.comm.forms import NUMBER, PID, checked, read
from tests.support.damage import damaged_json

REAL = {
    "pid": 17,
    "cores": [0, 1],
    "card": None,
    "names": {"65537": "weight"},
    "met": ["prefix", 3, True],
}
FORM = {
    "pid": PID,
    "cores": [NUMBER],
    "card": {str, None},
    "names": {str: str},
    "met": (str, range(8), bool),
}


def test_a_message_of_the_form_is_read():
    assert read(json.dumps(REAL), FORM, "the message") == REAL


@pytest.mark.parametrize(
    "value, form, found",
    [
        (True, int, "it has True"),
        (3.0, range(8), "it has 3.0"),
        (8, range(8), "it has 8"),
        ([1, "a"], [int], r"it has 'a' at \[1\]"),
        ([1], (int, int), r"it has \[1\]"),
        ({"a": [{}]}, {"a": [{"b": int}]}, r"it has {} at \['a'\]\[0\]"),
        ({"a": 1}, {str: str}, r"it has 1 at \['a'\]"),
        ("a", {None, int}, "it has 'a'"),
    ],
)
def test_what_does_not_have_the_form_is_shown_with_its_place(value, form, found):
    with pytest.raises(ValueError, match=f"the note of rank 2 cannot be read: {found}"):
        checked(value, form, "the note of rank 2", ValueError)


@settings(max_examples=300, deadline=None)
@given(damaged_json(REAL))
def test_whatever_is_there_is_of_the_form_or_one_error(text):
    try:
        value = read(text, FORM, "the note of rank 2")
    except FastcommError as error:
        assert str(error).startswith("the note of rank 2 cannot be read: ")
        assert len(str(error)) < 1000
    else:
        assert type(value["pid"]) is int and 0 < value["pid"] < 2**31
        assert all(type(core) is int and core >= 0 for core in value["cores"])
        assert all(type(name) is str for name in value["names"].values())
        _, number, is_last = value["met"]
        assert number in range(8) and is_last in (True, False)
