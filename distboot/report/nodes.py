"""The table of nodes: what each has, as the check of all nodes has seen it, the odd ones first. Pure.

The same table is in the report, on its page, and what `python -m distboot check` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..base.units import bit_rate, duration
from ..job.node_findings import describe_amount
from ..rendezvous.events import Event

_LINK = "link to the next node"


def nodes_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The rows of the table; none: the nodes were not checked.

    Each has its number, its host, what is wrong with it, and, by the name of a column, what was
    seen there.
    """
    found: list[dict[str, Any]] = []
    for one in events:
        if one.event == "checked":
            found = [_row(record) for record in one.details.get("nodes", ())]
    return found


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    seen = dict(record["names"])
    for name, amount in record["amounts"].items():
        seen[name] = describe_amount(name, amount)
    if record["link"] is not None:
        seen[_LINK] = _link(record["link"])
    return {
        "node_rank": record["node"],
        "host": record["host"],
        "findings": record["findings"],
        "seen": seen,
    }


def _link(link: Mapping[str, Any]) -> str:
    """`"94 Gbit/s, 0.2 ms to node-8"`."""
    if "problem" in link:
        return f"does not reach {link['to']}"
    return f"{bit_rate(link['rate'])}, {duration(link['round_trip'])} to {link['to']}"
