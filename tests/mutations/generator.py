"""Generates small defects: a comparison turned, a condition negated, a statement dropped, a
constant moved, an argument left out. In Python they are made from the syntax tree; in Cython, C and
CUDA from the text of a line, so that some of them do not compile.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TURNED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
}
_STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_COMPARISON = re.compile(r" (<=|>=|==|!=|<|>) ")
_NUMBER = re.compile(r"(?<![\w.\[])\d+(?![\w.\]])")
_CONDITION = {
    ".pyx": re.compile(r"^ +(?:if|elif|while) (.+):$"),
    ".c": re.compile(r"^ +(?:} else )?(?:if|while) (\(.+\)) \{$"),
}
_STATEMENT = {
    ".pyx": re.compile(r"^ +([\w.]+\(.*\)|\w+(?:\.\w+|\[.*\])+ [-+]?= .+)$"),
    ".c": re.compile(r"^ +([\w.>\[\]-]+\(.*\);|\w+(?:\.|->|\[).* [-+]?= .+;)$"),
}
_DECLARATION = re.compile(r"^ *(?:cdef|cpdef|def|cimport|from|import|ctypedef|enum|return)\b")


@dataclass(frozen=True)
class Generated:
    """`new` in place of the characters from `begin` to `end` of `file`."""

    file: str
    kind: str
    line: int
    begin: int
    end: int
    new: str
    tests: tuple[str, ...] = ()
    equivalent = ""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.new}"

    def of(self, text: str) -> str:
        """The text of the file with the defect."""
        return text[: self.begin] + self.new + text[self.end :]


def generate(file: str, text: str) -> list[Generated]:
    """All defects of one source. file: its path from the root of the tree."""
    found = _in_tree(text) if file.endswith(".py") else _in_lines(Path(file).suffix, text)
    tests = suites_of(file)
    generated = [
        Generated(file, kind, text.count("\n", 0, begin) + 1, begin, end, new, tests)
        for kind, begin, end, new in sorted(set(found), key=lambda one: one[1:])
    ]
    return [one for one in generated if not file.endswith(".py") or _is_python(one.of(text))]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def suites_of(file: str) -> tuple[str, ...]:
    """The tests that should notice: those of the same name first, then the folder that mirrors the
    source's.
    """
    folders = Path(file).parent.parts
    if folders[0] == "kernels":
        names = ["kernels"] if folders[1] == "cuda" else ["transports/shm", "transports/group"]
    else:
        names = ["/".join(folders[1:]).replace("torch_backend", "backend") or "cli"]
        names = [name.replace("transports/cuda", "transports/nccl") for name in names]
        names = [name.replace("control", "transports") for name in names]
    if folders[1:2] in (("comm",), ("control",), ("transports",)):
        names.append("contract")
    same_name = (f"tests/{name}/test_{Path(file).stem}.py" for name in names)
    return (
        *(path for path in same_name if (ROOT / path).exists()),
        *(f"tests/{name}" for name in names),
    )


def _in_tree(text: str) -> Iterator[tuple[str, int, int, str]]:
    place = _place_of_nodes(text)

    def source(node: ast.AST) -> str:
        return text[slice(*place(node, node))]

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = node.left, node.comparators[0]
            operator = text[place(sides[0], sides[0])[1] : place(sides[1], sides[1])[0]]
            turned = TURNED[operator.strip("() \n")]
            new = f"{source(sides[0])} {turned} {source(sides[1])}"
            yield "comparison turned", *place(node, node), new
        elif isinstance(node, ast.BoolOp):
            other = " or " if isinstance(node.op, ast.And) else " and "
            new = other.join(f"({source(value)})" for value in node.values)
            yield "condition turned", *place(node, node), f"({new})"
        elif isinstance(node, ast.Call) and (node.args or node.keywords):
            last = node.keywords[-1] if node.keywords else node.args[-1]
            begin, end = place(last, last)
            yield "argument left out", begin, end, ""
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            new = str(not node.value if type(node.value) is bool else node.value + 1)
            yield "constant moved", *place(node, node), new
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "condition negated", *place(node.test, node.test), f"(not ({source(node.test)}))"
        if _may_be_dropped(node):
            yield "statement dropped", *place(node, node), "pass"


def _place_of_nodes(text: str) -> Callable[[Any, Any], tuple[int, int]]:
    """A function that says where nodes are, from the first to the last."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(first: Any, last: Any) -> tuple[int, int]:
        begin, end = lines[first.lineno - 1], lines[last.end_lineno - 1]
        return begin + first.col_offset, end + last.end_col_offset

    return place


def _may_be_dropped(node: ast.AST) -> bool:
    """Not a name's first value, without which every test fails, and no docstring."""
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name | ast.Tuple)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break)


def _in_lines(suffix: str, text: str) -> Iterator[tuple[str, int, int, str]]:
    language = ".pyx" if suffix == ".pyx" else ".c"
    comment, nothing = ("#", "pass") if language == ".pyx" else ("//", ";")
    begin, in_docstring = 0, False
    for line in text.splitlines(keepends=True):
        code = _STRING.sub(lambda found: "_" * len(found[0]), line).partition(comment)[0].rstrip()
        quotes = line.count('"""')
        is_code = not in_docstring and not quotes and not _DECLARATION.match(code)
        in_docstring ^= quotes % 2 == 1
        if is_code and code.startswith(" ") and code.count("(") == code.count(")"):
            for kind, first, last, new in _in_line(language, line, code, nothing):
                yield kind, begin + first, begin + last, new
        begin += len(line)


def _in_line(
    language: str, line: str, code: str, nothing: str
) -> Iterator[tuple[str, int, int, str]]:
    for found in _COMPARISON.finditer(code):
        yield "comparison turned", *found.span(1), TURNED[found[1]]
    for found in _NUMBER.finditer(code):
        yield "constant moved", *found.span(), str(int(found[0]) + 1)
    if condition := _CONDITION[language].match(code):
        begin, end = condition.span(1)
        negated = "not ({})" if language == ".pyx" else "(!{})"
        yield "condition negated", begin, end, negated.format(line[begin:end])
    if statement := _STATEMENT[language].match(code):
        yield "statement dropped", *statement.span(1), nothing
