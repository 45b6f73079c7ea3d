from abc import ABCMeta

from fastcomm.control.front import Front

class ShmCommunicator(Front, metaclass=ABCMeta): ...
