"""The pictures of the benchmarks, drawn from the results they write: time over message
size, and bars of what a step takes. Measures nothing.

Every picture says what was measured and on which machine; bands and whiskers are the quartiles (in
bench/network.py the fastest and the slowest call). matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import chart as paper_chart

SUFFIXES = (".png", ".svg", ".pdf")
INK = "#010203"  # stands for the color of a page's text
# Of each contender: label, color, style of its line.
LOOKS = {
    "local": ("no communication", "silver", "-"),
    "unreduced": ("DDP alone", "lightgray", "-"),
    "unreduced_views": ("DDP alone, bucket views", "lightgray", "-"),
    "fastcomm": ("fastcomm", "tab:blue", "-"),
    "fastcomm_bf16": ("fastcomm, bfloat16", "tab:cyan", "-"),
    "fastcomm_int8": ("fastcomm, int8", "tab:olive", "-"),
    "hooks": ("idle hooks", "gainsboro", "-"),
    "python": ("nothing moved", "tab:gray", "-"),
    "wait": ("ranks meet", "tab:brown", "-"),
    "recorded": ("with a timeline", "tab:brown", ":"),
    "weighted": ("with weights", "tab:purple", "-"),
    "joined": ("inside join()", "tab:pink", "-"),
    "audited": ("with audits", "tab:pink", ":"),
    "skipping": ("skip_nonfinite", "tab:red", "-"),
    "clipped": ("clipped", "tab:pink", "-"),
    "clipped_by_torch": ("clipped by torch", "tab:gray", "-"),
    "sharded": ("sharded optimizer", "tab:green", "-"),
    "ddp": ("DDP", "tab:orange", "-"),
    "ddp_views": ("DDP, bucket views", "bisque", "-"),
    "backend": ('backend "fastcomm"', "steelblue", "-"),
    "backend_views": ('backend "fastcomm", views', "steelblue", "-"),
    "ddp_bf16": ("DDP, bfloat16", "peru", "-"),
    "gloo": ("Gloo", "tab:orange", "-"),
    "mpi": ("MPI", "tab:green", "-"),
    "openmpi": ("Open MPI", "tab:green", "-"),
    "mpich": ("MPICH", "tab:olive", "-"),
    "intelmpi": ("Intel MPI", "tab:purple", "-"),
    "before": ("fastcomm before", "tab:pink", "-"),
    "ordinary": ("fastcomm, torch.empty", "tab:cyan", "-"),
    "nccl": ("torch.distributed NCCL", "tab:red", "-"),
    "bound": ("streaming bound", "gray", ":"),
    "float32": ("hierarchical", "tab:blue", "-"),
    "bfloat16": ("hierarchical,\nbfloat16 wire", "tab:cyan", "-"),
    "int8": ("int8 wire", "tab:green", "-"),
    "int8_feedback": ("int8 wire,\nerror feedback", "tab:olive", "-"),
    "float8": ("float8 wire", "tab:purple", "-"),
    "every_gradient": ("every gradient", "silver", "-"),
    "local_sgd": ("LocalSGD", "tab:blue", "-"),
    "diloco": ("DiLoCo", "tab:green", "-"),
    "diloco_bf16": ("DiLoCo,\nbfloat16", "tab:cyan", "-"),
    "copy": ("plain copy", "silver", "-"),
    "foreach": ("torch foreach", "tab:orange", "-"),
    "dense": ("torch flatten_dense", "bisque", "-"),
}
OWN = ("fastcomm", "backend", "backend_views")  # the first one there is what titles speak of
REFERENCES = ("gloo", "nccl", "mpi")  # the first one there is what speed-ups are against
TENSORS = {"comm": "comm.empty", "ordinary": "ordinary tensors"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws the results of any benchmark into a file, whose suffix says in which format."""
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with _settings({}):
        figure = _figure(results)
        figure.supxlabel(machine_line(results["machine"]), fontsize=6, color="dimgray")
        figure.savefig(path, dpi=150, metadata=metadata)
    if path.suffix == ".png":
        _reduce_colors(path)


