"""The lifeline as a simulation: what beats cost, how soon a death is known to all, what the end costs rank 0."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from simulate_costs import Costs
from simulate_rollcall import Link

from distboot.lifeline.cases import GATHERING
from distboot.lifeline.line import interval_of
from distboot.lifeline.settings import DEFAULT_BOUND

_LOOKS = 0.1  # seconds between two looks at a line that is suspect
# In intervals, as lifeline/line.py has them.
_SLACK, _PROBING, _QUIET = 0.6, 1.0, 1.5


@dataclass(frozen=True)
class Lifeline:
    """What the lifeline of a job costs, and how fast it is. Times are in seconds.

    Attributes:
        interval: between two beats of a line.
        share: of a core, that rank 0 needs while nothing happens.
        told: after the death of a process, until the last rank knows.
        silent: after a host has vanished, until that is noticed: at best and at worst.
        end_cpu: of rank 0, for hearing how all others end.
        bytes_a_second: in one direction, while nothing happens.
    """

    interval: float
    share: float
    told: float
    silent: tuple[float, float]
    end_cpu: float
    bytes_a_second: float


def lifeline(
    costs: Costs, world_size: int, ranks_a_line: int = 1, *, latency: float = 1e-4, link: float = 10e9,
    ends_within: float = 1.0,
) -> Lifeline:  # fmt: skip
    """The lifeline of a job whose ranks end within so many seconds once they are told to."""
    lines = math.ceil(world_size / ranks_a_line)
    interval = interval_of(lines)
    # The loop wakes up for its own beats; those of the others wait until then.
    share = lines * (costs.beat + costs.wake) / interval
    return Lifeline(
        interval,
        share,
        _told(costs, lines, ranks_a_line, latency, link),
        silence_noticed(interval, DEFAULT_BOUND),
        _end(costs, lines, ranks_a_line, ends_within),
        lines * costs.beat_bytes / interval,
    )


def _told(costs: Costs, lines: int, ranks_a_line: int, latency: float, link: float) -> float:
    """The end of a connection, a moment for others of its host, and a message to each line."""
    wake = costs.wake * lines
    now, last, out = latency + wake + GATHERING + wake, 0.0, Link(link)
    for _ in range(lines):
        now += costs.tell
        last = out.send(now, costs.verdict_bytes)
    handed_on = (ranks_a_line - 1) * costs.tell
    return last + latency + handed_on


def _end(costs: Costs, lines: int, ranks_a_line: int, within: float) -> float:
    """CPU of a loop that wakes up whenever somebody has ended, and looks at all lines each time."""
    number = random.Random(0)
    ends = sorted(number.uniform(0.0, within) for _ in range(lines * ranks_a_line))
    now, heard, spent = 0.0, 0, 0.0
    while heard < len(ends):
        now = max(now, ends[heard])
        here = heard
        while here < len(ends) and ends[here] <= now:
            here += 1
        took = costs.wake * lines + (here - heard) * costs.end
        now, heard, spent = now + took, here, spent + took
    return spent


def silence_noticed(interval: float, bound: float) -> tuple[float, float]:
    """Seconds from the moment when a host has gone until rank 0 counts its ranks as lost: at best and at worst.

    Rank 0 looks at a line when it beats, and more often at one that is suspect. The host goes between the beat at 0,
    which it still acknowledged, and the next one.
    """
    beats = math.ceil(_QUIET)  # until it is looked at
    while beats * interval <= bound - _PROBING * interval:
        beats += 1
    suspect, lost = beats * interval, bound + _SLACK * interval
    noticed = suspect + max(math.ceil((lost - suspect) / _LOOKS) * _LOOKS, 0.0)
    return noticed - interval, noticed
