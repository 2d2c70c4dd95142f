"""The options of a command as a text: one a line, as `--help` shows them.

A line is `"--name VALUE  help"`, without VALUE for a switch. An indented line continues the one
before, and any other line is the title of a group. `cli.parser` makes a parser of it. Where no
option is given, `default_values` has what that parser would return: the import of argparse and the
parser take as long as a quarter of the start of Python.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

_UNSET = {"": False}  # by the value of an option: a switch has none


def entries(table: str) -> Iterator[tuple[str, str, str]]:
    """Names, value and help of each option: `("-t,--tee", "N", "begin …")`.

    A title has no help: `("as torchrun has them", "", "")`.
    """
    lines = table.strip().replace("\n ", " ").split("\n")
    for entry in filter(None, lines):
        option, _, text = entry.partition("  ")
        names, _, value = option.partition(" ")
        if not text:
            names = entry
            value = ""
        yield names, value, text


def default_values(table: str, more: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    """The attributes of the parsed options where none is given; `more` as in `cli.parser.Parser`."""
    values = {}
    for names, value, text in entries(table):
        if not text:
            continue
        attribute = names.rpartition("--")[2].replace("-", "_")
        unset = _UNSET.get(value)
        values[attribute] = more.get(names, {}).get("default", unset)
    return values
