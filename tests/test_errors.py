"""The errors' classes."""

import builtins

from fastcomm import TimeoutError


def test_a_timeout_is_pythons_timeout_error_too():
    assert issubclass(TimeoutError, builtins.TimeoutError)
