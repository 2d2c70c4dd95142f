"""README.md is short, and leads to where everything else is."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from distboot.errors import CODES

README = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\((?!https?://)([^)#\s]+)\)", README)


@pytest.mark.parametrize("link", dict.fromkeys(LINKS))
def test_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).is_file()


def test_it_opens_with_the_problem_the_line_and_the_picture() -> None:
    opening = README.partition("\n## ")[0]
    problem, line, picture = (opening.index(text) for text in ("N processes on M machines", "distboot.init()", "!["))
    assert problem < line < picture
    assert "(docs/pictures/report.png)" in opening
    assert len(README.splitlines()) <= 160


def test_tables_of_the_code_are_in_the_reference() -> None:
    assert "written by `make docs`" not in README
    assert not re.search(r"^\| `DISTBOOT_", README, re.MULTILINE)
    assert not any(f"| `{code}` |" in README for code in CODES)
