"""The pages that users read, and the blocks of code in them: what the tests of the documentation share."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docker" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)(?: +title=\"(?P<title>[^\"]*)\")? *$")


@dataclass(frozen=True)
class Block:
    """One block of code."""

    page: str  # path in the repository
    section: str  # the heading above it
    line: int  # its number in the page
    language: str  # what stands behind the backticks: console, python, …
    title: str  # in a page it is the name of a file, or that of a terminal
    text: str  # without the fences

    @property
    def first(self) -> str:
        """The first line, by which the tables of the tests know it."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def load(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    # Where its dataclasses look for themselves
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(language: str | None = None) -> list[Block]:
    found = [block for path in PAGES for block in _of(path)]
    return [block for block in found if language in (None, block.language)]


def _of(path: Path) -> Iterator[Block]:
    page = str(path.relative_to(ROOT))
    section = ""
    lines = iter(enumerate(path.read_text().splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            section = line.lstrip("# ")
        if line.lstrip().startswith("````"):  # that of a page about pages
            raise ValueError(f"{page}:{number}: a fence of four backticks")
        if not line.lstrip().startswith("```"):
            continue
        fence = _FENCE.match(line)
        if fence is None:
            raise ValueError(f"{page}:{number}: a fence that cannot be read: {line}")
        inside = []
        for _, text in lines:
            if text.strip() == "```":
                break
            inside.append(text.removeprefix(fence["indent"]))
        yield Block(
            page, section, number, fence["language"], fence["title"] or "", "\n".join(inside) + "\n"
        )
