"""The page that --report writes: what sections.py says of each benchmark's results and what
chart.py draws of them, as one HTML file that needs nothing else. It has no script, asks no network,
and follows the reader's preference for light or dark.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import chart
import sections
from sections import Results
from tables import WIDE_NOTE, Column, Section, Table

READING = (
    "A ratio says how many times fastcomm's time a peer takes, in the same run on the same "
    "machine: above 1 fastcomm is faster, below 1 the peer is. Beside it stand the least and the "
    "most it can be while both times are within their quartiles."
)

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #20252b; --quiet: #5d6670;
  --line: #dde2e7; --tint: #f4f6f8; --own: #14639f; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #dce1e6; --quiet: #98a2ad;
  --line: #343b43; --tint: #1d2227; --own: #7ab8ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 58rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; font-weight: 600; margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; line-height: 1.3; font-weight: 600; margin: 3.5rem 0 .5rem; }
p, figure, .scroll { margin: 0 0 1rem; }
main > p, section > p { max-width: 42rem; }
.quiet { color: var(--quiet); font-size: .875rem; }
a { color: var(--own); text-underline-offset: .2em; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--own); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; white-space: nowrap; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { padding-left: 0; }
.text { text-align: left; }
td.text { white-space: normal; min-width: 8rem; }
nav ul { columns: 18rem; padding-left: 1.25rem; }
td i { visibility: hidden; }
tbody tr + tr > * { border-top: 1px solid var(--tint); }
tr.own { color: var(--own); }
tr.own td:first-child { font-weight: 600; }
figure svg { display: block; width: 100%; min-width: 36rem; height: auto; }
code, pre { font: .85em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--tint); border-radius: .35rem; padding: .75rem 1rem; margin: 0 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def write(all_results: Sequence[Results]) -> str:
    """The page of these results, in their order."""
    made = _told_apart([(results, sections.of(results)) for results in all_results])
    parts = [_section(number, *pair) for number, pair in enumerate(made)]
    dates = sorted({results["machine"]["date"][:10] for results in all_results})
    commands = "\n".join(dict.fromkeys(sections.command(results) for results in all_results))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fastcomm beside its peers</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>fastcomm beside its peers</h1>
<p>{_text(_where(all_results))} Measured {" to ".join(dict.fromkeys((dates[0], dates[-1])))}.</p>
{_reading([section for _, section in made])}
{_contents([section for _, section in made])}
{_glance([section for _, section in made])}
{"".join(parts)}
<section>
<h2>Machine and versions</h2>
{_table(_machines(all_results))}
</section>
<section>
<h2>Measure it again</h2>
<pre>{_text(commands)}</pre>
</section>
</main>
</body>
</html>
"""


def _contents(made: Sequence[Section]) -> str:
    if len(made) < 2:
        return ""
    links = [
        f'<li><a href="#part{number}">{_text(section.title)}</a></li>'
        for number, section in enumerate(made)
    ]
    return f'<nav aria-label="Contents"><ul>{"".join(links)}</ul></nav>'


def _reading(made: Sequence[Section]) -> str:
    return f"<p>{_text(READING)}</p>" if any(section.ratios for section in made) else ""


def _where(all_results: Sequence[Results]) -> str:
    machines = list(_by_machine(all_results))
    if len(machines) > 1:
        return f"Results of {len(machines)} machines: below each picture stands which."
    facts = all_results[0]["machine"]
    gpu = f"{facts['gpus']} x {facts['gpu']} and " if "gpu" in facts else ""
    return f"On one machine with {gpu}{facts['cores']} cores of {facts['cpu']}."


def _told_apart(made: Sequence[tuple[Results, Section]]) -> list[tuple[Results, Section]]:
    """Sections that would have one title get the options by which they differ."""
    together: dict[str, list[set[str]]] = {}
    for results, section in made:
        together.setdefault(section.title, []).append(set(_options(results)))
    named = []
    for results, section in made:
        others = together[section.title]
        own = [one for one in _options(results) if one not in set.intersection(*others)]
        title = f"{section.title} ({' '.join(own)})" if own else section.title
        named.append((results, replace(section, title=title)))
    return named


def _options(results: Results) -> list[str]:
    """Of its command, each with its values, but for those that say how long it measures."""
    _, *options = sections.command(results).split(" -")
    return [f"-{one}" for one in options if one.split()[0] not in ("m", "-rounds", "-steps")]