def inline(results: Mapping[str, Any], name: str) -> str:
    """The picture as an <svg> for a page of HTML, in the page's own colors: on paper as dark as the
    reader likes it. `name` keeps its ids apart from those of the page's other pictures.
    """
    parts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    looks = {"svg.fonttype": "none", "grid.color": "gray", **dict.fromkeys(parts, INK)}
    with _settings(looks), io.StringIO() as file:
        _figure(results).savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")


def can_draw(results: Mapping[str, Any]) -> bool:
    return results["benchmark"] in _PICTURES


def _settings(more: dict[str, Any]) -> Any:
    """matplotlib's, by which the same results give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    own: Any = {"svg.hashsalt": "fastcomm", "font.size": 8, "legend.frameon": False}
    return matplotlib.rc_context(own | more)


def _figure(results: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    _PICTURES[results["benchmark"]](figure, results)
    return figure


def _reduce_colors(path: Path) -> None:
    """To a palette, a third of the file: pictures lie in the repository."""
    from PIL import Image  # matplotlib's own dependency

    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(64)
    reduced.save(path, optimize=True)


def machine_line(machine: Mapping[str, Any]) -> str:
    gpu = f"{machine['gpus']} x {machine['gpu']}, " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['simd']}, torch "
        f"{machine['torch']}, fastcomm {machine['fastcomm']}, {machine['date'][:10]}"
    )


# ---- time over message size ----------------------------------------------------------------------

Line = Sequence[tuple[float, float, float]]  # by size: quartile, median, quartile, microseconds


def _all_reduce(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/allreduce.py."""
    rows = results["rows"]
    lines = {}
    for peer in (name for name in LOOKS if name in rows[0]):
        times = [row[peer]["in_place"] for row in rows]
        lines[peer] = [spread_of(one) for one in times]
    on = " on GPUs" if results["device"] == "cuda" else ""
    figure.suptitle(
        f"all_reduce of {results['dtype']} in place, {results['op']}, {results['ranks']} ranks"
        f"{on}; fastcomm on {TENSORS[results['tensors']]}"
    )
    _over_size(figure.subplots(), [row["nbytes"] for row in rows], lines)


def spread_of(time: Mapping[str, Any]) -> tuple[float, float, float]:
    """Results of before 0.1 had no quartiles of the backend."""
    middle = time["time_us"]
    low, high = time.get("quartiles_us", (middle, middle))
    return low, middle, high


