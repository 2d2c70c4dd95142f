"""`doctor --job`: the findings of all ranks.

They come to rank 0 over the connections of the rendezvous, once that is over: every rank sends what
is not ok in one frame, authenticated as all others are. There is no answer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...agent.joining import join_here
from ...agent.session import Session
from ...base.dataclass import as_dict, dataclass
from ...base.errors import with_rank
from ...base.settings import join_timeout_setting
from ...base.table import first_that_holds
from ...base.text import counted, ranges, ranks_said
from ...detection.export import require_master
from ...rendezvous.membership import Membership
from ...rendezvous.protocol import Channel, Frames, ProtocolError, nested, of, several
from .finding import LONGEST, STATUSES, Finding
from .machine import Machine

_LIMIT = 10.0  # seconds for a rank to send its findings, which it does at once
_MOST = 100  # findings of one rank
_LOOK_THERE = (
    "look at its output: all ranks must run `doctor --job`, with the same version of distboot"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What is not ok on a rank."""

    findings: tuple[Finding, ...] = of(several(nested(Finding), _MOST), default=())


class JobFindings(NamedTuple):
    """The findings of all ranks, as rank 0 prints them."""

    report: dict[str, Any]  # as JSON
    titled: list[tuple[Finding, str]]
    where: str  # "8 ranks on 2 nodes"


def examine_job(machine: Machine, own: list[Finding]) -> JobFindings | None:
    """At rank 0, the findings of all ranks; None at other ranks."""
    placement = machine.placement_here()
    is_node = placement.node_level is not None
    # An interface that does not exist is a finding, and must not keep the ranks from meeting.
    environ = {
        name: value
        for name, value in machine.environ.items()
        if not name.endswith("_SOCKET_IFNAME")
    }
    with (
        with_rank(placement.who),
        # Where nodes are numbered, one process of each checks it: as if it started one rank there.
        join_here(
            require_master(placement), environ, join_timeout_setting(environ), ranks=int(is_node)
        ) as job,
    ):
        groups = grouped(gathered(job, own))
    if placement.rank != 0 or job.membership is None:
        return None
    where = counted(len(job.hosts), "node")
    if is_node:
        return _report(job, groups, "node", where)
    count = counted(placement.world_size, "rank")
    return _report(job, groups, "rank", f"{count} on {where}")


def _report(
    job: Session, groups: Sequence[tuple[Finding, list[int]]], unit: str, where: str
) -> JobFindings:
    assert job.membership is not None
    findings = []
    titled = []
    for finding, numbers in groups:
        findings.append({**as_dict(finding), f"{unit}s": numbers})
        whose = _whose(numbers, job.membership, unit)
        titled.append((finding, f"{finding.name}: {whose}"))
    report = {
        "hosts": job.hosts,
        "findings": findings,
        "warnings": job.warnings,
    }
    return JobFindings(report, titled, where)


def gathered(job: Session, own: list[Finding]) -> dict[int, list[Finding]]:
    """At rank 0, what is not ok, by rank; empty at all other ranks, which have sent theirs."""
    bad = [finding for finding in own if finding.status != "ok"]
    found: dict[int, list[Finding]] = {}
    if job.placement.rank == 0:
        found[0] = bad
    for rank, connection, channel in job.detach_all():
        with connection:
            connection.settimeout(_LIMIT)
            if job.placement.rank == 0:
                found[rank] = _received(connection, channel)
            else:
                connection.sendall(channel.sign(_shortened(bad)))
    return found


def _shortened(findings: Sequence[Finding]) -> Findings:
    short = []
    for finding in findings[:_MOST]:
        texts = [text[:LONGEST] for text in as_dict(finding).values()]
        short.append(Finding(*texts))
    return Findings(tuple(short))


def _received(connection: socket.socket, channel: Channel) -> list[Finding]:
    frames = Frames()
    why = "it has closed the connection"
    try:
        while data := connection.recv(1 << 16):
            for frame in frames.feed(data):
                return list(channel.verify(frame, frames, Findings).findings)
    except ProtocolError as error:
        why = f"it {error}"
    except OSError as error:
        why = str(error)
    seen = f"the findings of this rank did not arrive: {why}"
    return [Finding("doctor", "unknown", seen, _LOOK_THERE)]


def grouped(found: Mapping[int, Iterable[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Findings with the ranks that have them, the worst first.

    Findings with the same name, status and remedy are one.
    """
    groups: dict[tuple[str, str, str], tuple[Finding, list[int]]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            key = (finding.name, finding.status, finding.remedy)
            _, ranks = groups.setdefault(key, (finding, []))
            ranks.append(rank)
    return sorted(groups.values(), key=lambda group: STATUSES.index(group[0].status))


def _whose(numbers: Sequence[int], membership: Membership, unit: str) -> str:
    """`"all ranks"`, `"ranks 8-15 on node-1"`, `"ranks 0-15 on 2 nodes"`, `"node 1 on node-1"`."""
    node_of = membership.node_of()
    if len(numbers) == len(node_of):
        return f"all {unit}s"
    nodes = {node_of[number] for number in numbers}
    where = counted(len(nodes), "node")
    if len(nodes) == 1:
        where = membership.hosts[nodes.pop()]
    return first_that_holds(
        (unit == "rank", f"{ranks_said(numbers)} on {where}"),
        (len(numbers) == 1, f"node {numbers[0]} on {where}"),
        (True, f"nodes {ranges(numbers)}"),
    )
