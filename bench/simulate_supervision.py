"""Failure detection as a simulation: what beats cost, how soon a death is known to all, what the end costs rank 0."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulate_costs import Costs
from simulate_job import Link

from distboot.agent.heartbeat import BEATS, BOUND
from distboot.job.root_cause import GATHERING

# Seconds, at the most, from the last sign of a host that vanishes until it does
_SINCE = BEATS * BOUND


@dataclass(frozen=True)
class Supervision:
    """What failure detection of a job costs, and how fast it is. Times are in seconds.

    Attributes:
        interval: between two beats of another agent.
        beat: seconds of CPU of rank 0 in the time of the bound.
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


def supervision(
    costs: Costs, world_size: int, *, latency: float = 1e-4, link: float = 10e9
) -> Supervision:
    """Failure detection of a job."""
    share = world_size * costs.idle
    return Supervision(
        BEATS * BOUND,
        BOUND * share,
        share,
        _told(costs, world_size, latency, link),
        (BOUND - _SINCE, BOUND + 1.0),
        world_size * costs.beat_bytes / (BEATS * BOUND),
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
