"""Whether this container is ready for a distributed job: why it will fail, hang or be slow, before it starts.

A check is a small function from the machine to its findings, named after it, and reads nothing but that view of it. One
that crashes is a finding itself. Nothing here takes long, imports a framework, or changes anything.
Of a whole job the findings come to rank 0 over the connections of the roll call, once that is over: every rank sends
what is not ok in one frame, authenticated as all others are. There is no answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

from ..rendezvous.protocol import (
    BEFORE_AUTHENTICATION,
    Channel,
    Frame,
    Frames,
    ProtocolError,
    message,
    nested,
    of,
    several,
    text,
)
from ..text import escape_control, first_line
from .accelerators import accelerators, driver, visible_devices
from .machine import STATUSES, Finding, Machine, unknown
from .rdma import interfaces, nccl_rdma, nccl_settings, rdma_devices, rdma_gids, rdma_libraries, rdma_ports
from .start import clock, cpus, host_name, launcher, master_addr, memlock, open_files, ports, proxies, shared_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.job_info import JobInfo

_LIMIT = 10.0  # seconds for a rank to send them, which it does at once
_LONGEST = 2000  # characters of one text
_MOST = 100  # findings of one rank

Check = Callable[[Machine], Finding | Iterable[Finding]]

_ANYWHERE: tuple[Check, ...] = (launcher, host_name, master_addr, ports, proxies, clock)
_LINUX: tuple[Check, ...] = (
    *(cpus, shared_memory, memlock, open_files),
    *(accelerators, visible_devices, driver),
    *(rdma_devices, rdma_ports, rdma_libraries, rdma_gids),
    *(interfaces, nccl_rdma, nccl_settings),
)


def examine(machine: Machine, checks: tuple[Check, ...] | None = None) -> list[Finding]:
    """All that the checks find, in their order; default: all checks that fit the machine's system."""
    if checks is None:
        checks = (*_ANYWHERE, *_LINUX) if machine.system == "linux" else _ANYWHERE
    return [finding for check in checks for finding in _found(check, machine)]


def _found(check: Check, machine: Machine) -> list[Finding]:
    try:
        result = check(machine)
        found = [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # noqa: BLE001 - a machine may be stranger than a check expects
        seen = f"the check itself failed: {type(error).__name__}: {first_line(error)}"
        found = [unknown(seen, "please report it, with the output of `python -m distboot doctor --json`")]
    return [replace(finding, name=check.__name__.replace("_", "-")) for finding in found]


def _status(value: object) -> str:
    if value not in STATUSES:
        raise ValueError("status")
    return str(value)


@dataclass(frozen=True, slots=True)
class Sent:
    """A finding as it is sent."""

    name: str = of(text(_LONGEST))
    status: str = of(_status)
    seen: str = of(text(_LONGEST))
    remedy: str = of(text(_LONGEST))


@message
class Findings:
    """What is not ok on a rank."""

    findings: tuple[Sent, ...] = of(several(nested(Sent), _MOST), default=())


def gathered(job: JobInfo, own: list[Finding]) -> dict[int, list[Finding]]:
    """What is not ok, by rank, at rank 0; at all other ranks nothing: they have sent theirs."""
    bad = [finding for finding in own if finding.status != "ok"]
    found: dict[int, list[Finding]] = {0: bad} if job.placement.rank == 0 else {}
    for rank, connection, channel in job.detach_all():
        with connection:
            connection.settimeout(_LIMIT)
            if job.placement.rank == 0:
                found[rank] = _received(connection, channel)
            else:
                sent = (Sent(*(text[:_LONGEST] for text in astuple(finding))) for finding in bad[:_MOST])
                connection.sendall(channel.sign(Findings(tuple(sent))))
    return found


def grouped(found: Mapping[int, Iterable[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Findings with the ranks that have them, the worst first. Those are alike that have one name and one remedy."""
    groups: dict[tuple[str, str, str], tuple[Finding, list[int]]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            _, ranks = groups.setdefault((finding.name, finding.status, finding.remedy), (finding, []))
            ranks.append(rank)
    return sorted(groups.values(), key=lambda group: STATUSES.index(group[0].status))


def _received(connection: socket.socket, channel: Channel) -> list[Finding]:
    frames = Frames()
    received: list[Frame] = []
    try:
        while not received:
            data = connection.recv(min(frames.missing, BEFORE_AUTHENTICATION))
            if not data:
                return _none_from("it has closed the connection")
            received = frames.feed(data)
        return [_escaped(each) for each in channel.verify(received[0], frames, Findings).findings]
    except (OSError, ProtocolError) as error:
        return _none_from(f"it {error}" if isinstance(error, ProtocolError) else str(error))


def _escaped(sent: Sent) -> Finding:
    lines = "\n".join(map(escape_control, sent.remedy.split("\n")))
    return Finding(escape_control(sent.name), sent.status, escape_control(sent.seen), lines)


def _none_from(why: str) -> list[Finding]:
    remedy = "look at its output: all ranks are to run `doctor --job`, of the same distboot"
    return [Finding("doctor", "unknown", f"the findings of this rank did not come: {why}", remedy)]
