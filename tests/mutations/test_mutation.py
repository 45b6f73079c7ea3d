"""A mutation finds its place in its function, and refuses one that is not the only one."""

from __future__ import annotations

import pytest

from tests.mutations.mutation import replaced

PYTHON = """
class Loader:
    def read(self, n):
        if n > 3:  # pages
            self.close()
            return n > 3

    def skip(self, n):
        self.close()
"""
CYTHON = """
cdef class Ring:
    cdef int post(
        self, int n
    ) except -1:
        self.n = n

    def take(self):
        self.n = n
"""
C = """
static int first(int n) {
    return n + 1;
}

int second(
    int n) {
    return n +
           1;
}
"""


@pytest.mark.parametrize(
    "path, text, within, old, new, wanted",
    [
        ("a.py", PYTHON, "Loader.read", "if n > 3:", "if n > 4:", "if n > 4:  # pages"),
        ("a.py", PYTHON, "Loader.skip", "self.close()", "n\nn", "n):\n        n\n        n\n"),
        ("a.pyx", CYTHON, "Ring.post", "self.n = n", "self.n = 0", "-1:\n        self.n = 0\n"),
        ("a.pyx", CYTHON, "Ring.take", "self.n = n", "self.n = 1", "(self):\n        self.n = 1"),
        ("a.c", C, "second", "n + 1", "n", "int n) {\n    return n;"),
    ],
)
def test_the_place_is_found_in_its_function(path, text, within, old, new, wanted):
    assert wanted in replaced(path, text, within, old, new)


@pytest.mark.parametrize("within, old", [("Loader.read", "n > 3"), ("Loader.write", "n")])
def test_a_place_that_is_not_the_only_one_is_refused(within, old):
    with pytest.raises(LookupError):
        replaced("a.py", PYTHON, within, old, "0")
