"""`doctor`: whether this container is ready for a distributed job, and what to do where it is not.

Of a whole job the findings come to rank 0 over the connections of the roll call, once that is over: every rank sends
what is not ok in one frame, authenticated as all others are. There is no answer.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from ...agent.meet import join_here
from ...agent.session import Session
from ...base.errors import with_rank
from ...base.settings import join_timeout_setting
from ...base.text import (
    counted,
    escape_control,
    first_line,
    ranges,
    ranks_said,
)
from ...cli.output import emit
from ...cli.parser import Parser
from ...detection.export import require_master
from ...detection.here import detect_here
from ...rendezvous.membership import Membership
from ...rendezvous.protocol import (
    Channel,
    Frames,
    ProtocolError,
    nested,
    of,
    several,
)
from . import CHECKS, ON_EVERY_SYSTEM, Check
from .finding import (
    LONGEST,
    STATUSES,
    Finding,
    unknown,
)
from .machine import Machine

_NOT_READY = 78  # EX_CONFIG of sysexits.h, as for every broken environment
_LIMIT = 10.0  # seconds for a rank to send its findings, which it does at once
_MOST = 100  # findings of one rank


@dataclass(frozen=True, slots=True)
class Findings:
    """What is not ok on a rank."""

    findings: tuple[Finding, ...] = of(several(nested(Finding), _MOST), default=())


def doctor(arguments: list[str]) -> int:
    """`doctor`: examine this container, or those of all ranks."""
    options = Parser(
        "doctor",
        "Look for what will make a distributed job fail, hang or be slow here: exit code 78 if so.",
        "--json  print one JSON object\n"
        "--job  run on all ranks: they meet once, and rank 0 prints what is not ok on which of them",
    ).parse_args(arguments)
    environ = (
        {**os.environ, "DISTBOOT_LAUNCHER": options.launcher} if options.launcher else os.environ
    )
    machine = Machine(environ)
    found = examine(machine)
    if options.job:
        told = _of_job(machine, found)
        if told is None:
            # Rank 0 speaks for all of them; many launchers would kill it if another one failed first
            return 0
        report, for_people = told
    else:
        report = {"host": machine.host, "findings": [asdict(finding) for finding in found]}
        for_people = text(found, machine.host)
    ready = all(finding["status"] != "problem" for finding in report["findings"])
    emit(json.dumps({"ready": ready, **report}) if options.json else for_people)
    return 0 if ready else _NOT_READY


def examine(machine: Machine, checks: tuple[Check, ...] | None = None) -> list[Finding]:
    """All that the checks find, in their order; default: all checks that fit the machine's system."""
    if checks is None:
        checks = CHECKS if machine.system == "linux" else ON_EVERY_SYSTEM
    return [
        replace(finding, name=check.__name__.replace("_", "-"))
        for check in checks
        for finding in _found(check, machine)
    ]


