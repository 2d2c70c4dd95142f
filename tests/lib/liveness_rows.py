"""The life of a connection in rows: what is known of a peer at which second, and what is found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distboot.agent.liveness import LOST, REACHABLE, UNREACHABLE, Finding, Liveness, Signs

__all__ = ["ROWS", "Finding", "Liveness", "Signs", "play"]

HOST_DOWN = Finding(LOST, "no answer for 15 s: the host, or the network to it, is down")
FROZEN = Finding(LOST, "no answer for 34 s, though the host answers: stopped or frozen")
CUT = Finding(UNREACHABLE, "gave no answer for 15 s, though its host answers (a firewall?)")


@dataclass(frozen=True)
class Row:
    """At a second: for how long the peer's kernel has been silent, and what is found."""

    second: float
    silence: float
    found: Finding | None = None
    confirmed: bool = True
    heard: float = 0.0  # second of the last heartbeat
    answers: bool = False  # the host, at its other port
    received: int = 0  # messages, ever
    suspect: bool = False  # afterwards
    silent: bool = False  # afterwards


ROWS = {
    "a peer that speaks": [Row(7, 0.5), Row(14, 7.5, heard=7)],
    "its host is down: asked after 11.25 s, lost after 15": [
        Row(11.2, 11.2),
        Row(11.3, 11.3, suspect=True),
        Row(14.9, 14.9, suspect=True),
        Row(15, 15, HOST_DOWN),
    ],
    "a host that was not looked at for long has 0.9 s": [
        Row(30, 30, suspect=True),
        Row(30.8, 30.8, suspect=True),
        Row(30.9, 30.9, HOST_DOWN),
    ],
    "what was sent is not confirmed, though the other direction works": [
        Row(1, 1),
        Row(12.2, 0.2, confirmed=False, heard=12),
        Row(12.3, 0.3, confirmed=False, heard=12, suspect=True),
        Row(16, 0.1, HOST_DOWN, confirmed=False, heard=15.9),
    ],
    "a sign in between ends the suspicion": [
        Row(11.3, 11.3, suspect=True),
        Row(12, 0.5),
        Row(23, 11.5, heard=12, suspect=True),
        Row(26, 14.5, heard=12, suspect=True),
        Row(26.5, 15, HOST_DOWN, heard=12),
    ],
    "the host answers elsewhere: only the connection is cut, said once": [
        Row(11.3, 11.3, suspect=True),
        Row(15, 15, CUT, answers=True, received=4, silent=True),
        Row(16, 16, received=4, silent=True),
        Row(31, 31, answers=True, received=4, silent=True),
    ],
    "a message on a cut connection": [
        Row(11.3, 11.3, suspect=True),
        Row(15, 15, CUT, answers=True, received=4, silent=True),
        Row(16, 0.1, Finding(REACHABLE, "16 s"), received=5),
    ],
    "no heartbeat is expected from before it is reachable again": [
        Row(11.3, 11.3, suspect=True),
        Row(15, 15, CUT, answers=True, silent=True),
        Row(40, 0.1, Finding(REACHABLE, "40 s")),
        Row(74, 2),
        Row(74.6, 2, FROZEN),
    ],
    "a cut connection whose host dies, too: asked for as long as the bound": [
        Row(11.3, 11.3, suspect=True),
        Row(15, 15, CUT, answers=True, silent=True),
        Row(16, 16, silent=True),
        Row(30.9, 30.9, silent=True),
        Row(31, 31, HOST_DOWN, silent=True),
    ],
    "the kernel is there, and the process is frozen": [
        Row(34, 2),
        Row(34.6, 2, FROZEN),
    ],
    "a heartbeat as late as one may be": [Row(34, 2), Row(60, 2, heard=34)],
}


def play(rows: list[Row]) -> list[Row]:
    """The same rows, with what is found."""
    liveness = Liveness(15.0, 0.0)
    played = []
    for row in rows:
        signs = Signs(
            row.heard,
            row.silence,
            row.confirmed,
            row.received,
            row.answers,
        )
        found = liveness.observe(signs, row.second)
        is_silent = liveness.is_silent(row.received)
        played.append(replace(row, found=found, suspect=liveness.is_suspect, silent=is_silent))
    return played
