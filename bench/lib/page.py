"""The page that --report writes: chart.py's picture of each benchmark's results, the machine and
the command that measures them again, as one HTML file that needs nothing else. It has no script,
asks no network, and follows the reader's preference for light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lib import chart

Results = Mapping[str, Any]
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 58rem; padding: 2rem 1rem; font: 1rem/1.6 system-ui, sans-serif; }
h2 { font-size: 1.2rem; margin-top: 3rem; }
figure { margin: 0; overflow-x: auto; }
figcaption { font-size: .875rem; }
svg { display: block; width: 100%; min-width: 36rem; height: auto; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def write(all_results: Sequence[Results]) -> str:
    """The page of these results, in their order."""
    sections = "".join(_section(*pair) for pair in enumerate(all_results))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>fastcomm beside its peers</title>
<style>{STYLE}</style>
</head>
<body>
<h1>fastcomm beside its peers</h1>
{sections}</body>
</html>
"""


def _section(number: int, results: Results) -> str:
    command = html.escape(_command(results))
    title = command.removeprefix("python -m fastcomm ").removeprefix("bench ")
    remarks = "".join(f"<p>{html.escape(remark)}</p>\n" for remark in _remarks(results))
    picture = chart.inline(results, f"s{number}")
    svg = picture.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    machine = html.escape(chart.machine_line(results["machine"]))
    return f"""<section>
<h2>{title}</h2>
{remarks}<figure>{svg}<figcaption>{machine}</figcaption></figure>
<pre>{command}</pre>
</section>
"""


def _command(results: Results) -> str:
    """Some results were measured before their file held the command."""
    figure = f" {results['figure']} --wire {results['wire']}" if "figure" in results else ""
    plain = f"python -m fastcomm bench {results['benchmark']}{figure}"
    return str(results.get("command", plain))


def _remarks(results: Results) -> Iterator[str]:
    """What a reader has to know before believing the times of an all-reduce."""
    for peer, reason in results.get("peers_not_measured", {}).items():
        yield f"{chart.label(peer)} was not measured: {reason}."
    if results["benchmark"] != "allreduce":
        return
    for contender in chart.LOOKS:
        measured = [row.get(contender, {}) for row in results["rows"]]
        if any(of.get("wrong") for placements in measured for of in placements.values()):
            yield f"Results of {chart.label(contender)} were wrong: its times mean nothing."
