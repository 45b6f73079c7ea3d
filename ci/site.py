"""What mkdocs needs besides docs/ (see mkdocs.yml). The pages link to files of the repository as a
code host wants it, `../bench/step.py`: here each of these files becomes a page of the site.
CONTRIBUTING.md becomes one, too. A built page that would load something from the network is a
warning, and so an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?https?:[^>]*>""")
LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash"}
AS_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file of the repository that a page links to."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=contributing))
    texts = [file.content_string for file in files.documentation_pages()]
    linked = {match[1] for text in texts for match in OUTSIDE.finditer(text)}
    for name in sorted(linked - AS_PAGES.keys()):
        if not (ROOT / name).is_file():
            log.warning("a page links to %s, which is not there", name)
            continue
        language = LANGUAGES.get(Path(name).suffix, "text")
        text = f"# {name}\n\n````{language}\n{(ROOT / name).read_text()}````\n"
        page = File.generated(config, page_of(name), content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    start = posixpath.dirname(page.file.src_uri) or "."
    return OUTSIDE.sub(
        lambda link: f"]({posixpath.relpath(page_of(link[1]), start)}{link[2] or ''})", markdown
    )


def page_of(name: str) -> str:
    """The page that shows a file of the repository."""
    return AS_PAGES.get(name, f"files/{name}.md")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    for found in LOADED.finditer(output):
        log.warning("%s loads something from the network: %s", page.file.src_uri, found[0])
    if 'class="mermaid"' in output:
        log.warning("%s has a diagram that a script from the network draws", page.file.src_uri)
    return output
