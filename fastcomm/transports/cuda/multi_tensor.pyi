from pathlib import Path

import torch
from torch import Tensor

from fastcomm.transports.cuda.driver import Device

def kernel_file(name: str) -> Path | None: ...

class MultiTensor:
    def __init__(
        self,
        numels: list[int],
        offsets: list[int],
        dtype: torch.dtype,
        flat_dtype: torch.dtype,
        device: Device,
    ) -> None: ...
    def flatten(self, tensors: list[Tensor], flat: Tensor) -> None: ...
    def unflatten(
        self, flat: Tensor, tensors: list[Tensor], *, with_stats: bool = False
    ) -> None: ...
