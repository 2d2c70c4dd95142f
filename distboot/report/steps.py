"""The steps of a rank until it trains, in their order, and how long each took it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

# What a rank says of itself while it starts, by its own clock.
COMMAND, CALLED, ALL_CALLED = "command_started", "init_called", "all_called"  # by the wrapper, and in it
IMPORTED, ALL_READY, GROUP = "framework_imported", "all_ready", "group_ready"
OWN = (COMMAND, CALLED, ALL_CALLED, IMPORTED, ALL_READY, GROUP)
# Of every rank, by rank 0's clock. All that is not known is left out.
STEPS = ("process_start", "detected", "joined", "all_joined", *OWN)
_LATEST = 1 << 33  # seconds since the epoch


def own_steps(message: object) -> dict[str, float]:
    """The steps that a rank says it has taken, with the time of each; without those that only a newer distboot has.

    Raises:
        TypeError: it says something else.
    """
    if not isinstance(message, dict) or len(message) > 20:
        raise TypeError("sends broken steps")
    found = {name: when for name, when in message.items() if name in OWN}
    if not all(type(when) in (int, float) and 0 < when < _LATEST for when in found.values()):
        raise TypeError("sends broken steps")
    return {name: float(when) for name, when in found.items()}


@dataclass(frozen=True, slots=True)
class Phase:
    """What a rank does between two steps.

    Attributes:
        name: short, for a column and for the class of what is drawn.
        end: the step with which it is over.
        said: what takes the time; reads well after "rank 3 took 4 s".
        waits: whether the rank only waits for others.
    """

    name: str
    end: str
    said: str
    waits: bool = False


LAUNCH = Phase("launch", "process_start", "to be launched, counted from the first process of the job")
PHASES = (
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


def spans(steps: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """When each phase of a rank began and ended, by the name of the phase, as far as both are known.

    A step that does not exist for the rank (nothing is imported under the wrapper, say) is nobody's beginning.
    """
    found: dict[str, tuple[float, float]] = {}
    before = steps.get("process_start")
    for phase in PHASES:
        end = steps.get(phase.end)
        if end is None:
            before = None if phase.end in ("detected", "joined") else before
            continue
        if before is not None:
            # Two clocks are compared only so well: what ends before it began takes no time.
            found[phase.name] = (min(before, end), end)
        before = end
    return found


@dataclass(frozen=True, slots=True)
class Slowest:
    """Who needed longest for a phase, and how long.

    Attributes:
        seconds: of that rank.
        median: of all ranks of which it is known.
    """

    phase: Phase
    rank: int
    seconds: float
    median: float


def slowest(ranks: Mapping[int, Mapping[str, float]]) -> list[Slowest]:
    """The slowest rank in each phase in which a rank does not just wait, in the order of the phases."""
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)
    began = {rank: steps["process_start"] for rank, steps in ranks.items() if "process_start" in steps}
    first = min(began.values(), default=0.0)
    for rank, when in began.items():
        taken[LAUNCH.name].append((when - first, rank))
    for rank, steps in ranks.items():
        for name, (begin, end) in spans(steps).items():
            taken[name].append((end - begin, rank))
    found = []
    for phase in (LAUNCH, *PHASES):
        times = sorted(taken[phase.name], key=lambda one: (one[0], -one[1]))
        if times and not phase.waits:
            found.append(Slowest(phase, times[-1][1], times[-1][0], times[(len(times) - 1) // 2][0]))
    return found
