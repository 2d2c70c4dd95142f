"""What the pages link to outside of docs/ becomes part of the site: MkDocs itself knows the files of one folder only.

A link is written as it works for whoever reads the files as they are (`../examples/digits.py`, `../CONTRIBUTING.md`),
and is turned into one that works in the site. Markdown becomes a page, a picture stays one, and the rest is shown as
code. What is not there is left as it is, for MkDocs to complain about.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)\s#]+")
_MENU = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_PICTURES = (".svg", ".png")
_LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what is linked to, and what that links to in turn; and what the menu has."""
    queue = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    wanted = [path for path in _MENU if (ROOT / path).is_file()]
    for source in queue:
        wanted += _linked(source)
        for path in wanted:
            if files.get_file_from_path(_uri(path)) is None:
                files.append(_generated(path, config))
                queue.append(path)
        wanted = []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs'
    """Turn the links to what is outside of docs/ into those of the site."""
    source = _source(page.file.src_uri)

    def in_site(link: re.Match[str]) -> str:
        path = _target(source, link[0])
        return (
            posixpath.relpath(_uri(path), posixpath.dirname(page.file.src_uri)) if path else link[0]
        )

    return _LINK.sub(in_site, markdown)


def _linked(source: str) -> Iterator[str]:
    if source.endswith(".md"):
        links = _LINK.findall((ROOT / source).read_text())
        yield from filter(None, (_target(source, link) for link in links))


def _target(source: str, link: str) -> str | None:
    """The file of the repository that a link in another one leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    path = posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path
    return path if (ROOT / path).is_file() else None


def _uri(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return path if path.endswith((".md", *_PICTURES)) else f"{path}.md"


def _source(uri: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return (
        f"docs/{uri}"
        if (ROOT / "docs" / uri).exists()
        else uri
        if (ROOT / uri).exists()
        else uri[: -len(".md")]
    )


def _generated(path: str, config: MkDocsConfig) -> File:
    if path.endswith((".md", *_PICTURES)):
        return File.generated(
            config, _uri(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
        )
    language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
    text = f"# `{path}`\n\n````{language}\n{(ROOT / path).read_text()}````\n"
    return File.generated(config, _uri(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
