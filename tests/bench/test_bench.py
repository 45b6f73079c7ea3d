"""The benchmarks run, with real ranks and tiny sizes, and write what they promise. Nothing here
looks at a time. Those of the GPU run with the host in its place: see host_clock.py.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
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


def test_allreduce_says_of_an_mpi_that_is_missing_how_to_get_it(tmp_path):
    path = tmp_path / "allreduce.json"
    size = ["-b", "1K", "-e", "1K", "-n", "5", "--unchanged", "--json", path]
    printed = run("allreduce.py", *size, "--peers", "mpich", "--mpis", tmp_path)
    assert f"mpich is not measured: it is not in {tmp_path}/mpich: python3." in printed
    assert "pip install mpi4py mpich" in json.loads(path.read_text())["peers_not_measured"]["mpich"]


def test_parts_compares_what_moves_parts_with_gloo(tmp_path):
    path = tmp_path / "parts.json"
    options = ["-e", "4K", "--rounds", "2", "--json", path]
    printed = run("parts.py", *options, "--plot", tmp_path / "parts.png")
    assert "all_to_all_single" in printed
    rows = json.loads(path.read_text())["rows"]
    of_parts = ("gather", "scatter", "all_to_all_single", "send")
    assert [(row["collective"], row["nbytes"]) for row in rows] == [
        (collective, nbytes)
        for collective in (*of_parts, "coalesced", "one by one")
        for nbytes in (1 << 10, 1 << 12)
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


def test_step_leaves_what_it_has_measured_when_it_is_cut_short(tmp_path):
    path, second = tmp_path / "step.json", tmp_path / "second.py"
    second.write_text(
        "import os\nfrom lib.models import CASES\n"
        "CASES['conv'] = CASES['mlp']._replace(make_model=lambda: os._exit(1))"
    )
    size = ["--ranks", "1", "--rounds", "2", "--steps", "1", "--ways", "local", "fastcomm"]
    done = start("step.py", "--models", "mlp", "conv", *size, "--json", path, after=second)
    assert done.returncode == 1
    assert list(json.loads(path.read_text())["models"]) == ["mlp"]


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


def test_flatten_says_of_every_bar_whether_it_is_met(flattened):
    printed, result = flattened
    # Of each row: not slower than torch, less than 15 us, a tenth of per-tensor copies.
    assert len(result["bars"]) == 3 * len(result["rows"]) + len(result["launches"])
    assert (
        printed.splitlines()[-1]
        == f"# bars: {sum(bar['is_met'] for bar in result['bars'])} of {len(result['bars'])} met"
    )


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


def test_allreduce_refuses_more_ranks_than_cards(on_the_host):
    done = start("allreduce.py", "--device", "cuda", "--ranks", "3", on_the_host=on_the_host)
    assert done.returncode == 2 and "GPUs for 3 ranks" in done.stderr


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


@pytest.mark.parametrize("more", [["ddp_views"], ["sharded"]])
def test_step_takes_some_of_its_ways(on_the_host, tmp_path, more):
    ways = ["--ways", "local", "fastcomm", *more]
    options = ["--json", tmp_path / "step.json", "--plot", tmp_path / "step.png"]
    printed = run("step.py", *ON_CUDA, *ways, *options, on_the_host=on_the_host)
    assert "of 1 met" in printed  # both send bfloat16
    assert (tmp_path / "step.png").stat().st_size > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
@pytest.mark.parametrize(
    "arguments",
    [["flatten.py"], ["allreduce.py", "--device", "cuda"], ["step.py", "--device", "cuda"]],
)
def test_a_benchmark_of_the_gpu_says_in_a_sentence_that_there_is_none(arguments):
    done = start(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "CUDA" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_the_suite_of_the_gpu_says_in_a_sentence_that_there_is_none(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(ROOT / "ci/gpu.sh"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr and not list(tmp_path.iterdir())


# In place of an interpreter that finds a GPU: writes the results it is asked for, prints a lot and
# fails. The tests are one that hangs with the interpreter's lock held, as inside CUDA, for a while.
PYTHON_ON_A_GPU = """#!/bin/bash
case "$*" in
-c*) exit 0 ;;
*gpu_report.py*) exec {python} "$@" ;;
*pytest*tests/gpu)
    arguments=("${{@//faulthandler_timeout=60/faulthandler_timeout=1}}")
    exec {python} "${{arguments[@]/#tests?gpu/{hanging}}}" ;;
