"""The documentation says what the code does: the recipes are the examples' own lines, links lead
somewhere, and lines fit a window.
"""

from __future__ import annotations

import importlib
import re
import runpy
import textwrap
from pathlib import Path

import pytest

import fastcomm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_recipes_are_lines_of_the_examples() -> None:
    names = ("training_script.py", "uneven_data.py")
    examples = [(ROOT / "examples" / name).read_text() for name in names]
    shown = blocks((ROOT / "docs/training_script.md").read_text())
    assert len(shown) > 5
    for block in shown:
        assert any(block in text for text in examples), f"not in the examples:\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_a_page_lead_to_its_headings(page: Path) -> None:
    text = page.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([^)]*)\)", text):
        assert anchor in headings, f"{page.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_outside_tables_fit_a_window(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    wide = [n for n, line in lines if len(line) > 100 and not line.startswith("|")]
    assert not wide, f"wrap these lines of {page.name}: {wide}"


# Signatures are not statements.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.name
)
def test_python_on_a_page_can_be_compiled(page: Path) -> None:
    for block in blocks(page.read_text()):
        try:
            compile(textwrap.dedent(block), page.name, "exec")
        except SyntaxError as error:
            assert "outside function" in str(error), f"{error}:\n{block}"


def api() -> str:
    """What ci/api.py prints."""
    return str(runpy.run_path(str(ROOT / "ci/api.py"))["page"]())


def test_the_page_on_gpus_says_what_has_run_on_one(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    gpu_report = importlib.import_module("gpu_report")
    current = (ROOT / "docs" / "gpu.md").read_text()
    assert gpu_report.page(ROOT / "bench" / "results") in current, gpu_report.__doc__


def test_the_api_page_says_what_the_docstrings_say() -> None:
    current = (ROOT / "docs/api.md").read_text() == api()
    assert current, "run `python ci/api.py > docs/api.md`"


def test_every_public_name_is_on_the_api_page() -> None:
    headings = re.findall(r"^### `fastcomm\.(\w+)`$", api(), re.MULTILINE)
    assert sorted(headings) == sorted(fastcomm.__all__)
