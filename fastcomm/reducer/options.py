"""The options of a reducer that change what the ranks reduce: which values they may have, how the
ranks compare them, and a reducer in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastcomm.comm.collective import LINEAR_OPS, complex_refusal, refuse_error_feedback
from fastcomm.comm.transport import Transport
from fastcomm.reducer.features.compatibility import Feature, check, why_not
from fastcomm.reducer.validation import Model, NamedParameters

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

AUTO = "auto"  # a bucket_cap_mb: see plan.py
DEFAULT_CAP_MB = 25.0
# The default where the CPU moves data between hosts: what is left when backward ends waits for the
# link, and a bucket costs little beside it.
NETWORK_CAP_MB = 10.0


@dataclass(frozen=True)
class Options:
    """What Reducer was called with. Raises ValueError for values that no communicator supports."""

    bucket_cap_mb: float | str | None
    op: str
    wire_dtype: torch.dtype | None
    streams: int
    error_feedback: bool = False
    skip_nonfinite: bool = False
    sparse_parameters: tuple[str, ...] = ()
    audit: int | None = None

    def __post_init__(self) -> None:
        cap_mb = 1.0 if self.bucket_cap_mb in (None, AUTO) else self.bucket_cap_mb
        if isinstance(cap_mb, str):
            raise ValueError(f'bucket_cap_mb is a number or "auto"; got {cap_mb!r}')
        if float(cap_mb) <= 0:
            raise ValueError(f"bucket_cap_mb must be positive; got {self.bucket_cap_mb}")
        if self.streams < 1:
            raise ValueError(f"streams must be at least 1; got {self.streams}")
        if self.audit is not None and self.audit < 1:
            raise ValueError(f"audit must be at least 1, or None; got {self.audit}")
        if self.error_feedback:
            self._check_error_feedback()
            check(Feature.ERROR_FEEDBACK, self.features())

    def _check_error_feedback(self) -> None:
        if self.wire_dtype is None or self.wire_dtype == torch.float32:
            raise ValueError(
                "error_feedback=True keeps what a wire_dtype of 8 or 16 bits drops: choose one; "
                f"got {self.wire_dtype}"
            )

    def features(self) -> dict[Feature, str]:
        """The features that these options ask for, and a word for each in messages."""
        present = {
            Feature.OTHER_OP: self.op != "mean",
            Feature.NOT_LINEAR: self.op not in LINEAR_OPS,
            Feature.ERROR_FEEDBACK: self.error_feedback,
            Feature.AUTO: self.bucket_cap_mb == AUTO,
            Feature.SKIP_NONFINITE: self.skip_nonfinite,
            Feature.AUDIT: self.audit is not None,
        }
        op = f'op="{self.op}"'
        shown = {Feature.OTHER_OP: op, Feature.NOT_LINEAR: op}
        return {one: shown.get(one, one.value) for one, is_there in present.items() if is_there}

    def checked(self, comm: object) -> Transport:
        """Return the communicator. Raises TypeError for anything else, such as a model; ValueError
        for a wire_dtype that the communicator does not reduce, and for an error_feedback that it
        does not have.
        """
        if not isinstance(comm, Transport):
            remedy = ": Reducer(comm).attach(model)" if isinstance(comm, nn.Module) else ""
            if comm is None:
                remedy = ": split() leaves this rank out; for fastcomm.init() leave comm out"
            raise TypeError(
                f"expected a communicator (fastcomm.init()); got {type(comm).__name__}{remedy}"
            )
        wires = comm.wire_dtypes
        if self.wire_dtype not in (None, *wires):
            raise ValueError(
                f"over {comm.backend}, wire_dtype must be one of comm.wire_dtypes, "
                f"{', '.join(map(str, wires))}; got {self.wire_dtype!r}"
            )
        if self.error_feedback and not comm.feeds_back_errors:
            refuse_error_feedback(comm.backend)
        return comm

    def sparse_names(self, model: Model, named: NamedParameters) -> set[str]:
        """The names of the trainable parameters whose gradients may be sparse: those of embeddings
        made with sparse=True, and the declared ones. named: all of the model's.
        """
        modules = model.modules() if isinstance(model, nn.Module) else ()
        embeddings = (m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        found = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
        declared = self.sparse_parameters
        return {n for n, p in named if p.requires_grad and (id(p) in found or n in declared)}

    def refuse_parameters(self, model: Model, named: NamedParameters, *, is_sharded: bool) -> None:
        """Raises ValueError for parameters whose gradients cannot be reduced with these options."""
        sparse = self.sparse_names(model, named)
        for name, p in named:
            if p.requires_grad and p.is_complex():
                if self.op not in LINEAR_OPS:
                    raise ValueError(complex_refusal(f"the gradient of parameter {name}", self.op))
                if name in sparse:
                    raise ValueError(
                        f"the gradient of parameter {name} is sparse and complex: make the "
                        "parameter of pairs (torch.view_as_real), or use sparse=False"
                    )
        for name in sorted(set(self.sparse_parameters) - dict(named).keys()):
            raise ValueError(f"sparse_parameters: the model has no parameter {name}")
        present = self.features()
        if is_sharded:
            present[Feature.SHARDED] = Feature.SHARDED.value
        trouble = why_not(Feature.SPARSE, present)
        if sparse and trouble is not None:
            raise ValueError(f"the gradient of parameter {min(sparse)} is sparse: {trouble}")

    def described(self) -> dict[str, Any]:
        """The options by name, for comparison: ranks that differ here would reduce different
        buckets, or the same ones differently.
        """
        return vars(self) | {
            "wire_dtype": str(self.wire_dtype),
            "sparse_parameters": list(self.sparse_parameters),
        }


def describe(core: Core) -> str:
    """repr() of a Reducer."""
    options, comm = core.options, core.comm
    model = core.find_model()
    if model is None:
        holds = "detached"
    else:
        name = type(model).__name__ if isinstance(model, nn.Module) else "named parameters"
        parameters = [p for b in core.buckets for _, p in b.named_parameters()]
        numel, n_buckets = sum(p.numel() for p in parameters), len(core.buckets)
        holds = (
            f"{name}, {len(parameters)} trainable parameters of {numel:,} elements in {n_buckets} "
            f"bucket{'s' if n_buckets > 1 else ''}"
        )
    return (
        f"<Reducer: {holds}; op {options.op}, wire_dtype {options.wire_dtype}"
        f"{' with error feedback' if options.error_feedback else ''}"
        f"{core.planner.described()}"
        f"; over {comm.backend}, rank {comm.rank} of {comm.world_size}>"
    )
