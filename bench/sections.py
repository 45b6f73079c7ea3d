"""What each benchmark says of its results: the parts of a report's page, and the tables that it
prints when all is measured. Made of the results' JSON alone, so that results of before say as much
as new ones. Measures nothing, and knows no HTML: see page.py.

To appear in a report a benchmark gives three things:
- its JSON, by `report.write_results`;
- a function here that makes a `Section` of it, in SECTIONS;
- a picture, in chart.py.

One that gives only the first appears with the figures of its `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import meetings_section
import paper_section
import simulate_section
from chart import LOOKS, size_text, spread_of
from tables import Column, Ratio, Section, Spread, Table, Times

Results = Mapping[str, Any]
# Of the ratio to a peer, in every table that has one.
RATIO = (Column(9, ("ratio",)), Column(9, ("least",)), Column(9, ("most",)))


def of(results: Results) -> Section:
    return SECTIONS.get(results["benchmark"], _plain)(results)


def command(results: Results) -> str:
    """Results of before 0.1 do not hold theirs."""
    return str(results.get("command") or of(results).command)


def size_option(nbytes: int) -> str:
    """As -b and -e of the benchmarks take it."""
    return size_text(nbytes).removesuffix("iB").removesuffix("B").replace(" ", "")


def label(contender: str) -> str:
    return LOOKS[contender][0].replace("\n", " ") if contender in LOOKS else contender


def time_cell(spread: Spread, decimals: int) -> str:
    """The median, marked where the times spread widely."""
    return f"{spread.mark}{spread.middle:.{decimals}f}"


def ratio_cells(ratio: Spread | None) -> list[str]:
    """For the columns of RATIO. Times without quartiles have a ratio alone."""
    if ratio is None:
        return [""] * len(RATIO)
    has_spread = ratio.low < ratio.high
    ends = [three_digits(end) if has_spread else "" for end in (ratio.low, ratio.high)]
    return [three_digits(ratio.middle), *ends]


def three_digits(value: float) -> str:
    return f"{value:.{2 - (value >= 10) - (value >= 100)}f}"


# ---- all-reduce ----------------------------------------------------------------------------------


def _all_reduce(results: Results) -> Section:
    """bench/allreduce.py."""
    rows = results["rows"]
    times = {row["nbytes"]: Times(dict(_in_place(row))) for row in rows}
    on_gpus = results["device"] == "cuda"
    tensors = "comm.empty" if results["tensors"] == "comm" else "torch.empty"
    how = (
        f"An all-reduce ({results['op']}) of {results['dtype']} in place, called from Python on "
        f"{results['ranks']} ranks{' on GPUs' if on_gpus else ''}; fastcomm's tensors are of "
        f"{tensors}. "
        "Contenders take turns within every size; a time is the median over calls, averaged over "
        "the ranks."
    )
    if "bound" in rows[0]:
        how += " The streaming bound is the memory traffic of an all-reduce, and nothing else."
    if not results.get("unchanged", True):
        how += " Before every call the ranks rewrite their buffers, and meet."
    how += "".join(f" {remark}" for remark in _remarks(results))
    least, most = (size_option(rows[i]["nbytes"]) for i in (0, -1))
    options = f" --ranks {results['ranks']} -b {least} -e {most}"
    options += f" --tensors {results['tensors']}" + " --device cuda" * on_gpus
    return Section(
        f"All-reduce, {results['ranks']} ranks, {tensors}",
        how,
        [_by_size(times)],
        _ratios_by_size("all-reduce", times),
        f"python -m fastcomm bench allreduce{options}",
    )


def _remarks(results: Results) -> Iterator[str]:
    """What a reader has to know before believing the times."""
    for peer, reason in results.get("peers_not_measured", {}).items():
        yield f"{label(peer)} was not measured: {reason}."
    if results.get("ranks_share_a_gpu"):
        yield "The ranks share one GPU: this is for correctness only, the times mean nothing."
    wrong = {
        contender
        for row in results["rows"]
        for contender in LOOKS
        for placement in row.get(contender, {}).values()
        if placement["wrong"]
    }
    for contender in sorted(wrong):
        yield f"Results of {label(contender)} were wrong: its times mean nothing."


def _in_place(row: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    for contender in (name for name in LOOKS if name in row):
        measured = row[contender]["in_place"]
        low, high = measured["quartiles_us"]
        yield contender, Spread(low, measured["time_us"], high)


class SizeTable(Table):
    """Of an all-reduce by size, in microseconds: fastcomm's time, and for each peer its time and
    ratio.
    """

    def __init__(self, contenders: Sequence[str]) -> None:
        self.peers = [name for name in contenders if name not in ("fastcomm", "bound")]
        self.has_bound = "bound" in contenders
        columns = [Column(10, ("size",)), Column(15, ("fastcomm (us)",))]
        for peer in self.peers:
            columns += [Column(12, (f"{label(peer)} (us)",)), *RATIO]
        if self.has_bound:
            columns.append(Column(12, ("bound (us)",)))
        super().__init__(columns)

    def cells(self, nbytes: int, times: Times) -> list[str]:
        own = times.spreads["fastcomm"]
        cells = [size_text(nbytes), time_cell(own, 1)]
        for peer in self.peers:
            spread = times.spreads[peer]
            cells += [time_cell(spread, 1), *ratio_cells(spread.over(own))]
        if self.has_bound:
            cells.append(time_cell(times.spreads["bound"], 1))
        return cells


def _by_size(times: Mapping[int, Times]) -> Table:
    table = SizeTable(list(next(iter(times.values())).spreads))
    table.rows = [table.cells(nbytes, of_size) for nbytes, of_size in times.items()]
    return table


def _ratios_by_size(what: str, times: Mapping[int, Times]) -> list[Ratio]:
    return [
        Ratio(f"{what} of {size_text(nbytes)}", peer, spread.over(of_size.spreads["fastcomm"]))
        for nbytes, of_size in times.items()
        for peer, spread in of_size.spreads.items()
        if peer not in ("fastcomm", "bound")
    ]


# ---- training steps ------------------------------------------------------------------------------


def steps_table(model: Mapping[str, Any], title: str) -> Table:
    """A row for each way to make a step. Its ratio is to fastcomm's time with the same dtype on the
    wire.
    """
    width = max(10, 1 + max(map(len, model["quartiles_ms"])))
    columns = [Column(width, ("way",), "<"), Column(13, ("median (ms)",))]
    columns += [Column(12, (f"quartile {n}",)) for n in (1, 3)]
    columns += [Column(17, ("over local (ms)",)), *RATIO]
    table = Table(columns, title=title)
    ratios = dict(_ratios_of_steps(model))
    for way, quartiles in model["quartiles_ms"].items():
        spread = Spread(*quartiles)
        over = model["overhead_ms"].get(way)
        cells = [way, time_cell(spread, 2), f"{spread.low:.2f}", f"{spread.high:.2f}"]
        cells.append("" if over is None else f"{over:.2f}")
        table.rows.append([*cells, *ratio_cells(ratios.get(way))])
    return table


def _ratios_of_steps(model: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    times = model["quartiles_ms"]
    for way in times:
        own = "fastcomm_bf16" if way.endswith("_bf16") else "fastcomm"
        if way not in (own, "local"):
            yield way, Spread(*times[way]).over(Spread(*times[own]))


def model_title(model: Mapping[str, Any]) -> str:
    size = f"{model['parameters'] / 1e6:.1f} M parameters in {model['tensors']} tensors"
    return f"{model['model']}: {size}"


def _step(results: Results) -> Section:
    """bench/step.py."""
    on_gpus = results.get("device") == "cuda"
    models = results["models"]
    how = (
        f"A training step, {results['ranks']} ranks{' on GPUs' if on_gpus else ''}: "
        'without communication ("local"), with fastcomm\'s reducer, and with DDP. The ways take '
        "turns in every round; a time is that of the slowest rank. What a way takes over local is "
        "the median over rounds of the difference, so that what slows a whole round does not count."
    )
    options = f" --ranks {results['ranks']}" + " --device cuda" * on_gpus + _chosen(models)
    return Section(
        f"A training step, {results['ranks']} ranks",
        how,
        [steps_table(model, model_title(model)) for model in models.values()],
        [
            Ratio(f"step of {name}", way, ratio)
            for name, model in models.items()
            for way, ratio in _ratios_of_steps(model)
        ],
        f"python -m fastcomm bench step{options} --models {' '.join(models)}",
    )


def _chosen(models: Mapping[str, Any]) -> str:
    """The options of bench/step.py that were not left to their defaults."""
    model: Mapping[str, Any] = next(iter(models.values()), {"quartiles_ms": ()})
    optimizer = model.get("optimizer", "sgd")
    chosen = "" if optimizer == "sgd" else f" --optimizer {optimizer}"
    if not {"ddp", "ddp_views"} <= set(model["quartiles_ms"]):
        chosen += f" --ways {' '.join(model['quartiles_ms'])}"
    return chosen


def _backend(results: Results) -> Section:
    """bench/backend.py."""
    rows, models = results.get("all_reduce", ()), results.get("ddp", {})
    times = {
        row["bytes"]: Times({peer: Spread(*spread_of(row, peer)) for peer in ("fastcomm", "gloo")})
        for row in rows
    }
    how = (
        'torch.distributed over the backend "fastcomm" and over Gloo, in the same '
        f"{results['ranks']} processes: dist.all_reduce of ordinary float32 tensors, and a "
        "training step under DDP, of which a part is DDP's own work: "
        '"unreduced" is DDP with a hook that reduces nothing. An all-reduce takes what the slowest '
        "rank's median call takes."
    )
    tables = [_by_size(times)] if times else []
    tables += [steps_table(model, f"DDP, {model['model']}") for model in models.values()]
    ratios = _ratios_by_size("dist.all_reduce", times)
    ratios += [
        Ratio(f"DDP step of {name}", way, ratio)
        for name, model in models.items()
        for way, ratio in _ratios_of_steps(model)
    ]
    return Section(
        f"The torch.distributed backend, {results['ranks']} ranks",
        how,
        tables,
        ratios,
        f"python -m fastcomm bench backend --ranks {results['ranks']}",
    )


# ---- several hosts -------------------------------------------------------------------------------

CONTENDERS = {
    "gloo": "gloo, all ranks",
    "float32": "hierarchical, float32",
    "bfloat16": "hierarchical, bfloat16",
    "int8": "hierarchical, int8",
    "int8_feedback": "hierarchical, int8 fb",
    "float8": "hierarchical, float8",
    "backend": 'backend "fastcomm"',
}


def hosts_table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ratio is that of Gloo's time to a row's."""
    columns = [Column(24, ("way",), "<"), Column(12, ("median (s)",)), Column(10, ("fastest",))]
    columns += [Column(10, ("slowest",)), Column(11, ("bound (s)",)), *RATIO]
    columns += [Column(14, ("gloo / bound",)), Column(12, ("error",))]
    table = Table(columns)
    ratios = dict(_ratios_of_hosts(rows))
    for name, row in rows.items():
        error = row["relative_error"]
        table.rows.append(
            [
                CONTENDERS[name],
                time_cell(_spread_of_host(row), 3),
                *(f"{row[key]:.3f}" for key in ("fastest", "slowest", "bound")),
                *ratio_cells(ratios.get(name)),
                f"{row['gloo/bound']:.2f}",
                "" if error is None else f"{error:.1e}",
            ]
        )
    return table


