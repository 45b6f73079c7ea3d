import torch

def load() -> int: ...

class Device:
    device: torch.device
    index: int
    n_multiprocessors: int
    def __init__(self, device: torch.device) -> None: ...
    def synchronize(self) -> None: ...
