"""The house's layers: a package or module of fastcomm imports only from layers below its own, and
nothing imports in a circle, C included. Reads sources only."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastcomm"

# From the ground up. Those of one layer do not import each other; inside a package, modules may.
LAYERS = (
    ("errors",),
    ("comm", "transports"),  # the latter's own file, which imports nothing
    ("postmortem",),
    ("control",),
    ("transports.cuda",),
    ("transports.shm", "transports.nccl", "transports.group"),
    ("launching",),
    ("insight",),
    ("reducer",),
    ("optim", "torch_backend"),
    ("__init__", "__main__"),
)
LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
# By module: what it uses of its own layer.
NEIGHBOURS = {
    "__main__": {"__init__"},
}


# Cython's imports of our own modules: each one, with `cimport` read as `import`, is Python.
CYTHON_IMPORT = re.compile(
    r"^[ \t]*((?:from[ \t]+(?:\.|fastcomm\b)[\w.]*[ \t]+c?import|c?import[ \t]+fastcomm\b)"
    r"[ \t]*(?:\([^)]*\)|[^#\n]*))",
    re.MULTILINE,
)


def sources() -> list[Path]:
    kinds = (".py", ".pyi", ".pyx", ".pxd")
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in kinds)


def name_of(path: Path) -> str:
    """Of a module, without the package: "errors", "comm.objects"; a package's own is "comm"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path) for path in sources()}


def imports_of(path: Path, *, of_types: bool = True) -> set[str]:
    """The modules of fastcomm that a source file imports, at its head or anywhere else in it."""
    text = path.read_text()
    if path.suffix in (".pyx", ".pxd"):
        found = CYTHON_IMPORT.findall(text)
        text = "\n".join(statement.replace("cimport", "import") for statement in found)
    return python_imports(text, of_types=of_types)


class WithoutTypes(ast.NodeTransformer):
    """Leaves out what only a type checker imports."""

    def visit_If(self, node: ast.If) -> ast.AST:  # noqa: N802 (ast asks for it by this name)
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return ast.Pass() if is_for_types else self.generic_visit(node)


def python_imports(text: str, *, of_types: bool = True) -> set[str]:
    """of_types: also what only a type checker imports."""
    found: set[str] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree if of_types else WithoutTypes().visit(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= modules_named(alias.name, [])
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports between modules of fastcomm are absolute"
            found |= modules_named(node.module or "", [alias.name for alias in node.names])
    return found


def modules_named(source: str, names: list[str]) -> set[str]:
    """Which modules `from <source> import <names>` reaches."""
    package, _, module = source.partition(".")
    if package != "fastcomm":
        return set()
    inside = {f"{module}.{name}".lstrip(".") for name in names} & MODULES
    return inside or {module or "__init__"}


def unit_of(module: str) -> str:
    package, *inner = module.split(".")
    return f"{package}.{inner[0]}" if package == "transports" and inner else package


def test_modules_import_only_from_layers_below() -> None:
    without = {name_of(path) for path in sources() if unit_of(name_of(path)) not in LAYER_OF}
    assert not without, f"give these a layer in LAYERS: {', '.join(sorted(without))}"
    wrong = [f"{path.name} imports {', '.join(above(path))}" for path in sources() if above(path)]
    assert not wrong, "from the same layer or one above: " + "; ".join(wrong)


def above(path: Path) -> list[str]:
    """What a source imports, and may not."""
    name = name_of(path)
    unit = unit_of(name)
    others = {unit_of(module) for module in imports_of(path)} - {unit} - NEIGHBOURS.get(name, set())
    return sorted(other for other in others if LAYER_OF[other] >= LAYER_OF[unit])


def test_modules_do_not_import_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        name = name_of(path)
        graph.setdefault(name, set()).update(imports_of(path, of_types=False) - {name})
    graphlib.TopologicalSorter(graph).prepare()


# Names of Python's and torch's that modules of ours happen to define, too.
OTHERS = {"_replace", "_values", "_allgather_base"}


def private_names(tree: ast.AST) -> set[str]:
    """The names with one underscore in front that a module's classes and functions define."""
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_module_reaches_into_the_private_names_of_another() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    private = {path: private_names(tree) for path, tree in trees.items()}
    ours = set().union(*private.values())
    reaches = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ours - private[path] - OTHERS
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert not reaches, "\n".join(reaches)


def test_c_files_do_not_call_each_other_in_a_circle() -> None:
    texts = {path: path.read_text() for path in sorted((ROOT / "kernels/shm").glob("*.c"))}
    defined = {
        path: set(re.findall(r"^(?!static)\w[^;{}()\n]*?\b(shm_\w+)\([^;{}]*\)\s*\{", text, re.M))
        for path, text in texts.items()
    }
    assert all(defined.values()), "every file has something for the others"
    calls = {
        path: {
            other
            for other, names in defined.items()
            if other != path and any(re.search(rf"\b{name}\(", text) for name in names)
        }
        for path, text in texts.items()
    }
    assert any(calls.values())
    graphlib.TopologicalSorter(calls).prepare()


def test_kernels_know_nothing_of_python() -> None:
    for path in (ROOT / "kernels").rglob("*"):
        if path.is_file() and path.suffix != ".fatbin":
            assert "Python.h" not in path.read_text(), f"{path.name} includes Python.h"
