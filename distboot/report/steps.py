"""The steps of a rank's start, and how long it took for each phase between two of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from ..rendezvous.events import ALL_CALLED, ALL_READY, CALLED, COMMAND, GROUP, IMPORTED


class Phase(NamedTuple):
    """What a rank does between two steps."""

    name: str  # on the page
    end: str  # the step that ends it
    said: str  # what takes the time; reads well after "rank 3 took 4 s"
    waits: bool = False  # whether the rank only waits for others


PHASES = (
    Phase("launch", "process_start", "to be launched, counted from the first process of the job"),
    Phase("start", "detected", "from the beginning of its process until it knew its rank"),
    Phase("join", "joined", "to reach rank 0"),
    Phase("wait", "all_joined", "waiting until all ranks had joined", waits=True),
    Phase("command", COMMAND, "to start the command"),
    Phase("script", CALLED, "from the start of its command until that called init()"),
    Phase("meet", ALL_CALLED, "waiting until all ranks had called init()", waits=True),
    Phase("import", IMPORTED, "to have its framework imported and its device set"),
    Phase("ready", ALL_READY, "waiting until all ranks were ready", waits=True),
    Phase("group", GROUP, "to start the group of all ranks"),
)


_EVERY_RANK_HAS = ("process_start", "detected", "joined")  # steps


def spans(
    steps: Mapping[str, float], launched: float | None = None
) -> dict[str, tuple[float, float]]:
    """The start and the end of each phase of a rank, by name of the phase, where both are known.

    A step that a rank does not have does not start a phase: under the wrapper nothing is imported,
    for example.
    """
    found: dict[str, tuple[float, float]] = {}
    start = launched
    for phase in PHASES:
        end = steps.get(phase.end)
        if end is not None:
            if start is not None:
                # Clocks are compared with some error: what ends before it starts takes no time.
                found[phase.name] = (min(start, end), end)
            start = end
        elif phase.end in _EVERY_RANK_HAS:
            start = None  # not known when the next phase starts
    return found


def slowest(ranks: Mapping[int, Mapping[str, float]]) -> list[dict[str, object]]:
    """The slowest rank in each phase, with the median of all; without phases of waiting."""
    taken = _seconds_by_phase(ranks)
    found: list[dict[str, object]] = []
    for phase in PHASES:
        times = sorted(taken[phase.name], key=lambda one: (one[0], -one[1]))
        if not times or phase.waits:
            continue
        seconds, rank = times[-1]
        median, _ = times[(len(times) - 1) // 2]
        found.append(
            {
                "step": phase.end,
                "rank": rank,
                "seconds": round(seconds, 3),
                "median": round(median, 3),
                "said": phase.said,
            }
        )
    return found


def _seconds_by_phase(
    ranks: Mapping[int, Mapping[str, float]],
) -> dict[str, list[tuple[float, int]]]:
    """How long each rank took for each phase: seconds and rank."""
    launches = (steps.get("process_start") for steps in ranks.values())
    launched = min(filter(None, launches), default=None)
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank, steps in ranks.items():
        for name, (start, end) in spans(steps, launched).items():
            taken[name].append((end - start, rank))
    return taken
