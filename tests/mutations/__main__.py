"""Puts each mutation into a copy of this tree, compiles what it needs, and runs its tests, which
must fail. Without arguments, those that were written by hand; with --generate, some that are made
from the sources: of each file that differs from --base, or of the files that are named.

    python -m tests.mutations --only shm reducer
    python -m tests.mutations --generate 5 --seed 7 --base HEAD~3
    python -m tests.mutations --generate 20 --seed 7 fastcomm/reducer/*.py

Ends with 1 if a mutation survives. This tree has to be built.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.generator import Generated, generate
from tests.mutations.mutation import Mutation, extensions_of

ROOT = Path(__file__).resolve().parent.parent.parent
# Asked for once: sysconfig gives None to a thread while another is its first caller.
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# A few tests at a time: what most of them do without is not loaded.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "FASTCOMM_TESTS_PRELOAD": "little"}
LIMIT_S = 300.0  # what takes longer hangs: it has noticed the mutation, or this machine is too slow
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".*_cache", "temp.*", "lib.*", "torch-versions", "__pycache__")
)
# Without optimisation, which takes a tenth of the time.
COMPILER = (
    *("gcc", "-std=gnu11", "-O0", "-w", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fvisibility=hidden", "-Ikernels", "-ldl"),
)

# The C that an extension is made of, beside its own.
CORES = {
    "transports.shm.ring": "kernels/shm/*.c",
    "transports.group.wire": "kernels/wire/*.c",
}


class Tree:
    """The copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation | Generated) -> Iterator[None]:
        source = self._path / mutation.file
        modules = {name: self._module(name) for name in extensions_of(mutation.file)}
        before = {path: path.read_bytes() for path in (source, *modules.values())}
        try:
            defective = mutation.of(source.read_text())
            if source.suffix == ".py":
                ast.parse(defective)  # what cannot be imported is noticed by any test
            source.write_text(defective)
            for name, module in modules.items():
                self._compile(name, module)
            yield
        finally:
            for path, content in before.items():
                path.write_bytes(content)

    def _module(self, name: str) -> Path:
        return self._path / "fastcomm" / f"{name.replace('.', '/')}{EXT_SUFFIX}"

    def _compile(self, name: str, module: Path) -> None:
        stem = f"fastcomm/{name.replace('.', '/')}"
        core = sorted(self._path.glob(CORES[name])) if name in CORES else []
        include = sysconfig.get_path("include")
        for command in (
            (sys.executable, "-m", "cython", f"{stem}.pyx"),
            (*COMPILER, f"-I{include}", f"{stem}.c", *core, "-o", module),
        ):
            subprocess.run(command, cwd=self._path, check=True, stderr=subprocess.DEVNULL)

    def judge(self, tests: Sequence[str], limit_s: float | None = LIMIT_S) -> tuple[str, str]:
        """Runs the tests, until one of them notices.

        Returns the verdict and the test that noticed, "" if none is known.
        """
        with tempfile.TemporaryFile("w+") as said:  # a pipe is held open by what a test leaves
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no"]
                + ["-p", "no:cacheprovider", *tests],
                cwd=self._path,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self._path)},
                stdout=said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                if process.wait(limit_s) == 0:
                    return "SURVIVED", ""
            except subprocess.TimeoutExpired:
                return "hung", ""
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said.seek(0)
            by = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said.read(), re.MULTILINE)
            return "killed", by[1] if by else ""


def verdict_on(tree: Tree, mutation: Mutation | Generated) -> tuple[str, str]:
    """As of Tree.judge, or "no build"."""
    if mutation.equivalent:
        return "equivalent", ""
    try:
        with tree.mutated(mutation):
            return tree.judge(mutation.tests)
    except subprocess.CalledProcessError:
        return "no build", ""


def generated(files: Sequence[str], base: str, n: int, seed: int) -> list[Generated]:
    """`n` mutations of each file; without files, of those that differ from the revision `base`."""
    if not files:
        command = f"git diff --name-only --diff-filter=d {base} fastcomm kernels".split()
        files = subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout.split()
    chosen = []
    for file in (one for one in files if one.endswith((".py", ".pyx", ".c", ".cu"))):
        found = generate(file, (ROOT / file).read_text())
        chosen += random.Random(f"{seed} {file}").sample(found, min(n, len(found)))
    return chosen


def table(verdicts: dict[str, str]) -> str:
    """How many of each area, or folder, were noticed. verdicts: by name."""
    kinds = ("killed", "hung", "SURVIVED", "no build", "equivalent")
    areas = dict.fromkeys(area_of(name) for name in verdicts)
    rows = [("", *kinds)]
    for area in (*areas, "all"):
        of_area = [verdict for name, verdict in verdicts.items() if area in ("all", area_of(name))]
        rows.append((area, *(str(of_area.count(kind)) for kind in kinds)))
    return "\n".join(f"{row[0]:28}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def area_of(name: str) -> str:
    return os.path.dirname(name.partition(":")[0]) or name.partition(":")[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", help="sources, for --generate")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of names")
    parser.add_argument("--generate", type=int, metavar="N", help="so many of each file")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among all")
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args()
    if options.generate:
        every = generated(options.files, options.base, options.generate, options.seed)
    else:
        every = list(MUTATIONS)
    chosen = [one for one in every if any(part in one.name for part in options.only)]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for i in range(min(options.jobs, len(chosen))):
            trees.put(Tree(Path(folder, f"tree-{i}")))

        def judge(mutation: Mutation | Generated) -> str:
            tree, before = trees.get(), time.monotonic()
            try:
                verdict, by = verdict_on(tree, mutation)
            finally:
                trees.put(tree)  # or the others would wait for it
            took_s = time.monotonic() - before
            print(f"{verdict:10}  {mutation.name}  ({took_s:.0f} s)  {by}", flush=True)
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            found = pool.map(judge, chosen)
            verdicts = dict(zip((one.name for one in chosen), found, strict=True))
        # One that fails anyway has noticed nothing.
        noticing = sorted({test for one in chosen for test in one.tests})
        is_sound = not noticing or trees.get().judge(noticing, limit_s=None)[0] == "SURVIVED"
    print(table(verdicts))
    if not is_sound:
        print("but some of these tests fail without any mutation, too")
    return int("SURVIVED" in verdicts.values() or not is_sound)


if __name__ == "__main__":
    sys.exit(main())
