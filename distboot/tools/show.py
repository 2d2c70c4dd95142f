"""`show`: print what was detected, with the source of every value; with `--job`, where all ranks
are.
"""

from __future__ import annotations

import json
import os

from ..base.errors import DistbootError, printed
from ..base.settings import warn_of_unknown
from ..base.table import first_that_holds
from ..base.text import escape_control
from ..cli.output import emit
from ..cli.parser import Parser
from ..detection import surroundings
from ..detection.here import detect_here
from ..detection.order import LAUNCHERS
from ..detection.placement import FIELDS, PLATFORMS, Placement
from ..startup.launcher_above import find_launcher_above

# What `show` says of a field that has no value; any other is completed when the ranks meet.
_MISSING = {
    "platform": "",
    "job_id": "",
    "master_addr": "not known: set MASTER_ADDR for every process",
    "master_port": "not known: set MASTER_PORT for every process",
}


def show(arguments: list[str]) -> int:
    """The command `show`."""
    options = Parser(
        "show",
        "Print what was detected, every value with its source.",
        "--json  print one JSON object\n"
        "--job  run on all ranks: they meet once, and rank 0 says where each is, or who is missing",
    ).parse_args(arguments)
    if options.job:
        from .show_job import show_job  # here, so that a plain `show` does not pay for sockets

        show_job(options.launcher, as_json=options.json)
        return 0
    placement = detect_here(launcher=options.launcher)
    warn_of_unknown(os.environ, placement.rank, placement.who)
    placement = _with_more_notes(placement, options.launcher)
    if options.json:
        emit(json.dumps(placement.as_dict()))
    else:
        emit(_table(placement))
    return 0


def where() -> str:
    """Where this process is, in a sentence or two, or why that is not known."""
    try:
        return _headline(detect_here())
    except DistbootError as error:
        return printed(error).rstrip()


def _with_more_notes(placement: Placement, launcher: str | None) -> Placement:
    """The placement with notes on what the job leaves unused, and on a launcher above it."""
    notes = list(placement.notes)
    unused = surroundings.find_possible_peers(placement, os.environ, launcher)
    if unused is not None:
        notes.append(f"{surroundings.described(placement, unused)}: {unused.remedy}")
    above = find_launcher_above(placement, os.environ, launcher)
    if above is not None:
        notes.append(f"{above.described}: {above.remedy}")
    return placement._replace(notes=tuple(notes))


def _table(placement: Placement) -> str:
    shown = {field: _shown(getattr(placement, field)) for field in FIELDS}
    width = max(map(len, shown.values()))
    lines = [_headline(placement), ""]
    for field, value in shown.items():
        source = placement.sources.get(field) or _missing(field, placement)
        lines.append(f"{field:<16}  {value:<{width}}  {source}".rstrip())
    for note in placement.notes:
        lines.append(f"note: {escape_control(note)}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return escape_control(str(value))


def _headline(placement: Placement) -> str:
    """One sentence: rank or node, launcher and platform."""
    launcher = LAUNCHERS[placement.launcher].title
    titles: dict[str | None, str] = {known.name: f", in {known.title}" for known in PLATFORMS}
    platform = titles.get(placement.platform, "")
    number = f"{placement.rank} of {placement.world_size}"
    if placement.node_level is not None:
        why = escape_control(placement.node_level)
        return (
            f"Node {number}, not a rank: {why}.\n"
            f"Started by {launcher}{platform}.\n"
            "Start the ranks with: python -m distboot --nproc-per-node N script.py …"
        )
    if not placement.has_launcher:
        return f"Not started by a launcher: rank {number}{platform}."
    where = f"Rank {number}"
    where += _index_of("local rank", placement.local_rank, placement.local_world_size)
    where += _index_of("node", placement.node_rank, placement.num_nodes)
    return f"{where}: started by {launcher}{platform}."


def _index_of(what: str, index: int | None, count: int | None) -> str:
    """`", node 0 of 2"`; empty if the index is not known."""
    return first_that_holds(
        (index is None, ""),
        (count is None, f", {what} {index}"),
        (True, f", {what} {index} of {count}"),
    )


def _missing(field: str, placement: Placement) -> str:
    completed = "not known from one process alone: completed when the ranks meet"
    has_free_port = (field, placement.world_size) == ("master_port", 1)
    return first_that_holds(
        (getattr(placement, field) is not None, ""),
        (has_free_port, "not set: a free port is taken at the start"),
        (True, _MISSING.get(field, completed)),
    )
