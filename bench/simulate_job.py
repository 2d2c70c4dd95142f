"""A job as the simulation has it: its ranks, its network, and what came of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

_SEGMENT, _HEADERS = 1448, 78  # bytes of data in a packet, and what Ethernet, IP and TCP add
# Bytes that a new connection may send before it is acknowledged; doubles each time
_FIRST_WINDOW = 10 * _SEGMENT


@dataclass(frozen=True)
class Setting:
    """A job and its network.

    Attributes:
        latency: one way, in seconds.
        link: of rank 0's host, in bits a second.
        pace: seconds between the first call of one rank and of the next; 0: they come when they come.
        slow: part of the ranks that start up to `slow_by` seconds later than the others.
        dead: part of the ranks that never start.
    """

    world_size: int
    latency: float = 1e-4
    link: float = 10e9
    pace: float = 0.0
    slow: float = 0.0
    slow_by: float = 10.0
    dead: float = 0.0
    join_timeout: float = 300.0
    seed: int = 0


@dataclass
class Outcome:
    """What came of it. Times are in seconds, from the start of the first rank; None: it did not come to that.

    Attributes:
        last_start: when the last rank started.
        membership: when the last rank had the membership.
        go: when the last rank had the word to go.
        told: when the last rank knew who is missing.
        text: what it knew.
        unanswered: ranks that rank 0 could not answer within its time limit.
        gave_up: connections that a rank ended because rank 0 did not answer.
        cpu: of rank 0, until all had the membership.
        cpu_go: of rank 0 from then on.
        on_the_link: seconds for which the link of rank 0 is sending or receiving, whichever is more.
        messages: by kind, at rank 0.
    """

    last_start: float = 0.0
    membership: float | None = None
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
    """A rank with its connection.

    Attributes:
        start: when it first connects.
        end: when it gives up.
        attempt: how often it has connected in vain.
        pause: seconds before the next attempt.
    """

    start: float
    end: float
    pause: float
    attempt: int = 0


def lines_of(setting: Setting, first_pause: float) -> tuple[list[Line], list[int], float]:
    """The lines, the ranks that never start, and when the last one starts. Rank 0 is there from the beginning."""
    draw, lines, missing, last = random.Random(setting.seed), list[Line](), list[int](), 0.0
    for rank in range(1, setting.world_size):
        if draw.random() < setting.dead:
            missing.append(rank)
            continue
        start = draw.uniform(0.0, setting.slow_by) if draw.random() < setting.slow else 0.0
        last = max(last, start)
        calls = len(lines) * setting.pace if setting.pace else start
        lines.append(Line(calls, start + setting.join_timeout, first_pause))
    return lines, missing, last
