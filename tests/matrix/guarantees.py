"""The matrix as a page for users: `python -m tests.matrix.guarantees > docs/guarantees.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from tests.matrix import ROWS, THEMES, Row

INTRO = """\
# Guarantees

Whatever you do with autograd and `nn.Module`, one of two things happens under a `fastcomm.Reducer`:

- **reduced**: gradients are the mean over ranks of what every rank's own model would have had,
  bitwise equal on all ranks; after the optimizer's step, so are the parameters;
- **error**: every rank gets an exception (`FastcommError`; `ValueError` from `attach()`; torch's
  own where torch refuses) that names the parameter, if it is about one, and says what to do.
  No parameter has moved, and after the remedy training goes on.

No line below has a third outcome: no hang, and no rank that silently diverges. A rank has to report
one thing itself, with `comm.abandon()`: that it skips a step, or fails before its first gradient. A
rank that skips an optimizer's step after backward, or makes one alone, is found in the next
backward, where every rank gets `MismatchError`.

What a rank does to parameters by itself is no line below: it steps gradients of `no_sync()`, has
another learning rate, clips or drops gradients that were reduced, or adds noise. On the CPU ranks
compare a few elements of what an optimizer's step has made of their parameters, and get
`MismatchError`, mostly in the next backward. Not found are differences in elements that are hardly
ever compared, in frozen parameters, in buffers, in what an optimizer written by hand does, under a
`ShardedOptimizer`, and with a hook: see [limits.md](limits.md).

NCCL compares nothing before data moves. So over NCCL such a rank is not found, nor are ranks whose
backward reaches two reducers of one communicator in different orders: give models that share a loss
one reducer, `attach(nn.ModuleList([a, b]))`, if graphs differ between ranks.
`reducer.check_in_sync()`, called now and then, finds all of it.

Every line below is a test in `tests/matrix`. It runs with 2 ranks over shared memory and over NCCL,
and with 3 over `torch.distributed` (what compiles, over the first two alone): every second line on
one host, the others across two. The tables are made from the tests: instead of editing them, run
`python -m tests.matrix.guarantees > docs/guarantees.md`.
"""


def page() -> str:
    """The text of docs/guarantees.md."""
    return "\n".join([INTRO, *(line for theme in THEMES for line in _section(theme))])


def _section(theme: object) -> Iterator[str]:
    yield f"## {inspect.getdoc(theme)}\n"
    yield "| | outcome | instead |"
    yield "|---|---|---|"
    for row in ROWS.values():
        if row.theme == theme.__name__:
            yield f"| {row.feature} | {_outcome(row)} | {row.instead} |"
    yield ""


def _outcome(row: Row) -> str:
    return "reduced" if row.is_reduced else "**error**"


if __name__ == "__main__":
    print(page(), end="")