esac
while (($#)); do
    if [ "$1" = --json ]; then echo '{{}}' >"$2"; fi
    shift
done
for i in {{1..400}}; do printf '%0150d\n' "$i"; done
exit 1
"""
HANGING = """import ctypes, os
def test_that_hangs():
    ctypes.PyDLL(None).sleep(2)
    os._exit(1)
"""
STEPS_OF_A_RUN = (
    *("build", "kernels", "flatten", "tests", "step", "compiled", "allreduce"),
    *("documents", "reducer"),
)


@pytest.fixture(scope="module")
def failed_on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of ci/gpu.sh prints whose steps all fail, and the folder of its results."""
    scratch = tmp_path_factory.mktemp("gpu")
    folder, stub, hanging = scratch / "results", scratch / "python", scratch / "test_hanging.py"
    hanging.write_text(HANGING)
    stub.write_text(PYTHON_ON_A_GPU.format(python=sys.executable, hanging=hanging))
    sanitizer = scratch / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    for script in (stub, sanitizer):
        script.chmod(0o755)
    path = os.pathsep.join([str(scratch), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(ROOT / "ci/gpu.sh"), str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PATH": path, "PYTHON": str(stub)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, folder


def test_a_run_on_a_gpu_returns_at_most_five_files_and_prints_at_most_10000_characters(
    failed_on_a_gpu,
):
    printed, folder = failed_on_a_gpu
    steps = json.loads((folder / "gpu-summary.json").read_text())["steps"]
    assert [step["name"] for step in steps] == [*STEPS_OF_A_RUN, "memcheck", "racecheck"]
    assert {step["outcome"] for step in steps} == {"failed (1)"}
    assert len(list(folder.iterdir())) <= 5 and len(printed) <= 10000
    failures = (folder / "gpu-failures.log").read_text()
    for step in steps:
        assert f"== {step['name']}: failed (1)" in failures
    assert len(failures.splitlines()) <= len(steps) * 151


def test_a_run_on_a_gpu_names_the_test_that_hangs(failed_on_a_gpu):
    failures = (failed_on_a_gpu[1] / "gpu-failures.log").read_text()
    assert "test_hanging.py::test_that_hangs" in failures
    assert "Timeout (0:00:01)!" in failures and "in test_that_hangs" in failures


STEPS = """build\tpassed\t80\tdone
tests\tfailed (1)\t33\t1 failed, 61 passed
step\tno time left\t0\t
"""


def test_a_run_on_a_gpu_becomes_rows_of_the_documents(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCH)
    gpu_report = importlib.import_module("gpu_report")
    assert "has run on a GPU yet" in gpu_report.page(tmp_path)
    (tmp_path / "steps").write_text(STEPS)
    machine = {"gpu": "a card", "nccl": "2.28.9", "driver": "580.1", "commit": "abc1234"}
    facts = gpu_report.this_machine() | machine
    assert facts["torch"] == torch.__version__
    steps = list(gpu_report.read_steps(tmp_path / "steps"))
    (tmp_path / "gpu-summary.json").write_text(json.dumps({"machine": facts, "steps": steps}))
    bars = [{"what": "launch", "figure": "3.1 us", "is_met": is_met} for is_met in (True, False)]
    (tmp_path / "flatten.json").write_text(json.dumps({"bars": bars}))
    added = {"fastcomm": 1, "ddp": 2, "ddp_views": 1.5}
    model = {"model": "a net", "quartiles_ms": {"local": [8, 9, 10]}, "overhead_ms": added}
    results = {"machine": facts, "models": {"net": model}}
    (tmp_path / "step-cuda.json").write_text(json.dumps(results))
    page = gpu_report.page(tmp_path)
    assert "on a card, driver 580.1, NCCL 2.28.9" in page and "commit abc1234" in page
    assert "- passed: build\n- failed (1): tests\n- no time left: step\n" in page
    assert "| a net | 9.00 | 1.00 | 2.00 | 1.50 |  |  |  |" in page
    assert gpu_report.overheads(tmp_path).endswith("| a net | 9.00 | 1.00 | 2.00 | 1.50 |")
    assert "met 1 of 2 targets; missed: launch (3.1 us)" in page


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
