"""The documentation says what the code does: its Python runs, or is a part of an example that runs;
links lead somewhere, and pages are short. `make docs` checks the site made of it.
"""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

import fastcomm
from ci import pictures
from fastcomm.__main__ import make_parser
from fastcomm.comm.collective import CPU_DTYPES, OPS, REDUCTIONS, name_of
from tests.support.scripts import printed_by

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
# What the loops of these pages have before they change.
BEFORE = """
import torch, fastcomm
from contextlib import nullcontext
from torch.utils.data import DataLoader, DistributedSampler

Net = lambda: torch.nn.Linear(4, 1)
data = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
loader, model, loss_of = DataLoader(data), Net(), torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
n_accumulated, path = 2, "model.pt"
"""
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def prose(page: Path) -> str:
    """Without what ci/reference.py writes, in which signatures and docstrings stand."""
    return re.sub(r"<!-- fastcomm\..*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Its Python that should run by itself, block by block."""
    found = BLOCK.finditer(prose(page))
    return [
        block["code"]
        for block in found
        if block["why"] is None and not any(block["code"] in text for text in EXAMPLES)
    ]


@pytest.mark.parametrize("page", list(filter(blocks, PAGES)), ids=lambda page: page.name)
def test_python_on_a_page_runs_on_two_ranks_on_any_device(page: Path, tmp_path: Path) -> None:
    parts = [""]
    for block in blocks(page):
        # Ranks that make two process groups at one port may meet at the store of the first.
        if "init_process_group(" in block and "init_process_group(" in parts[-1]:
            parts.append("")
        parts[-1] += f"{block}\n"
    for i, part in enumerate(parts):
        script = tmp_path / f"{page.stem}_{i}.py"
        script.write_text(part)
        printed_by(script, folder=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the device is a real one")
@pytest.mark.parametrize(
    ("forgetful", "said"),
    [
        ("fastcomm.Reducer(comm).attach(torch.nn.Linear(8, 1))", "move the model to comm.device"),
        ("torch.nn.Linear(8, 1).to(comm.device)(torch.randn(4, 8))", "move all to comm.device"),
        ("comm.all_reduce(torch.ones(3))", "takes dense tensors on the CPU; got"),
    ],
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
    for block in BLOCK.finditer(prose(page)):
        try:
            compile(textwrap.dedent(block["code"]), page.name, "exec")
        except SyntaxError as error:
            assert "outside function" in str(error), f"{error}:\n{block['code']}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if DIFF.search(page.read_text())], ids=lambda page: page.name
)
def test_a_loop_trains_after_the_change_that_a_page_shows(page: Path, tmp_path: Path) -> None:
    (change,) = DIFF.findall(page.read_text())
    after = [line[1:] for line in change.splitlines() if not line.startswith("-")]
    script = tmp_path / "after.py"
    script.write_text(BEFORE + "\n".join(after))
    printed_by(script, folder=tmp_path)


def test_the_first_page_shows_what_its_script_prints(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    (code,) = blocks(page)
    script = tmp_path / "train.py"
    script.write_text(code)
    shown = re.findall(r"^\[rank 0\] (.*)$", page.read_text(), re.MULTILINE)
    assert printed_by(script).splitlines() == shown


def test_a_page_has_one_name() -> None:
    nav = re.findall(r"^ +- (.+): ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {ROOT / "docs" / page: title for title, page in nav}
    heads = {page: page.read_text().split("\n")[0] for page in pages if page.exists()}
    assert {page: head for page, head in heads.items() if head != f"# {pages[page]}"} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_is_read_from_top_to_bottom_is_short(page: Path) -> None:
    is_looked_up = page.name in ("compatibility.md", "design.md")
    if not is_looked_up and page.parent.name not in ("reference", "lab"):
        assert len(page.read_text().split()) <= 1500, "which part is a page of its own?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_say_what_has_run_on_a_gpu(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    gpu_report = importlib.import_module("gpu_report")
    results = ROOT / "bench" / "results"
    for text, page in ((gpu_report.page, "lab/notebook.md"), (gpu_report.overheads, "gpu.md")):
        assert text(results) in (ROOT / "docs" / page).read_text(), gpu_report.__doc__


def test_every_public_name_is_in_the_reference() -> None:
    pages = (page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    found = re.findall(r"^<!-- fastcomm\.(\w+) -->$", "\n".join(pages), re.MULTILINE)
    assert sorted(found) == sorted(fastcomm.__all__)


def test_the_promise_of_the_readme_is_what_was_measured() -> None:
    models = json.loads(pictures.RESULTS.read_text())["models"].values()
    times = [{way: of[1] for way, of in each["quartiles_ms"].items()} for each in models]
    saved = [1 - each["fastcomm"] / each["ddp"] for each in times]
    promise = f"{min(saved):.0%} to {max(saved):.0%} less time"
    for page in ("README.md", "docs/comparison.md"):
        assert promise in (ROOT / page).read_text(), promise


def test_what_programs_have_written_is_current() -> None:
    picture = pictures.drawn(pictures.RESULTS.read_text())
    assert pictures.PICTURE.read_text() == picture, "python -m ci.pictures"
    pytest.importorskip("griffe")  # which `ci/gpu.sh` does not ask for
    reference = importlib.import_module("ci.reference")
    package = reference.load()
    for page in (ROOT / "docs/reference").glob("*.md"):
        text = page.read_text()
        assert reference.filled(text, package) == text, "python -m ci.reference"


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
    page = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| `(FASTCOMM_\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(read)


def test_the_page_on_commands_has_every_option() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    (commands,) = (one for one in make_parser()._actions if one.choices)
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(commands.choices)
    usages = " ".join(parser.format_usage() for parser in commands.choices.values())
    assert not [name for name in re.findall(r"--\w+", usages) if f"`{name}" not in page]


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
