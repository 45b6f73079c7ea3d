"""The matrix: features of autograd and of nn.Module, and what a reducer makes of each.

A module for each theme; what a row is stands in row.py.
"""

from tests.matrix import (
    backwards,
    changes,
    compiled,
    dtypes,
    functions,
    gradients,
    modules,
    optimizers,
)
from tests.matrix.row import ROWS, Row, run_row

THEMES = (backwards, functions, modules, dtypes, gradients, changes, optimizers, compiled)

__all__ = ["ROWS", "THEMES", "Row", "run_row"]