def _found(check: Check, machine: Machine) -> list[Finding]:
    try:
        result = check(machine)
        return [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # noqa: BLE001 - a machine may be stranger than a check expects
        seen = f"the check itself failed: {type(error).__name__}: {first_line(error)}"
        return [
            unknown(seen, "please report it, with the output of `python -m distboot doctor --json`")
        ]


def _of_job(machine: Machine, own: list[Finding]) -> tuple[dict[str, Any], str] | None:
    """What all ranks have found, as JSON and for people, at rank 0."""
    placement = detect_here(machine.environ, look_up=machine.look_up, is_own=machine.is_own)
    is_node = placement.node_level is not None
    counts = "node" if is_node else "rank"
    with with_rank(placement.who):
        # An interface that is not there is a finding here, and must not keep the ranks from meeting.
        environ = {
            name: value
            for name, value in machine.environ.items()
            if not name.endswith("_SOCKET_IFNAME")
        }
        # Where nodes are numbered, and not ranks, one process of each checks it: as if it started one rank there.
        with join_here(
            require_master(placement), environ, join_timeout_setting(None), ranks=int(is_node)
        ) as job:
            groups = grouped(gathered(job, own))
    if placement.rank != 0 or job.membership is None:
        return None
    findings = [{**asdict(finding), f"{counts}s": numbers} for finding, numbers in groups]
    titled = [
        (finding, f"{finding.name}: {_whose(numbers, job.membership, counts)}")
        for finding, numbers in groups
    ]
    where = counted(len(job.hosts), "node")
    if counts == "rank":
        where = f"{counted(placement.world_size, 'rank')} on {where}"
    report = {"hosts": job.hosts, "findings": findings, "warnings": job.warnings}
    return report, _text(titled, where)


def gathered(job: Session, own: list[Finding]) -> dict[int, list[Finding]]:
    """What is not ok, by rank, at rank 0; at all other ranks nothing: they have sent theirs."""
    bad = [finding for finding in own if finding.status != "ok"]
    found: dict[int, list[Finding]] = {0: bad} if job.placement.rank == 0 else {}
    for rank, connection, channel in job.detach_all():
        with connection:
            connection.settimeout(_LIMIT)
            if job.placement.rank == 0:
                found[rank] = _received(connection, channel)
            else:
                short = (
                    Finding(*(text[:LONGEST] for text in astuple(finding)))
                    for finding in bad[:_MOST]
                )
                connection.sendall(channel.sign(Findings(tuple(short))))
    return found


def _received(connection: socket.socket, channel: Channel) -> list[Finding]:
    frames, why = Frames(), "it has closed the connection"
    try:
        while data := connection.recv(1 << 16):
            for frame in frames.feed(data):
                return list(channel.verify(frame, frames, Findings).findings)
    except ProtocolError as error:
        why = f"it {error}"
    except OSError as error:
        why = str(error)
    remedy = (
        "look at its output: all ranks must run `doctor --job`, with the same version of distboot"
    )
    return [
        Finding("doctor", "unknown", f"the findings of this rank did not arrive: {why}", remedy)
    ]


def grouped(found: Mapping[int, Iterable[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Findings with the ranks that have them, the worst first. Those are alike that have one name and one remedy."""
    groups: dict[tuple[str, str, str], tuple[Finding, list[int]]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            groups.setdefault((finding.name, finding.status, finding.remedy), (finding, []))[
                1
            ].append(rank)
    return sorted(groups.values(), key=lambda group: STATUSES.index(group[0].status))


def text(found: Sequence[Finding], host: str) -> str:
    """The findings on one host for people, the worst first."""
    worst_first = sorted(found, key=lambda finding: STATUSES.index(finding.status))
    return _text([(finding, finding.name) for finding in worst_first], host)


def _text(titled: Sequence[tuple[Finding, str]], where: str) -> str:
    """`"Not ready: 2 problems, 1 warning (node-3)."`, and below it each finding."""
    counts = Counter(finding.status for finding, _ in titled)
    listed = ", ".join(
        counted(counts[what], what) for what in ("problem", "warning") if counts[what]
    )
    verdict = "Not ready" if counts["problem"] else "Ready"
    lines = [f"{verdict}: {listed or 'no problems found'} ({where})."]
    lines += [""] if titled else []
    for finding, title in titled:
        # problem  shared-memory: /dev/shm has 64 MiB …, and below it the remedy
        first, *others = finding.remedy.split("\n")
        lines += [f"{finding.status:<8} {title}: {finding.seen}"]
        lines += [f"{'':<8}   remedy: {first}"] if first else []
        lines += [f"{'':<8}     {line}" for line in others]
    return "\n".join(map(escape_control, lines))


def _whose(numbers: Sequence[int], membership: Membership, counts: str) -> str:
    """`"all ranks"`, `"ranks 8-15 on node-1"`, `"ranks 0-15 on 2 nodes"`; or `"node 1 on node-1"`."""
    node_of = membership.node_of()
    if len(numbers) == len(node_of):
        return f"all {counts}s"
    nodes = sorted({node_of[number] for number in numbers})
    where = counted(len(nodes), "node")
    if len(nodes) == 1:
        where = membership.hosts[nodes[0]]
    if counts == "rank":
        return f"{ranks_said(numbers)} on {where}"
    return f"nodes {ranges(numbers)}" if len(nodes) > 1 else f"node {numbers[0]} on {where}"
