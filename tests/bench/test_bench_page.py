"""The page that the benchmarks' --report writes: it says what was measured, needs nothing but
itself, and a browser shows all of it, on a desktop and on a phone.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
RESULTS = sorted(BENCH.glob("results/*.json"))
WITHOUT_PEER = (
    "paper-fig11-shm",
    "simulate",
    "simulate-network",
    "timeline",
    "meetings",
    "meetings-loss",
    "overhead-2ranks",
    "compiled-2ranks",
)  # nobody else has them
SHOWN = ("allreduce-2ranks-comm", "step-2ranks", "host_cost")
DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of bench/, which import each other by name."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(BENCH))
        yield {name: importlib.import_module(name) for name in ("page", "sections", "tables")}


def results_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCH / "results" / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def written(modules: dict[str, ModuleType]) -> str:
    """Of results of two machines, wherever the files come from."""
    pytest.importorskip("matplotlib")
    results = [results_of(name) for name in SHOWN]
    for one in results:
        one["machine"] = {**results[0]["machine"], "cpu": "One Processor"}
    results[-1]["machine"]["cpu"] = "Another Processor"
    return str(modules["page"].write(results))


def test_the_page_holds_tables_a_plot_and_the_command_of_each(written: str) -> None:
    assert written.count("<svg") == len(SHOWN)
    assert "A training step, 2 ranks" in written and "GPT-2 small" in written
    assert "python -m fastcomm bench allreduce --ranks 2 -b 1K -e 256M --tensors comm" in written
    assert "Results of 2 machines" in written and "Another Processor" in written


def test_the_page_needs_nothing_but_itself(written: str) -> None:
    assert not re.search(r"<(script|link|img|iframe|object|embed)\b|@import|\bsrc=", written)
    targets = re.findall(r'(?:href="|url\()([^")]*)', written)
    assert targets and all(target.startswith("#") for target in targets)
    names = re.findall(r'\bid="([^"]*)"', written)
    assert len(names) == len(set(names))


def test_the_plots_have_the_color_of_the_pages_text(written: str) -> None:
    assert "currentColor" in written and "prefers-color-scheme: dark" in written
    assert "#010203" not in written


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_of_every_benchmark_have_a_section(
    modules: dict[str, ModuleType], path: Path
) -> None:
    sections = modules["sections"]
    results = json.loads(path.read_text())
    assert results["benchmark"] in sections.SECTIONS
    section = sections.of(results)
    has_peer = path.stem not in WITHOUT_PEER
    assert section.title and section.how and section.tables and bool(section.ratios) == has_peer
    assert section.command.startswith(f"python -m fastcomm bench {results['benchmark']}")
    for table in section.tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    for ratio in section.ratios:
        assert ratio.spread.low <= ratio.spread.middle <= ratio.spread.high


def test_a_page_of_several_benchmarks_has_a_contents_list(modules: dict[str, ModuleType]) -> None:
    written = modules["page"].write([results_of(name) for name in SHOWN])
    links = re.findall(r'<li><a href="#(part\d+)">', written)
    assert len(links) == len(SHOWN)
    assert all(written.count(f'<section id="{name}">') == 1 for name in links)
    assert "<nav" not in modules["page"].write([results_of(SHOWN[0])])


def test_results_of_one_benchmark_are_told_apart(modules: dict[str, ModuleType]) -> None:
    names = ("step-weighted", "step-joined", "paper-fig7-shm")
    written = modules["page"].write([results_of(name) for name in names])
    titles = re.findall(r"<h2>([^<]*)</h2>", written)
    assert titles[1:4] == [
        "A training step, 2 ranks (--ways local fastcomm weighted)",
        "A training step, 2 ranks (--ways local fastcomm joined)",
        "The paper&#x27;s fig7: latency by bucket size",
    ]
    assert f">{titles[1]}</td>" in written


def test_ratios_are_the_peers_time_over_fastcomms(modules: dict[str, ModuleType]) -> None:
    results = results_of("allreduce-2ranks-comm")
    ratios = {(r.what, r.peer): r.spread for r in modules["sections"].of(results).ratios}
    row = results["rows"][5]
    assert row["nbytes"] == 1 << 20
    middle = ratios["all-reduce of 1 MiB", "gloo"].middle
    assert middle == pytest.approx(row["ratios"]["gloo/fastcomm"], rel=1e-3)


def test_the_page_says_whose_times_mean_nothing(modules: dict[str, ModuleType]) -> None:
    results = results_of("allreduce-2ranks-comm")
    assert "mean nothing" not in modules["sections"].of(results).how
    results["rows"][3]["gloo"]["in_place"]["wrong"] = 7
    results["peers_not_measured"] = {"mpi": "there is none"}
    how = modules["sections"].of(results | {"ranks_share_a_gpu": True}).how
    assert "Results of Gloo were wrong: its times mean nothing." in how
    assert "MPI was not measured: there is none." in how
    assert "The ranks share one GPU" in how


def test_a_ratio_lies_between_what_the_quartiles_allow(modules: dict[str, ModuleType]) -> None:
    spread = modules["tables"].Spread
    assert spread(8, 12, 18).over(spread(2, 3, 4)) == (2, 4, 9)
    assert spread(8, 12, 18).over(spread(-1, 3, 4)).high == float("inf")


@pytest.mark.parametrize("value, text", [(0.956, "0.96"), (12.34, "12.3"), (458.2, "458")])
def test_ratios_have_three_digits(modules: dict[str, ModuleType], value: float, text: str) -> None:
    assert modules["sections"].three_digits(value) == text


def test_a_benchmark_without_a_section_shows_its_rows(modules: dict[str, ModuleType]) -> None:
    row = {"size": 4, "name": "<b>", "ms": {"fastcomm": [1, 2, 3]}, "more": [1]}
    results = {"benchmark": "new_one", "machine": results_of("step-2ranks")["machine"]}
    text = modules["page"].write([results | {"rows": [row], "command": "measure it"}])
    assert "New one" in text and "fastcomm (ms)" in text and "2.000" in text
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert "<pre>measure it</pre>" in text


# In a browser

LOOK = """
const inside = (box, of) => box.left >= of.left - 1 && box.right <= of.right + 1;
const points = table => [...table.tHead.rows[0].cells].map((head, i) => {
  if (head.className === "text") return [];
  const cells = [...table.tBodies[0].rows].map(row => row.cells[i].firstChild);
  const figures = cells.filter(text => text && /^[-~]?[0-9]+([.][0-9]+)?$/.test(text.data));
  return figures.map(text => {
    const range = new Range();
    range.setStart(text, 0);
    range.setEnd(text, (text.data + ".").indexOf("."));
    return Math.round(range.getBoundingClientRect().right);
  });
});
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const all = selector => [...page.querySelectorAll(selector)];
    return {
      width: root.clientWidth,
      needs: Math.max(root.scrollWidth, page.body.scrollWidth),
      plots: all("svg").map(svg => svg.getBoundingClientRect()).map(b => [b.width, b.height]),
      outside: all("svg text").filter(text => !inside(text.getBoundingClientRect(),
        text.ownerSVGElement.getBoundingClientRect())).map(text => text.textContent),
      cut: all("h1, h2, p, pre, th, td, caption, figcaption").filter(element =>
        element.scrollWidth > element.clientWidth + 1).map(element => element.textContent),
      requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
      points: all("table").flatMap(points),
    };
  });
  const text = document.createElement("pre");
  text.textContent = JSON.stringify(found);
  document.body.replaceChildren(text);
});
"""


@pytest.fixture(scope="module")
def shown(written: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What a browser makes of the page, by the width of its window."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe width="{width}" height="800" srcdoc="{html.escape(written)}"></iframe>'
        for width in (DESKTOP, PHONE)
    )
    page = folder / "look.html"
    page.write_text(f'<meta charset="utf-8"><body>{frames}<script>{LOOK}</script></body>')
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
    command += ["--disable-component-update", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=100
    )
    match = re.search(r"<pre>(.*)</pre>", done.stdout)
    assert match, done.stderr
    desktop, phone = json.loads(html.unescape(match[1]))
    return {DESKTOP: desktop, PHONE: phone}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_browser_shows_all_of_the_page(shown: dict[int, dict[str, Any]], width: int) -> None:
    look = shown[width]
    assert look["needs"] <= look["width"] <= width
    assert look["cut"] == [] and look["outside"] == []


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_browser_shows_the_plots_large_enough_to_read(
    shown: dict[int, dict[str, Any]], width: int
) -> None:
    assert len(shown[width]["plots"]) == len(SHOWN)
    assert all(wide > 500 and high > 150 for wide, high in shown[width]["plots"])


def test_a_browser_asks_no_network_for_the_page(shown: dict[int, dict[str, Any]]) -> None:
    assert [look["requests"] for look in shown.values()] == [[], []]


def test_figures_are_aligned_at_the_decimal_point(shown: dict[int, dict[str, Any]]) -> None:
    columns = [column for column in shown[DESKTOP]["points"] if len(column) > 1]
    assert len(columns) > 20
    for places in columns:
        assert max(places) - min(places) <= 1
