"""Where a bucket's launch reads each gradient: where autograd has put it, if it lies there as its
slot does; else gather has copied it. Asked of torch in C, and in Python as of an older torch.
"""

from __future__ import annotations

import pytest
import torch

from fastcomm.nccl import gradient_slot
from tests.nccl import communicator, stand_in_values


class Subclass(torch.Tensor):
    pass


def _of_another_dtype():
    gradient = torch.zeros(4, 3)
    gradient.data = torch.ones(4, 3, dtype=torch.float64)
    return gradient


# Gradients of ones, and whether they lie as the slot does.
GRADIENTS = {
    "contiguous": (lambda: torch.ones(4, 3), True),
    "of a subclass": (lambda: torch.ones(4, 3).as_subclass(Subclass), True),
    "of one column": (lambda: torch.ones(4, 2)[:, :1].clone().as_strided((4, 1), (1, 7)), True),
    "empty": (lambda: torch.ones(0, 3), True),
    "transposed": (lambda: torch.ones(3, 4).t(), False),
    "every second": (lambda: torch.ones(8, 3)[::2], False),
    "with the negative bit": (lambda: torch._neg_view(torch.full((4, 3), -1.0)), False),
    "of another dtype": (_of_another_dtype, False),
}


@pytest.mark.parametrize("asks_in_c", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_gradient_is_read_where_it_lies_only_if_it_lies_as_its_slot_does(kind, asks_in_c):
    (values,) = stand_in_values(1, _change_after_gathering, kind, asks_in_c)
    numel = GRADIENTS[kind][0]().numel()
    assert values == [3.0 if GRADIENTS[kind][1] else 1.0] * numel


def _change_after_gathering(place, kind, asks_in_c):
    """What is reduced of a gradient that changes between gather and launch."""
    comm = communicator(place)
    gradient_slot.use_exchange_table(asks_in_c)
    try:
        gradient = GRADIENTS[kind][0]()
        numel = gradient.numel()
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
    return flat[:numel].tolist()


def test_a_torch_that_has_the_exchange_table_is_asked_in_c():
    assert gradient_slot.use_exchange_table() == hasattr(torch._C, "_dlpack_exchange_api")
