"""Tables of a page in docs/ that tests write: one for each way, a row for each case, a column for each launcher."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Cells = Mapping[tuple[str, str, str], str]  # by the name of the case, way and launcher


class Tables(NamedTuple):
    """How they look."""

    word: str  # the head of the first column
    titles: Mapping[str, str]  # of the cases, by name
    ways: Sequence[str]  # one table for each
    launchers: Sequence[str]  # the heads of the other columns
    missing: str = "n/a"  # for what could not be had

    def checked(self, file: Path, texts: Cells, *, write: bool) -> str:
        """The page, all of whose tables are as they should be; written first, where what was not run stays."""
        page = file.read_text()
        if write:
            page = self.page(page, {**self.cells(page), **texts})
            file.write_text(page)
        assert self.page(page, self.cells(page)) == page
        return page

    def page(self, old: str, texts: Cells) -> str:
        """The page with these cells in its tables."""
        tables = iter(self._table(way, texts) for way in self.ways)
        return self._pattern.sub(lambda _: next(tables), old)

    def cells(self, page: str) -> Cells:
        names = {title: name for name, title in self.titles.items()}
        found = {}
        for way, table in zip(self.ways, self._pattern.findall(page), strict=True):
            for line in table.splitlines():
                title, *texts = line.strip("| ").split(" | ")
                if title in names:
                    pairs = zip(self.launchers, texts, strict=True)
                    found.update({(names[title], way, launcher): one for launcher, one in pairs})
        return found

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"^\| {self.word} \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)

    def _table(self, way: str, texts: Cells) -> str:
        rows = [
            f"| {self.word} | {' | '.join(self.launchers)} |",
            "|---" * (len(self.launchers) + 1) + "|",
        ]
        for name, title in self.titles.items():
            found = [texts.get((name, way, launcher), self.missing) for launcher in self.launchers]
            rows.append(f"| {title} | {' | '.join(found)} |")
        return "\n".join(rows) + "\n"
