"""`check`: all ranks meet, all nodes are compared, and rank 0 prints what each has."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..base.errors import CODES, DistbootError
from ..base.table import first_that_holds
from ..base.text import counted, escape_control, in_columns
from ..base.units import byte_rate, duration, size
from ..cli.output import emit
from ..cli.parser import Parser
from ..context import Context
from ..initialize import current_session, init
from .checked_job import meet, report_of

_MOST_PAIRS = 10  # that are printed
# Before a row
_ODD = "!"
_FINE = ""
_findings = itemgetter("findings")


def check(arguments: list[str]) -> int:
    """The command `check`."""
    options = Parser(
        "check",
        "Run it on all ranks, before the job: they meet, all nodes and the links between them are\n"
        "compared, and rank 0 prints what each node has, the odd ones first. Exit code 78 if\n"
        "there is one.",
        "--allreduce  measure all-reduce, too: of all ranks by size, and of pairs of nodes, with\n"
        "  PyTorch, on the accelerators or else on the CPU\n"
        "--json  print one JSON object",
        hints={"--nproc-per-node": "python -m distboot run --nproc-per-node N -m distboot check"},
    ).parse_args(arguments)
    os.environ["DISTBOOT_CHECK"] = "warn"  # what is found is printed here, whatever the job does
    if options.allreduce:
        context = _measured(options.launcher)
    else:
        context = meet(options.launcher)
    report = report_of(context)
    if not report:
        # Rank 0's exit code is that of all; many launchers would kill rank 0 if another rank failed
        # first
        return 0
    _refuse_unchecked(report)
    is_fit = not _is_odd(report)
    if options.json:
        emit(json.dumps({"fit": is_fit, **_as_json(report)}))
    else:
        emit(_text(report))
    if is_fit:
        return 0
    return CODES["node-check"][0]


def _measured(launcher: str | None) -> Context:
    """Start PyTorch, and measure all-reduce."""
    from .all_reduce import TIMEOUT, measured  # here, as few checks measure

    context = init("torch", launcher=launcher, timeout=TIMEOUT)
    session = current_session()
    if session.membership is None or session.link is None:  # one rank has nobody to reduce with
        return context
    found = measured(context, session.membership)
    if context.is_main:
        session.link.tell(found)
    return context


def _refuse_unchecked(report: Mapping[str, Any]) -> None:
    if not report["nodes"] and report["world_size"] > 1:
        raise DistbootError(
            "usage",
            "the nodes were not compared: DISTBOOT_CHECK=off holds for the wrapper around this "
            "command",
            "unset DISTBOOT_CHECK",
        )


def _is_odd(report: Mapping[str, Any]) -> bool:
    has_odd_pair = report["allreduce"] is not None and bool(report["allreduce"]["findings"])
    return has_odd_pair or any(map(_findings, report["nodes"]))


def _as_json(report: Mapping[str, Any]) -> dict[str, Any]:
    names = ("world_size", "hosts", "findings", "nodes", "allreduce")
    return {name: report[name] for name in names}


def _text(report: Mapping[str, Any]) -> str:
    nodes = report["nodes"]
    if not nodes:
        return "One rank: there is no node to compare with. `doctor` looks at this one."
    lines = _lines_of_nodes(report)
    if report["allreduce"] is not None:
        lines += ["", *_table_of_sizes(report["allreduce"])]
        lines += _table_of_pairs(report["allreduce"])
    return "\n".join(lines)


def _lines_of_nodes(report: Mapping[str, Any]) -> list[str]:
    nodes = report["nodes"]
    # A node alone is looked at for its accelerators only
    if len(nodes) == 1 and not _has_been_seen(nodes[0]):
        return ["One node: there is no other to compare with. `doctor` looks at this one."]
    odd = list(filter(_findings, nodes))
    return [
        f"{counted(len(report['hosts']), 'node')} checked, {_counted(len(odd))}.",
        "",
        *_table_of_nodes(nodes),
    ]


def _has_been_seen(node: Mapping[str, Any]) -> bool:
    return bool(node["seen"] or node["findings"])


def _counted(odd: int) -> str:
    return first_that_holds(
        (odd == 0, "none is odd"),
        (odd == 1, "1 is odd: its row is marked, and a warning says why"),
        (True, f"{odd} are odd: their rows are marked, and warnings say why"),
    )


def _table_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    columns: dict[str, None] = {}
    for node in nodes:
        columns.update(dict.fromkeys(node["seen"]))
    rows = [["", "node", "host", *columns]]
    for node in nodes:
        row = [
            _FINE,
            str(node["node_rank"]),
            escape_control(node["host"]),
        ]
        if node["findings"]:
            row[0] = _ODD
        for column in columns:
            seen = node["seen"].get(column, "-")
            row.append(escape_control(seen))
        rows.append(row)
    return in_columns(rows)


def _table_of_sizes(measured: Mapping[str, Any]) -> list[str]:
    rows = [["", "size", "time", "bus bandwidth"]]
    for one in measured["sizes"]:
        row = [
            "",
            size(one["bytes"]),
            duration(one["seconds"]),
            byte_rate(one["rate"]),
        ]
        rows.append(row)
    ranks = counted(measured["ranks"], "rank")
    return [f"all-reduce of {ranks}, {measured['backend']}:", *in_columns(rows)]


def _table_of_pairs(measured: Mapping[str, Any]) -> list[str]:
    if not measured["pairs"]:
        return []
    rows = []
    for pair in measured["pairs"][:_MOST_PAIRS]:
        names = " and ".join(map(escape_control, pair["hosts"]))
        rows.append(["", names, byte_rate(pair["rate"])])
    return [
        "",
        f"pairs of nodes, median {byte_rate(measured['median'])}, the slowest:",
        *in_columns(rows),
        *measured["findings"],
    ]
