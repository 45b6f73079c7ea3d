"""What ranks offer each other of sparse gradients, where it is damaged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcomm import FastcommError, Reducer
from fastcomm.comm.transport import Part
from fastcomm.control.announcement import Call
from fastcomm.reducer.features.sparse_bucket import Offer
from tests.support.ranks import on_ranks

LIKES = [torch.empty(10, 4, device="meta"), torch.empty(6, 2, device="meta")]
MEAN = Call("all_reduce", op="weighted mean", fingerprint=7, part=Part(0.5, 2.0))
REAL = Offer(MEAN, [3, 0], [1, 1]).numbers()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, len(REAL) - 1),
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 20)),
)
def test_a_damaged_offer_is_one_that_can_be_or_an_error(place, number):
    numbers = [number if i == place else one for i, one in enumerate(REAL)]
    try:
        offer = Offer.of(numbers, LIKES)
    except ValueError as error:
        assert "is no offer of gradients" in str(error) or "is no collective" in str(error)
    else:
        assert 0 <= offer.n_rows[0] <= 10 and 0 <= offer.n_rows[1] <= 6


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("shm", "group")
@on_ranks(2)
def test_every_rank_hears_who_has_made_an_impossible_offer(comm):
    model = torch.nn.Embedding(10, 4, sparse=True)
    reducer = Reducer(comm).attach(model)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Offer, "numbers", lambda offer: [*[0] * 7, 2**50, 1])
        with pytest.raises(FastcommError, match=r"rank 1 has sent what cannot be: 0000"):
            model(torch.tensor([1, 2])).sum().backward()
    reducer.detach()
