"""`check`: all ranks meet, all nodes are compared, and rank 0 prints what each has."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import CODES, DistbootError
from ..base.text import counted, escape_control
from ..base.units import byte_rate, duration, size
from ..cli.output import emit
from ..cli.parser import Parser
from ..context import Context
from ..initialize import current_session, init
from .checked_job import report_of

_MOST_PAIRS = 10  # that are printed
_ODD, _FINE = "!", ""  # before a row


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
    ).parse_args(arguments)
    os.environ["DISTBOOT_CHECK"] = "warn"  # what is found is printed here, whatever the job does
    if options.allreduce:
        context = init("torch", launcher=options.launcher)
        _measure(context)
    else:
        os.environ["DISTBOOT_FAILURE_DETECTION"] = "0"  # no rank waits for another one any more
        context = init("none", launcher=options.launcher)
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
        emit("\n".join(_lines(report)))
    if is_fit:
        return 0
    return CODES["node-check"][0]


def _measure(context: Context) -> None:
    from .all_reduce import measured  # here, as it imports torch

    session = current_session()
    if session.membership is None or session.link is None:  # one rank has nobody to reduce with
        return
    found = measured(context, session.membership)
    if context.is_main:
        session.link.tell(found)


def _refuse_unchecked(report: Mapping[str, Any]) -> None:
    if not report["nodes"] and report["world_size"] > 1:
        raise DistbootError(
            "usage",
            "the nodes were not compared: DISTBOOT_CHECK=off holds for the wrapper around this "
            "command",
            "unset DISTBOOT_CHECK",
        )


def _is_odd(report: Mapping[str, Any]) -> bool:
    measurement = report["allreduce"] or {"findings": ()}
    odd_nodes = [node for node in report["nodes"] if node["findings"]]
    return bool(odd_nodes or measurement["findings"])


def _as_json(report: Mapping[str, Any]) -> dict[str, Any]:
    names = ("world_size", "hosts", "findings", "nodes", "allreduce")
    return {name: report[name] for name in names}


def _lines(report: Mapping[str, Any]) -> list[str]:
    nodes = report["nodes"]
    if not nodes:
        return ["One rank: there is no node to compare with. `doctor` looks at this one."]
    odd = [node for node in nodes if node["findings"]]
    found = [f"{_counted(odd, len(report['hosts']))}.", "", *_table_of_nodes(nodes)]
    if report["allreduce"] is not None:
        found += ["", *_lines_of_all_reduce(report["allreduce"])]
    return found


def _counted(odd: Sequence[object], nodes: int) -> str:
    ready = f"{counted(nodes, 'node')} checked"
    if not odd:
        return f"{ready}, none is odd"
    if len(odd) == 1:
        return f"{ready}, 1 is odd: its row is marked, and a warning says why"
    return f"{ready}, {len(odd)} are odd: their rows are marked, and warnings say why"


def _table_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    columns: dict[str, None] = {}
    for node in nodes:
        columns.update(dict.fromkeys(node["seen"]))
    rows = [["", "node", "host", *columns]]
    for node in nodes:
        mark = _ODD if node["findings"] else _FINE
        seen = [escape_control(node["seen"].get(column, "-")) for column in columns]
        rows.append([mark, str(node["node_rank"]), escape_control(node["host"]), *seen])
    return _aligned(rows)


def _lines_of_all_reduce(found: Mapping[str, Any]) -> list[str]:
    lines = [f"all-reduce of {counted(found['ranks'], 'rank')}, {found['backend']}:"]
    rows = [["", "size", "time", "bus bandwidth"]]
    for one in found["sizes"]:
        rate = byte_rate(one["rate"])
        rows.append(["", size(one["bytes"]), duration(one["seconds"]), rate])
    lines += _aligned(rows)
    if found["pairs"]:
        lines += ["", f"pairs of nodes, median {byte_rate(found['median'])}, the slowest:"]
        rows = []
        for pair in found["pairs"][:_MOST_PAIRS]:
            names = " and ".join(map(escape_control, pair["hosts"]))
            rows.append(["", names, byte_rate(pair["rate"])])
        lines += _aligned(rows)
    lines += found["findings"]
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