def _glance(made: Sequence[Section]) -> str:
    """For each peer, the least, the median and the greatest of its ratios."""
    columns = [Column(40, ("benchmark",), "<"), Column(12, ("peer",), "<")]
    columns += [Column(10, (title,)) for title in ("settings", "least", "median", "greatest")]
    table = Table(columns)
    for section in made:
        for peer in dict.fromkeys(ratio.peer for ratio in section.ratios):
            middles = [ratio.spread.middle for ratio in section.ratios if ratio.peer == peer]
            figures = (min(middles), statistics.median(middles), max(middles))
            cells = [section.title, sections.label(peer), str(len(middles))]
            table.rows.append([*cells, *map(sections.three_digits, figures)])
    if not table.rows:
        return ""
    return f"<h2>The ratios at a glance</h2>\n{_table(table)}"


def _section(number: int, results: Results, section: Section) -> str:
    tables = "\n".join(map(_table, section.tables))
    has_marks = any("~" in cell for table in section.tables for row in table.rows for cell in row)
    note = f'<p class="quiet">{_text(WIDE_NOTE)}.</p>' if has_marks else ""
    return f"""
<section id="part{number}">
<h2>{_text(section.title)}</h2>
<p>{_text(section.how)}</p>
{_picture(results, section.title, f"s{number}")}
{tables}
{note}
<pre>{_text(sections.command(results))}</pre>
</section>
"""


def _picture(results: Results, title: str, name: str) -> str:
    if not chart.can_draw(results):
        return ""
    svg = chart.inline(results, name)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{_text(title)}"', 1)
    on = chart.machine_line(results["machine"])
    return (
        f'<figure>{_scroll(svg, title)}<figcaption class="quiet">{_text(on)}</figcaption></figure>'
    )


def _by_machine(
    all_results: Iterable[Results],
) -> dict[tuple[tuple[str, str], ...], list[str]]:
    """The benchmarks, by what is known of their machine. The date is no part of that."""
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for results in all_results:
        facts = {key: str(fact) for key, fact in results["machine"].items() if key != "date"}
        machines.setdefault(tuple(facts.items()), []).append(str(results["benchmark"]))
    return machines


def _machines(all_results: Iterable[Results]) -> Table:
    """A column for each machine."""
    machines = _by_machine(all_results)
    titles = (", ".join(dict.fromkeys(of)) for of in machines.values())
    columns = [Column(0, (title,), "<") for title in ("machine", *titles)]
    names = dict.fromkeys(name for facts in machines for name, _ in facts)
    rows = [
        [name.replace("_", " "), *(dict(of).get(name, "") for of in machines)] for name in names
    ]
    return Table(columns, rows=rows)


# ---- HTML ----------------------------------------------------------------------------------------


def _text(text: str) -> str:
    text = re.sub(r"\(us\)", "(\u00b5s)", html.escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _table(table: Table) -> str:
    kinds = [' class="text"' if column.align == "<" else "" for column in table.columns]
    head = "".join(
        f'<th scope="col"{kind}>{_text(" ".join(filter(None, column.titles)))}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    written = [
        _aligned(cells) if column.align == ">" else map(_text, cells)
        for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True)
    ]
    rows = "\n".join(
        f"<tr{_own(row)}>"
        + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, kinds, strict=True))
        + "</tr>"
        for row, cells in zip(table.rows, zip(*written, strict=True), strict=True)
    )
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    content = f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    return _scroll(content, table.title or "table")


def _own(cells: Sequence[str]) -> str:
    return ' class="own"' if cells[0] == "fastcomm" else ""


def _aligned(cells: Sequence[str]) -> list[str]:
    """Decimal points stand below each other: digits that are not shown fill up the shorter ones."""
    matches = [re.fullmatch(r"[-~]?\d+(\.\d+)?", cell) for cell in cells]
    longest = max((match[1] or "" for match in matches if match), key=len, default="")
    return [
        _text(cell) + (_unseen(longest[len(match[1] or "") :]) if match else "")
        for cell, match in zip(cells, matches, strict=True)
    ]


def _unseen(digits: str) -> str:
    return f'<i aria-hidden="true">{re.sub("[0-9]", "0", digits)}</i>' if digits else ""


def _scroll(content: str, title: str) -> str:
    """What is wider than a phone moves by itself; the keyboard can reach it."""
    region = f'role="region" aria-label="{_text(title)}" tabindex="0"'
    return f'<div class="scroll" {region}>{content}</div>'
