"""What ends a job: the first failure of a rank, or a signal from outside. Every rank prints the same."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import printable
from ..roster import Roster, ranks_said
from .ends import End, shown, signal_name

_LONGEST = 200  # characters of an exception in one line
_LONGEST_DELAY = 10.0  # seconds
_MOST_LINES = 12  # of a traceback, on the ranks that did not write it
_LEFT_OUT = "…"
_FRAME = re.compile(r'  File ".*/distboot/([^"]+)", line ')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank is."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    pid: int = 0

    def said(self) -> str:
        """`"on node-a (node 1, local rank 0, process 4711)"`."""
        process = f", process {self.pid}" if self.pid else ""
        return f"on {printable(self.host)} (node {self.node_rank}, local rank {self.local_rank}{process})"


def seats(roster: Roster) -> list[Seat]:
    """The seats of a job, by rank."""
    found = [
        Seat(rank, roster.hosts[node], node, local_rank)
        for node, ranks in enumerate(roster.nodes)
        for local_rank, rank in enumerate(ranks)
    ]
    return sorted(found, key=lambda seat: seat.rank)


def pid_of(message: object) -> int:
    """The process of a rank, as it says it.

    Raises:
        TypeError: it does not.
    """
    pid = message.get("pid") if isinstance(message, dict) else None
    if type(pid) is not int or not 0 <= pid < 1 << 32:
        raise TypeError("sends a broken process id")
    return pid


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ends.

    Attributes:
        ranks: those that failed first, or that were stopped first.
        is_failure: else somebody outside stopped the job.
        text: what all ranks print.
        delay: seconds for the others before they stop, so that their launcher sees the failure first.
    """

    ranks: tuple[int, ...]
    is_failure: bool
    text: str
    delay: float = 0.0

    def as_message(self) -> dict[str, object]:
        """As plain JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: object) -> Verdict:
        """What rank 0 sent.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(message, dict) or message.keys() != set(cls.__slots__) or not _is_verdict(message):
            raise TypeError("sends a broken verdict")
        lines = "\n".join(map(printable, message["text"].split("\n")))
        return cls(tuple(message["ranks"]), message["is_failure"], lines, float(message["delay"]))


def _is_verdict(message: Mapping[str, Any]) -> bool:
    ranks, delay = message["ranks"], message["delay"]
    return (
        isinstance(ranks, list)
        and all(type(rank) is int for rank in ranks)
        and type(message["is_failure"]) is bool
        and isinstance(message["text"], str)
        and isinstance(delay, int | float)
        and 0 <= delay <= _LONGEST_DELAY
    )


def failed(seat: Seat, end: End, delay: float, before: Sequence[int] = ()) -> Verdict:
    """A rank ended in failure, when the ranks `before` had ended well."""
    words = end.words.splitlines()
    lines = shown("\n".join(_excerpt(words, innermost_first=end.is_crash)))
    said = end.said()
    if end.status is None and not end.cause and end.words:  # it is still about to end
        message = printable(_headline(words))
        said = "uncaught exception: " + (message if len(message) <= _LONGEST else message[:_LONGEST] + "…")
    first = "failed first"
    if end.is_consequence:
        first += ", as a peer had gone" + (f" ({ranks_said(before)} had ended with exit code 0)" if before else "")
    return Verdict((seat.rank,), True, f"rank {seat.rank} {first}: {said}, {seat.said()}{_at(end)}{lines}", delay)


def lost(gone: Sequence[Seat], why: str) -> Verdict:
    """Ranks of one node were lost, and none of them said anything."""
    first = gone[0]
    where = first.said() if len(gone) == 1 else f"on {printable(first.host)} (node {first.node_rank})"
    ranks = [seat.rank for seat in gone]
    return Verdict(tuple(ranks), True, f"{ranks_said(ranks)} lost first: {why}, {where}")


def stopped(seat: Seat, number: int) -> Verdict:
    """Somebody outside stopped a rank, and so the job."""
    text = f"stopped by {signal_name(number)} from outside: rank {seat.rank} got it first, {seat.said()}"
    return Verdict((seat.rank,), False, text)


def _excerpt(words: Sequence[str], *, innermost_first: bool) -> Sequence[str]:
    """What all ranks show of a traceback: where it is long, not our own part of it."""
    if len(words) <= _MOST_LINES:
        return words
    if innermost_first:
        return [*words[:_MOST_LINES], _LEFT_OUT]
    kept: list[str] = []
    is_ours = False
    for line in words:
        is_ours = _is_ours(line) or (is_ours and line.startswith("    "))
        if not is_ours:
            kept.append(line)
        elif not kept or kept[-1] != _LEFT_OUT:
            kept.append(_LEFT_OUT)
    if len(kept) <= _MOST_LINES:
        return kept
    begin = len(kept) - _MOST_LINES
    while kept[begin].startswith("    ") and begin < len(kept) - _MOST_LINES + 2:  # what stands there, without where
        begin += 1
    return [_LEFT_OUT, *kept[begin:]]


def _is_ours(line: str) -> bool:
    """Whether a line of a traceback names a file of this package, which every rank has, wherever that is."""
    file = _FRAME.match(line)
    return file is not None and os.path.isfile(os.path.join(_PACKAGE, file[1]))


def _headline(words: Sequence[str]) -> str:
    """The first line of the exception itself in a traceback: what it says may have several."""
    frames = [number for number, line in enumerate(words) if line.startswith('  File "')]
    after = words[frames[-1] + 1 :] if frames else []
    return next((line for line in after if line and not line.startswith(" ")), words[-1])


def _at(end: End) -> str:
    return f", at {time.strftime('%H:%M:%S', time.gmtime(end.when))} UTC"
