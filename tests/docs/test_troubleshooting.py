"""docs/reference/errors.md has every message of fastcomm that does not itself say what to do, and
no other: both are read from the sources. Messages are often put together in several places, so
every text of three words or more that is no docstring counts. `…` stands for what varies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from Cython.Compiler import ExprNodes, Nodes
from Cython.Compiler.TreeFragment import parse_from_strings

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "errors.md"
VARIES = "…"
# Needs no entry: an imperative, a question, what must be, or a part of "… cannot be read: …".
SAID = re.compile(
    r"[:;,.] (or |and )?(attach|build|call|capture|change|choose|clone|define|detach|enter|fill|"
    r"freeze|give|go|keep|leave|let|load|loop|make|move|name|pass|pip install|restore|run|see|set|"
    r"skip|start|take|train|turn|unset|use|wait)\b|\bmust |; got |\?|: torch\.tensor|"
    r"^the (note|number|claim) |has (sent|announced|got) ",
    re.IGNORECASE,
)
# What a command prints, and what an object looks like, is no message of an error.
COMMANDS = ("__main__.py", "diagnosis.py")
DESCRIPTIONS = ("Feature", "__repr__", "describe")
# Texts that no user meets as a message: what a timeline's tables and pictures, and a profiler, say;
# names of threads and collectives, a note between watchdogs, where torch's messages are cut.
INTERNAL = {
    "…: no step yet that all ranks have recorded",
    "…: rounds … to …, medians in ms…",
    "Slowest: rank …, last in … of … rounds. The others then waited … ms for it (median).",
    "fastcomm::… bucket … of reducer …, …",
    "outside lower center",
    "reducer… over …, … ranks",
    "waits for rank …",
    "waits, or is queued",
    "where are you?",
    # phases, of a straggler or in a dump
    "data and other",
    "data, forward and other",
    "the wait for gradients",
    "%s (see reducer.stragglers())",
    # in a dump, for `diagnose`
    "another rank's communicator has failed",
    'File "…", line …, in …',
    "meeting of the ranks",
    r"GLOBAL (\S+) was",
    "\nException raised from",
}


def texts_of(node: Any) -> Iterator[str]:
    """The texts below a node of Cython's syntax tree, docstrings left out."""
    if isinstance(node, ExprNodes.JoinedStrNode):
        yield "".join(str(part.value) if is_text(part) else VARIES for part in node.values)
        # it may have further texts inside its braces
        for part in node.values:
            if not is_text(part):
                yield from texts_of(part)
    elif is_text(node):
        yield str(node.value).replace("{}", VARIES)
    elif not is_silent(node):
        for child in children(node):
            yield from texts_of(child)


def is_silent(node: Any) -> bool:
    is_docstring = isinstance(node, Nodes.ExprStatNode) and is_text(node.expr)
    return is_docstring or getattr(node, "name", None) in DESCRIPTIONS


def is_text(node: Any) -> bool:
    return isinstance(node, ExprNodes.UnicodeNode)


def children(node: Any) -> Iterator[Any]:
    for name in node.child_attrs or ():
        child = getattr(node, name)
        if name != "doc" and not (isinstance(node, Nodes.PyClassDefNode) and is_text(child)):
            yield from child if isinstance(child, list) else [] if child is None else [child]


@cache
def sources() -> dict[str, str]:
    """Every text of the sources, and the file it is in."""
    found = {}
    for path in sorted(ROOT.glob("fastcomm/**/*.py*")):
        if path.suffix in (".py", ".pyx") and path.name not in COMMANDS:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            level = "module" if path.suffix == ".pyx" else None
            tree = parse_from_strings(name, path.read_text(), level=level)
            for text in texts_of(tree):
                found[text.replace("`", "")] = path.name
    return found


def entries() -> list[str]:
    """The messages on the page: what stands in code in the first column of its tables."""
    rows = [line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    return [message for row in rows for message in spans(row) if len(words(message)) >= 3]


def spans(text: str) -> list[str]:
    """What stands in code, but not in a block of it."""
    text = re.sub("```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def words(text: str) -> list[str]:
    return [word for word in text.replace(VARIES, " ").split() if re.search(r"[A-Za-z]", word)]


@cache
def fixed_parts(message: str) -> list[str]:
    parts = (part.strip(" .,;:()\n") for part in message.split(VARIES))
    return [part for part in parts if words(part)]


def stands_in(message: str, text: str) -> bool:
    """Whether the fixed parts of the message stand in the text, in order."""
    at = 0
    for part in fixed_parts(message):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_every_message_has_an_entry() -> None:
    shown = spans(PAGE.read_text())
    missing = [
        f"{file}: {text}"
        for text, file in sources().items()
        if len(words(text)) >= 3
        and text not in INTERNAL
        and not SAID.search(text)
        # whole, or cut short on the page
        and not any(
            stands_in(text, entry) or (len(words(entry)) > 3 and stands_in(entry, text))
            for entry in shown
        )
    ]
    assert not missing, "not in docs/reference/errors.md:\n" + "\n".join(missing)


def test_every_entry_is_a_message() -> None:
    everything = "\n".join(sources())

    def is_known(entry: str) -> bool:
        # put together in several places (as words.waited does), or whole in one
        phrases = [part.strip() for part in re.split(rf"{VARIES} s\b|[{VARIES};:.,()]+", entry)]
        return any(stands_in(entry, text) for text in sources()) or all(
            phrase in everything for phrase in phrases
        )

    unknown = [entry for entry in entries() if not is_known(entry)]
    assert len(entries()) > 100 and not unknown, "in no source:\n" + "\n".join(unknown)
