"""The sdist and the wheel: they build from the sources alone, and the wheel works in an environment
that has never seen the source tree.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from torch.distributed import Backend

import fastcomm

ROOT = Path(__file__).resolve().parent.parent
CYTHON_SOURCES = [*(ROOT / "fastcomm").rglob("*.pyx"), *(ROOT / "fastcomm").rglob("*.pxd")]
NOT_SOURCES = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".*_cache",
    "build",
    "dist",
    "*.egg-info",
    "*.so",
    "*.fatbin",
    "__pycache__",
)


# Compiling the extension and importing torch in a fresh environment take longer than other tests
# may.
pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


def call(*command: str | Path, cwd: Path, **variables: str | Path) -> str:
    """Runs a command away from this tree and returns what it printed; its whole output is in the
    failure otherwise.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update({name: str(value) for name, value in variables.items()})
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, (
        f"{' '.join(map(str, command))} exited with {result.returncode}:\n{result.stdout}"
    )
    return result.stdout


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# In place of the compiler, in the folder of the sdist: takes the object that `make` has made of the
# same source, with the same headers and options, or the one of an earlier run, if there is one.
COMPILER = """
for argument; do
    case $previous in -c) source=$argument ;; -o) object=$argument ;; esac
    previous=$argument
done
[ "$source" ] || exec {compiler} "$@"
inputs() {{
    (cd "$1" && sha256sum "$source" setup.py $(find kernels -name '*.[ch]' | sort)) 2>/dev/null
}}
built={built}/${{source%.*}}.o
if [ -f "$built" ] && [ "$(inputs .)" = "$(inputs {root})" ] &&
    [ -z "$(find {root}/"$source" {root}/setup.py {root}/kernels -type f ! -name '*.fatbin' \\
        -newer "$built")" ]; then
    exec cp "$built" "$object"
fi
made=$( (echo "$@"; {compiler} --version; inputs .) | sha256sum | cut -d ' ' -f 1)
if [ ! -f {made}/$made ]; then
    # How fast the code is does not matter here: `make` has built it all with its own options.
    {compiler} "$@" -O0 && cp "$object" {made}/$$ && mv {made}/$$ {made}/$made || exit
fi
cp {made}/$made "$object"
"""
# In place of an nvcc before 12.8, which knows no compute_100.
NVCC = """
case "$*" in
--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
*compute_100* | *options-file*) exit 1 ;; # the file names compute_100
*) for last; do :; done; echo "$*" >"$last" ;;
esac
"""
BUILT = f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, built from a copy of the sources, and the wheel, built from the sdist, so that
    nothing is missing there.
    """
    scratch = tmp_path_factory.mktemp("distributions")
    tree = shutil.copytree(ROOT, scratch / "tree", ignore=NOT_SOURCES)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch / "dist")
    call(*build, "--sdist", tree, cwd=scratch)
    (sdist,) = (scratch / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, scratch)
    unpacked = scratch / sdist.name.removesuffix(".tar.gz")
    lend_translations(unpacked)
    made = ROOT / "build" / "tests" / "objects"
    made.mkdir(parents=True, exist_ok=True)
    paths = {"root": ROOT, "built": ROOT / "build" / BUILT, "made": made}
    quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
    text = COMPILER.format(compiler=os.environ.get("CC", "gcc"), **quoted)
    nvcc = script(scratch / "cuda" / "bin" / "nvcc", NVCC)
    home = nvcc.parent.parent
    call(*build, "--wheel", unpacked, cwd=scratch, CC=script(scratch / "cc", text), CUDA_HOME=home)
    (wheel,) = (scratch / "dist").glob("*.whl")
    return sdist, wheel


def lend_translations(unpacked: Path) -> None:
    """Gives the sdist what Cython has made of its sources in this tree, where that is not older
    than they are. A source that is missing in the sdist is not missed then: see
    test_sdist_holds_the_sources_and_nothing_built.
    """
    newest = max(path.stat().st_mtime for path in CYTHON_SOURCES)
    for path in (ROOT / "build" / BUILT / "fastcomm").rglob("*.c"):
        if path.stat().st_mtime > newest:
            lent = unpacked / path.relative_to(ROOT)
            lent.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, lent)


@pytest.fixture(scope="module")
def clean_python(
    distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The interpreter of a new virtual environment that holds the wheel; torch is lent to it from
    the environment of the tests.
    """
    environment = tmp_path_factory.mktemp("clean") / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    python = environment / "bin" / "python"
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        distributions[1],
        cwd=environment.parent,
    )
    # A line in a .pth file adds a folder without running the .pth files in it, so the editable
    # fastcomm there stays out of sight.
    site_packages = call(
        python,
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=environment.parent,
    ).strip()
    (Path(site_packages) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_newest_changes_are_those_of_this_version() -> None:
    """The version stands in fastcomm/__init__.py alone; what else names it must agree."""
    newest = re.search(r"^## \[(\S+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == fastcomm.__version__
    recipe = re.search(r'^  version: "(.*)"$', (ROOT / "ci/recipe.yaml").read_text(), re.MULTILINE)
    assert recipe is not None and recipe[1] == fastcomm.__version__


def test_the_changelog_has_the_sections_of_its_format() -> None:
    found = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(found) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_sdist_holds_the_sources_and_nothing_built(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        "fastcomm/transports/shm/communicator.pyx",
        "kernels/shm/protocol.c",
        "kernels/shm/core.h",
        "Makefile",
        "tests/test_package.py",
        "tests/public_names.txt",
        "LICENSE",
        "fastcomm_autoload.py",
        "CITATION.cff",
    }
    assert sources <= names
    assert {str(path.relative_to(ROOT)) for path in CYTHON_SOURCES} <= names
    assert {
        "kernels/cuda/flatten.cu",
        "tests/kernels/host_shim.h",
        "kernels/cuda/nvcc.options",
        "tests/kernels/driver.cpp",
        "tests/kernels/emulator.h",
        "ci/kernels.sh",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".fatbin"))]
    assert not [name for name in names if name.startswith("fastcomm/") and name.endswith(".c")]


