"""What a page says of the results of bench/simulate.py and bench/tune.py. Nothing is measured
beside a peer there: the model of a step predicts, and steps of this machine say how well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables import Column, Section, Table


def simulate(results: Mapping[str, Any]) -> Section:
    titles = ("model", "ranks", "wire", "buckets (MB)", "predicted (ms)", "measured (ms)")
    names = ("model", "ranks", "wire", "cap_mb", "predicted_ms", "measured_ms")
    table = Table([Column(14, (title,)) for title in titles])
    table.rows = [[str(row[name]) for name in names] for row in results["validation"]]
    return Section(
        "A model of a step",
        f"Steps predicted from two ranks' calibration, then measured: off by "
        f"{results['errors']['all']:.1%} at the median.",
        [table],
        [],
        "python -m fastcomm bench simulate",
    )


def tune(results: Mapping[str, Any]) -> Section:
    table = tune_table(results)
    how = f"Predicted for {results['model']} on {results['ranks']} ranks, by the size of buckets: "
    how += "a step, what its communication takes, and how much of that is exposed, which is not "
    return Section(
        "What bucket size",
        how + f"hidden behind backward. Recommended: {'; '.join(results['advice'])}.",
        [table],
        [],
        f"python -m fastcomm tune --model {results['model']} --ranks {results['ranks']}",
    )


def tune_table(results: Mapping[str, Any]) -> Table:
    columns = [("MB", 7), ("buckets", 9), ("step (ms)", 11), ("communication (ms)", 20)]
    columns += [("exposed (ms)", 14)]
    names = ["predicted_ms", "communication_ms", "exposed_ms"]
    if results["rows"][0]["measured_ms"] is not None:
        columns, names = [*columns, ("measured (ms)", 15)], [*names, "measured_ms"]
    table = Table([Column(width, (title,)) for title, width in columns])
    for row in results["rows"]:
        times = [f"{row[name]:.1f}" for name in names]
        table.rows.append([f"{row['cap_mb']:g}", str(row["buckets"]), *times])
    return table
