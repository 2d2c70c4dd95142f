"""What rank 0 learns of a job, as an append-only list of events; and from them when each rank took which step.

`content` makes the report of it, in plain JSON types, and `files` writes that or the page. The list is begun during the
rendezvous, passed to the process that supervises rank 0, and continued there. `time` is by rank 0's clock; times in
`details` are by the clock of the rank that says them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ..rendezvous.membership import Membership
from ..rendezvous.messages import WorkerInfo

Kind = Literal[
    "rendezvous_started",  # launcher, world_size, round, versions
    # Host, node, pid, local_rank, local_world_size, node_rank, process_start, detected, offset, uncertainty
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
PLACE = ("local_rank", "local_world_size", "node_rank")  # as a launcher says them
_MOST_OF_A_KIND = 100  # of one rank: what a rank may send again and again is bounded


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
        """What JSON has made of an `EventLog`."""
        return cls(Event(*row) for row in rows)

    def add(self, event: Kind, rank: int | None = None, /, **details: Any) -> None:
        self._counts[rank, event] += 1
        if self._counts[rank, event] <= _MOST_OF_A_KIND:
            self.append(Event(time.time(), rank, event, details))


class ClockOffset(NamedTuple):
    """Seconds for which the clock of a rank is ahead of rank 0's, and by how much that may be wrong."""

    offset: float = 0.0
    uncertainty: float = 0.0


class JoinLog(EventLog):
    """The events of the rendezvous, which begin with rank 0's own record."""

    def __init__(self, own: WorkerInfo) -> None:
        super().__init__()
        self._nodes: dict[str, int] = {}
        # Not the settings: their values are the user's own.
        versions = {name: value for name, value in own.facts if not name.endswith("=")}
        begun = {"launcher": own.launcher, "world_size": own.world_size, "round": own.round}
        self.add("rendezvous_started", **begun, versions=versions)
        self.joined(own)

    def joined(self, record: WorkerInfo, welcomed: float | None = None) -> None:
        """A rank has sent its record, and read its clock for that between `welcomed` and now; None: on our clock."""
        clock = ClockOffset()
        if welcomed is not None:  # 107 at some moment between 100 and 101 is 6.5 ± 0.5
            now = time.time()
            clock = ClockOffset(record.clock - (welcomed + now) / 2, abs(now - welcomed) / 2)
        place = {name: getattr(record, name) for name in PLACE}
        node = self._nodes.setdefault(record.node, len(self._nodes))
        when = {"process_start": record.started, "detected": record.detected, **clock._asdict()}
        self.add(
            "joined", record.rank, host=record.host, node=node, pid=record.pid, **place, **when
        )

    def spread(self, membership: Membership) -> None:
        """What the agents of nodes have said counts for each of their ranks from now on."""
        nodes = membership.nodes
        self[0].details["world_size"] = membership.world_size
        told = list(self)
        self.clear()
        for one in told:
            ranks = (None,) if one.rank is None else nodes[one.rank]
            for local_rank, rank in enumerate(ranks):
                place = dict(zip(PLACE, (local_rank, len(ranks), one.rank), strict=True))
                self.append(
                    Event(
                        one.time,
                        rank,
                        one.event,
                        one.details | (place if one.event == "joined" else {}),
                    )
                )


class Phase(NamedTuple):
    """What a rank does between two steps."""

    name: str  # as the page has it
    end: str  # the step with which it is over
    said: str  # what takes the time; reads well after "rank 3 took 4 s"
    waits: bool = False  # whether the rank only waits for others


# What a rank says of itself while it starts, by its own clock.
# By the wrapper, and in it
COMMAND, CALLED, ALL_CALLED = "command_started", "init_called", "all_called"
IMPORTED, ALL_READY, GROUP = "framework_imported", "all_ready", "group_ready"
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
    """The steps that a rank says it has taken, with the time of each; without those that only a newer distboot has."""
    return {name: float(when) for name, when in taken.items() if name in OWN}


