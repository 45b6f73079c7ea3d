"""What mkdocs needs besides docs/ (see mkdocs.yml). The pages link to files of the repository as a
code host wants it, `../bench/step.py`: here each of these files becomes a page of the site.
So do the files of ROOT_PAGES, of which README.md is the first page, and the heads of all modules.

Links that show a page's file name show its title, and code begins at the margin. A built page that
would load something from the network is a warning, and so an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"(?<=^```python\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"\[(?:docs/)?(\w+\.md)\]\(")
LINK = re.compile(r"\]\((\.\./[^)#]+)(#[^)]*)?\)")
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?https?:[^>]*>""")
HEAD = re.compile(r'\A(?:#[^\n]*\n)*"""(.*?)"""', re.DOTALL)
LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash"}
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file of the repository that a page links to."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=from_docs((ROOT / name).read_text())))
    files.append(File.generated(config, "modules.md", content="\n".join(modules())))
    linked = {
        target(link, folder_of(page))
        for page in files.documentation_pages()
        for link in LINK.finditer(page.content_string)
    }
    for name in sorted(name for name in linked - ROOT_PAGES.keys() if not name.startswith("docs/")):
        if not (ROOT / name).is_file():
            log.warning("a page links to %s, which is not there", name)
            continue
        language = LANGUAGES.get(Path(name).suffix, "text")
        text = f"# {name}\n\n````{language}\n{(ROOT / name).read_text()}````\n"
        page = File.generated(config, page_of(name), content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def from_docs(text: str) -> str:
    """A page of the repository's root, with links as a page of docs/ has them."""
    return re.sub(r"\]\((?!\w+:|#)(docs/)?", lambda link: "](" if link[1] else "](../", text)


def modules() -> Iterator[str]:
    """What each module is for, by its own words."""
    yield "# Modules\n\nWhat each module says of itself.\n"
    for path in sorted((ROOT / "fastcomm").glob("**/*.py*")):
        head = HEAD.match(path.read_text()) if path.suffix in (".py", ".pyx") else None
        if head is not None:
            yield f"## `{path.relative_to(ROOT)}`\n\n{head[1].strip()}\n"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    folder = folder_of(page.file)
    titles = dict(titles_of(config.nav))
    markdown = CODE.sub(lambda block: textwrap.dedent(block[1]), markdown)
    markdown = NAMED.sub(lambda link: f"[*{titles.get(link[1], link[1])}*](", markdown)
    return LINK.sub(
        lambda link: (
            f"]({posixpath.relpath(page_of(target(link, folder)), folder)}{link[2] or ''})"
        ),
        markdown,
    )


def folder_of(file: File) -> str:
    return posixpath.dirname(file.src_uri) or "."


def target(link: re.Match[str], folder: str) -> str:
    """The file of the repository that a link leads to from a page in a folder of docs/."""
    return posixpath.normpath(posixpath.join("docs", folder, link[1]))


def titles_of(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Every page of the navigation, and its title there."""
    for entry in nav:
        for title, below in entry.items():
            if isinstance(below, str):
                yield below, title
            else:
                yield from titles_of(below)


def page_of(name: str) -> str:
    """The page that shows a file of the repository."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return ROOT_PAGES.get(name, f"files/{name}.md")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    for found in LOADED.finditer(output):
        log.warning("%s loads something from the network: %s", page.file.src_uri, found[0])
    if 'class="mermaid"' in output:
        log.warning("%s has a diagram that a script from the network draws", page.file.src_uri)
    return output
