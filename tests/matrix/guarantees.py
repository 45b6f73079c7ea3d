"""The matrix, and the table of features that do not go together, as a page for users:
`python -m tests.matrix.guarantees > docs/guarantees.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fastcomm.reducer.features.compatibility import REFUSALS
from tests.matrix import ROWS, THEMES, Row

INTRO = """\
# Guarantees, and what does not go together

This page says what becomes of checkpointing, tied weights, torch.compile and the rest. Whatever you
do with autograd and `nn.Module`, one of two things happens under a `fastcomm.Reducer`:

```python
import torch, fastcomm

comm = fastcomm.init()
model = torch.nn.Linear(4, 1).to(comm.device)
reducer = fastcomm.Reducer(comm).attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4, device=comm.device)).sum().backward()  # reduced
optimizer.step()
for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)  # by hand, and so this rank's own
try:
    optimizer.step()
except fastcomm.FastcommError as error:  # names the parameter, and says what to do
    print(error)
    reducer.reduce()
optimizer.step()
comm.close()
```

- **reduced**: gradients are the mean over ranks of what every rank's own model would have had,
  bitwise equal on all ranks; after the optimizer's step, so are the parameters;
- **error**: every rank gets an exception (`FastcommError`; `ValueError` from `attach()`; torch's
  own where torch refuses) that names the parameter, if it is about one, and says what to do.
  No parameter has moved, and after the remedy training goes on.

No line below has a third outcome: no hang, and no rank that silently diverges. A rank has to report
one thing itself, with `comm.abandon()`: that it skips a step, or fails before its first gradient. A
rank that skips an optimizer's step after backward, or makes one alone, is found in the next
backward, where every rank gets `MismatchError`.

The tables do not cover what one rank alone does to its parameters: it steps gradients of
`no_sync()`, has another learning rate, clips or drops gradients that were reduced, or adds noise.
On the CPU ranks compare a few elements of their parameters, and mostly get `MismatchError` in the
next backward: [limits.md](limits.md) says what is not found.

NCCL compares nothing before data moves. So over NCCL a rank that has skipped a step, or made one
alone, is found when the ranks next tell each other what their steps took, about every 2 s. What one
rank does to its parameters is not found, nor are ranks whose backward reaches two reducers of one
communicator in different orders: give models that share a loss one reducer,
`attach(nn.ModuleList([a, b]))`, if graphs differ between ranks.
`reducer.check_in_sync()`, called now and then, finds all of it.

Every line with an outcome is a test in `tests/matrix`. It runs with 2 ranks over shared memory and
over NCCL, and with 3 over `torch.distributed` (what compiles, over the first two alone): every
second line on one host, the others across two. The tables are made from the tests, and the last one
from what the code asks: instead of editing them, run
`python -m tests.matrix.guarantees > docs/guarantees.md`.
"""

REFUSED = """\
## What does not go together

Features of a reducer may be combined, but for the pairs below: each is a `ValueError`, at the call
that asks for the second feature. No other pair is refused. While ranks step by themselves, under
`LocalSGD` or `DiLoCo`, `reduce()`, `set_weight()`, `skip_step()` and `refresh()` raise
`FastcommError`: call `finish()` first, on every rank.

| feature | and any of | why, and what to do |
|---|---|---|"""


def page() -> str:
    """The text of docs/guarantees.md."""
    themes = [line for theme in THEMES for line in _section(theme)]
    return "\n".join([INTRO, *themes, REFUSED, *_refusals(), ""])


def _section(theme: object) -> Iterator[str]:
    yield f"## {inspect.getdoc(theme)}\n"
    yield "| | outcome | instead |"
    yield "|---|---|---|"
    for row in ROWS.values():
        if row.theme == theme.__name__:
            yield f"| {row.feature} | {_outcome(row)} | {row.instead} |"
    yield ""


def _refusals() -> Iterator[str]:
    for one, others, why in REFUSALS:
        yield f"| {one.value} | {'; '.join(other.value for other in others)} | {why} |"


def _outcome(row: Row) -> str:
    return "reduced" if row.is_reduced else "**error**"


if __name__ == "__main__":
    print(page(), end="")
