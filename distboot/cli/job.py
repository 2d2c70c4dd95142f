"""`show --job`: all ranks meet once, and rank 0 prints where each is; or every rank says who is missing."""

from __future__ import annotations

import json
import os

from ..errors import printable, said_by
from ..nodes import refuse_unless_rank
from ..placement import Placement
from ..rendezvous import join_timeout_setting, settled
from ..rollcall.attend import attend
from ..rollcall.meeting import Meeting
from ..roster import Roster, ranks_said
from .output import say


def show(placement: Placement, *, as_json: bool) -> None:
    """Hold the roll call alone, and print the roster."""
    with said_by(placement.who):
        refuse_unless_rank(placement)
        with attend(settled(placement), os.environ, join_timeout_setting(None)) as meeting:
            pass
    if placement.rank == 0 and meeting.roster is not None:
        say(json.dumps(_as_dict(meeting, meeting.roster)) if as_json else _map(meeting, meeting.roster))


def _as_dict(meeting: Meeting, roster: Roster) -> dict[str, object]:
    nodes = [
        {"node_rank": node, "host": host, "ranks": list(ranks)}
        for node, (host, ranks) in enumerate(zip(roster.hosts, roster.nodes, strict=True))
    ]
    placement = meeting.placement
    return {
        **{name: getattr(placement, name) for name in ("launcher", "world_size", "num_nodes")},
        **{name: getattr(placement, name) for name in ("master_addr", "master_port")},
        "nodes": nodes,
        "warnings": meeting.findings,
    }


def _map(meeting: Meeting, roster: Roster) -> str:
    width = max(map(len, roster.hosts))
    lines = [
        f"node {node:<5} {printable(host):<{width}}  {ranks_said(sorted(ranks))}"
        for node, (host, ranks) in enumerate(zip(roster.hosts, roster.nodes, strict=True))
    ]
    count = f"{len(roster.nodes)} node{'s' if len(roster.nodes) > 1 else ''}"
    where = f"rank 0 at {meeting.placement.master_addr}, port {meeting.placement.master_port}"
    there = (
        "The one rank is there"
        if meeting.placement.world_size == 1
        else f"All {meeting.placement.world_size} ranks are there"
    )
    return "\n".join([f"{there}, on {count}; {where}.", *lines])