def test_wheel_holds_types_and_scripts_but_no_sources_of_what_is_compiled(
    distributions: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    assert {"fastcomm/py.typed", "fastcomm/transports/shm/communicator.pyi"} <= names
    assert {
        "fastcomm/examples/train_gpt.py",
        "fastcomm/bench/allreduce.py",
        "fastcomm/bench/step.py",
        "fastcomm/bench/lib/report.py",
    } <= names
    assert not [
        name
        for name in names
        if name.endswith((".c", ".pyx")) or name.startswith("fastcomm/kernels/shm")
    ]
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "fastcomm",
        "fastcomm_autoload.py",
    }


def test_wheel_holds_the_cuda_kernels_for_cupy_and_what_nvcc_makes_of_them(
    distributions: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        kernels = {
            name.removeprefix("fastcomm/kernels/cuda/")
            for name in archive.namelist()
            if name.startswith("fastcomm/kernels/")
        }
        compiled = archive.read("fastcomm/kernels/cuda/flatten.fatbin")
    families = {"flatten", "unflatten", "blocks"}
    headers = {"multi_tensor.cuh", "multi_tensor.h", "bytes.cuh", "blocks.h"}
    assert kernels == headers | {f"{one}.{kind}" for one in families for kind in ("cu", "fatbin")}
    assert b"code=[sm_80,compute_80]" in compiled and b"code=sm_90" in compiled


def test_wheel_installs_the_command(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("entry_points.txt"))
        assert "fastcomm = fastcomm.__main__:main" in archive.read(name).decode()


# Without an import of fastcomm until the end of the first part.
INSTALLED = """
import runpy, sys, torch
from torch.distributed import Backend, all_reduce, group, init_process_group, is_backend_available

assert is_backend_available("fastcomm") and "fastcomm" not in sys.modules
init_process_group("fastcomm", init_method="file://" + sys.argv[1], rank=0, world_size=1)
made = type(group.WORLD)
all_reduce(torch.ones(3))
import fastcomm
assert Backend.backend_list.count("fastcomm") == 1 and type(group.WORLD) is made
print(made.__module__)

for arguments in (["info"], ["bench", "allreduce", "--help"]):
    print("-----", flush=True)
    sys.argv = ["fastcomm", *arguments]
    try:
        runpy.run_module("fastcomm", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code
"""


@pytest.fixture(scope="module")
def installed(clean_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the installed wheel prints: as torch's backend, of itself, and of a script. In one
    process, most of which is the import of torch.
    """
    folder = tmp_path_factory.mktemp("installed")
    return call(clean_python, "-c", INSTALLED, folder / "store", cwd=folder).split("-----\n")


def test_torch_has_the_backend_of_the_installed_wheel_without_an_import(
    installed: list[str],
) -> None:
    assert installed[0].splitlines()[-1] == "fastcomm.torch_backend.process_group"


# Where torch may not load backends when it is imported.
LOOKED_FOR = """
import sys, torch.distributed as dist

assert "FASTCOMM" not in dist.Backend._plugins
dist.init_process_group("fastcomm", init_method="file://" + sys.argv[1], rank=0, world_size=1)
print(type(dist.group.WORLD).__module__)
"""


@pytest.mark.skipif(
    not hasattr(Backend, "_ensure_backend_registered"),
    reason="before torch 2.15 only an import makes a backend known",
)
def test_torch_looks_for_the_backend_of_the_installed_wheel_when_it_is_named(
    clean_python: Path, tmp_path: Path
) -> None:
    arguments = (clean_python, "-c", LOOKED_FOR, tmp_path / "store")
    printed = call(*arguments, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert printed.splitlines()[-1] == "fastcomm.torch_backend.process_group"


def test_info_of_the_installed_wheel(clean_python: Path, installed: list[str]) -> None:
    lines = installed[1].splitlines()
    facts = {name: fact.strip() for name, _, fact in (line.partition(" ") for line in lines)}
    assert f" in {clean_python.parent.parent}/" in facts["fastcomm"]
    assert facts["shm"] == "ready"
    assert facts["NCCL"]


def test_scripts_of_the_installed_wheel_are_found(installed: list[str]) -> None:
    assert "usage" in installed[2]


def test_sources_that_are_not_built_say_so(clean_python: Path, tmp_path: Path) -> None:
    """A newcomer after `pip install .`: Python finds the folder before what was installed."""
    shutil.copytree(ROOT / "fastcomm", tmp_path / "fastcomm", ignore=NOT_SOURCES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [clean_python, "-c", "import fastcomm"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "is not built" in done.stderr and "pip install -e ." in done.stderr


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a free-threaded Python"
)
def test_an_import_turns_the_interpreters_lock_on_again() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    code = "import sys, torch, fastcomm; print(sys._is_gil_enabled())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout == "True\n", result.stderr
