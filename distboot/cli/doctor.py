"""`doctor`: whether this container is ready for a distributed job, and what to do where it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ..detection import detect
from ..doctor import examine
from ..doctor.finding import STATUSES, Finding
from ..doctor.machine import Machine, this_machine
from ..errors import printable, said_by
from ..nodes import refuse_unless_rank
from ..rendezvous import join_timeout_setting, settled
from ..roster import Roster, ranks_said
from .output import say
from .parser import Parser

_NOT_READY = 78  # EX_CONFIG of sysexits.h, as for every broken environment


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        "doctor", "Look for what will make a distributed job fail, hang or be slow here: exit code 78 if so."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--job",
        action="store_true",
        help="to be run on all ranks: let them meet once, and print what is not ok on which of them (rank 0 does)",
    )
    options = parser.parse_args(arguments)
    environ = {**os.environ, "DISTBOOT_LAUNCHER": options.launcher} if options.launcher else os.environ
    machine = this_machine(environ)
    if options.job:
        return _of_all_ranks(machine, as_json=options.json)
    found = examine(machine)
    ready = _is_ready(found)
    if options.json:
        say(json.dumps({"host": machine.host, "ready": ready, "findings": [asdict(finding) for finding in found]}))
    else:
        say(text(found, machine.host))
    return 0 if ready else _NOT_READY


def text(found: Sequence[Finding], host: str) -> str:
    """The findings on one host for people, the worst first."""
    worst_first = sorted(found, key=lambda finding: STATUSES.index(finding.status))
    lines = [line for finding in worst_first for line in _lines(finding, finding.name)]
    return "\n".join([_headline(found, host), "", *lines])


def _of_all_ranks(machine: Machine, *, as_json: bool) -> int:
    from ..doctor.together import gathered, grouped  # only here, so that a plain `doctor` does not pay for it
    from ..rollcall.attend import attend

    own = examine(machine)
    placement = detect(machine.environ)
    with said_by(placement.who):
        refuse_unless_rank(placement)
        # An interface that is not there is a finding here, and must not keep the ranks from meeting.
        environ = {name: value for name, value in machine.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        with attend(settled(placement), environ, join_timeout_setting(None), relays=False) as meeting:
            found = gathered(meeting, own)
    if placement.rank != 0:
        return 0  # rank 0 speaks for all of them; many launchers would kill it if another one failed first
    assert meeting.roster is not None
    groups = grouped(found)
    ready = _is_ready(finding for finding, _ in groups)
    if as_json:
        findings = [{**asdict(finding), "ranks": ranks} for finding, ranks in groups]
        hosts, warnings = meeting.roster.hosts, meeting.findings
        say(json.dumps({"hosts": hosts, "ready": ready, "findings": findings, "warnings": warnings}))
    else:
        say(_text_of_all(groups, meeting.roster))
    return 0 if ready else _NOT_READY


def _text_of_all(groups: Sequence[tuple[Finding, list[int]]], roster: Roster) -> str:
    titles = [f"{finding.name}: {_whose(ranks, roster)}" for finding, ranks in groups]
    found = [finding for finding, _ in groups]
    lines = [line for finding, title in zip(found, titles, strict=True) for line in _lines(finding, title)]
    ranks = sum(map(len, roster.nodes))
    headline = _headline(found, f"{_counted(ranks, 'rank')} on {_counted(len(roster.nodes), 'node')}")
    return "\n".join([headline, "", *lines] if lines else [headline])


def _whose(ranks: Sequence[int], roster: Roster) -> str:
    """`"all ranks"`, `"ranks 8-15 on node-1"`, `"ranks 0-15 on 2 nodes"`."""
    node_of = roster.node_of()
    if len(ranks) == len(node_of):
        return "all ranks"
    nodes = sorted({node_of[rank] for rank in ranks})
    where = printable(roster.hosts[nodes[0]]) if len(nodes) == 1 else _counted(len(nodes), "node")
    return f"{ranks_said(ranks)} on {where}"


def _is_ready(found: Iterable[Finding]) -> bool:
    return all(finding.status != "problem" for finding in found)


def _headline(found: Sequence[Finding], where: str) -> str:
    """`"Not ready: 2 problems, 1 warning (node-3)."`."""
    counts = {status: sum(finding.status == status for finding in found) for status in ("problem", "warning")}
    said = ", ".join(_counted(count, what) for what, count in counts.items() if count)
    return f"{'Ready' if _is_ready(found) else 'Not ready'}: {said or 'nothing found'} ({printable(where)})."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _lines(finding: Finding, title: str) -> list[str]:
    """`problem  shared-memory: /dev/shm has 64 MiB …`, and below it the remedy."""
    first, *others = map(printable, finding.remedy.split("\n"))
    lines = [f"{finding.status:<8} {title}: {printable(finding.seen)}"]
    lines += [f"{'':<8}   remedy: {first}"] if first else []
    return lines + [f"{'':<8}     {line}" for line in others]
