"""The benchmarks run, with real ranks and tiny sizes, and write what they promise. Nothing here
looks at a time. Those of the GPU run with the host in its place: see host_clock.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.stand_ins import environment, stand_ins
from tests.support import namespaces
from tests.support.forked_python import python
from tests.support.small_models import WIDTHS

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = ROOT / "bench"


def start(
    script: str,
    *arguments: str | Path,
    on_the_host: Mapping[str, str] | None = None,
    after: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """How a benchmark ends that has a small model in place of its MLP. after: a script that runs
    first, in the same process.
    """
    imports: list[str | Path] = ["tests.support.small_models"]
    if on_the_host is not None:
        imports.append("tests.support.host_clock")
    if after is not None:
        imports.append(after)
    return python(BENCH / script, *arguments, env=on_the_host or {}, imports=imports)


def run(script: str, *arguments: str | Path, on_the_host: Mapping[str, str] | None = None) -> str:
    """What it prints."""
    done = start(script, *arguments, on_the_host=on_the_host)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def on_the_host() -> Mapping[str, str]:
    """The environment in which a benchmark of the GPU runs on the host."""
    return environment(stand_ins())


def test_allreduce_prints_the_table_of_nccl_tests_and_writes_json(tmp_path):
    path = tmp_path / "allreduce.json"
    options = ["-b", "1K", "-e", "64K", "-f", "8", "-n", "20", "--peers", "gloo,backend"]
    printed = run("allreduce.py", *options, "--json", path)
    rows = [line.split() for line in printed.splitlines() if line and not line.startswith("#")]
    assert [row[:5] for row in rows] == [
        [str(n), str(n // 4), "float", "sum", "-1"] for n in (1024, 8192, 65536)
    ]
    assert "# Out of bounds values : 0 OK" in printed
    result = json.loads(path.read_text())
    assert result["ranks"] == 2 and result["machine"]["cores"] >= 1
    for row in result["rows"]:
        assert set(row["ratios"]) == {"gloo/fastcomm", "backend/fastcomm", "fastcomm/bound"}
        assert row["fastcomm"]["in_place"]["wrong"] == 0
        if result["machine"]["cores"] > 1:
            assert row["caches"] in ("one", "two", "mixed")


def test_without_json_a_benchmark_changes_no_committed_figures():
    before = {path: path.stat().st_mtime_ns for path in BENCH.glob("results/*")}
    printed = run("step.py", "--hook-cost", "--ranks", "1")
    assert "us per parameter and step" in printed and "Results:" not in printed
    assert {path: path.stat().st_mtime_ns for path in BENCH.glob("results/*")} == before


def test_parts_compares_what_moves_parts_with_gloo(tmp_path):
    path = tmp_path / "parts.json"
    options = ["-e", "1K", "--rounds", "2", "--json", path]
    printed = run("parts.py", *options, "--plot", tmp_path / "parts.png")
    assert "all_to_all_single" in printed
    rows = json.loads(path.read_text())["rows"]
    of_parts = ("gather", "scatter", "all_to_all_single", "send")
    assert [(row["collective"], row["nbytes"]) for row in rows] == [
        (collective, 1024) for collective in (*of_parts, "coalesced", "one by one")
    ]
    for row in rows:
        assert set(row["quartiles_us"]) == {"fastcomm", "ordinary", "gloo"}
        assert set(row["ratios"]) == {"gloo/fastcomm", "gloo/ordinary"}
    assert (tmp_path / "parts.png").stat().st_size > 0


def test_step_takes_its_overhead_apart(tmp_path):
    path = tmp_path / "step.json"
    ways = ["--ways", "local", "hooks", "python", "wait", "fastcomm", "recorded", "backend", "ddp"]
    size = ["--models", "mlp", "--rounds", "2", "--steps", "1", "--json", path]
    printed = run("step.py", *size, *ways, "--plot", tmp_path / "step.png")
    assert "waiting for the slower rank" in printed and "with a timeline" in printed
    assert "DDP over backend fastcomm is" in printed
    parts = json.loads(path.read_text())["models"]["mlp"]["parts"]
    assert all({"ms", "share_of_ddp"} <= set(part) for part in parts.values())
    assert (tmp_path / "step.png").stat().st_size > 0


def test_compiled_says_when_buckets_of_compiled_models_are_launched(tmp_path):
    path = tmp_path / "compiled.json"
    options = ["--backend", "eager", "--rounds", "2", "--steps", "1"]
    printed = run("compiled.py", "--models", "mlp", *options, "--json", path)
    assert "first launch" in printed
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == ["eager", "whole", "pieces"]
    assert all(0 < row["first_launch"] <= 1 and not row["off_eager"] for row in rows)


def test_elastic_counts_the_steps_that_a_training_keeps_while_ranks_are_killed(tmp_path):
    path = tmp_path / "elastic.json"
    # one kill: a second one may find nobody else who has the parameters
    options = ["--ranks", "2", "--seconds", "4", "--kill-every", "2", "--step-ms", "5"]
    printed = run("elastic.py", *options, "--json", path)
    assert "one process computes the same bits" in printed
    row = next(row for row in json.loads(path.read_text())["rows"] if row["way"] == "fastcomm")
    assert row["kills"] == 1 and row["disturbed"] > 0
    assert row["kept"] == round(row["disturbed"] / row["undisturbed"], 4)


def test_step_compares_fastcomm_with_ddp_and_writes_json(tmp_path):
    path = tmp_path / "step.json"
    printed = run(
        "step.py",
        *["--models", "mlp", "--rounds", "2", "--steps", "1", "--json", str(path)],
        *["--plot", str(tmp_path / "step.png"), "--report", str(tmp_path / "step.html")],
    )
    assert "of the overhead fastcomm's is" in printed
    again = "python -m fastcomm bench step --models mlp --rounds 2 --steps 1"
    assert f"<pre>{again}</pre>" in (tmp_path / "step.html").read_text()
    assert (tmp_path / "step.png").stat().st_size > 0
    result = json.loads(path.read_text())["models"]["mlp"]
    assert set(result["quartiles_ms"]) == {"local", "fastcomm", "ddp", "ddp_views"}
    assert set(result["overhead_ms"]) == {"fastcomm", "ddp", "ddp_views"}
    assert result["parameters"] == sum(p * q + q for p, q in pairwise(WIDTHS))


def test_tune_tells_what_a_step_takes_by_size(tmp_path):
    """Of a model that has several buckets by two sizes."""
    small = tmp_path / "small.py"
    small.write_text("from fastcomm.reducer import plan\nplan.CAPS_MB = (0.0001,)\n")
    done = start("tune.py", "--model", "mlp", "--steps", "2", after=small)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("  0.0001  ", "bucket_cap_mb=", "communication"):
        assert words in done.stdout


# On a GPU


@pytest.fixture(scope="module")
def flattened(
    on_the_host: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """What bench/flatten.py prints and writes."""
    path = tmp_path_factory.mktemp("flatten") / "flatten.json"
    printed = run(
        "flatten.py",
        *["--lists", "tiny", "--rounds", "2", "--launches", "1", "32", "--json"],
        *[str(path), "--plot", str(path.with_suffix(".png"))],
        *["--report", str(path.with_suffix(".html"))],
        on_the_host=on_the_host,
    )
    assert "<h2>flatten --lists tiny" in path.with_suffix(".html").read_text()
    return printed, json.loads(path.read_text())


def test_flatten_compares_the_kernels_with_their_peers(flattened):
    _, result = flattened
    modes = ("fp32", "bf16", "fp32->bf16")
    assert [(row["mode"], row["way"]) for row in result["rows"]] == [
        (mode, way) for mode in modes for way in ("flatten", "unflatten")
    ]
    for row in result["rows"]:
        assert {"fastcomm", "copy", "foreach", "dense", "per tensor"} <= set(row["contenders"])


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_allreduce_on_cuda_compares_fastcomm_with_nccl_and_writes_json(
    on_the_host, tmp_path, ranks
):
    path = tmp_path / "allreduce.json"
    sizes = ["-b", "1K", "-e", "8K", "-f", "8", "-n", "10"]
    printed = run(
        "allreduce.py",
        "--device",
        "cuda",
        "--ranks",
        ranks,
        *sizes,
        "--json",
        str(path),
        on_the_host=on_the_host,
    )
    assert "# Out of bounds values : 0 OK" in printed and "# NCCL 2." in printed
    result = json.loads(path.read_text())
    assert result["device"] == "cuda" and result["ranks"] == int(ranks)
    for row in result["rows"]:
        assert set(row["ratios"]) == {"ordinary/fastcomm", "nccl/fastcomm"}


ON_CUDA = ("--device", "cuda", "--ranks", "1", "--rounds", "2", "--steps", "1")


def test_step_on_cuda_compares_fewer_bits_on_the_wire_as_well(on_the_host, tmp_path):
    path = tmp_path / "step.json"
    printed = run("step.py", *ON_CUDA, "--json", path, on_the_host=on_the_host)
    result = json.loads(path.read_text())["models"]["mlp"]
    assert set(result["overhead_ms"]) == {
        "fastcomm",
        "ddp",
        "ddp_views",
        "fastcomm_bf16",
        "fastcomm_int8",
        "ddp_bf16",
    }
    assert "of 2 met" in printed.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
@pytest.mark.parametrize(
    "arguments",
    [["flatten.py"], ["allreduce.py", "--device", "cuda"], ["step.py", "--device", "cuda"]],
)
def test_a_benchmark_of_the_gpu_says_in_a_sentence_that_there_is_none(arguments):
    done = start(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "CUDA" in done.stderr


SMALL = "--layers", "1", "--width", "64"


@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
@pytest.mark.parametrize(
    "options, words",
    [
        (["--mib", "1", "--wires", "bfloat16", "int8_feedback"], "backend"),
        (["syncs", "--every", "2", *SMALL], "MB per step"),
        (
            ["losses", "--seeds", "2", "--steps", "2", "--ways", "every_gradient", "int8", *SMALL],
            "mean",
        ),
    ],
)
def test_network_sets_ways_of_hosts_beside_each_other(options, words, tmp_path):
    path = tmp_path / "network.json"
    output = ["--json", path, "--plot", path.with_suffix(".png")]
    assert words in run("network.py", *options, "--rounds", "2", *output)
    assert len(json.loads(path.read_text())["rows"]) >= 2
    assert path.with_suffix(".png").stat().st_size > 0
