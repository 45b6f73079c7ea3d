"""What a mutation is: plain data, and what follows from the name of its file.

It goes into a function, to the one place there that reads as it says. White space does not count,
nor what stands around the function, so that code can be moved without touching the list.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_HEADS = {
    ".py": r"^( *)(?:async )?(?:def|class) {name}\b",
    ".pyx": r"^( *)(?:class|(?:c|cp)?def)\b[^\n=#(]*\b{name}\b *[(:]",
}
_C_HEAD = r"^()(?!typedef|#)\w[^;={{}}#]*?\b{name}\([^;{{}}]*\)[^;{{}}()]*\{{"


@dataclass(frozen=True)
class Mutation:
    """One defect: in the function `within` of `file`, `old` becomes `new`.

    tests: those that must fail with it, as pytest's arguments.
    equivalent: why nobody can see it. It is not run then; it stands here so that nobody looks for a
    test again.
    """

    name: str
    file: str
    within: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def of(self, text: str) -> str:
        """The text of the file with the defect. Raises LookupError if it has no place for it."""
        return replaced(self.file, text, self.within, self.old, self.new)


def extensions_of(file: str) -> tuple[str, ...]:
    """Which extension modules have to be compiled again: comm.standing, for example."""
    path = Path(file)
    if path.parts[:2] == ("kernels", "shm"):
        is_arithmetic = path.name.startswith("reduce")
        return ("transports.shm.ring", *(["transports.group.shards"] if is_arithmetic else ()))
    if path.parts[:2] == ("kernels", "wire"):
        return ("transports.group.wire",)
    if path.suffix == ".pyx":
        return (".".join(path.with_suffix("").parts[1:]),)
    return ()  # Python; kernels/cuda is compiled by the tests themselves


def replaced(path: str, text: str, within: str, old: str, new: str) -> str:
    """The text of the file with `new` in place of `old`.

    within: the function's qualified name, as Class.method; "" means the whole file. Raises
    LookupError if it has no such function, or `old` is not there exactly once.
    """
    begin, end = _scope(path, text, within)
    pattern = re.compile(r"\s+".join(map(re.escape, old.split())))
    found = list(pattern.finditer(text, begin, end))
    if len(found) != 1:
        raise LookupError(f"{path}, {within or 'anywhere'}: {len(found)} times there is {old!r}")
    begin, end = found[0].span()
    column = begin - (text.rfind("\n", 0, begin) + 1)
    return text[:begin] + textwrap.indent(new, " " * column).lstrip(" ") + text[end:]


def _scope(path: str, text: str, within: str) -> tuple[int, int]:
    """From the head of the function to the next line that is indented no deeper."""
    head = _HEADS.get(path[path.rindex(".") :], _C_HEAD)
    begin, end = 0, len(text)
    for name in filter(None, within.split(".")):
        found = re.compile(head.format(name=name), re.MULTILINE).search(text, begin, end)
        if found is None:
            raise LookupError(f"{path} has no {within}")
        # the closing parenthesis of a signature in several lines is no deeper
        behind = re.compile(rf"^ {{0,{len(found[1])}}}[^ \n)#]", re.MULTILINE)
        after = behind.search(text, found.end(), end)
        begin, end = found.start(), end if after is None else after.start()
    return begin, end
