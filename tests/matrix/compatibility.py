"""The tables of docs/compatibility.md: the matrix, and what reducers refuse. Writes them:
`python -m tests.matrix.compatibility`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from fastcomm.reducer.features.compatibility import REFUSALS
from tests.matrix import ROWS, THEMES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def filled(page: str) -> str:
    """The page, with its tables as the code has them now."""
    for name, lines in (("matrix", _sections()), ("refusals", _refusals())):
        begin, rest = page.split(f"<!-- {name} -->\n")
        end = rest[rest.index("<!-- end -->") :]
        page = "\n".join([f"{begin}<!-- {name} -->", "", *lines, end])
    return page


def _sections() -> Iterator[str]:
    for theme in THEMES:
        yield f"## {inspect.getdoc(theme)}\n"
        rows = [row for row in ROWS.values() if row.theme == theme.__name__]
        yield "Reduced:\n"
        yield from (_item(row.feature) for row in rows if row.is_reduced)
        refused = [row for row in rows if not row.is_reduced]
        yield "\n| error | do instead |\n|---|---|" if refused else ""
        for do in dict.fromkeys(row.instead for row in refused):
            yield f"| {'; '.join(row.feature for row in refused if row.instead == do)} | {do} |"
        yield ""


def _item(text: str) -> str:
    return fill(f"- {text}", 100, subsequent_indent="  ", break_on_hyphens=False)


def _refusals() -> Iterator[str]:
    yield "| feature | and any of | why, and what to do |"
    yield "|---|---|---|"
    for one, others, why in REFUSALS:
        yield f"| {one.value} | {'; '.join(other.value for other in others)} | {why} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
