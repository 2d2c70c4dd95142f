"""`launchers`: print the table of all launchers and platforms, from the records that detection
uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..cli.output import emit
from ..cli.parser import Parser
from ..detection.launchers import Launcher
from ..detection.order import LAUNCHERS
from ..detection.placement import PLATFORMS, Platform

_FIELDS = ("name", "title", "markers", "source")


def launchers(arguments: list[str]) -> int:
    """The command `launchers`."""
    description = "Print all launchers, innermost first, and all platforms that can be recognized."
    parser = Parser("launchers", description, "--json  print one JSON object", detects=False)
    if parser.parse_args(arguments).json:
        table = {"launchers": _as_json(LAUNCHERS.values()), "platforms": _as_json(PLATFORMS)}
        emit(json.dumps(table))
        return 0
    lines = [
        "launchers, the innermost first: the first that claims a process owns its rank",
        *map(_row, LAUNCHERS.values()),
        "",
        "platforms: they own no rank, but may know the address of rank 0 and the job's id",
        *map(_row, PLATFORMS),
    ]
    emit("\n".join(lines))
    return 0


def _as_json(records: Iterable[Launcher | Platform]) -> list[dict[str, object]]:
    rows = []
    for record in records:
        rows.append({name: getattr(record, name) for name in _FIELDS})
    return rows


def _row(record: Launcher | Platform) -> str:
    markers = ", ".join(record.markers) or "when nothing above claims the process"
    first = f"  {record.name:<11} {record.title}"
    second = f"  {'':<11}   {markers}"
    return f"{first}\n{second}"
