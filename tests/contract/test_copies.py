"""What is of one process: copies of what holds it hold the same one, and no file takes it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.ranks import on_ranks
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


def check_not_saved(thing, words):
    for save in (pickle.dumps, lambda it: torch.save({"it": it}, io.BytesIO())):
        with pytest.raises(TypeError, match=words):
            save(thing)


@over(2)
@on_ranks()
def test_a_copy_of_a_model_holds_the_same_communicator(comm):
    model = nn.Linear(2, 2)
    model.comm = comm
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert twin.comm is comm
    check_not_saved(comm, r"Communicator .*pickled: keep it out .*call fastcomm.init\(\)")


@over(2)
@on_ranks()
def test_the_state_of_a_hook_keeps_its_communicator_in_a_copy(comm):
    state = fastcomm.HookState(comm)
    assert copy.deepcopy(state).comm is comm
    check_not_saved(state, "Communicator .*pickled")


@over(2)
@on_ranks()
def test_what_would_be_wrong_in_a_copy_is_not_copied(comm):
    reducer, model = fastcomm.Reducer(comm), nn.Linear(2, 2)
    reducer.attach(model)
    work = comm.barrier(async_op=True)
    things = {
        r"Work .*wait\(\)": work,
        "Reducer .*attach another one to the copy": reducer,
        "Join ": reducer.join([]),
        "Timeline ": reducer.timeline(),
        r"LocalSGD .*state_dict\(\)": fastcomm.LocalSGD(reducer, every=2),
    }
    for words, thing in things.items():
        for copies in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=words):
                copies(thing)
        check_not_saved(thing, words)
    work.wait()
