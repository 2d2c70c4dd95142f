"""`launchers`: the table of all that can be recognised, from the records that detection itself uses."""

from __future__ import annotations

import json

from ..launchers import INNERMOST_FIRST
from ..platforms import PLATFORMS
from .output import say
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("launchers", "Print all launchers, innermost first, and all platforms that can be recognised.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the launchers as the README has them")
    options = parser.parse_args(arguments)
    say(json.dumps(_records()) if options.json else markdown() if options.markdown else _table())
    return 0


def markdown() -> str:
    """The table of launchers for the documents."""
    head = ["| name | launcher | recognised by | facts from |", "|---|---|---|---|"]
    rows = []
    for known in INNERMOST_FIRST:
        markers = ", ".join(f"`{marker}`" for marker in known.markers) or "no trace of any of these"
        rows.append(f"| `{known.name}` | {known.title} | {markers} | {known.source} |")
    return "\n".join(head + rows)


def _records() -> dict[str, list[dict[str, object]]]:
    launchers: list[dict[str, object]] = [
        {"name": known.name, "title": known.title, "markers": known.markers, "source": known.source}
        for known in INNERMOST_FIRST
    ]
    platforms: list[dict[str, object]] = [
        {"name": known.name, "title": known.title, "markers": known.markers, "source": known.source}
        for known in PLATFORMS
    ]
    return {"launchers": launchers, "platforms": platforms}


def _table() -> str:
    lines = ["launchers, the innermost first: the first that claims a process owns its rank"]
    for kind in (INNERMOST_FIRST, PLATFORMS):
        if kind is PLATFORMS:
            lines += ["", "platforms: they own no rank, but may know the address of rank 0 and the job's id"]
        for known in kind:
            lines.append(f"  {known.name:<11} {known.title}")
            lines.append(f"  {'':<11}   {', '.join(known.markers) or 'when nothing above claims the process'}")
    return "\n".join(lines)
