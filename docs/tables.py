"""Write the tables of README.md anew from the records that the code itself uses: `make docs`. A test checks them."""

from __future__ import annotations

import re
from pathlib import Path

from distboot.cli.launchers import markdown, platforms_markdown
from distboot.errors import CODES

README = Path(__file__).parent.parent / "README.md"


def _errors() -> str:
    rows = [f"| `{code}` | {number} | {meaning} |" for code, (number, meaning) in CODES.items()]
    return "\n".join(["| code | exit code | meaning |", "|---|---|---|", *rows])


TABLES = {"launchers": markdown, "platforms": platforms_markdown, "errors": _errors}


def rendered(text: str) -> str:
    """The text with every table between its two comments as it is to be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text, count = re.subn(pattern, lambda _, t=table, b=begin, e=end: f"{b}\n{t()}\n{e}", text, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1, f"README.md has {count} places for the table of {name}"
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
