"""How many lines each part of the repository may have. A budget goes down only: who needs more
raises it in a commit that says what users get for the lines. What ci/reference.py writes into
docs/reference is not counted: those lines are docstrings.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = (".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".cpp", ".cu", ".cuh", ".sh", ".md")
BUDGETS = {
    "fastcomm": 28040,
    "kernels": 3615,
    "tests": 47245,
    "bench": 7000,
    "docs": 4145,
}
GENERATED = rb"(?s)<!-- fastcomm\..*?<!-- end -->"
SLACK = 0.01  # so that not every commit has to change this file


def lines_of(part: str) -> int:
    listed = subprocess.run(
        ["git", "ls-files", part], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = (ROOT / name for name in listed.stdout.splitlines() if name.endswith(CODE))
    texts = (path.read_bytes() for path in paths if path.exists())
    return sum(re.sub(GENERATED, b"", text).count(b"\n") for text in texts)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="counts what git tracks")
@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_has_no_more_lines_than_its_budget_and_the_budget_is_not_loose(part: str) -> None:
    lines, budget = lines_of(part), BUDGETS[part]
    assert lines <= budget, f"{part} has {lines - budget} lines too many: what can go?"
    assert lines >= budget * (1 - SLACK), f"{part} has {lines} lines only: lower its budget"
