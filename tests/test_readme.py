"""The README says what the code says."""

from __future__ import annotations

import re

from conftest import ROOT

from distboot.errors import CODES

README = (ROOT / "README.md").read_text()


def test_table_of_errors() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (.+) \|$", README, re.MULTILINE)
    assert {code: (int(number), meaning) for code, number, meaning in rows} == CODES


def test_every_code_is_used_and_every_setting_is_listed() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "distboot").rglob("*.py")))
    raised = re.sub(r"CODES: .*?\n}\n", "", source, flags=re.DOTALL)
    assert [code for code in CODES if f'"{code}"' not in raised] == []
    settings = set(re.findall(r'"(DISTBOOT_[A-Z_]+)[="]', source))
    assert settings == set(re.findall(r"^\| `(DISTBOOT_[A-Z_]+)`", README, re.MULTILINE))
