"""Where a mutation goes: into a function, to the one place there that reads as it says. Layout,
comments, and what stands around the function, do not count, so that code can be moved and laid out
anew without touching the list.

In Python the place is a node of the syntax tree, or statements that follow each other. In Cython, C
and CUDA, and where it is no whole node of Python (`if x:`), it is text, of which white space does
not count.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

Span = tuple[int, int]  # of characters

_CYTHON_SCOPE = re.compile(
    r"^( *)(?:class|(?:c|cp)?def)\b[^\n=#]*?(\w+)(?: *\(|:|\()", flags=re.MULTILINE
)
_C_FUNCTION = re.compile(r"^(?!typedef|#)\w[^;={}#]*?\b(\w+)\([^;{}]*\)[^;{}()]*\{", re.MULTILINE)


def replaced(path: str, text: str, within: str, old: str, new: str) -> str:
    """The text of the file with `new` in place of `old`.

    within: the function's qualified name, as Class.method; "" means the whole file. Raises
    LookupError if it has no such function, or `old` is not there exactly once.
    """
    is_tree = path.endswith(".py") and _parses(old, "exec")
    is_expression = is_tree and _parses(old, "eval") and _parses(new, "eval")
    begin, end = _scope(path, text, within) if within else (0, len(text))
    if is_tree:
        spans = list(_spans_in_tree(text, (begin, end), old, is_expression))
    else:
        pattern = re.compile(r"\s+".join(map(re.escape, old.split())))
        spans = [match.span() for match in pattern.finditer(text, begin, end)]
    if len(spans) != 1:
        raise LookupError(f"{path}, {within or 'anywhere'}: {len(spans)} times there is {old!r}")
    begin, end = spans[0]
    column = begin - (text.rfind("\n", 0, begin) + 1)
    new = textwrap.indent(new, " " * column).lstrip(" ")
    if is_tree:
        new = f"({new})" if is_expression else new or "pass"
    return text[:begin] + new + text[end:]


def _parses(code: str, mode: Literal["eval", "exec"]) -> bool:
    """Whether it is Python: for "eval", an expression."""
    try:
        ast.parse(textwrap.dedent(code), mode=mode)
    except SyntaxError:
        return False
    return True


def _scope(path: str, text: str, within: str) -> Span:
    found = [span for name, span in _scopes(Path(path).suffix, text) if name == within]
    if len(found) != 1:
        raise LookupError(f"{path} has {len(found)} of {within}")
    return found[0]


@functools.cache
def _scopes(suffix: str, text: str) -> list[tuple[str, Span]]:
    return list({".py": _python_scopes, ".pyx": _cython_scopes}.get(suffix, _c_scopes)(text))


def _spans_in_tree(text: str, scope: Span, old: str, is_expression: bool) -> Iterator[Span]:
    wanted = list(map(ast.dump, ast.parse(textwrap.dedent(old)).body))
    place = place_of_nodes(text)
    for row in _rows(text, is_expression):
        for i in range(len(row) - len(wanted) + 1):
            some = row[i : i + len(wanted)]
            begin, end = place(some[0], some[-1])
            if scope[0] <= begin and end <= scope[1] and _dumps(some) == wanted:
                yield begin, end


def _dumps(nodes: Sequence[ast.stmt | ast.expr]) -> list[str]:
    return [ast.dump(ast.Expr(node) if isinstance(node, ast.expr) else node) for node in nodes]


@functools.cache
def _rows(text: str, of_expressions: bool) -> list[list[Any]]:
    """The nodes of the tree that follow each other: expressions one by one, or the statements of
    each block.
    """
    nodes = ast.walk(ast.parse(text))
    if of_expressions:
        return [[node] for node in nodes if isinstance(node, ast.expr)]
    fields = (value for node in nodes for _, value in ast.iter_fields(node))
    return [
        value
        for value in fields
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt)
    ]


@functools.cache
def place_of_nodes(text: str) -> Callable[[Any, Any], Span]:
    """A function that says where nodes are, from the first to the last."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(first: Any, last: Any) -> Span:
        begin, end = lines[first.lineno - 1], lines[last.end_lineno - 1]
        return begin + first.col_offset, end + last.end_col_offset

    return place


def _python_scopes(text: str) -> Iterator[tuple[str, Span]]:
    """Classes and functions, by qualified name."""
    place = place_of_nodes(text)

    def walk(node: ast.AST, outer: str) -> Iterator[tuple[str, Span]]:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{outer}.{child.name}".lstrip(".")
                yield name, place(child, child)
            yield from walk(child, name)

    yield from walk(ast.parse(text), "")


def _cython_scopes(text: str) -> Iterator[tuple[str, Span]]:
    """Classes and functions, by qualified name: each ends before the next line that is indented no
    deeper.
    """
    outer: list[tuple[int, str]] = []
    for match in _CYTHON_SCOPE.finditer(text):
        depth = len(match[1])
        outer = [one for one in outer if one[0] < depth]
        outer.append((depth, match[2]))
        body = text.index("\n", match.end()) + 1 if "\n" in text[match.end() :] else len(text)
        # the closing parenthesis of a signature in several lines is no deeper
        behind = re.compile(rf"^ {{0,{depth}}}[^ \n)]", re.MULTILINE).search(text, body)
        name = ".".join(one for _, one in outer)
        yield name, (match.start(), len(text) if behind is None else behind.start())


def _c_scopes(text: str) -> Iterator[tuple[str, Span]]:
    """Functions, by name: each ends with the next brace at the beginning of a line."""
    for match in _C_FUNCTION.finditer(text):
        end = text.find("\n}", match.end())
        yield match[1], (match.start(), len(text) if end < 0 else end)
