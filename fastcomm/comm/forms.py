"""What other processes have written for this one as JSON, in the store or in a file, and its form.

A message may be cut off, of another version, or another program's. So each is compared with the
form that its reader expects, before anything is made of it. A form is

    int, float, str, bool     a value of this type alone
    object                    any value
    None                      null
    range(8)                  an integer in this range
    {int, None}               one of several forms, which are no lists or objects
    [form]                    a list of any length
    (int, [str])              a list of exactly these
    {"pid": int}              an object that has at least these keys
    {str: int}                an object with any keys
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Iterator
from typing import Any

from fastcomm.errors import FastcommError

PID = range(1, 2**31)
NUMBER = range(2**63)  # of a collective, an epoch, a meeting, or bytes

Form = Any


def read(text: str | bytes, form: Form, what: str, kind: type[Exception] = FastcommError) -> Any:
    """The value of a message. Raises `kind` if it does not have the form. what: the message, in
    words, with who has written it.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(what, str(error), kind) from error
    return checked(value, form, what, kind)


def checked(value: Any, form: Form, what: str, kind: type[Exception] = FastcommError) -> Any:
    """The value. Raises `kind` if it does not have the form."""
    misfit = _misfit(value, form, "")
    if misfit is not None:
        raise _refused(what, misfit, kind)
    return value


def _refused(what: str, why: str, kind: type[Exception]) -> Exception:
    return kind(
        f"{what} cannot be read: {why}. Do all processes run the same version of fastcomm, or has "
        "another program written it?"
    )


def _misfit(value: Any, form: Form, place: str) -> str | None:
    """The first part that does not fit; None if all do. place: where the value stands."""
    if not _fits(value, form):
        return f"it has {reprlib.repr(value)}" + (f" at {place}" if place else "")
    misfits = (
        _misfit(part, expected, f"{place}[{key!r}]") for key, part, expected in _parts(value, form)
    )
    return next((one for one in misfits if one is not None), None)


def _fits(value: Any, form: Form) -> bool:
    """Whether it does, but for its parts."""
    if isinstance(form, set):
        return any(_misfit(value, one, "") is None for one in form)
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, tuple):
        return isinstance(value, (list, tuple)) and len(value) == len(form)
    if isinstance(form, list):
        return isinstance(value, (list, tuple))
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key is str or key in value for key in form)
    return form is object or type(value) is form or value is form


def _parts(value: Any, form: Form) -> Iterator[tuple[object, Any, Form]]:
    """What a value consists of, where its form says so: the key, the part and its form."""
    if isinstance(form, tuple):
        yield from zip(range(len(form)), value, form, strict=True)
    elif isinstance(form, list):
        yield from zip(range(len(value)), value, itertools.repeat(form[0]))
    elif isinstance(form, dict):
        for key, expected in form.items():
            for name in value if key is str else (key,):
                yield name, value[name], expected
