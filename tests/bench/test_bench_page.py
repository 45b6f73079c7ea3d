"""The page that the benchmarks' --report writes: it says what was measured, and needs nothing but
itself.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("lib.page")


def results_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCH / "results" / f"{name}.json").read_text())
    return found


def test_the_page_shows_a_picture_the_machine_and_the_command_of_each(page: ModuleType) -> None:
    results = [results_of(name) for name in ("step-weighted", "paper-fig7-shm", "elastic")]
    written = page.write(results)
    sections = ElementTree.fromstring(written.partition("\n")[2]).findall("body/section")
    assert len(sections) == len(results)
    for section, one in zip(sections, results, strict=True):
        assert section.find("figure/{http://www.w3.org/2000/svg}svg") is not None
        assert one["machine"]["cpu"] in (section.findtext("figure/figcaption") or "")
    commands = [section.findtext("pre") for section in sections]
    assert commands[0] == results[0]["command"]
    assert commands[1] == "python -m fastcomm bench paper fig7 --wire shm"  # which had none yet
    targets = re.findall(r'(?:href="|url\()([^")]*)', written)
    assert targets and all(target.startswith("#") for target in targets)
    names = re.findall(r'\bid="([^"]*)"', written)
    assert len(names) == len(set(names))
    assert "currentColor" in written and "#010203" not in written  # the reader's own colors


def test_the_page_says_whose_times_mean_nothing(page: ModuleType) -> None:
    results = results_of("allreduce-2ranks-comm")
    assert "mean nothing" not in page.write([results])
    results["rows"][3]["gloo"]["in_place"]["wrong"] = 7
    results["peers_not_measured"] = {"mpi": "<none>"}
    written = page.write([results])
    assert "Results of Gloo were wrong: its times mean nothing." in written
    assert "MPI was not measured: &lt;none&gt;." in written
