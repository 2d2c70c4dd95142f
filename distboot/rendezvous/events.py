"""What rank 0 learns about a job, as an append-only list of events; and from them, when each rank
took which step.

The rendezvous starts the list, and the process that supervises rank 0 continues it. `content` makes
the report of it, in plain JSON types, and `files` writes that or the page. `time` is by rank 0's
clock; times in `details` are by the clock of the rank that sends them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from .membership import Membership
from .messages import WorkerInfo

Kind = Literal[
    "rendezvous_started",  # launcher, world_size, round, versions
    # Host, node, pid, local_rank, local_world_size, node_rank, process_start, detected, offset,
    # uncertainty
    "joined",
    "left",  # before all had joined
    "all_joined",  # findings
    "not_ready",
    "registered",  # pid: its failures are detected from now on
    "phases",  # the time of each step that it has taken: OWN
    "failing",  # text: it is about to fail, or cannot go on
    "exited",  # exit_code, signal, stopped_by_us, external_signal, at, traceback (of a root cause)
    "unreachable",  # text
    "silent",  # text: its connection gives no sign, though its host answers; the job goes on
    "reachable",  # again, after that
    "stop_requested",  # text
    "stop_agreed",  # read, missing
    "late",  # ranks, waiting, text, stacks
    "late_over",
    "root_cause",  # kind, ranks, text, location, traceback
]
PLACE = ("local_rank", "local_world_size", "node_rank")  # as the launcher sets them
_MOST_OF_A_KIND = 100  # events of one rank: a rank may send the same again and again


class Event(NamedTuple):
    """One fact. `rank` is None where it is about the whole job."""

    time: float
    rank: int | None
    event: Kind
    details: dict[str, Any]


class EventLog(list[Event]):
    """The events of a job, in the order in which rank 0 learned of them."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__(events)
        self._counts: Counter[tuple[int | None, Kind]] = Counter()

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[Any]]) -> EventLog:
        """Read an `EventLog` from its JSON."""
        return cls(Event(*row) for row in rows)

    def add(self, event: Kind, rank: int | None = None, /, **details: Any) -> None:
        self._counts[rank, event] += 1
        if self._counts[rank, event] <= _MOST_OF_A_KIND:
            self.append(Event(time.time(), rank, event, details))


class ClockOffset(NamedTuple):
    """Seconds by which a rank's clock is ahead of rank 0's, and by which that may be wrong."""

    offset: float = 0.0
    uncertainty: float = 0.0


class JoinLog(EventLog):
    """The events of the rendezvous, which begin with rank 0's own record."""

    def __init__(self, own: WorkerInfo) -> None:
        super().__init__()
        self._nodes: dict[str, int] = {}
        # Not the settings: their values are the user's own.
        versions = {name: value for name, value in own.facts if not name.endswith("=")}
        self.add(
            "rendezvous_started",
            launcher=own.launcher,
            world_size=own.world_size,
            round=own.round,
            versions=versions,
        )
        self.joined(own)

    def joined(self, record: WorkerInfo, welcomed: float | None = None) -> None:
        """A rank has sent its record. It read its clock for that between `welcomed` and now.

        `welcomed` is None for rank 0 itself.
        """
        clock = ClockOffset()
        if welcomed is not None:
            now = time.time()
            # 107 on its clock at some moment between 100 and 101 is 6.5 ± 0.5.
            clock = ClockOffset(record.clock - (welcomed + now) / 2, abs(now - welcomed) / 2)
        self.add(
            "joined",
            record.rank,
            host=record.host,
            node=self._nodes.setdefault(record.node, len(self._nodes)),
            pid=record.pid,
            **{name: getattr(record, name) for name in PLACE},
            process_start=record.started,
            detected=record.detected,
            **clock._asdict(),
        )

    def spread(self, membership: Membership) -> None:
        """Turn the events of nodes' agents into events of their ranks."""
        self[0].details["world_size"] = membership.world_size
        of_nodes = list(self)
        self.clear()
        for one in of_nodes:
            if one.rank is None:
                self.append(one)
                continue
            ranks = membership.nodes[one.rank]
            for local_rank, rank in enumerate(ranks):
                details = one.details
                if one.event == "joined":
                    place = (local_rank, len(ranks), one.rank)
                    details = {**details, **dict(zip(PLACE, place, strict=True))}
                self.append(Event(one.time, rank, one.event, details))


class Phase(NamedTuple):
    """What a rank does between two steps."""

    name: str  # on the page
    end: str  # the step that ends it
    said: str  # what takes the time; reads well after "rank 3 took 4 s"
    waits: bool = False  # whether the rank only waits for others


# The steps that a rank reports while it starts, by its own clock
COMMAND = "command_started"  # by the wrapper
CALLED = "init_called"
ALL_CALLED = "all_called"
IMPORTED = "framework_imported"
ALL_READY = "all_ready"
GROUP = "group_ready"
OWN = (COMMAND, CALLED, ALL_CALLED, IMPORTED, ALL_READY, GROUP)
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


def own_steps(taken: Mapping[str, float]) -> dict[str, float]:
    """The steps that a rank reports, with their times; without those of a newer distboot."""
    return {name: float(when) for name, when in taken.items() if name in OWN}


