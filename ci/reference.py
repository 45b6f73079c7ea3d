"""Writes docs/reference: what a page says of a public name, between `<!-- fastcomm.NAME -->` and
`<!-- end -->`, is the signature and the docstring of that name and of its public members.

    python -m ci.reference
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import griffe

from ci.docstrings import Docstrings

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
ENTRY = re.compile(r"(?<=<!-- )(fastcomm\.[\w.]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
WIDTH = 88
Arguments = Mapping[str, griffe.Parameter]


def main() -> None:
    package = load()
    for page in PAGES.glob("*.md"):
        page.write_text(filled(page.read_text(), package))


def load() -> griffe.Module:
    extensions = griffe.load_extensions(Docstrings)
    loaded = griffe.load(
        "fastcomm", search_paths=[ROOT], extensions=extensions, allow_inspection=False
    )
    assert isinstance(loaded, griffe.Module)
    return loaded


def filled(page: str, package: griffe.Module) -> str:
    """The page with its entries as the docstrings are now."""
    return ENTRY.sub(lambda found: f"{found[1]}{found[2]}{entry(found[1], package)}\n", page)


def entry(path: str, package: griffe.Module) -> str:
    shown = package[path.removeprefix("fastcomm.")]
    shown = shown.final_target if shown.is_alias else shown
    parts = [f"## `{path}`", *described(shown)]
    if shown.is_class:
        for name, member in shown.members.items():
            member = member.final_target if member.is_alias else member
            if not name.startswith("_") and member.docstring is not None:
                parts += [f"### `{shown.name}.{name}`", *described(member)]
    return "\n".join(f"{part}\n" for part in parts)


def described(shown: griffe.Object) -> Iterator[str]:
    called = shown.members.get("__init__") if isinstance(shown, griffe.Class) else shown
    arguments: Arguments = {}
    if isinstance(called, griffe.Function) and not shown.name.endswith("Error"):
        arguments = {each.name: each for each in called.parameters if each.name != "self"}
        yield f"```python\n{signature(shown, called)}\n```"
    if shown.docstring is not None:
        yield from paragraphs(shown.docstring.value, arguments)


def signature(shown: griffe.Object, called: griffe.Function) -> str:
    parameters, seen = [], False
    for each in called.parameters:
        if each.kind is griffe.ParameterKind.keyword_only and not seen:
            parameters.append("*")
        seen = seen or each.kind in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        )
        if each.name != "self":
            parameters.append(annotated(each))
    returned = "" if called is not shown or called.overloads else f" -> {called.returns}"
    line = f"{shown.name}({', '.join(parameters)}){returned}"
    if len(line) > WIDTH:
        inside = "".join(f"    {each},\n" for each in parameters)
        line = f"{shown.name}(\n{inside}){returned}"
    return line


def annotated(parameter: griffe.Parameter) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}
    star = stars.get(parameter.kind.value, "") if parameter.kind else ""
    default = "" if star or parameter.required else f" = {parameter.default}"
    of = "" if parameter.annotation is None else f": {parameter.annotation}"
    return f"{star}{parameter.name}{of}{default}"


def paragraphs(docstring: str, arguments: Arguments) -> Iterator[str]:
    """A list of arguments becomes a table; what else is in it stays a list."""
    for text in docstring.split("\n\n"):
        items = [" ".join(one.split()) for one in re.split(r"^- (?=`)", text, flags=re.MULTILINE)]
        if items[0] or len(items) == 1:
            yield text
            continue
        named = {one: re.findall(r"\w+", one)[0] for one in items[1:]}
        rows = [row(one, arguments[name]) for one, name in named.items() if name in arguments]
        if rows:
            yield "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])
        others = [one for one, name in named.items() if name not in arguments]
        if others:
            yield "\n".join(f"- {one}" for one in others)


def row(item: str, argument: griffe.Parameter) -> str:
    names, _, meaning = item.replace("|", r"\|").partition(": ")
    default = "required" if argument.required else f"`{argument.default}`"
    return f"| {names} | {default} | {meaning} |"


if __name__ == "__main__":
    main()
