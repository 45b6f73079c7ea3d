"""The table of features that do not go together, as a page for users:
`python -m ci.compatibility > docs/compatibility.md`.
"""

from __future__ import annotations

from fastcomm.reducer.features.compatibility import REFUSALS

INTRO = """\
# What does not go together

Features of a reducer may be combined, but for the pairs below: each is a `ValueError`, at the call
that asks for the second feature. No other pair is refused. While ranks step by themselves, under
`LocalSGD` or `DiLoCo`, `reduce()`, `set_weight()`, `skip_step()` and `refresh()` raise
`FastcommError`: call `finish()` first, on every rank.

The table is made from the one that the code asks (`fastcomm/reducer/features/compatibility.py`):
instead of editing it, run `python -m ci.compatibility > docs/compatibility.md`.

| asked for | where there is | why, and what to do |
|---|---|---|
"""


def page() -> str:
    """The text of docs/compatibility.md."""
    rows = [
        f"| {asked.value} | {present.value} | {sentence.format('…')} |"
        for (asked, present), sentence in REFUSALS.items()
    ]
    return INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