def _spread_of_host(row: Mapping[str, Any]) -> Spread:
    return Spread(row["fastest"], row["seconds"], row["slowest"])


def _ratios_of_hosts(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Spread]]:
    gloo = _spread_of_host(rows["gloo"])
    for name, row in rows.items():
        if name != "gloo":
            yield name, gloo.over(_spread_of_host(row))


def _hierarchical(results: Results) -> Section:
    """bench/hierarchical.py."""
    hosts = " + ".join(map(str, results["hosts"]))
    rows = results["rows"]
    how = (
        f"All-reduce of {size_text(results['nbytes'])} of float32 between hosts of {hosts} ranks, "
        f"which are network namespaces, over links of {results['rate']}. A time is the median over "
        "calls of the slowest rank's, beside the fastest and the slowest call; the bound is what "
        "the bytes that must cross a link need at its rate."
    )
    options = f"--hosts {','.join(map(str, results['hosts']))} --rate {results['rate']}"
    return Section(
        f"All-reduce between hosts of {hosts} ranks",
        how,
        [hosts_table(rows)],
        [
            Ratio(f"all-reduce by {CONTENDERS[name]}", "gloo", ratio)
            for name, ratio in _ratios_of_hosts(rows)
            if name in ("float32", "backend")  # which send as much as Gloo does
        ],
        f"python -m fastcomm bench hierarchical {options} --mib {results['nbytes'] >> 20}",
    )


