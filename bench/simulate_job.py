"""A job as the simulation has it: its ranks and relays, its network, and what came of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

RELAYS_A_SECOND = 40_000  # ranks, as rollcall/relay.py has it
_WINDOW = 0.02  # seconds in which what the ranks of a node say is gathered
_FIRST_LIMIT = 1.0  # seconds for a first answer, as rollcall/caller.py has it
_SEGMENT, _HEADERS = 1448, 78  # bytes of data in a packet, and what Ethernet, IP and TCP add
_FIRST_WINDOW = 10 * _SEGMENT  # bytes that a new connection may send before it is acknowledged; doubles each time


@dataclass(frozen=True)
class Setting:
    """A job and its network.

    Attributes:
        ranks_a_line: 1: every rank has a connection; more: those of a node have one, that of their relay.
        latency: one way, in seconds.
        link: of rank 0's host, in bits a second.
        pace: seconds between the first call of one line and of the next; 0: they come when they come.
        slow: part of the ranks that start up to `slow_by` seconds later than the others.
        dead: part of the ranks that never start.
        relay_start: seconds that a relay needs to start.
    """

    world_size: int
    ranks_a_line: int = 1
    latency: float = 1e-4
    link: float = 10e9
    pace: float = 0.0
    slow: float = 0.0
    slow_by: float = 10.0
    dead: float = 0.0
    join_timeout: float = 300.0
    relay_start: float = 0.2
    seed: int = 0

    @property
    def has_relays(self) -> bool:
        """Whether ranks share a connection."""
        return self.ranks_a_line > 1

    @property
    def spread(self) -> float:
        """Seconds within which the relays call."""
        return self.world_size / RELAYS_A_SECOND if self.has_relays else 0.0

    @property
    def first_limit(self) -> float:
        """Seconds for the first answer."""
        return max(_FIRST_LIMIT, 2 * self.spread)


@dataclass
class Outcome:
    """What came of it. Times are in seconds, from the start of the first rank; None: it did not come to that.

    Attributes:
        last_start: when the last rank started.
        roster: when the last rank had the roster.
        go: when the last rank had the word to go.
        told: when the last rank knew who is missing.
        text: what it knew.
        unanswered: ranks that rank 0 could not answer within its time limit.
        gave_up: connections that a line ended because rank 0 did not answer.
        cpu: of rank 0, until all had the roster.
        cpu_go: of rank 0 from then on.
        on_the_link: seconds for which the link of rank 0 is sending or receiving, whichever is more.
        messages: by kind, at rank 0.
    """

    last_start: float = 0.0
    roster: float | None = None
    go: float | None = None
    told: float | None = None
    text: str = ""
    unanswered: int = 0
    gave_up: int = 0
    cpu: float = 0.0
    cpu_go: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    on_the_link: float = 0.0
    files: int = 0
    memory: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)


class Link:
    """One direction of rank 0's link: one message after the other."""

    def __init__(self, bits_a_second: float) -> None:
        self._rate = bits_a_second / 8
        self.free = self.busy = self.bytes = 0.0

    def send(self, now: float, size: float) -> float:
        """When the last byte has left."""
        took = (size + math.ceil(size / _SEGMENT) * _HEADERS) / self._rate
        self.busy += took
        self.bytes += size
        self.free = max(self.free, now) + took
        return self.free


def way(size: float, latency: float) -> float:
    """Seconds from rank 0's link to a rank: a new connection begins with a small window."""
    rounds = math.ceil(math.log2(size / _FIRST_WINDOW + 1))
    return latency * (1 + 2 * max(rounds - 1, 0))


@dataclass(eq=False, slots=True)
class Line:
    """Whoever connects: a rank, or the relay of a node.

    Attributes:
        start: when it first connects.
        starts: of the ranks that it speaks for.
        end: when it gives up.
        attempt: how often it has connected in vain.
        pause: seconds before the next attempt.
    """

    start: float
    starts: list[float]
    end: float
    pause: float
    attempt: int = 0

    def batches(self, now: float) -> list[tuple[float, int]]:
        """When it reports how many ranks, once it is welcome."""
        if len(self.starts) == 1:
            return [(max(now, self.starts[0]), 1)]
        found: list[tuple[float, int]] = []
        for start in sorted(max(now, start) for start in self.starts):
            if found and start <= found[-1][0]:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((start + _WINDOW, 1))
        return found


def lines_of(setting: Setting, first_pause: float) -> tuple[list[Line], list[int], float]:
    """The lines, the ranks that never start, and when the last one starts. Rank 0 is there from the beginning."""
    draw, lines, missing, last = random.Random(setting.seed), list[Line](), list[int](), 0.0
    for first in range(0, setting.world_size, setting.ranks_a_line):
        starts: list[float] = []
        for rank in range(max(first, 1), min(first + setting.ranks_a_line, setting.world_size)):
            if draw.random() < setting.dead:
                missing.append(rank)
                continue
            starts.append(draw.uniform(0.0, setting.slow_by) if draw.random() < setting.slow else 0.0)
        if starts:
            last = max(last, *starts)
            own = setting.relay_start + draw.uniform(0.0, setting.spread) if setting.has_relays else 0.0
            calls = len(lines) * setting.pace if setting.pace else min(starts) + own
            lines.append(Line(calls, starts, min(starts) + setting.join_timeout, first_pause))
    return lines, missing, last
