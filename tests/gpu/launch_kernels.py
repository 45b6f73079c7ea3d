"""Launches every kernel on small inputs, for compute-sanitizer (see ci/gpu.sh): each pair of dtypes
in both directions, with few tensors and with many, aligned and not, each in its own memory so
that a step beyond it is seen; and those of the wire of 8 bits.
"""

from __future__ import annotations

import os
import sys

# Before torch is imported: its allocator would put many tensors side by side into one allocation.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from fastcomm.transports.cuda.blocks import BlockKernels, covered_bits
from fastcomm.transports.cuda.driver import Device
from fastcomm.transports.cuda.multi_tensor import WIRE_DTYPES, MultiTensor

# Around a tile of 2048 elements and a 16-byte access; 449 tensors need the larger table.
FEW = [1, 7, 8, 33, 2047, 2048, 2049, 5000]
MANY = [1 + i % 5 for i in range(449)]


def launch(
    numels: list[int], tensors: list[torch.Tensor], flat: torch.Tensor, device: Device
) -> None:
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    multi_tensor = MultiTensor(numels, offsets, tensors[0].dtype, flat.dtype, device)
    multi_tensor.flatten(tensors, flat)
    multi_tensor.unflatten(flat, tensors)
    multi_tensor.unflatten(flat, tensors, with_stats=True)
    multi_tensor.norm(tensors)


def main() -> int:
    place = torch.device("cuda", 0)
    device = Device(place)
    n_launches = 0
    for dtype, wires in WIRE_DTYPES.items():
        for numels in (FEW, MANY):
            tensors = [
                torch.ones(numel + i % 2, device=place, dtype=dtype)[i % 2 :]
                for i, numel in enumerate(numels)
            ]
            for wire in wires:
                flat = torch.zeros(
                    sum(numels) * wire.itemsize, dtype=torch.uint8, device=place
                ).view(wire)
                launch(numels, tensors, flat, device)
                torch.cuda.synchronize()
                n_launches += 4
    kernels = BlockKernels(device)
    for numel in FEW:
        values = torch.ones(numel, device=place)
        covered = covered_bits(numel, [numel], [0]).to(place)
        blocks = torch.cat([kernels.encode(values, covered) for _ in range(3)])
        kernels.add(values, covered, blocks, 1)
        kernels.decode(values, blocks[: len(blocks) // 3])
        torch.cuda.synchronize()
        n_launches += 5
    print(f"{n_launches} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