# ---- the GPU's kernels, and the host's cost ------------------------------------------------------


def _flatten(results: Results) -> Section:
    """bench/flatten.py."""
    rows = results["rows"]
    return Section(
        "The kernels of the GPU",
        "Many tensors into one flat buffer and back, on a GPU and on its clock; a copy moves as "
        "many bytes from device to device. The launches are on the host's clock.",
        [_passes_table(rows), _launches_table(results["launches"])],
        [
            Ratio(f"{row['way']} of {row['list']}, {row['mode']}", peer, ratio)
            for row in rows
            for peer, ratio in _ratios_of_pass(row)
        ],
        "python -m fastcomm bench flatten",
    )


def _passes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    peers = list(dict.fromkeys(peer for row in rows for peer, _ in _ratios_of_pass(row)))
    columns = [Column(12, (title,), "<") for title in ("list", "mode", "way")]
    columns += [Column(12, ("moved (MB)",)), Column(11, ("copy (us)",))]
    columns += [Column(15, ("fastcomm (us)",)), Column(13, ("of copy (%)",))]
    for peer in peers:
        columns += [Column(12, (f"{peer} (us)",)), *RATIO]
    table = Table(columns)
    for row in rows:
        times, ratios = row["contenders"], dict(_ratios_of_pass(row))
        cells = [row["list"], row["mode"], row["way"], f"{row['nbytes'] / 1e6:.1f}"]
        cells += [time_cell(_spread_of_pass(times[name]), 1) for name in ("copy", "fastcomm")]
        cells.append(f"{100 * times['fastcomm']['of_copy']:.1f}")
        for peer in peers:
            cells.append(time_cell(_spread_of_pass(times[peer]), 1) if peer in times else "")
            cells += ratio_cells(ratios.get(peer))
        table.rows.append(cells)
    return table


