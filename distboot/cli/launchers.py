"""`launchers`: the table of all that can be recognised, from the records that detection itself uses."""

from __future__ import annotations

import json

from ..launchers import INNERMOST_FIRST, Launcher
from ..platforms import PLATFORMS, Platform
from .output import say
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("launchers", "Print all launchers, innermost first, and all platforms that can be recognised.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    say(json.dumps(_records()) if options.json else _table())
    return 0


def markdown() -> str:
    """The table of launchers for the documents."""
    return _markdown("launcher", INNERMOST_FIRST)


def platforms_markdown() -> str:
    """The table of platforms for the documents."""
    return _markdown("platform", PLATFORMS)


def _markdown(kind: str, records: tuple[Launcher, ...] | tuple[Platform, ...]) -> str:
    rows = [f"| name | {kind} | recognised by | facts from |", "|---|---|---|---|"]
    for known in records:
        markers = ", ".join(f"`{marker}`" for marker in known.markers) or "no trace of any of these"
        rows.append(f"| `{known.name}` | {known.title} | {markers} | {known.source} |")
    return "\n".join(rows)


def _records() -> dict[str, list[dict[str, object]]]:
    return {
        kind: [
            {"name": known.name, "title": known.title, "markers": known.markers, "source": known.source}
            for known in records
        ]
        for kind, records in (("launchers", INNERMOST_FIRST), ("platforms", PLATFORMS))
    }


def _table() -> str:
    lines = ["launchers, the innermost first: the first that claims a process owns its rank"]
    for kind in (INNERMOST_FIRST, PLATFORMS):
        if kind is PLATFORMS:
            lines += ["", "platforms: they own no rank, but may know the address of rank 0 and the job's id"]
        for known in kind:
            lines.append(f"  {known.name:<11} {known.title}")
            lines.append(f"  {'':<11}   {', '.join(known.markers) or 'when nothing above claims the process'}")
    return "\n".join(lines)
