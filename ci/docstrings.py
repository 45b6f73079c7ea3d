"""Docstrings as Markdown, for the reference (see reference.py). In a docstring, arguments are
paragraphs of lines `name: text`, which become lists, and examples are indented. Members whose
docstring begins with one of INTERNAL are for other modules of fastcomm, and left out. A stub (.pyi)
gets the docstrings of its source (.pyx).
"""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

INTERNAL = "For reducers"
ITEM = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)
# What a docstring names as it stands in code: calls, constants, names with a dot or an underscore.
NAME = re.compile(
    r"(?<![\w`.])(?:\w[\w.]*\([\w=., ]*\)|(?:torch|nn|fastcomm|reducer|comm)(?:\.\w+)+|\.grad\b"
    r"|\w*[a-zA-Z]_[a-zA-Z]\w*(?:=\w+)?|\w+=(?:True|False|None|\d+)|[A-Z]\w+Error|None|True|False"
    r"|ShardedOptimizer|LocalSGD|DiLoCo)(?![\w`=])"
)
# A class or a function, and its docstring if it has one; parameters may have calls in them.
DEFINITION = re.compile(
    r"^( *)(?:cdef class|class|cpdef|def) (?:\w+ )*(\w+)(?:\((?:[^()]|\([^()]*\))*\))?[^\n(]*:\n"
    r'(?: +"""(.*?)""")?',
    re.DOTALL | re.MULTILINE,
)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        obj.labels.discard("abstractmethod")  # who reads it only calls it
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if isinstance(mod.filepath, Path) and mod.filepath.suffix == ".pyi":
            for name, text in docstrings_of(mod.filepath.with_suffix(".pyx").read_text()):
                with contextlib.suppress(KeyError):  # Python does not see it
                    mod[name].docstring = griffe.Docstring(markdown(text), parent=mod[name])

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """The members of a base class stand under the public class, unless the base is public."""
        classes = list(_classes_in(pkg))
        for cls in classes:
            if not cls.name.endswith("Error"):
                for name, member in cls.inherited_members.items():
                    owner = member.final_target.parent
                    if owner is not None and owner.name not in pkg.members:
                        cls.set_member(name, member.final_target)
        for cls in classes:
            if not cls.name.endswith("Error"):
                cls.bases = []

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if member.docstring is not None and member.docstring.value.startswith(INTERNAL):
                cls.del_member(name)


def _classes_in(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if not member.is_alias and isinstance(member, griffe.Module):
            yield from _classes_in(member)
        elif not member.is_alias and isinstance(member, griffe.Class):
            yield member


def docstrings_of(source: str) -> Iterator[tuple[str, str]]:
    """Of the classes, methods and functions of a .pyx file, by name."""
    owner = ""
    for indent, name, text in DEFINITION.findall(source):
        if not indent:
            owner = name
        if text:
            yield f"{owner}.{name}" if indent else name, inspect.cleandoc(text)


def markdown(docstring: str) -> str:
    return "\n\n".join(map(_paragraph, docstring.split("\n\n")))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return f"```python\n{textwrap.dedent(text)}\n```"
    if ITEM.match(text):
        text = re.sub(r"\n(?![a-z_, ]+: )", "\n    ", text)
        text = ITEM.sub(lambda item: f"- `{item[1].replace(', ', '`, `')}`: ", text)
    parts = re.split("(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else NAME.sub(r"`\g<0>`", one) for one in parts)
