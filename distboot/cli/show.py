"""`show`: what was detected, every value with its source, what is not known, and what was ignored."""

from __future__ import annotations

import json

from ..detection import detect
from ..errors import printable
from ..placement import FIELDS, Placement
from .output import say
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("show", "Print what was detected, every value with its source.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    placement = detect(launcher=options.launcher)
    say(json.dumps(placement.as_dict()) if options.json else _table(placement))
    return 0


def _table(placement: Placement) -> str:
    values = {field: getattr(placement, field) for field in FIELDS}
    shown = {field: "-" if value is None else printable(str(value)) for field, value in values.items()}
    width = max(map(len, shown.values()))
    sources = {field: placement.sources.get(field) or _unknown(field, placement) for field in FIELDS}
    lines = [f"{field:<16}  {shown[field]:<{width}}  {sources[field]}".rstrip() for field in FIELDS]
    return "\n".join([*lines, *(f"note: {note}" for note in placement.notes)])


def _unknown(field: str, placement: Placement) -> str:
    if getattr(placement, field) is not None or field in ("platform", "job_id"):
        return ""
    if field == "master_port" and placement.world_size == 1:
        return "not set: a free one is taken at the start"
    if field in ("master_addr", "master_port"):
        return f"not known: set {field.upper()} for every process"
    return "not known from one process alone: completed when the ranks meet"