class JobState:
    """What the events say of a job."""

    def __init__(self, events: Iterable[Event]) -> None:
        latest: dict[Kind, dict[Any, Event]] = defaultdict(dict)  # of each kind, by rank
        self.failed: set[int] = set()  # the ranks of which a failure is known
        self.late: set[int] = set()  # the ranks for which others waited to the end
        # The steps of which a rank says when it took them
        self._own: dict[Any, dict[str, float]] = defaultdict(dict)
        # By node: its ranks share a clock, and the best reading counts
        self._clocks: dict[int, ClockOffset] = {}
        for one in events:
            latest[one.event][one.rank] = one
            if one.event == "joined":
                node, clock = (
                    one.details["node"],
                    ClockOffset(one.details["offset"], one.details["uncertainty"]),
                )
                self._clocks[node] = min(
                    self._clocks.get(node, clock), clock, key=lambda each: each.uncertainty
                )
            elif one.event == "left":
                latest["joined"].pop(one.rank, None)
            elif one.event == "phases":
                self._own[one.rank].update(one.details)
            elif one.event == "reachable":
                self.failed.discard(one.rank or 0)
            elif one.event in ("late", "late_over"):
                self.late = set(one.details.get("ranks", ()))
            elif one.rank is not None and (
                one.event == "failing" or (one.event == "unreachable" and not latest["root_cause"])
            ):
                self.failed.add(one.rank)
        # By rank; those that have joined are still there.
        self.joined, self.registered, self.exited = (
            latest["joined"],
            latest["registered"],
            latest["exited"],
        )
        self.failed |= {
            rank for rank, one in self.exited.items() if _outcome_of(one) == "failed later"
        }
        self._all_joined = latest["all_joined"].get(None)
        # None: nothing has gone wrong
        self.root_cause = next(iter(latest["root_cause"].values()), None)

    @property
    def is_failure(self) -> bool:
        """Whether a rank has failed; else nothing has gone wrong, or an external signal has stopped the job."""
        return self.root_cause is not None and self.root_cause.details["kind"] != "stopped"

    def later_failures(self) -> int:
        """How many ranks have failed besides the root cause."""
        return (
            len(self.failed.difference(self.root_cause.details["ranks"])) if self.root_cause else 0
        )

    def kind_for(self, rank: int) -> str:
        """That of the root cause, if it is this rank's; else empty."""
        cause = self.root_cause.details if self.root_cause else {"ranks": ()}
        return str(cause["kind"]) if rank in cause["ranks"] else ""

    def of_rank(self, rank: int) -> str:
        """What became of a rank: `state` in the report."""
        as_cause = {"failed": "failed first", "lost": "lost", "late": "late"}.get(
            self.kind_for(rank)
        )
        outcome = _outcome_of(self.exited[rank]) if rank in self.exited else "not known"
        is_late = rank in self.late and outcome in ("stopped", "not known")
        return as_cause or ("late" if is_late else outcome)

    def exit_code(self, rank: int) -> str:
        """The exit code of a rank, for people."""
        code = self.exited[rank].details["exit_code"] if rank in self.exited else None
        return (
            "lost" if self.kind_for(rank) == "lost" else "not known" if code is None else str(code)
        )

    def clock(self, rank: int) -> ClockOffset:
        """The clock of a rank; as rank 0's where nothing is known."""
        return (
            self._clocks[self.joined[rank].details["node"]]
            if rank in self.joined
            else ClockOffset()
        )

    def offsets(self) -> dict[int, float]:
        """Rank -> seconds for which its clock is ahead of rank 0's."""
        return {rank: self.clock(rank).offset for rank in self.joined if rank}

    def steps(self, rank: int) -> dict[str, float]:
        """When a rank took which step, in their order, as far as it is known."""
        join = self.joined.get(rank)
        if join is None:
            return {}
        told = {name: join.details[name] for name in ("process_start", "detected")} | self._own.get(
            rank, {}
        )
        found = {name: when - self.clock(rank).offset for name, when in told.items() if when}
        found["joined"] = join.time
        if self._all_joined is not None:
            found["all_joined"] = self._all_joined.time
        return {phase.end: found[phase.end] for phase in PHASES if phase.end in found}


def _outcome_of(exited: Event) -> str:
    details = exited.details
    if details["stopped_by_us"] or details["external_signal"] is not None:
        return "stopped"
    return "ended" if details["exit_code"] == 0 else "failed later"


def spans(
    steps: Mapping[str, float], launched: float | None = None
) -> dict[str, tuple[float, float]]:
    """When each phase of a rank began and ended, by the name of the phase, as far as both are known.

    A step that does not exist for the rank (nothing is imported under the wrapper, say) does not begin a phase.
    """
    found: dict[str, tuple[float, float]] = {}
    before = launched
    for phase in PHASES:
        end = steps.get(phase.end)
        if end is None:
            before = None if phase.end in ("process_start", "detected", "joined") else before
            continue
        if before is not None:
            # Two clocks are compared only so well: what ends before it began takes no time.
            found[phase.name] = (min(before, end), end)
        before = end
    return found


def slowest(ranks: Mapping[int, Mapping[str, float]]) -> list[dict[str, object]]:
    """The slowest rank in each phase in which a rank does not just wait, in their order, with the median of all."""
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)
    first = min(
        (steps["process_start"] for steps in ranks.values() if "process_start" in steps),
        default=None,
    )
    for rank, steps in ranks.items():
        for name, (begin, end) in spans(steps, first).items():
            taken[name].append((end - begin, rank))
    found: list[dict[str, object]] = []
    for phase in PHASES:
        times = sorted(taken[phase.name], key=lambda one: (one[0], -one[1]))
        if times and not phase.waits:
            seconds, rank = times[-1]
            median, _ = times[(len(times) - 1) // 2]
            said = {"seconds": round(seconds, 3), "median": round(median, 3), "said": phase.said}
            found.append({"step": phase.end, "rank": rank, **said})
    return found
