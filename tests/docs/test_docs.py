"""The documentation says what the code does: its Python runs, or is a part of an example that runs;
links lead somewhere, and lines fit a window. `make docs` checks the site made of it.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm.comm.collective import CPU_DTYPES, OPS, REDUCTIONS, name_of
from tests.support.scripts import printed_by

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Its Python that should run by itself, block by block."""
    found = BLOCK.finditer(page.read_text())
    return [
        block["code"]
        for block in found
        if block["why"] is None and not any(block["code"] in text for text in EXAMPLES)
    ]


@pytest.mark.parametrize("page", list(filter(blocks, PAGES)), ids=lambda page: page.name)
def test_python_on_a_page_runs_on_two_ranks_on_any_device(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(blocks(page)))
    printed_by(script, folder=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the device is a real one")
@pytest.mark.parametrize(
    ("forgetful", "said"),
    [
        ("fastcomm.Reducer(comm).attach(torch.nn.Linear(8, 1))", "move the model to comm.device"),
        ("torch.nn.Linear(8, 1).to(comm.device)(torch.randn(4, 8))", "move all to comm.device"),
        ("comm.all_reduce(torch.ones(3))", "takes dense tensors on the CPU; got"),
    ],
    ids=["model", "batch", "tensor"],
)
def test_python_that_leaves_something_on_the_host_does_not_run(
    forgetful: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import torch, fastcomm\ncomm = fastcomm.init()\n{forgetful}\n")
    with pytest.raises(AssertionError, match=said):
        printed_by(script, ranks=1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_can_be_compiled(page: Path) -> None:
    for block in BLOCK.finditer(page.read_text()):
        try:
            compile(textwrap.dedent(block["code"]), page.name, "exec")
        except SyntaxError as error:
            assert "outside function" in str(error), f"{error}:\n{block['code']}"


def test_the_first_script_is_the_same_wherever_it_stands() -> None:
    assert blocks(ROOT / "README.md")[0] in (ROOT / "docs" / "index.md").read_text()


def test_the_page_on_loops_shows_lines_of_examples_alone() -> None:
    page = ROOT / "docs" / "quickstart.md"
    shown = BLOCK.findall(page.read_text())
    assert len(shown) > 5 and not blocks(page)


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


def test_the_page_on_gpus_says_what_has_run_on_one(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    gpu_report = importlib.import_module("gpu_report")
    current = (ROOT / "docs" / "gpu.md").read_text()
    assert gpu_report.page(ROOT / "bench" / "results") in current, gpu_report.__doc__


def test_every_public_name_is_in_the_reference() -> None:
    pages = (page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    found = re.findall(r"^::: fastcomm\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(found) == sorted(fastcomm.__all__)


@pytest.mark.parametrize("name", fastcomm.__all__)
def test_every_public_name_says_what_it_is_for(name: str) -> None:
    public = getattr(fastcomm, name)
    assert public.__doc__, f"{name} has no docstring"
    classes = public.__mro__ if isinstance(public, type) else ()
    for of in (cls for cls in classes if cls.__module__.startswith("fastcomm.")):
        for member, value in vars(of).items():
            if callable(value) and not member.startswith("_"):
                assert value.__doc__, f"{name}.{member} has no docstring"


def test_members_that_pages_name_are_public() -> None:
    classes = {
        "comm": "fastcomm.Communicator",
        "reducer": "fastcomm.Reducer",
        "syncs": "fastcomm.LocalSGD",
        "diloco": "fastcomm.DiLoCo",
        "timeline": "fastcomm.insight.timeline.Timeline",
    }
    public = re.findall(r"^[\w.]+", (ROOT / "tests/public_names.txt").read_text(), re.MULTILINE)
    files = "md|py|pyx|png|svg|json|rst"
    member = re.compile(rf"(?<![\w./])({'|'.join(classes)})\.(?!(?:{files})\b)([a-z]\w*)")
    for page in PAGES:
        if page.name not in ("design.md", "CONTRIBUTING.md"):  # for maintainers
            for of, name in member.findall(page.read_text()):
                assert f"{classes[of]}.{name}" in public, f"{page.name} names {of}.{name}"


def test_the_table_of_variables_has_every_one_that_fastcomm_reads() -> None:
    sources = (ROOT / "fastcomm").rglob("*.py*")
    texts = (path.read_text() for path in sources if path.suffix in (".py", ".pyx"))
    read = {name for text in texts for name in re.findall(r"\bFASTCOMM_[A-Z_]+", text)}
    page = (ROOT / "docs" / "launching.md").read_text()
    rows = re.findall(r"^\| `(FASTCOMM_\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(read)


def test_the_documented_ops_are_those_of_the_table() -> None:
    rows = re.findall(
        r'^\| `"(\w+)"` \| (?:`"(\w+)"`, )?`ReduceOp\.(\w+)` \|',
        (ROOT / "docs" / "reference" / "communicator.md").read_text(),
        re.MULTILINE,
    )
    assert [(name, second or name, of_torch) for name, second, of_torch in rows] == [
        (one.name, one.of_torch.lower(), one.of_torch) for one in REDUCTIONS
    ]
    backend = f"ops {', '.join(one.of_torch for one in REDUCTIONS)} |"
    assert backend in (ROOT / "docs" / "backend.md").read_text()
    named = re.findall(r'"(\w+)"', str(fastcomm.Communicator.all_reduce.__doc__))
    assert tuple(named) == OPS


@pytest.mark.parametrize("page", ["reference/communicator.md", "backend.md"])
def test_the_documented_dtypes_are_those_of_the_table(page: str) -> None:
    *others, last = map(name_of, CPU_DTYPES)
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert f" {', '.join(others)} and {last}" in text
