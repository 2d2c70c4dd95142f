"""`doctor`: whether this container is ready for a distributed job, and what to do where it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ..detection.detect import detect, refuse_unless_rank
from ..doctor import examine, gathered, grouped
from ..doctor.machine import STATUSES, Finding, Machine, this_machine
from ..errors import with_rank
from ..rendezvous.master import require_master
from ..rendezvous.membership import Membership, ranks_said
from ..settings import join_timeout_setting
from ..text import counted, escape_control
from . import Parser, emit

_NOT_READY = 78  # EX_CONFIG of sysexits.h, as for every broken environment


def doctor(arguments: list[str]) -> int:
    """`doctor`: examine this container, or those of all ranks."""
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
        emit(json.dumps({"host": machine.host, "ready": ready, "findings": [asdict(finding) for finding in found]}))
    else:
        emit(text(found, machine.host))
    return 0 if ready else _NOT_READY


def text(found: Sequence[Finding], host: str) -> str:
    """The findings on one host for people, the worst first."""
    worst_first = sorted(found, key=lambda finding: STATUSES.index(finding.status))
    return _text([(finding, finding.name) for finding in worst_first], host)


def _of_all_ranks(machine: Machine, *, as_json: bool) -> int:
    from ..rendezvous.plan import join_here  # only here, so that a plain `doctor` does not pay for it

    own = examine(machine)
    placement = detect(machine.environ)
    with with_rank(placement.who):
        refuse_unless_rank(placement)
        # An interface that is not there is a finding here, and must not keep the ranks from meeting.
        environ = {name: value for name, value in machine.environ.items() if not name.endswith("_SOCKET_IFNAME")}
        with join_here(require_master(placement), environ, join_timeout_setting(None)) as job:
            found = gathered(job, own)
    if placement.rank != 0:
        return 0  # rank 0 speaks for all of them; many launchers would kill it if another one failed first
    membership = job.membership
    assert membership is not None
    groups = grouped(found)
    ready = _is_ready(finding for finding, _ in groups)
    if as_json:
        findings = [{**asdict(finding), "ranks": ranks} for finding, ranks in groups]
        report = {"hosts": membership.hosts, "ready": ready, "findings": findings, "warnings": job.warnings}
        emit(json.dumps(report))
    else:
        where = f"{counted(len(membership.node_of()), 'rank')} on {counted(len(membership.nodes), 'node')}"
        emit(_text([(finding, f"{finding.name}: {_whose(ranks, membership)}") for finding, ranks in groups], where))
    return 0 if ready else _NOT_READY


def _text(titled: Sequence[tuple[Finding, str]], where: str) -> str:
    lines = [line for finding, title in titled for line in _lines(finding, title)]
    headline = _headline([finding for finding, _ in titled], where)
    return "\n".join([headline, "", *lines] if lines else [headline])


def _whose(ranks: Sequence[int], membership: Membership) -> str:
    """`"all ranks"`, `"ranks 8-15 on node-1"`, `"ranks 0-15 on 2 nodes"`."""
    node_of = membership.node_of()
    if len(ranks) == len(node_of):
        return "all ranks"
    nodes = sorted({node_of[rank] for rank in ranks})
    where = escape_control(membership.hosts[nodes[0]]) if len(nodes) == 1 else counted(len(nodes), "node")
    return f"{ranks_said(ranks)} on {where}"


def _is_ready(found: Iterable[Finding]) -> bool:
    return all(finding.status != "problem" for finding in found)


def _headline(found: Sequence[Finding], where: str) -> str:
    """`"Not ready: 2 problems, 1 warning (node-3)."`."""
    counts = {status: sum(finding.status == status for finding in found) for status in ("problem", "warning")}
    listed = ", ".join(counted(count, what) for what, count in counts.items() if count)
    return f"{'Ready' if _is_ready(found) else 'Not ready'}: {listed or 'nothing found'} ({escape_control(where)})."


def _lines(finding: Finding, title: str) -> list[str]:
    """`problem  shared-memory: /dev/shm has 64 MiB …`, and below it the remedy."""
    first, *others = map(escape_control, finding.remedy.split("\n"))
    lines = [f"{finding.status:<8} {title}: {escape_control(finding.seen)}"]
    lines += [f"{'':<8}   remedy: {first}"] if first else []
    return lines + [f"{'':<8}     {line}" for line in others]
