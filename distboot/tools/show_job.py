"""`show --job`: all ranks meet, and rank 0 prints where each is; or every rank prints who is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from ..agent.session import Session
from ..base.text import counted, escape_control, in_columns, ranks_said
from ..cli.output import emit
from ..detection.order import LAUNCHERS
from ..initialize import current_session
from .checked_job import meet, report_of

_OF_THE_JOB = ("launcher", "world_size", "num_nodes", "master_addr")
_PLACE = itemgetter("node_rank", "local_rank")


def show_job(launcher: str | None, *, as_json: bool) -> None:
    """Let all ranks meet once, and print where each is; or every rank prints who is missing."""
    context = meet(launcher)
    job = current_session()
    report = report_of(context)
    if context.rank != 0:
        return
    found: dict[str, Any] = {name: getattr(job.placement, name) for name in _OF_THE_JOB}
    found["master_port"] = _port(job)
    found["nodes"] = _nodes(report)
    found["warnings"] = report["findings"]
    if as_json:
        emit(json.dumps(found))
    else:
        emit(_text(found))


def _port(job: Session) -> int | None:
    """The port at which the ranks met: by now MASTER_PORT is another one, for the script."""
    has_own_port = LAUNCHERS[job.placement.launcher].serves_master_port
    if has_own_port or job.store_address is None:
        return job.placement.master_port
    return job.store_address[1]


def _nodes(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes with their ranks, by local rank, and the CPUs to which each is bound."""
    found = []
    ranks = sorted(report["ranks"], key=_PLACE)
    for node, group in groupby(ranks, key=itemgetter("node_rank")):
        here = list(group)
        record = {
            "node_rank": node,
            "host": report["hosts"][node],
            "ranks": list(map(itemgetter("rank"), here)),
            "cpus": list(map(itemgetter("cpus"), here)),
        }
        found.append(record)
    return found


def _text(found: Mapping[str, Any]) -> str:
    who = f"All {found['world_size']} ranks"
    if found["world_size"] == 1:
        who = "The only rank"
    nodes = counted(found["num_nodes"], "node")
    where = f"rank 0 at {found['master_addr']}, port {found['master_port']}"
    rows = []
    for node in found["nodes"]:
        ranks = ranks_said(sorted(node["ranks"]))
        row = [
            f"node {node['node_rank']:<5}",
            escape_control(node["host"]),
            f"{ranks}{_cpus(node['cpus'])}",
        ]
        rows.append(row)
    lines = [f"{who} joined, on {nodes}; {where}.", *in_columns(rows)]
    return "\n".join(lines)


def _cpus(of_ranks: list[str | None]) -> str:
    """To which CPUs the ranks of a node are bound: `", bound to CPUs 0-3 | 4-7"`."""
    if not any(of_ranks):
        return ""
    each = [cpus or "all" for cpus in of_ranks]
    return f", bound to CPUs {' | '.join(each)}"
