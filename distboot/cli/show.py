"""`show`: what was detected, every value with its source, what is not known, and what was ignored."""

from __future__ import annotations

import json

from ..detection import detect, launcher_of
from ..errors import printable
from ..placement import FIELDS, Placement
from ..platforms import PLATFORMS
from .output import say
from .parser import Parser


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser("show", "Print what was detected, every value with its source.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--job",
        action="store_true",
        help="to be run on all ranks: let them meet once, and say where each is (rank 0 does), or who is missing",
    )
    options = parser.parse_args(arguments)
    placement = detect(launcher=options.launcher)
    if options.job:
        from . import job  # only here, so that a plain `show` does not pay for sockets

        job.show(placement, as_json=options.json)
        return 0
    say(json.dumps(placement.as_dict()) if options.json else _table(placement))
    return 0


def _table(placement: Placement) -> str:
    values = {field: getattr(placement, field) for field in FIELDS}
    shown = {field: "-" if value is None else printable(str(value)) for field, value in values.items()}
    width = max(map(len, shown.values()))
    sources = {field: placement.sources.get(field) or _unknown(field, placement) for field in FIELDS}
    lines = [f"{field:<16}  {shown[field]:<{width}}  {sources[field]}".rstrip() for field in FIELDS]
    return "\n".join([_headline(placement), "", *lines, *(f"note: {printable(note)}" for note in placement.notes)])


def _headline(placement: Placement) -> str:
    """One sentence: who this process is, by whom it was started, and where."""
    launcher = launcher_of(placement)
    platform = next((f", in {platform.title}" for platform in PLATFORMS if platform.name == placement.platform), "")
    if placement.node_level is not None:
        return (
            f"Node {placement.rank} of {placement.world_size}, and no rank: {printable(placement.node_level)}.\n"
            f"Started by {launcher.title}{platform}.\n"
            "Start the ranks with: python -m distboot --nproc-per-node N script.py …"
        )
    if launcher.name == "single":
        return f"One process, alone: no launcher claims it{platform}."
    where = f"rank {placement.rank} of {placement.world_size}"
    if placement.local_rank is not None:
        of = f" of {placement.local_world_size}" if placement.local_world_size is not None else ""
        where += f", local rank {placement.local_rank}{of}"
    if placement.node_rank is not None:
        of = f" of {placement.num_nodes}" if placement.num_nodes is not None else ""
        where += f", node {placement.node_rank}{of}"
    return f"{where[0].upper()}{where[1:]}: started by {launcher.title}{platform}."


def _unknown(field: str, placement: Placement) -> str:
    if getattr(placement, field) is not None or field in ("platform", "job_id"):
        return ""
    if field == "master_port" and placement.world_size == 1:
        return "not set: a free one is taken at the start"
    if field in ("master_addr", "master_port"):
        return f"not known: set {field.upper()} for every process"
    return "not known from one process alone: completed when the ranks meet"
