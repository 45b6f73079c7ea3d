"""What hooks that were written for DDP get of a bucket."""

from __future__ import annotations

import torch

from fastcomm.reducer.features.ddp_hooks import GradBucket


def test_gradients_lie_in_the_buffer_that_was_set_wherever_that_begins():
    like = [torch.empty(2, 3), torch.empty(3, 2).t()]
    bucket = GradBucket(0, True, torch.zeros(16), [0, 8], like, [])
    wire = torch.arange(20.0)[4:]
    bucket.set_buffer(wire)
    assert bucket.buffer() is wire
    first, second = bucket.gradients()
    assert first.flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert second.t().flatten().tolist() == [12, 13, 14, 15, 16, 17]
    assert first.data_ptr() == wire.data_ptr() and second.shape == (2, 3)
