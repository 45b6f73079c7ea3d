"""What bench/flatten.py measures: the lists of tensors, copies of them on the GPU, and the ways to
flatten and unflatten them, fastcomm's kernels among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lib import cuda_clock, models
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fastcomm.reducer.layout import plan_buckets
from fastcomm.transports.cuda.multi_tensor import MultiTensor

# All copies of a list together are so many times the L2 cache. Not more copies than this, or
# capturing takes longer than running.
TIMES_L2 = 4
FEWEST_COPIES, MOST_COPIES = 2, 16

MODES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32->bf16": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class Place:
    """One copy of a list of tensors, and of the flat buffer they go into and come from. views[i] is
    where tensors[i] lies in it.
    """

    tensors: list[Tensor]
    flat: Tensor
    views: list[Tensor]


# ---- what is flattened ---------------------------------------------------------------------------


def shapes_of(make_model: Callable[[], torch.nn.Module]) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in make_model().parameters()]


def tiny_shapes() -> list[torch.Size]:
    """2,000 tensors of 1 to 1,999 elements, 1,000 on average, few of which end where 16 bytes do.
    617 spreads the sizes: it is prime.
    """
    return [torch.Size([1 + 617 * i % 1999]) for i in range(2000)]


def bucket_shapes() -> list[torch.Size]:
    """25 MiB of float32, the usual bucket: weights of 1 MiB, the last of which leaves room for the
    biases of all.
    """
    n, width = 25, 512
    shapes = [(width, width)] * (n - 1) + [(width - n, width)] + [(width,)] * n
    return list(map(torch.Size, shapes))


LISTS: dict[str, Callable[[], list[torch.Size]]] = {
    "bucket": bucket_shapes,
    "resnet50": lambda: shapes_of(models.resnet50),
    "bert-large": lambda: shapes_of(lambda: models.Bert(1024, 24, 16)),
    "gpt2": lambda: shapes_of(models.Gpt2),
    "tiny": tiny_shapes,
}


def shapes_in(name: str, mode: str) -> list[torch.Size]:
    """The list's shapes. A bucket is closed by the bytes of its gradients: in 16 bits it holds
    twice as many.
    """
    shapes = LISTS[name]()
    dtype, _ = MODES[mode]
    return shapes * (torch.float32.itemsize // dtype.itemsize) if name == "bucket" else shapes


def make_places(
    shapes: Sequence[torch.Size], mode: str, device: torch.device
) -> tuple[list[Place], list[int]]:
    """The copies of a list, and the offsets in their flat buffers. Tensors come from the allocator
    one by one, as gradients do.
    """
    dtype, wire = MODES[mode]
    plan = [(shape.numel(), dtype, dtype.itemsize) for shape in shapes]
    (layout,) = plan_buckets(plan, cap_bytes=sys.maxsize, first_cap_bytes=sys.maxsize)
    nbytes = layout.numel * (dtype.itemsize + wire.itemsize)
    n_copies = min(MOST_COPIES, max(FEWEST_COPIES, -(-TIMES_L2 * cuda_clock.l2_bytes() // nbytes)))
    places = []
    for _ in range(n_copies):
        tensors = [
            torch.randn(shapes[slot.index], dtype=dtype, device=device) for slot in layout.slots
        ]
        flat = torch.zeros(layout.numel, dtype=wire, device=device)
        views = [
            flat[slot.offset : slot.offset + slot.numel].view(shapes[slot.index])
            for slot in layout.slots
        ]
        places.append(Place(tensors, flat, views))
    return places, [slot.offset for slot in layout.slots]


# ---- the contenders ------------------------------------------------------------------------------


def flattening(
    multi_tensor: MultiTensor, places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    """By contender, what flattens each of the places."""

    def dense(place: Place) -> None:
        _flatten_dense_tensors(place.tensors).to(place.flat.dtype)

    def per_tensor(place: Place) -> None:
        for view, tensor in zip(place.views, place.tensors, strict=True):
            view.copy_(tensor)

    ways: dict[str, Callable[[Place], object]] = {
        "fastcomm": lambda place: multi_tensor.flatten(place.tensors, place.flat),
        "foreach": lambda place: torch._foreach_copy_(place.views, place.tensors),
        "dense": dense,
        "per tensor": per_tensor,
    }
    return on_all(ways, places)


def unflattening(
    multi_tensor: MultiTensor, places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    """By contender, what brings each of the places back."""

    def dense(place: Place) -> None:
        numel = sum(tensor.numel() for tensor in place.tensors)
        views = _unflatten_dense_tensors(
            place.flat[:numel].to(place.tensors[0].dtype), place.tensors
        )
        torch._foreach_copy_(place.tensors, list(views))

    def per_tensor(place: Place) -> None:
        for view, tensor in zip(place.views, place.tensors, strict=True):
            tensor.copy_(view)

    ways: dict[str, Callable[[Place], object]] = {
        "fastcomm": lambda place: multi_tensor.unflatten(place.flat, place.tensors),
        "with norm": lambda place: multi_tensor.unflatten(
            place.flat, place.tensors, with_stats=True
        ),
        "foreach": lambda place: torch._foreach_copy_(place.tensors, place.views),
        "dense": dense,
        "per tensor": per_tensor,
    }
    return on_all(ways, places)


def on_all(
    ways: dict[str, Callable[[Place], object]], places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    return {name: [partial(way, place) for place in places] for name, way in ways.items()}


def copying(nbytes: int, n_copies: int, device: torch.device) -> list[Callable[[], object]]:
    """Device-to-device copies that read and write `nbytes` together, one pair of buffers each."""
    pairs = [
        [torch.zeros(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(n_copies)
    ]
    return [partial(into.copy_, source) for into, source in pairs]