def _launches_table(launches: Sequence[Mapping[str, Any]]) -> Table:
    columns = [Column(10, ("tensors",)), Column(11, ("wire",), "<")]
    columns += [Column(13, (title,)) for title in ("gather (us)", "launch (us)")]
    table = Table(columns, title="What launching a bucket costs the host")
    for cost in launches:
        figures = [f"{cost[key]:.2f}" for key in ("gather", "launch")]
        table.rows.append([str(cost["n_tensors"]), cost["wire"], *figures])
    return table


def _ratios_of_pass(row: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    own = _spread_of_pass(row["contenders"]["fastcomm"])
    for name, contender in row["contenders"].items():
        if name not in ("fastcomm", "copy", "with norm"):
            yield name, _spread_of_pass(contender).over(own)


def _spread_of_pass(contender: Mapping[str, Any]) -> Spread:
    low, high = contender["quartiles_us"]
    return Spread(low, contender["time_us"], high)


def host_cost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = [
        Column(36, ("what",), "<"),
        Column(11, ("per",), "<"),
        Column(16, ("predicted (us)",)),
    ]
    columns += [Column(13, ("median (us)",)), *(Column(12, (f"quartile {n}",)) for n in (1, 3))]
    table = Table([*columns, Column(10, ("fastest",))])
    for row in rows:
        spread = Spread(*row["quartiles"])
        figures = (spread.low, spread.high, row["fastest"])
        cells = [row["what"], row["per"], f"{row['predicted']:.2f}", time_cell(spread, 2)]
        table.rows.append([*cells, *(f"{figure:.2f}" for figure in figures)])
    return table


def _host_cost(results: Results) -> Section:
    """bench/host_cost.py."""
    steps = {
        tuple(row["what"].split(", step of ")): Spread(*row["quartiles"])
        for row in results["rows"]
        if ", step of " in row["what"]
    }
    how = (
        "What communication on a GPU costs the host, over stand-ins for the driver and NCCL: with "
        "null calls, without their own time. No GPU took part. A step's cost is the CPU time of "
        "Python's thread less that of a step without communication, per parameter; DDP's is over "
        "Gloo on the CPU. The predictions were written down before the first run."
    )
    return Section(
        "What a launch costs the host",
        how,
        [host_cost_table(results["rows"])],
        [
            Ratio(f"what a step of {n} parameters adds", way, spread.over(steps["fastcomm", n]))
            for (way, n), spread in steps.items()
            if way != "fastcomm"
        ],
        f"python -m fastcomm bench host_cost --rounds {results['rounds']}",
    )


# ---- any other -----------------------------------------------------------------------------------


def _plain(results: Results) -> Section:
    """Of a benchmark that has no section: the figures of its rows, as they are."""
    found = results.get("rows")
    rows = [dict(_figures(row)) for row in found] if isinstance(found, list) else []
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table([Column(12, (name.replace("_", " "),)) for name in names])
    table.rows = [[row.get(name, "") for name in names] for row in rows]
    name = str(results["benchmark"])
    return Section(
        str(results.get("title", name.replace("_", " ").capitalize())),
        f"`python -m fastcomm bench {name} --help` says what was measured, and how.",
        [table] if table.rows else [],
        [],
        f"python -m fastcomm bench {name}",
    )


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A row's figures by name, and of each contender the median of its three."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            for contender, spread in value.items():
                if isinstance(spread, list) and len(spread) == 3:
                    yield f"{contender} ({name})", f"{spread[1]:.3f}"
        elif isinstance(value, float):
            yield name, f"{value:.3f}"
        elif isinstance(value, (str, int)):
            yield name, str(value)


SECTIONS: dict[str, Callable[[Results], Section]] = {
    "allreduce": _all_reduce,
    "step": _step,
    "backend": _backend,
    "hierarchical": _hierarchical,
    "meetings": meetings_section.section,
    "flatten": _flatten,
    "host_cost": _host_cost,
    "paper": paper_section.section,
    "simulate": simulate_section.simulate,
    "tune": simulate_section.tune,
    "timeline": _plain,
    "overhead": _plain,
    "compiled": _plain,
}
