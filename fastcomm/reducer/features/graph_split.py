"""PlannedSplit: torch's DDPOptimizer, which cuts a graph into pieces where DDP's buckets end, told
to cut where a reducer's buckets are full.

All cutting and compiling is torch's. What is imported from torch here is no public API, so
compiled.py imports this module only when it is needed, and says so where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import _TorchCompileInductorWrapper, _TorchCompileWrapper, fx
from torch._dynamo.backends import registry
from torch._dynamo.backends.distributed import DDPOptimizer

# DDPOptimizer closes a piece when its size reaches the cap, and joins a first one of size 0 to the
# next.
_CLOSED = 2
_HOLDS_PARAMETERS = 1

Compiler = Callable[..., Callable[..., Any]]


def piece_compiler(backend: Any, mode: str | None, options: Any, dynamic: bool | None) -> Compiler:
    """What torch.compile makes of these options: a function of a graph and its inputs."""
    if backend is None:
        backend = getattr(registry, "get_default_backend", lambda: "inductor")()
    if backend == "inductor":
        return _TorchCompileInductorWrapper(mode, options, dynamic)
    return _TorchCompileWrapper(backend, mode, options, dynamic)


class PlannedSplit(DDPOptimizer):
    """Compiles one graph in pieces.

    bucket_of: numbers of the reducer's buckets, by id of the parameter.
    """

    def __init__(self, bucket_of: Mapping[int, int], compile_piece: Compiler) -> None:
        super().__init__(_CLOSED, compile_piece, first_bucket_cap=_CLOSED)
        self._bucket_of = bucket_of
        self._first_uses: dict[fx.Node, int] = {}  # by parameter: the position of a node
        self._positions: dict[fx.Node, int] = {}
        self._ends: list[int] = []  # positions of the nodes behind which the graph is cut
        self.whole_for: int | None = None  # id of the parameter for which nothing can be cut

    def compile_fn(
        self, gm: fx.GraphModule, example_inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compiles a graph, as a backend of torch.compile."""
        self._positions = {node: i for i, node in enumerate(gm.graph.nodes)}
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameters = {
            node: id(value)
            for node, value in zip(placeholders, example_inputs, strict=True)
            if id(value) in self._bucket_of and node.users
        }
        self._first_uses = {
            node: min(self._positions[user] for user in node.users) for node in parameters
        }
        used = [(self._bucket_of[parameters[node]], at) for node, at in self._first_uses.items()]
        self._ends = full_at(used)
        compiled: Callable[..., Any] = super().compile_fn(gm, example_inputs, **options)
        if len(self.buckets) == 1 and len({number for number, _ in used}) > 1:
            first = min(self._first_uses, key=lambda node: self._first_uses[node])
            self.whole_for = parameters[first]
        return compiled

    def add_param_args(self, bucket: Any, node: fx.Node) -> None:
        """Called for each operation, from the last to the first: in the order of the backward."""
        own = [one.name for one in node.all_input_nodes if one in self._first_uses]
        if own:
            bucket.params += own
            bucket.size = max(bucket.size, _HOLDS_PARAMETERS)
        while self._ends and self._positions[node] <= self._ends[0]:
            del self._ends[0]
            bucket.size = _CLOSED


def full_at(used: list[tuple[int, int]]) -> list[int]:
    """The positions, in descending order, at which the backward of a graph has filled another
    bucket that can be launched: buckets are launched in order, and the last one at the end anyway.

    used: for each parameter the number of its bucket and the position of its first use, where its
    gradient is complete.
    """
    complete: dict[int, int] = {}
    for number, position in used:
        complete[number] = min(position, complete.get(number, position))
    found: list[int] = []
    for number in sorted(complete)[:-1]:
        if not found or complete[number] < found[-1]:
            found.append(complete[number])
    return found
