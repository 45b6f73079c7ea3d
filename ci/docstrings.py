"""Docstrings as Markdown, for the API reference (see mkdocs.yml). In a docstring, arguments are
paragraphs of lines `name: text`, which become lists, and examples are indented. Members whose
docstring begins with one of INTERNAL are for other modules of fastcomm, and left out.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

INTERNAL = ("For reducers", "See ")
ITEM = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if member.docstring is not None and member.docstring.value.startswith(INTERNAL):
                cls.del_member(name)


def markdown(docstring: str) -> str:
    return "\n\n".join(map(_paragraph, docstring.split("\n\n")))


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return f"```python\n{textwrap.dedent(text)}\n```"
    if ITEM.match(text):
        continued = re.sub(r"\n(?![a-z_, ]+: )", "\n    ", text)
        return ITEM.sub(lambda item: f"- `{item[1].replace(', ', '`, `')}`: ", continued)
    return text
