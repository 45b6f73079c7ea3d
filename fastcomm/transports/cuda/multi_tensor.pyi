from pathlib import Path

import torch
from torch import Tensor

from fastcomm.transports.cuda.driver import Device

NAMES: dict[torch.dtype, str]
WIRE_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]]

def kernel_file(name: str) -> Path | None: ...

class MultiTensor:
    device: Device
    dtype: torch.dtype
    flat_dtype: torch.dtype
    numels: list[int]
    offsets: list[int]
    tables: list[Tensor]
    square_sum: Tensor
    n_nonfinite: Tensor
    def __init__(
        self,
        numels: list[int],
        offsets: list[int],
        dtype: torch.dtype,
        flat_dtype: torch.dtype,
        device: Device,
        longer: MultiTensor | None = None,
    ) -> None: ...
    def flatten(
        self,
        tensors: list[Tensor],
        flat: Tensor,
        scale: float = 1.0,
        divisor: Tensor | None = None,
    ) -> None: ...
    def unflatten(
        self, flat: Tensor, tensors: list[Tensor], scale: float = 1.0, *, with_stats: bool = False
    ) -> None: ...
    def norm(self, tensors: list[Tensor]) -> None: ...
