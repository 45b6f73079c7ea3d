"""Gradients that are not tensors of real numbers: complex ones, and sparse ones."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMPLEX = "tests/reducer/test_complex.py"
SPARSE = "tests/reducer/features/test_sparse.py"
BUCKET = "fastcomm/reducer/features/sparse_bucket.py"


def _complex(name: str) -> tuple[str, ...]:
    return (f"{COMPLEX}::{name}",)


def _sparse(name: str) -> tuple[str, ...]:
    return (f"{SPARSE}::{name}",)


MUTATIONS = (
    Mutation(
        name="sparse: a rank keeps back what no backward has touched",
        file=BUCKET,
        within="SparseBucket._brought",
        old="gradients.append(gradient)",
        new="gradients.append(None if i in self._untouched else gradient)",
        tests=_sparse("test_gradients_add_up_over_rounds"),
    ),
)