def _parts(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/parts.py: one panel for each collective."""
    figure.set_size_inches(12, 4)
    collectives = list(dict.fromkeys(row["collective"] for row in results["rows"]))
    for part, collective in zip(figure.subfigures(1, len(collectives)), collectives, strict=True):
        part.suptitle(f"{collective} of float32, {results['ranks']} ranks")
        rows = [row for row in results["rows"] if row["collective"] == collective]
        lines = {way: [row["quartiles_us"][way] for row in rows] for way in rows[0]["quartiles_us"]}
        _over_size(part.subplots(), [row["nbytes"] for row in rows], lines)


def _over_size(axes: Any, sizes: Sequence[int], lines: Mapping[str, Line]) -> None:
    for peer, line in lines.items():
        label, color, style = LOOKS[peer]
        low, middle, high = zip(*line, strict=True)
        marker = "." if style == "-" else ""
        axes.plot(sizes, middle, style, color=color, label=label, marker=marker)
        axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(n) for n in sizes], rotation=45)
    axes.minorticks_off()
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda microseconds, _: time_text(microseconds))
    axes.set_xlabel("message size")
    axes.set_ylabel("time per call")
    axes.grid(alpha=0.3)
    _label_speedups(axes, sizes, lines)
    axes.legend()


def _label_speedups(axes: Any, sizes: Sequence[int], lines: Mapping[str, Line]) -> None:
    """How many times fastcomm's time the first of REFERENCES takes, below fastcomm's line."""
    reference = next((peer for peer in REFERENCES if peer in lines), None)
    if reference is None:
        return
    ours = lines.get("fastcomm") or lines["backend"]
    for nbytes, (_, own, _), (_, its, _) in zip(sizes, ours, lines[reference], strict=True):
        axes.annotate(
            f"{number_text(its / own)}x",
            (nbytes, own),
            (0, -5),
            textcoords="offset points",
            ha="center",
            va="top",
            color=LOOKS["fastcomm"][1],
        )
    axes.set_title(f"labels: times as fast as {LOOKS[reference][0]}", fontsize=7)


def number_text(value: float) -> str:
    """Two digits, more where they stand before the point."""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"


def size_text(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(microseconds: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3), ("us", 1.0)):
        if microseconds >= factor:
            return f"{microseconds / factor:g} {unit}"
    return f"{1e3 * microseconds:g} ns"


# ---- bars ----------------------------------------------------------------------------------------


def _step(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/step.py: one panel for each model; or, if they were measured, the parts of it all."""
    models = list(results["models"].values())
    if models and "parts" in models[0]:
        _overhead_in_parts(figure, models)
        return
    on = "a GPU each" if results.get("device") == "cuda" else "CPU"
    figure.set_size_inches(9, 3.2)
    optimizer = models[0].get("optimizer", "sgd") if models else "sgd"
    figure.suptitle(
        f"One training step in milliseconds, {results['ranks']} ranks, {on}, {optimizer}"
    )
    part = figure.subfigures()  # its legend keeps off the line below
    _panels(part, part.subplots(1, len(models), squeeze=False)[0], models)


def _overhead_in_parts(figure: Any, models: Sequence[Mapping[str, Any]]) -> None:
    """What all of fastcomm and each of its parts add, with their quartiles."""
    rows = [
        (f"{model['model'].partition(',')[0]}: {part}", added)
        for model in models
        for part, added in model["parts"].items()
        if part != "all of DDP"
    ][::-1]
    middles = [added["ms"] for _, added in rows]
    below = [added["ms"] - added["quartile_1_ms"] for _, added in rows]
    above = [added["quartile_3_ms"] - added["ms"] for _, added in rows]
    axes = figure.subplots()
    axes.errorbar(middles, range(len(rows)), xerr=[below, above], fmt="o", capsize=3)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_xlabel("ms added to a step, and quartiles")


def _panels(figure: Any, panels: Sequence[Any], models: Sequence[Mapping[str, Any]]) -> None:
    for axes, model in zip(panels, models, strict=True):
        times = model["quartiles_ms"]
        own = next((way for way in OWN if way in times), list(times)[-1])
        other = next((way for way in ("ddp", "ddp_views") if way in times), "local")
        if other == "local":  # the peer of a sharded step
            own = list(times)[-1]
        ratio = times[other][1] / times[own][1]
        name, _, batch = model["model"].partition(", ")
        bars = _bars(axes, times, [number_text(middle) for _, middle, _ in times.values()])
        axes.set_title(
            f"{name}\n{batch}\n{ratio:.2f} times as fast as {LOOKS[other][0]}", fontsize=7
        )
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(bars, [LOOKS[way][0] for way in times], loc="outside lower center", ncols=6)


def _bars(axes: Any, times: Mapping[str, Sequence[float]], labels: Sequence[str]) -> Any:
    """One bar for each contender, with whiskers. Returns the bars."""
    middles = [middle for _, middle, _ in times.values()]
    whiskers = [
        [middle - low for low, middle, _ in times.values()],
        [high - middle for _, middle, high in times.values()],
    ]
    bars = axes.bar(
        range(len(times)),
        middles,
        color=[LOOKS[name][1] for name in times],
        yerr=whiskers,
        error_kw={"elinewidth": 0.8, "ecolor": "dimgray"},
    )
    axes.bar_label(bars, labels, padding=2, fontsize=7)
    axes.margins(y=0.12)
    return bars


def label(contender: str) -> str:
    return LOOKS[contender][0].replace("\n", " ")


def _network(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/network.py."""
    (_between_hosts if results["part"] == "all_reduce" else _trained)(figure, results)


def _between_hosts(figure: Any, results: Mapping[str, Any]) -> None:
    """An all-reduce, with the link's own time as a line across each bar."""
    rows = results["rows"]
    hosts = " + ".join(map(str, results["hosts"]))
    figure.suptitle(
        f"all_reduce of {size_text(results['nbytes'])} of float32, hosts of {hosts} ranks, links "
        f"of {results['rate']}"
    )
    axes = figure.subplots()
    times = {name: (row["fastest"], row["seconds"], row["slowest"]) for name, row in rows.items()}
    labels = [f"{row['seconds']:.2f} s, {row['gloo/it']:.2f}x" for row in rows.values()]
    _bars(axes, times, labels)
    bounds = [row["bound"] for row in rows.values()]
    places = range(len(rows))
    axes.hlines(
        bounds,
        [place - 0.4 for place in places],
        [place + 0.4 for place in places],
        colors=axes.xaxis.label.get_color(),
        linestyles=":",
        label="what must cross a link, at its rate",
    )
    axes.set_xticks(places, [LOOKS[name][0] for name in rows])
    axes.set_ylabel("time (s)")
    axes.legend(loc="upper right")


def _trained(figure: Any, results: Mapping[str, Any]) -> None:
    """The time of a step and what it sends; or the losses of all seeds."""
    rows = results["rows"]
    axes = figure.subplots()
    if results["part"] == "syncs":
        figure.suptitle(
            f"Two hosts, a link of {results['rate']}, syncs every {results['every']} steps"
        )
        labels = [
            f"{row['seconds'][1]:.2f} s\n{row['nbytes'] / 1e6:.1f} MB" for row in rows.values()
        ]
        _bars(axes, {way: row["seconds"] for way, row in rows.items()}, labels)
        axes.set_ylabel("time of a step (s)")
    else:
        figure.suptitle(f"{results['seeds']} seeds, syncs every {results['every']} steps")
        for x, (way, row) in enumerate(rows.items()):
            axes.plot([x] * len(row["losses"]), row["losses"], "o", color=LOOKS[way][1])
        axes.set_ylabel(f"loss after {results['steps']} steps")
    axes.set_xticks(range(len(rows)), [LOOKS[way][0] for way in rows])


def _flatten(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/flatten.py: one panel for each list of tensors."""
    lists = list(dict.fromkeys(row["list"] for row in results["rows"]))
    ways = [name for name in LOOKS if name in results["rows"][0]["contenders"]]
    figure.set_size_inches(9, 2.4 * len(lists) + 0.8)
    figure.suptitle("Many tensors into one buffer and back on a GPU: GB/s read and written")
    for axes, name in zip(figure.subplots(len(lists), 1, squeeze=False)[:, 0], lists, strict=True):
        rows = [row for row in results["rows"] if row["list"] == name]
        for number, way in enumerate(ways):
            places = [i + 0.8 * number / len(ways) for i in range(len(rows))]
            heights = [row["contenders"].get(way, {"gbs": 0})["gbs"] for row in rows]
            label, color, _ = LOOKS[way]
            axes.bar(places, heights, 0.8 / len(ways), color=color, label=label, align="edge")
        axes.set_title(name, fontsize=7)
        axes.set_xticks(
            [i + 0.4 for i in range(len(rows))], [f"{row['mode']} {row['way']}" for row in rows]
        )
    axes.margins(y=0.25)
    axes.legend(ncols=len(ways))


def _compiled(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/compiled.py: how far the backward is when the first bucket is launched."""
    axes = figure.subplots()
    rows = results["rows"][::-1]
    axes.barh(range(len(rows)), [100 * row["first_launch"] for row in rows])
    axes.set_yticks(range(len(rows)), [f"{row['model']}, {row['way']}" for row in rows])
    axes.set_xlabel("% of the backward that is over at the first launch of a bucket")


def _elastic(figure: Any, results: Mapping[str, Any]) -> None:
    """bench/elastic.py: of the steps of an undisturbed run, those that are made all the same."""
    axes = figure.subplots()
    rows = results["rows"][::-1]
    bars = axes.barh(range(len(rows)), [100 * row["kept"] for row in rows])
    axes.bar_label(bars, fmt="%.0f%%", label_type="center")
    axes.set_yticks(range(len(rows)), [f"{row['way']}, {row['kills']} kills" for row in rows])
    axes.set_xlabel("% of the steps of a run that loses no rank")


_PICTURES = {
    "allreduce": _all_reduce,
    "parts": _parts,
    "step": _step,
    "network": _network,
    "flatten": _flatten,
    "paper": paper_chart.draw,
    "compiled": _compiled,
    "elastic": _elastic,
}
