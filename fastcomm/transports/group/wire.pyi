from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

BLOCK: int

class Wire:
    def __init__(self, dtype: torch.dtype, *, error_feedback: bool) -> None: ...
    def rows_for(self, n_rows: int, numel: int) -> Tensor: ...
    def encode(self, key: Hashable, values: Tensor, coded: Tensor) -> None: ...
    def decode(self, coded: Tensor, values: Tensor) -> None: ...
    def reduce(
        self,
        coded: Sequence[Tensor] | Tensor,
        rows: Tensor,
        own: int,
        op: str,
        factors: Sequence[float] | None = None,
    ) -> Tensor: ...
