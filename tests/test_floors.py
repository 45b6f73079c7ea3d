"""The house's floors: a module of fastcomm imports only from floors below its own, so that there are no circles. Reads sources only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. Modules of one floor do not import each other either. The package itself, `__init__`, re-exports the public names and
# stands above all that it is made of.
FLOORS = (
    ("errors",),
    ("autograd", "cuda", "gradient_hook", "layout", "optimizer_steps", "shm_core", "shm_memory"),
    ("communicator", "multi_tensor", "nccl_library", "peers", "tripwires", "watchdog"),
    ("agreement", "nccl_lane", "hosted_call"),
    ("nccl_memory", "hosted_exchange"),
    ("nccl_link", "hosted_work"),
    ("nccl_bucket",),
    ("shm", "nccl", "hosted", "hook_bucket"),
    ("hierarchical",),
    ("rendezvous",),
    ("bucket",),
    ("reducer",),
    ("ddp_hook", "process_group_work", "timeline", "autotune"),
    ("process_group_engine",),
    ("process_group",),
    ("__init__",),
    ("__main__",),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}

# Cython's imports of our own modules: each one, with `cimport` read as `import`, is a Python statement.
CYTHON_IMPORT = re.compile(
    r"^[ \t]*((?:from[ \t]+(?:\.|fastcomm\b)[\w.]*[ \t]+c?import|c?import[ \t]+fastcomm\b)[ \t]*(?:\([^)]*\)|[^#\n]*))", re.MULTILINE
)


def sources() -> list[Path]:
    return sorted(path for path in (ROOT / "fastcomm").iterdir() if path.suffix in (".py", ".pyi", ".pyx", ".pxd"))


def imports_of(path: Path) -> set[str]:
    """The modules of fastcomm that a source file imports, at its head or anywhere else in it."""
    text = path.read_text()
    if path.suffix in (".pyx", ".pxd"):
        text = "\n".join(statement.replace("cimport", "import") for statement in CYTHON_IMPORT.findall(text))
    return python_imports(text)


def python_imports(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= modules_named(alias.name, [])
        elif isinstance(node, ast.ImportFrom):
            source = f"fastcomm.{node.module or ''}" if node.level else node.module or ""
            found |= modules_named(source, [alias.name for alias in node.names])
    return found


def modules_named(source: str, names: list[str]) -> set[str]:
    """Which modules `from <source> import <names>` reaches; a name of the package that is no module comes from `__init__`."""
    package, _, module = source.partition(".")
    if package != "fastcomm":
        return set()
    if module:
        return {module.partition(".")[0]}
    modules = {path.stem for path in sources()}
    return {name if name in modules else "__init__" for name in names} or {"__init__"}


def test_python_imports_are_found_wherever_they_stand() -> None:
    text = "import fastcomm.layout\nfrom .errors import InitError\ndef f():\n    from fastcomm import init\nimport torch\n"
    assert python_imports(text) == {"layout", "errors", "__init__"}


def test_cython_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "module.pyx"
    path.write_text(
        "from .cuda cimport launch  # why\n    cimport fastcomm.shm\nfrom fastcomm.errors import (\n    A,\n)\nfrom libc cimport math\n"
    )
    assert imports_of(path) == {"cuda", "shm", "errors"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_a_module_imports_only_from_floors_below(path: Path) -> None:
    assert path.stem in FLOOR_OF, f"{path.name} has no floor yet: give it one in FLOORS"
    floor = FLOOR_OF[path.stem]
    above = {name for name in imports_of(path) - {path.stem} if FLOOR_OF[name] >= floor}
    assert not above, f"{path.name} (floor {floor}) imports {', '.join(sorted(above))} from its own floor or above"


def test_kernels_know_nothing_of_python() -> None:
    sources = (path for path in (ROOT / "kernels").iterdir() if path.suffix != ".fatbin")
    for path in sources:
        assert "Python.h" not in path.read_text(), f"{path.name} includes Python.h"
