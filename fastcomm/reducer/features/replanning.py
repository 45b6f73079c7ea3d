"""What features share that plan a reducer's buckets anew between two rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from fastcomm.comm.abandonment import note_abandoned
from fastcomm.errors import FastcommError
from fastcomm.reducer.features.defer_signals import defer_signals

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer


@contextlib.contextmanager
def all_or_none(reducer: Reducer, stop: Callable[[Reducer], None]) -> Iterator[None]:
    """Around what all ranks do together, or none. stop: called where it cannot be done."""
    with defer_signals():
        try:
            yield
        except BaseException as error:
            # The others are not to wait for this one.
            stop(reducer)
            with contextlib.suppress(FastcommError):
                reducer.comm.abandon()
            note_abandoned(reducer.comm, error)
            raise


def hook_up_anew(reducer: Reducer) -> None:
    """Make the buckets once more, as options and order are now. Collective."""
    model = reducer.attached_model()
    reducer.detach()
    try:
        with torch.inference_mode(False):
            reducer.hook_up(model)
    except BaseException:
        reducer.stand_still(model)
        raise
