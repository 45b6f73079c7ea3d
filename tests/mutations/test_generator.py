"""The generator makes every kind of defect, in each language, where a person would."""

from __future__ import annotations

import ast

import pytest

from tests.mutations.generator import ROOT, generate, suites_of

PYTHON = '''
def first(n):
    """More than 3 < 4."""
    if n > 3 and n is not None:
        n.stop(1, now=True)
        n.x = 2.5
    return n
'''
CYTHON = '''
cdef int first(int n) except -1:
    """More than 3 < 4: stop(n)."""
    if n > 3:  # if n > 4:
        n.stop(n, "a < b")
        n.x = 7
'''
C = """
int first(int n) {
    // if (n > 4) {
    if (n > 3) {
        stop(n);
        n->x = 7;
    }
}
"""


def made(file: str, text: str) -> dict[str, set[str]]:
    """The line with each defect, by kind."""
    found: dict[str, set[str]] = {}
    for one in generate(file, text):
        line = one.of(text).splitlines()[one.line - 1].strip()
        found.setdefault(one.kind, set()).add(line)
    return found


def test_python_is_changed_by_its_syntax_tree() -> None:
    assert made("fastcomm/reducer/a.py", PYTHON) == {
        "comparison turned": {
            "if n >= 3 and n is not None:",
            "if n > 3 and n is None:",
        },
        "condition turned": {"if ((n > 3) or (n is not None)):"},
        "condition negated": {"if (not (n > 3 and n is not None)):"},
        "constant moved": {
            "if n > 4 and n is not None:",
            "n.stop(2, now=True)",
            "n.stop(1, now=False)",
            "n.x = 3.5",
        },
        "argument left out": {"n.stop(1, )"},
        "statement dropped": {"pass"},
    }


@pytest.mark.parametrize(
    "file, text, compared, negated, nothing",
    [
        (
            *("fastcomm/reducer/a.pyx", CYTHON, "if n > 3:  # if n > 4:"),
            *("if not (n > 3):  # if n > 4:", "pass"),
        ),
        ("kernels/shm/a.c", C, "if (n > 3) {", "if (!(n > 3)) {", ";"),
    ],
)
def test_cython_and_c_are_changed_by_line(
    file: str, text: str, compared: str, negated: str, nothing: str
) -> None:
    found = made(file, text)
    assert found["condition negated"] == {negated}
    assert [line.replace(">=", ">") for line in found["comparison turned"]] == [compared]
    assert found["statement dropped"] == {nothing}


def test_every_source_has_tests_that_are_there_and_what_is_made_of_python_is_python() -> None:
    for path in sorted((ROOT / "fastcomm").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        assert all((ROOT / test).exists() for test in suites_of(file)), file
    path = ROOT / "fastcomm/reducer/round.py"
    for one in generate("fastcomm/reducer/round.py", path.read_text()):
        ast.parse(one.of(path.read_text()))
