"""The order of the times that ranks wait, which their table states."""

from __future__ import annotations

import re

import pytest

from fastcomm.comm import times

ORDERS = re.findall(r"^    (\S.* < \S+)", times.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("order", ORDERS)
def test_times_are_in_the_order_that_their_table_states(order: str) -> None:
    assert eval(order, vars(times).copy())


def test_the_table_states_an_order() -> None:
    assert len(ORDERS) == 5
