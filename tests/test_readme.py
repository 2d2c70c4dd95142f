"""The README says what the code says."""

from __future__ import annotations

import importlib.util
import re

from conftest import ROOT

from distboot.errors import CODES

README = (ROOT / "README.md").read_text()


def test_tables_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.rendered(README) == README, "run `make docs`"


def test_every_code_is_used_and_every_setting_is_listed() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "distboot").rglob("*.py")))
    raised = re.sub(r"CODES: .*?\n}\n", "", source, flags=re.DOTALL)
    assert [code for code in CODES if f'"{code}"' not in raised] == []
    settings = set(re.findall(r'"(DISTBOOT_[A-Z_]+)[="]', source))
    assert settings == set(re.findall(r"^\| `(DISTBOOT_[A-Z_]+)`", README, re.MULTILINE))
