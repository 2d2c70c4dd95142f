"""Failure detection as a simulation: what beats cost, how soon a death is known to all, what the end costs rank 0."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from simulate_costs import Costs
from simulate_job import Link

from distboot.agent.heartbeat import INTERVAL
from distboot.agent.root_cause import GATHERING
from distboot.settings import DEFAULTS

_LOOKS = 0.1  # seconds between two looks at a line that is suspect
# In intervals, as agent/heartbeat.py has them.
_SLACK, _PROBING, _QUIET = 0.6, 1.0, 1.5
_MOST_BEATS = 2000  # a second, as agent/heartbeat.py has it
_LEAST_BEATS = 2  # within the bound, as agent/agent.py has it


@dataclass(frozen=True)
class Supervision:
    """What failure detection of a job costs, and how fast it is. Times are in seconds.

    Attributes:
        interval: between two beats of a line.
        beat: seconds of CPU of rank 0 for one beat of all lines.
        share: of a core, that it needs while nothing happens.
        told: after the death of a process, until the last rank knows.
        silent: after a host has vanished, until that is noticed: at best and at worst.
        bytes_a_second: in one direction, while nothing happens.
    """

    interval: float
    beat: float
    share: float
    told: float
    silent: tuple[float, float]
    bytes_a_second: float


def supervision(costs: Costs, world_size: int, *, latency: float = 1e-4, link: float = 10e9) -> Supervision:
    """Failure detection of a job."""
    interval = max(INTERVAL, world_size / _MOST_BEATS)
    bound = max(float(DEFAULTS["DISTBOOT_HEARTBEAT_TIMEOUT"]), _LEAST_BEATS * interval)
    # The loop wakes up for its own beats; those of the others wait until then.
    beat = world_size * (costs.beat + costs.wake)
    return Supervision(
        interval,
        beat,
        beat / interval,
        _told(costs, world_size, latency, link),
        silence_noticed(interval, bound),
        world_size * costs.beat_bytes / interval,
    )


def _told(costs: Costs, world_size: int, latency: float, link: float) -> float:
    """The end of a connection, a moment for others of its host, and a message to each rank."""
    decided = latency + GATHERING + 2 * costs.wake * world_size
    out = Link(link)
    out.send(0.0, costs.verdict_bytes * world_size)
    return decided + max(costs.tell * world_size, out.busy) + latency


def end_of_all(costs: Costs, world_size: int, within: float = 1.0) -> float:
    """CPU of rank 0 for hearing how all others end, within so many seconds.

    The loop wakes up whenever somebody has ended, and looks at all lines each time.
    """
    number = random.Random(0)
    ends = sorted(number.uniform(0.0, within) for _ in range(world_size))
    now, heard, spent = 0.0, 0, 0.0
    while heard < len(ends):
        now = max(now, ends[heard])
        here = heard
        while here < len(ends) and ends[here] <= now:
            here += 1
        took = costs.wake * world_size + (here - heard) * costs.end
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
