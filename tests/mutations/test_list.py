"""The list of mutations fits the sources and the tests, so that it cannot rot unseen."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


def faults_of(mutation: Mutation) -> Iterator[str]:
    before = text_of(mutation.file)
    try:
        if mutation.of(before) == before:
            yield "it changes nothing"
    except LookupError as error:
        yield str(error)
    if bool(mutation.tests) == bool(mutation.equivalent):
        yield "it is either killed or equivalent"
    for test in mutation.tests:
        path, _, name = test.partition("::")
        if (f"def {name.partition('[')[0]}(" if name else "def test_") not in text_of(path):
            yield f"there is no {test}"


def test_mutations_fit_the_sources_and_the_tests():
    faults = [f"{one.name}: {fault}" for one in MUTATIONS for fault in faults_of(one)]
    assert not faults, "\n".join(faults)


def test_every_mutation_has_a_name_of_its_own():
    assert Counter(one.name for one in MUTATIONS).most_common(1)[0][1] == 1
