from abc import ABCMeta
from typing import Any

from fastcomm.comm.transport import Transport

# Transport says what its methods take. They are not abstract in the .pyx.
class Front(Transport, metaclass=ABCMeta):
    def __init__(self, *arguments: Any) -> None: ...
