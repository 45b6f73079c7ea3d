"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu import closes, eventually, new_communicator


@pytest.fixture(scope="module")
def comm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = new_communicator(tmp_path_factory.mktemp("store"))
    yield made
    assert eventually(lambda: closes(made))
