"""Where a bucket's launch reads each gradient: where autograd has put it, if it lies there as its
slot does; else gather has copied it. Asked of torch in C, and in Python as of an older torch.
"""

from __future__ import annotations

import pytest
import torch

from fastcomm.comm import gradient_slot
from tests.support.ranks import on_ranks
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")

# More than shared memory copies while it gathers.
ROWS, COLUMNS = 64, 96


class Subclass(torch.Tensor):
    pass


def _of_another_dtype():
    gradient = torch.zeros(ROWS, COLUMNS)
    gradient.data = torch.ones(ROWS, COLUMNS, dtype=torch.float64)
    return gradient


# Gradients of ones, and whether they lie as the slot does.
GRADIENTS = {
    "contiguous": (lambda: torch.ones(ROWS, COLUMNS), True),
    "of a subclass": (lambda: torch.ones(ROWS, COLUMNS).as_subclass(Subclass), True),
    "of one column": (
        lambda: torch.ones(5000, 2)[:, :1].clone().as_strided((5000, 1), (1, 7)),
        True,
    ),
    "empty": (lambda: torch.ones(0, COLUMNS), True),
    "transposed": (lambda: torch.ones(COLUMNS, ROWS).t(), False),
    "every second": (lambda: torch.ones(2 * ROWS, COLUMNS)[::2], False),
    "with the negative bit": (lambda: torch._neg_view(torch.full((ROWS, COLUMNS), -1.0)), False),
    "of another dtype": (_of_another_dtype, False),
}


@pytest.mark.parametrize("asks_in_c", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize("kind", GRADIENTS)
@over(1, group=(), hierarchical=())
@on_ranks()
def test_a_gradient_is_read_where_it_lies_only_if_it_lies_as_its_slot_does(comm, kind, asks_in_c):
    """Seen by what is reduced of a gradient that changes between gather and launch."""
    make, is_read_there = GRADIENTS[kind]
    gradient = make()
    numel = gradient.numel()
    gradient_slot.use_exchange_table(asks_in_c)
    try:
        flat = comm.empty(numel + 1, dtype=torch.float32).zero_()
        views = [flat[:numel].view(gradient.shape)]
        bucket = comm.bind_bucket(flat, views, [0], wire_dtype=None, label=1)
        parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameter.data = torch.zeros(gradient.shape)
        assert bucket.gather([parameter]) == []
    finally:
        gradient_slot.use_exchange_table()
    with torch.no_grad():
        gradient.mul_(3)
    bucket.launch("sum", []).wait()
    assert flat[:numel].tolist() == [3.0 if is_read_there else 1.0] * numel


def test_a_torch_that_has_the_exchange_table_is_asked_in_c():
    assert gradient_slot.use_exchange_table() == hasattr(torch._C, "_dlpack_exchange_api")
