"""The list of mutations fits the sources and the tests, so that it cannot rot unseen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_sources_and_the_tests(mutation):
    n_found = (ROOT / mutation.file).read_text().count(mutation.old)
    assert n_found == 1, f"{mutation.file} holds the old text {n_found} times"
    assert mutation.new != mutation.old
    assert bool(mutation.tests) != bool(mutation.equivalent), "it is either killed or equivalent"
    for test in mutation.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text if name else "def test_" in text, test


def test_every_mutation_has_a_name_of_its_own():
    assert Counter(one.name for one in MUTATIONS).most_common(1)[0][1] == 1