# Kind of a root cause -> state of its ranks
_STATE_OF_CAUSE = {"failed": "failed first", "lost": "lost", "late": "late"}


class JobState:
    """The state of a job according to its events."""

    def __init__(self, events: Iterable[Event]) -> None:
        # The last event of a kind, by rank
        self.joined: dict[Any, Event] = {}  # without those that left
        self.registered: dict[Any, Event] = {}
        self.exited: dict[Any, Event] = {}
        self.failed: set[int] = set()  # ranks with a known failure
        self.late: set[int] = set()  # ranks that others waited for at the end
        self.root_cause: Event | None = None  # None: no failure, and no external signal
        self._all_joined: Event | None = None
        # The steps that each rank reports, with their times
        self._own: dict[Any, dict[str, float]] = defaultdict(dict)
        # By node: its ranks share a clock, and the best reading counts
        self._clocks: dict[int, ClockOffset] = {}
        for one in events:
            self._apply(one)
        for rank, exited in self.exited.items():
            if _outcome_of(exited) == "failed later":
                self.failed.add(rank)

    def _apply(self, one: Event) -> None:
        match one.event:
            case "joined":
                self.joined[one.rank] = one
                self._read_clock(one.details)
            case "left":
                self.joined.pop(one.rank, None)
            case "all_joined":
                self._all_joined = one
            case "registered":
                self.registered[one.rank] = one
            case "phases":
                self._own[one.rank].update(one.details)
            case _:
                self._apply_trouble(one)

    def _apply_trouble(self, one: Event) -> None:
        match one.event:
            case "failing" | "unreachable":
                self._fail(one)
            case "reachable":
                self.failed.discard(one.rank)
            case "late" | "late_over":
                self.late = set(one.details.get("ranks", ()))
            case "exited":
                self.exited[one.rank] = one
            case "root_cause":
                self.root_cause = one

    def _read_clock(self, details: Mapping[str, Any]) -> None:
        clock = ClockOffset(details["offset"], details["uncertainty"])
        known = self._clocks.get(details["node"])
        if known is None or clock.uncertainty < known.uncertainty:
            self._clocks[details["node"]] = clock

    def _fail(self, one: Event) -> None:
        # After the root cause, ranks end and become unreachable without a failure of their own.
        is_consequence = one.event == "unreachable" and self.root_cause is not None
        if one.rank is not None and not is_consequence:
            self.failed.add(one.rank)

    @property
    def is_failure(self) -> bool:
        """Whether a rank has failed; an external signal that stopped the job is not a failure."""
        return self.root_cause is not None and self.root_cause.details["kind"] != "stopped"

    def later_failures(self) -> int:
        """How many ranks have failed besides the root cause."""
        if self.root_cause is None:
            return 0
        return len(self.failed.difference(self.root_cause.details["ranks"]))

    def kind_for(self, rank: int) -> str:
        """The kind of the root cause if it is this rank's, else empty."""
        if self.root_cause is None or rank not in self.root_cause.details["ranks"]:
            return ""
        return str(self.root_cause.details["kind"])

    def of_rank(self, rank: int) -> str:
        """The state of a rank, as the report names it."""
        kind = self.kind_for(rank)
        if kind in _STATE_OF_CAUSE:
            return _STATE_OF_CAUSE[kind]
        outcome = "not known"
        if rank in self.exited:
            outcome = _outcome_of(self.exited[rank])
        if rank in self.late and outcome in ("stopped", "not known"):
            return "late"
        return outcome

    def exit_code(self, rank: int) -> str:
        """The exit code of a rank, for people."""
        if self.kind_for(rank) == "lost":
            return "lost"
        if rank not in self.exited or self.exited[rank].details["exit_code"] is None:
            return "not known"
        return str(self.exited[rank].details["exit_code"])

    def clock(self, rank: int) -> ClockOffset:
        """The clock of a rank; that of rank 0 if it is not known."""
        if rank not in self.joined:
            return ClockOffset()
        return self._clocks[self.joined[rank].details["node"]]

    def offsets(self) -> dict[int, float]:
        """Rank -> seconds by which its clock is ahead of rank 0's."""
        return {rank: self.clock(rank).offset for rank in self.joined if rank}

    def steps(self, rank: int) -> dict[str, float]:
        """The times of the steps of a rank by rank 0's clock, in order, without unknown ones."""
        join = self.joined.get(rank)
        if join is None:
            return {}
        by_own_clock = {
            "process_start": join.details["process_start"],
            "detected": join.details["detected"],
            **self._own.get(rank, {}),
        }
        offset = self.clock(rank).offset
        times = {name: when - offset for name, when in by_own_clock.items() if when}
        times["joined"] = join.time
        if self._all_joined is not None:
            times["all_joined"] = self._all_joined.time
        return {phase.end: times[phase.end] for phase in PHASES if phase.end in times}


def _outcome_of(exited: Event) -> str:
    details = exited.details
    if details["stopped_by_us"] or details["external_signal"] is not None:
        return "stopped"
    if details["exit_code"] == 0:
        return "ended"
    return "failed later"


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
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)
    launches = [steps["process_start"] for steps in ranks.values() if "process_start" in steps]
    launched = min(launches, default=None)
    for rank, steps in ranks.items():
        for name, (start, end) in spans(steps, launched).items():
            taken[name].append((end - start, rank))
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
