"""defer_signals(): a signal that comes in the block is handled after it, whatever ends it."""

from __future__ import annotations

import signal

import pytest

from fastcomm import AbandonedError
from fastcomm.reducer.defer_signals import defer_signals


@pytest.fixture
def handled():
    """The signals that Python's handler of SIGUSR1 has handled, each of which raises."""
    numbers = []

    def handle(number, frame):
        numbers.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_the_first_signal_is_handled_after_the_block(handled):
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGUSR1)
        assert handled == []
    assert len(handled) == 1


def test_what_its_handler_raises_is_raised_from_the_error_that_ends_the_block(handled):
    error = AbandonedError("rank 1 abandoned")
    with pytest.raises(KeyboardInterrupt) as interrupt, defer_signals():
        signal.raise_signal(signal.SIGUSR1)
        raise error
    assert interrupt.value.__cause__ is error
    with pytest.raises(KeyboardInterrupt):  # the handler is back
        signal.raise_signal(signal.SIGUSR1)
    assert len(handled) == 2


def test_the_second_signal_is_handled_at_once(handled):
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        pytest.fail("the second one was put off, too")
    assert len(handled) == 2
