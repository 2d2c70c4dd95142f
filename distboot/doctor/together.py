"""The findings of all ranks at rank 0, over the connections of the roll call once that is over.

Every rank sends what is not ok in one frame, sealed as everything in the roll call is. Nobody answers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from ..errors import printable
from ..rollcall.meeting import Meeting
from ..rollcall.wire import MOST_FROM_A_RANK, Frames, Session, WireError, canonical
from .finding import STATUSES, Finding, unknown

_LIMIT = 10.0  # seconds for a rank to send them, which it does at once
_LONGEST = 2000  # characters of one text
_MOST = 100  # findings of one rank


def gathered(meeting: Meeting, own: list[Finding]) -> dict[int, list[Finding]]:
    """What is not ok, by rank, at rank 0; at all other ranks nothing: they have sent theirs."""
    bad = [finding for finding in own if finding.status != "ok"]
    found: dict[int, list[Finding]] = {0: bad} if meeting.placement.rank == 0 else {}
    for (rank, *_), connection, session, _ in meeting.hand_over():
        with connection:
            connection.settimeout(_LIMIT)
            if meeting.placement.rank == 0:
                found[rank] = _received(connection, session)
            else:
                connection.sendall(session.sealed("doctor", canonical([asdict(finding) for finding in bad])))
    return found


def grouped(found: Mapping[int, Iterable[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Findings with the ranks that have them, the worst first. Those are alike that have one name and one remedy."""
    groups: dict[tuple[str, str, str], tuple[Finding, list[int]]] = {}
    for rank, findings in sorted(found.items()):
        for finding in findings:
            _, ranks = groups.setdefault((finding.name, finding.status, finding.remedy), (finding, []))
            ranks.append(rank)
    return sorted(groups.values(), key=lambda group: STATUSES.index(group[0].status))


def _received(connection: socket.socket, session: Session) -> list[Finding]:
    frames = Frames(MOST_FROM_A_RANK)
    messages: list[dict[str, object]] = []
    try:
        while not messages:
            data = connection.recv(min(frames.missing, MOST_FROM_A_RANK))
            if not data:
                return _none_from("it has closed the connection")
            messages = frames.feed(data)
        return _findings(session.opened(messages[0], "doctor")[1])
    except (OSError, WireError) as error:
        return _none_from(f"it {error}" if isinstance(error, WireError) else str(error))


def _none_from(why: str) -> list[Finding]:
    remedy = "look at its output: all ranks are to run `doctor --job`, of the same distboot"
    return [unknown("doctor", f"the findings of this rank did not come: {why}", remedy)]


def _findings(content: object) -> list[Finding]:
    """What a rank sent."""
    found = []
    for each in content[:_MOST] if isinstance(content, list) else [None]:
        texts = [each.get(name) for name in ("name", "status", "seen", "remedy")] if isinstance(each, dict) else []
        known = [text[:_LONGEST] for text in texts if isinstance(text, str)]
        if len(known) != 4 or known[1] not in STATUSES:
            raise WireError("sends broken findings")
        name, status, seen, remedy = known
        lines = "\n".join(map(printable, remedy.split("\n")))
        found.append(Finding(printable(name), status, printable(seen), lines))
    return found
